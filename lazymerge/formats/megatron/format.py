"""Megatron checkpoints: which of its layouts a folder is in, and where what belongs to it may be.

    torch_dist, zarr, torch_dcp, fsdp_dtensor    lazymerge.formats.megatron.dist
    mp_rank_XX[_YYY[_ZZZ]]/model_optim_rng.pt    lazymerge.formats.megatron.ranks

A folder of DCP or zarr with a metadata.json is Megatron's. One without may be anyone's: it is taken for
Megatron's if it mentions modules that only Megatron's models have.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.errors import AmbiguousCheckpoint, IncompleteCheckpoint, NotACheckpoint
from lazymerge.files.local import LocalFile
from lazymerge.formats.dcp import METADATA, holds_dcp
from lazymerge.formats.megatron.arguments import BACKEND, COMMON, LEAF, RUN_CONFIG
from lazymerge.formats.megatron.dist import read_dist
from lazymerge.formats.megatron.found import Found
from lazymerge.formats.megatron.grid import FILE, rank_folder_of
from lazymerge.formats.megatron.ranks import holds_ranks, read_ranks
from lazymerge.formats.registry import OpenOptions, sidecar_folders
from lazymerge.formats.zarr import holds_zarr

_PARTS = (METADATA, BACKEND, COMMON, RUN_CONFIG)
_STEP = re.compile(r"iter_([0-9]{1,18})")
_WHOLE_NUMBERS = ("int", "uint", "bool")
_SEARCHED = 16 << 20  # bytes of .metadata; names come first in it
_MARKS = (b"decoder.layers.", b"embedding.word_embeddings.")
_OPTIMIZER = Path("optimizer") / LEAF


class MegatronFormat:
    """Opens the distributed checkpoints of Megatron-LM and its kin, and its older rank files."""

    name = "megatron"
    looks_for = (
        f"{METADATA} with .distcp files and {BACKEND}, <name>/.zarray folders,"
        " mp_rank_XX/model_optim_rng.pt, in iter_N or dist_ckpt"
    )

    def recognises(self, path: Path) -> bool:
        """Whether the folder holds such a checkpoint; looks at names, and at the start of a ``.metadata``.

        Raises `IncompleteCheckpoint` for a part of one, which must not be opened as if it were whole.
        """
        _refuse_part(path, self)
        if not path.is_dir():
            return False
        if holds_ranks(path) or _is_without_model(path):
            return True
        if os.path.lexists(path / BACKEND):  # if it is no file, that is said when it is read
            return holds_dcp(path) or holds_zarr(path)
        if holds_zarr(path):
            return any(entry.name.encode(errors="replace").startswith(_MARKS) for entry in path.iterdir())
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
        _refuse_two_layouts(folder)
        found = read_ranks(folder) if holds_ranks(folder) else read_dist(folder)
        if not found.gathers:
            raise NotACheckpoint(f"{folder}: holds no weights", "give the folder that holds the model")
        return Checkpoint(
            gathers=found.gathers,
            format=self.name,
            topology=found.topology,
            sidecars=_sidecars(folder, options),
            notes=(*found.notes, *_doubts(folder, found)),
            left_out=found.left_out,
            copies=found.copies,
            files=tuple(found.files),
            settings=found.settings,
        )


FORMAT = MegatronFormat()


def _refuse_part(path: Path, whole: MegatronFormat) -> None:
    """Refuse one file of a checkpoint, or the folder of one rank, naming the folder to give."""
    rank = rank_folder_of(path)
    if rank is not None:
        folder = rank.parent
    elif path.name == FILE and path.is_file():
        folder = Path(f"iter_N that holds all mp_rank_XX/{FILE}")
    elif (
        path.is_file() and (path.name in _PARTS or path.suffix == ".distcp") and whole.recognises(path.parent)
    ):
        folder = path.parent
    else:
        return
    raise IncompleteCheckpoint(f"{path}: a part of a Megatron checkpoint alone", f"give the folder {folder}")


def _refuse_two_layouts(folder: Path) -> None:
    """Refuse a folder that holds more than one checkpoint."""
    layouts = {
        f"mp_rank_XX/{FILE}": holds_ranks(folder),
        f"{METADATA} or .distcp files": holds_dcp(folder),
        "<name>/.zarray": holds_zarr(folder),
    }
    held = [layout for layout, holds in layouts.items() if holds]
    if len(held) > 1:
        raise AmbiguousCheckpoint(
            f"{folder}: holds {' and '.join(held)}, which are checkpoints of different kinds",
            "move away what does not belong to the one to merge",
        )


def _is_without_model(path: Path) -> bool:
    """Whether it is what verl saves where the weights are in Hugging Face's form already."""
    return (path / _OPTIMIZER).is_dir() and not (path / "model" / LEAF).is_dir()


def _mentions_megatron(metadata: Path) -> bool:
    """Whether the names in a ``.metadata`` are a Megatron model's."""
    if not metadata.is_file():
        return False
    file = LocalFile(metadata)
    start = file.read(0, min(file.size, _SEARCHED))
    return any(mark in start for mark in _MARKS)


def _doubts(folder: Path, found: Found) -> Iterator[Note]:
    """What may be honest and is odd: an iteration that is not the folder's, whole numbers for weights."""
    step = _STEP.fullmatch(folder.name)
    if step and type(found.iteration) is int and found.iteration != int(step[1]):
        yield Note("warning", f"{folder}: its files say that they are of iteration {found.iteration}")
    whole = [name for name, gather in found.gathers.items() if gather.dtype.name.startswith(_WHOLE_NUMBERS)]
    if whole and found.settings.get("params_dtype") is not None:
        more = f", as are {len(whole) - 1} more tensors" if len(whole) > 1 else ""
        dtype = found.gathers[whole[0]].dtype
        yield Note(
            "warning",
            f"{whole[0]}: is {dtype}{more}, in a model trained in {found.settings['params_dtype']}",
            whole[0],
        )


def _sidecars(folder: Path, options: OpenOptions) -> tuple[Path, ...]:
    """Where config and tokenizer may be: huggingface/ beside dist_ckpt/, the folder itself, the run's."""
    beside = [folder.parent / "huggingface"] if folder.name == LEAF else []
    run = [] if folder.name == LEAF else [folder.parent]
    first = [options.hf_config] if options.hf_config else []
    known = [*first, *beside, *sidecar_folders([folder], options), *run]
    return tuple(dict.fromkeys(each for each in known if each.is_dir()))
