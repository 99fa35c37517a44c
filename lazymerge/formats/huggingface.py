"""Hugging Face model folders: one weight file, or shards and the index that lists them.

    model.safetensors               or  model.safetensors.index.json and its files
    pytorch_model.bin               or  pytorch_model.bin.index.json and its files
    X.safetensors                   one file of any name, given itself

    index    {"metadata": ..., "weight_map": {tensor name: file name}}

The index and the headers of the files it names have to agree: each tensor is in exactly the file that
the index says, and in no other. As transformers does, safetensors are taken where both kinds are there. A
lone pytorch_model.bin is a full state dict, which lazymerge.formats.fsdp opens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.errors import (
    AmbiguousCheckpoint,
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    UnsupportedCheckpoint,
)
from lazymerge.files.json_text import read_object
from lazymerge.files.local import Descriptors, LocalFile, refuse_no_file
from lazymerge.files.region import Region
from lazymerge.files.safetensors_file import read_safetensors
from lazymerge.files.stored_tensor import StoredTensor, refuse_unresolved
from lazymerge.files.torch_file import read_torch_file
from lazymerge.formats.registry import OpenOptions, sidecar_folders
from lazymerge.formats.staged import Staged, read_staged
from lazymerge.gather import Gather, of_region

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BIN = "pytorch_model.bin"
_BIN_INDEX = "pytorch_model.bin.index.json"
_SUFFIX = ".safetensors"
_LARGEST_INDEX = 1 << 26  # bytes; DeepSeek-V3's has 9 million


class HuggingFaceFormat:
    """Opens folders that transformers loads, and single safetensors files."""

    name = "huggingface"
    looks_for = f"{WEIGHTS}, {INDEX}, {_BIN_INDEX}, or a safetensors file"

    def recognises(self, path: Path) -> bool:
        """Whether the folder holds such a file, or the path is one."""
        if path.is_dir():
            return any(os.path.lexists(path / name) for name in (WEIGHTS, INDEX, _BIN_INDEX))
        if path.suffix != _SUFFIX or not path.exists():
            return False
        refuse_no_file(path)
        return True

    def open(self, paths: Sequence[Path], options: OpenOptions) -> Checkpoint:
        """The checkpoint in this folder or file; nothing but headers and index is read."""
        if len(paths) > 1:
            raise AmbiguousCheckpoint(
                f"{paths[1]}: a second Hugging Face model", "give one; only ranks of one save go together"
            )
        (path,) = paths
        tensors, files = read_model(path)
        staged = read_staged(path) if path.is_dir() else Staged(self.name)
        return Checkpoint(
            gathers=tensors,
            format=staged.format,
            sidecars=sidecar_folders(paths, options),
            notes=tuple(_left_alone(path, files)) if path.is_dir() else (),
            files=(*files, *staged.files),
            settings=staged.settings,
        )


FORMAT = HuggingFaceFormat()


def read_model(path: Path) -> tuple[dict[str, Gather], list[LocalFile]]:
    """The tensors of a model folder (or of one file) by name, unread, and the files that they are in.

    Raises `NotACheckpoint` for a folder without weights, `IncompleteCheckpoint` for a shard or a tensor
    that is not there, and `InconsistentCheckpoint` where index and files differ.
    """
    folder, single, index = _weights(path)
    pool = Descriptors()
    if index is None:
        files = {single: LocalFile(folder / single, pool)}
        regions = {single: _read(files[single])}
    else:
        places = read_index(folder, index)
        files = _shards(folder, index, places.values(), pool)
        regions = {name: _read(file) for name, file in files.items()}
        _check_index(folder, index, places, regions)
    tensors = {name: of_region(region) for held in regions.values() for name, region in held.items()}
    return tensors, list(files.values())


def _weights(path: Path) -> tuple[Path, str, str | None]:
    """Folder, name of the one weight file, and name of the index if there is one."""
    if not path.is_dir():
        return path.parent, path.name, None
    for single, index in ((WEIGHTS, INDEX), (_BIN, _BIN_INDEX)):
        both = [name for name in (single, index) if os.path.lexists(path / name)]
        for name in both:
            refuse_no_file(path / name)
        if len(both) == 2:
            raise AmbiguousCheckpoint(
                f"{path}: holds {single} and {index}, which are two models",
                f"move one away, or give {path / single} itself",
            )
        if both:
            return path, single, index if both == [index] else None
    raise NotACheckpoint(
        f"{path}: holds neither {INDEX} nor {WEIGHTS}", "give the folder of a Hugging Face model"
    )


def _read(file: LocalFile) -> Mapping[str, Region]:
    """Where the tensors of a weight file are, by name."""
    if file.path.suffix == _SUFFIX:
        return read_safetensors(file)
    state = read_torch_file(file)
    if not isinstance(state, dict):
        raise UnsupportedCheckpoint(
            f"{file.path}: holds {type(state).__name__}, expected a state dict", "save model.state_dict()"
        )
    for name, value in state.items():
        refuse_unresolved(f"{str(name)[:200]!r} in {file.path}", value)
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise UnsupportedCheckpoint(
                f"{str(name)[:200]!r} in {file.path}: no plain tensor",
                "save a flat state dict: names to tensors",
            )
    return {name: value.region() for name, value in state.items()}


def _left_alone(folder: Path, files: Sequence[LocalFile]) -> Iterable[Note]:
    """Notes on weights in the folder that no loader would take."""
    used = {file.path.name for file in files}
    others = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in used and (path.suffix == _SUFFIX or path.name.startswith("pytorch_model"))
    )
    if others:
        listed = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        yield Note("warning", f"{folder}: {listed} beside the model was left alone")


def read_index(folder: Path, name: str = INDEX) -> dict[str, str]:
    """What the index says: tensor name -> name of a file beside it."""
    file = LocalFile(folder / name)
    try:
        places = read_object(file, _LARGEST_INDEX).get("weight_map")
    except ValueError as error:
        raise _damaged(file, str(error)[:100]) from None
    suffix = _SUFFIX if name == INDEX else ".bin"
    if not isinstance(places, dict) or not all(_is_file_name(each, suffix) for each in places.values()):
        raise _damaged(file, "no weight_map of tensor names to file names")
    return places


def _is_file_name(name: Any, suffix: str) -> bool:
    return isinstance(name, str) and name.endswith(suffix) and Path(name).name == name


def _damaged(file: LocalFile, what: str) -> DamagedFile:
    return DamagedFile(f"{file.path}: not an index of weights ({what})", "copy it again")


def _shards(folder: Path, index: str, names: Iterable[str], pool: Descriptors) -> dict[str, LocalFile]:
    names = sorted(set(names))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise IncompleteCheckpoint(
            f"{folder}: {len(missing)} of {len(names)} files of {index} are missing, first {missing[0]}",
            "copy all files of the model",
        )
    return {name: LocalFile(folder / name, pool) for name in names}


def _check_index(
    folder: Path, index: str, places: Mapping[str, str], regions: Mapping[str, Mapping[str, Region]]
) -> None:
    for name, place in places.items():
        if name not in regions[place]:
            raise IncompleteCheckpoint(
                f"{folder / place}: does not hold {name}, which {index} puts there",
                "index and files are not of one model; copy them again",
            )
    for file, held in regions.items():
        stray = next((name for name in held if places.get(name) != file), None)
        if stray is not None:
            expected = f"which is in {places[stray]}" if stray in places else "which is in no file"
            raise InconsistentCheckpoint(
                f"{folder / file}: holds {stray}, {expected} by {index}",
                "index and files are not of one model; copy them again",
            )
