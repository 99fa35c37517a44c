"""The files of a model folder against each other: index, headers, numbering. No weight is read.

names        the index lists exactly what the headers hold, each in its file and in no other
total_size   the bytes of all tensors, where the index has it
numbering    X-00001-of-0000N to X-0000N-of-0000N, or one file and no index
headers      format "pt", tensors back to back up to the last byte (lazymerge.files.safetensors_file)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.errors import LazymergeError
from lazymerge.files.json_text import bounded
from lazymerge.files.local import Descriptors, LocalFile
from lazymerge.files.region import Region
from lazymerge.files.safetensors_file import read_metadata, read_safetensors
from lazymerge.formats.huggingface import read_model

SAFETENSORS = ".safetensors"
WEIGHTS = (SAFETENSORS, ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
"""Suffixes of files that a loader might take for weights."""

INDEX = ".index.json"
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_LARGEST_INDEX = 1 << 28


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a file of a folder (`file` is relative to it), or with one of its tensors."""

    file: str
    text: str
    tensor: str | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor}: {self.text}" if self.tensor else f"{self.file}: {self.text}"


def check_structure(folder: Path) -> tuple[Problem, ...]:
    """What is wrong with the weight files of the folder and their index; nothing if they are as they must be.

    Raises `NotACheckpoint` where there are no weights at all.
    """
    pool = Descriptors()
    names = sorted(path.name for path in folder.glob(f"*{SAFETENSORS}"))
    if not names:
        read_model(folder)  # torch files prove their own places, and an index its files
        return ()
    problems: list[Problem] = []
    headers: dict[str, Mapping[str, Region]] = {}
    for name in names:
        try:
            file = LocalFile(folder / name, pool)
            headers[name] = read_safetensors(file)
            made_for = read_metadata(file).get("format")
        except LazymergeError as error:
            problems.append(Problem(name, _without(error.problem, folder / name)))
            continue
        if made_for != "pt":
            problems.append(Problem(name, f"its header says format {made_for!r:.50}, expected 'pt'"))
    problems += _doubles(headers)
    indexes = sorted(path.name for path in folder.glob(f"*{SAFETENSORS}{INDEX}"))
    if len(indexes) > 1:
        problems.append(Problem(indexes[1], f"a second index beside {indexes[0]}"))
    elif indexes:
        problems += _against_index(folder, indexes[0], names, headers)
    elif len(names) > 1:
        problems.append(Problem(names[1], f"{len(names)} weight files and no index that lists them"))
    problems += _numbering(names)
    return tuple(problems)


def left_alone(folder: Path) -> tuple[Note, ...]:
    """A warning about torch files beside safetensors, which are loaded in their place."""
    if not any(folder.glob(f"*{SAFETENSORS}")):
        return ()
    others = sorted(path.name for path in folder.glob("pytorch_model*"))
    if not others:
        return ()
    listed = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    return (Note("warning", f"{listed} beside the model was not checked: loaders take the safetensors"),)


def _without(text: str, path: Path) -> str:
    """The text of an error without the path in front."""
    return text.removeprefix(f"{path}: ")


def _doubles(headers: Mapping[str, Mapping[str, Region]]) -> Iterator[Problem]:
    places: dict[str, str] = {}
    for file, held in headers.items():
        for name in held:
            if name in places:
                yield Problem(file, f"is in {places[name]} too", name)
            else:
                places[name] = file


def _against_index(
    folder: Path, index: str, names: list[str], headers: Mapping[str, Mapping[str, Region]]
) -> Iterator[Problem]:
    try:
        content = _read_index(folder / index)
    except (ValueError, RecursionError) as error:
        yield Problem(index, f"not an index of weights ({str(error)[:100]})")
        return
    places = content["weight_map"]
    for name, file in places.items():
        if file not in names:
            yield Problem(index, f"puts it into {file!r:.200}, which is not there", name)
        elif file in headers and name not in headers[file]:
            yield Problem(file, f"not in it, where {index} puts it", name)
    for file, held in headers.items():
        if file not in places.values():
            yield Problem(file, f"a weight file that {index} does not name")
            continue
        for name in held:
            if name not in places:
                yield Problem(file, f"is not in {index}", name)
            elif places[name] != file:
                yield Problem(file, f"is in {places[name]!r:.200} by {index}", name)
    total = content.get("metadata", {}).get("total_size")
    found = sum(region.extent for held in headers.values() for region in held.values())
    if total is not None and len(headers) == len(names) and total != found:
        yield Problem(index, f"total_size {total!r:.50}, expected {found} by the headers")


def _read_index(path: Path) -> dict[str, Any]:
    """The index; `ValueError` if it is none."""
    if path.stat().st_size > _LARGEST_INDEX:
        raise ValueError(f"{path.stat().st_size} bytes")
    content = json.loads(bounded(path.read_bytes()))
    if not isinstance(content, dict) or not isinstance(content.get("metadata", {}), dict):
        raise ValueError("no JSON object with metadata")
    places = content.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError("no weight_map of tensor names to file names")
    return content


def _numbering(names: list[str]) -> Iterator[Problem]:
    """Numbered files of which some are missing, or which are of several sets."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        if numbered:
            sets.setdefault((numbered[1], numbered[3]), set()).add(int(numbered[2]))
    for (stem, count), numbers in sets.items():
        missing = [at for at in range(1, min(int(count), len(numbers) + 1) + 1) if at not in numbers]
        if missing:
            file = f"{stem}-{missing[0]:05}-of-{count}{SAFETENSORS}"
            yield Problem(file, f"is missing: {len(numbers)} of {int(count)} files are there")
        if numbers and max(numbers) > int(count):
            yield Problem(f"{stem}-{max(numbers):05}-of-{count}{SAFETENSORS}", "a number beyond the last")
    if len(sets) > 1:
        (stem, count), *_ = sorted(sets)[1:]
        yield Problem(f"{stem}-00001-of-{count}{SAFETENSORS}", "of a second set of weight files")
