"""Megatron checkpoints: which of its layouts a folder is in, and where what belongs to it may be.

    torch_dist, zarr, torch_dcp, fsdp_dtensor    lazymerge.formats.megatron.dist
    mp_rank_XX[_YYY[_ZZZ]]/model_optim_rng.pt    lazymerge.formats.megatron.ranks

A DCP folder with a metadata.json is Megatron's. One without may be anyone's: it is taken for Megatron's
if its ``.metadata`` mentions modules that only Megatron's models have.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lazymerge.checkpoint import Checkpoint
from lazymerge.errors import AmbiguousCheckpoint, NotACheckpoint
from lazymerge.files.local import LocalFile
from lazymerge.formats.dcp import METADATA, holds_dcp
from lazymerge.formats.megatron.dist import read_dist
from lazymerge.formats.megatron.ranks import holds_ranks, read_ranks
from lazymerge.formats.registry import OpenOptions, sidecar_folders
from lazymerge.formats.zarr import holds_zarr

BACKEND = "metadata.json"
_LEAF = "dist_ckpt"
_SEARCHED = 16 << 20  # bytes of .metadata; names come first in it
_MARKS = (b"decoder.layers.", b"embedding.word_embeddings.")
_OPTIMIZER = Path("optimizer") / _LEAF


class MegatronFormat:
    """Opens the distributed checkpoints of Megatron-LM and its kin, and its older rank files."""

    name = "megatron"
    looks_for = (
        f"{METADATA} with .distcp files and {BACKEND}, <name>/.zarray folders,"
        " mp_rank_XX/model_optim_rng.pt, in iter_N or dist_ckpt"
    )

    def recognises(self, path: Path) -> bool:
        """Whether the folder holds such a checkpoint; looks at names, and at the start of a ``.metadata``."""
        if not path.is_dir():
            return False
        if holds_ranks(path) or _is_without_model(path):
            return True
        if (path / BACKEND).is_file():
            return holds_dcp(path) or holds_zarr(path)
        return holds_dcp(path) and _mentions_megatron(path / METADATA)

    def open(self, paths: Sequence[Path], options: OpenOptions) -> Checkpoint:
        """The checkpoint in the folder under canonical names; nothing but metadata is read."""
        if len(paths) > 1:
            raise AmbiguousCheckpoint(
                f"{paths[0]}: {len(paths)} folders, where a Megatron checkpoint is one",
                "give one; files that were saved on several nodes have to be copied into one folder",
            )
        folder = paths[0]
        if _is_without_model(folder):
            folder = folder / _OPTIMIZER  # which says where the model is
        found = read_ranks(folder) if holds_ranks(folder) else read_dist(folder)
        if not found.gathers:
            raise NotACheckpoint(f"{folder}: holds no weights", "give the folder that holds the model")
        return Checkpoint(
            gathers=found.gathers,
            format=self.name,
            topology=found.topology,
            sidecars=_sidecars(folder, options),
            notes=tuple(found.notes),
            left_out=found.left_out,
            copies=found.copies,
            files=tuple(found.files),
            settings=found.settings,
        )


FORMAT = MegatronFormat()


def _is_without_model(path: Path) -> bool:
    """Whether it is what verl saves where the weights are in Hugging Face's form already."""
    return (path / _OPTIMIZER).is_dir() and not (path / "model" / _LEAF).is_dir()


def _mentions_megatron(metadata: Path) -> bool:
    """Whether the names in a ``.metadata`` are a Megatron model's."""
    if not metadata.is_file():
        return False
    file = LocalFile(metadata)
    start = file.read(0, min(file.size, _SEARCHED))
    return any(mark in start for mark in _MARKS)


def _sidecars(folder: Path, options: OpenOptions) -> tuple[Path, ...]:
    """Where config and tokenizer may be: huggingface/ beside dist_ckpt/, the folder itself, the run's."""
    beside = [folder.parent / "huggingface"] if folder.name == _LEAF else []
    run = [] if folder.name == _LEAF else [folder.parent]
    first = [options.hf_config] if options.hf_config else []
    known = [*first, *beside, *sidecar_folders([folder], options), *run]
    return tuple(dict.fromkeys(each for each in known if each.is_dir()))
