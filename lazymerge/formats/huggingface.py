"""Hugging Face model folders: one ``model.safetensors``, or shards and the index that lists them.

    model.safetensors.index.json    {"metadata": ..., "weight_map": {tensor name: file name}}

The index and the headers of the files it names have to agree: each tensor is in exactly the file that
the index says, and in no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lazymerge.errors import DamagedFile, IncompleteCheckpoint, InconsistentCheckpoint, NotACheckpoint
from lazymerge.files.local import Descriptors, LocalFile
from lazymerge.files.region import Region
from lazymerge.files.safetensors_file import read_safetensors
from lazymerge.gather import Gather, of_region

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_INDEX = 1 << 28  # bytes; DeepSeek-V3's has 9 million


def read_model(folder: Path) -> tuple[dict[str, Gather], list[LocalFile]]:
    """The tensors of a model folder by name, unread, and the files that they are in.

    Raises `NotACheckpoint` for a folder without safetensors, `IncompleteCheckpoint` for a shard or a tensor
    that is not there, and `InconsistentCheckpoint` where index and files differ.
    """
    pool = Descriptors()
    if (folder / INDEX).is_file():
        places = read_index(folder)
        files = _shards(folder, places.values(), pool)
    elif (folder / WEIGHTS).is_file():
        files = {WEIGHTS: LocalFile(folder / WEIGHTS, pool)}
        places = None
    else:
        raise NotACheckpoint(
            f"{folder}: holds neither {INDEX} nor {WEIGHTS}", "give the folder of a Hugging Face model"
        )
    regions = {name: read_safetensors(file) for name, file in files.items()}
    if places is not None:
        _check_index(folder, places, regions)
    tensors = {name: of_region(region) for held in regions.values() for name, region in held.items()}
    return tensors, list(files.values())


def read_index(folder: Path) -> dict[str, str]:
    """What the index says: tensor name -> name of a file beside it."""
    file = LocalFile(folder / INDEX)
    try:
        if file.size > _LARGEST_INDEX:
            raise ValueError(f"{file.size} bytes")
        index = json.loads(file.read(0, file.size))
    except (ValueError, RecursionError) as error:
        raise _damaged(file, str(error)[:100]) from None
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(_is_file_name(name) for name in places.values()):
        raise _damaged(file, "no weight_map of tensor names to file names")
    return places


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _damaged(file: LocalFile, what: str) -> DamagedFile:
    return DamagedFile(f"{file.path}: not an index of weights ({what})", "copy it again")


def _shards(folder: Path, names: Iterable[str], pool: Descriptors) -> dict[str, LocalFile]:
    names = sorted(set(names))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise IncompleteCheckpoint(
            f"{folder}: {len(missing)} of {len(names)} files of {INDEX} are missing, first {missing[0]}",
            "copy all files of the model",
        )
    return {name: LocalFile(folder / name, pool) for name in names}


def _check_index(folder: Path, places: dict[str, str], regions: dict[str, dict[str, Region]]) -> None:
    for name, place in places.items():
        if name not in regions[place]:
            raise IncompleteCheckpoint(
                f"{folder / place}: does not hold {name}, which {INDEX} puts there",
                "index and files are not of one model; copy them again",
            )
    for file, held in regions.items():
        stray = next((name for name in held if places.get(name) != file), None)
        if stray is not None:
            expected = f"which is in {places[stray]}" if stray in places else "which is in no file"
            raise InconsistentCheckpoint(
                f"{folder / file}: holds {stray}, {expected} by {INDEX}",
                "index and files are not of one model; copy them again",
            )
