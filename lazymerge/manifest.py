"""lazymerge-manifest.json: what the files of a result held when it was verified, to find later what changed.

    {"manifest": 1, "lazymerge": VERSION,
     "files": {NAME: {"size": BYTES, "xxh3_128": of the whole file},
               NAME.safetensors: {"size": BYTES, "header": xxh3_128 of all before the first tensor,
                                  "tensors": {NAME: {"dtype": ..., "shape": ..., "xxh3_128": ...}}}},
     "checksum": xxh3_128 of this text without the checksum}

Together these cover every byte of every file, this one included. The text has one form only (keys sorted,
two spaces), so that a byte that changes nothing in it is found as well.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import xxhash

from lazymerge import __version__
from lazymerge.errors import LazymergeError
from lazymerge.files.json_text import bounded
from lazymerge.files.local import Descriptors, LocalFile
from lazymerge.files.region import Region
from lazymerge.files.safetensors_file import read_safetensors
from lazymerge.files.writing import write_whole
from lazymerge.output import MANIFEST
from lazymerge.sidecars import is_sidecar
from lazymerge.structure import SAFETENSORS, WEIGHTS, Problem
from lazymerge.threads import share

_VERSION = 1
_LARGEST = 1 << 28  # bytes of a manifest
BLOCK = 1 << 20
"""Bytes that a worker reads at a time."""

_HELD = (*WEIGHTS, ".json", ".jinja", ".py", ".model", ".tiktoken")
"""Suffixes of files that belong to a model, besides the names of sidecars."""

_LOADED = re.compile(
    r"\.(safetensors|bin|ckpt)"  # and what follows: .bin.1, .ckpt.data-00000-of-00001
    r"|\.(pt|pth|pkl|pickle|joblib|np[yz]|h5|hdf5|keras|msgpack|gg(uf|ml|jt)|onnx|pb|tflite|distcp|metadata|nemo"
    r"|engine|plan|ot|(pd)?params|mlmodel|mar|zip|tar|tgz|so|dll|dylib|py[cd]?|json|jinja2?|j2|ya?ml"
    r"|model|tiktoken|spm|vocab|bpe|codes|tokenizer)$"
    r"|^(tokenizer\.|dict\.txt$)",  # tokenizer.model.v3
    re.IGNORECASE,
)
"""Names of files that a loader might take."""

_NOT_OURS = {".lazymerge", ".cache", ".git"}
"""Folders of tools: of a merge, of downloads from the hub, of git."""

OnBytes = Callable[[int, int, str], None]
"""Called from any thread with (bytes just read, bytes of all, file or tensor)."""


@dataclass(frozen=True, slots=True)
class ManifestReport:
    """What checking a folder against its manifest has found; `nbytes` were read, of so many files."""

    files: int
    tensors: int
    nbytes: int
    problems: tuple[Problem, ...]

    @property
    def same(self) -> bool:
        """Whether nothing has changed."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        return {"same": self.same, **asdict(self)}


# ------------------------------------------------------------------------------------- making


def make_manifest(
    folder: Path,
    digests: Mapping[str, str] | None = None,
    *,
    names: Iterable[str] | None = None,
    workers: int = 1,
    on_bytes: OnBytes | None = None,
) -> bytes:
    """The manifest of these files (default: of all of the model) in the folder, as they stand on the disk.

    `digests` are the xxh3_128 of the tensors in the folder itself, where they are known already: a tensor
    that is in it is not read. Raises what reading raises.
    """
    digests = digests or {}
    files: dict[str, Any] = {}
    parts: list[_Part] = []
    pool = Descriptors()
    for name in sorted(_names(folder) if names is None else names):
        file = LocalFile(folder / name, pool)
        if not name.endswith(SAFETENSORS):
            parts.append(_Part(file, name, None, 0, file.size))
            files[name] = {"size": file.size}
            continue
        regions = read_safetensors(file)
        parts.append(_Part(file, name, None, 0, _data_start(file, regions)))
        files[name] = {"size": file.size, "tensors": {each: _kind(r) for each, r in regions.items()}}
        for each, region in regions.items():
            if "/" not in name and each in digests:
                files[name]["tensors"][each]["xxh3_128"] = digests[each]
            else:
                parts.append(_Part(file, name, each, region.offset, region.extent))
    for part, digest in _digests(parts, workers, on_bytes):
        entry = files[part.name]
        if part.tensor is not None:
            entry["tensors"][part.tensor]["xxh3_128"] = digest
        else:
            entry["header" if "tensors" in entry else "xxh3_128"] = digest
    return _sealed({"manifest": _VERSION, "lazymerge": __version__, "files": files})


def write_manifest(folder: Path, content: bytes) -> None:
    """Put a manifest into the folder, whole or not at all; `OutputError` if that fails."""
    write_whole(folder / MANIFEST, content, folder / f".{MANIFEST}.part")


def _names(folder: Path) -> Iterator[str]:
    """The files of the model in the folder and below, by name; hidden folders and the manifest apart."""
    found = []
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        where = Path(path).relative_to(folder)
        for name in names:
            relative = (where / name).as_posix()
            held = name.endswith(_HELD) or is_sidecar(name) or is_sidecar(relative)
            if held and not name.startswith(".") and relative != MANIFEST:
                found.append(relative)
    return iter(sorted(found))


def _kind(region: Region) -> dict[str, Any]:
    return {"dtype": region.dtype.name, "shape": list(region.shape)}


def _data_start(file: LocalFile, regions: Mapping[str, Region]) -> int:
    return min((region.offset for region in regions.values()), default=file.size)


def _sealed(content: Mapping[str, Any]) -> bytes:
    """The text of a manifest with its checksum."""
    text = _text(content)
    return _text({**content, "checksum": xxhash.xxh3_128_hexdigest(text)})


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


# ------------------------------------------------------------------------------------- checking


def has_manifest(folder: Path) -> bool:
    """Whether the folder has a manifest to check."""
    return os.path.lexists(folder / MANIFEST)


def check_manifest(folder: Path, *, workers: int = 1, on_bytes: OnBytes | None = None) -> ManifestReport:
    """Compare the folder, as it stands on the disk, with its manifest: every byte of every file."""
    try:
        recorded = read_manifest(folder)
    except (LazymergeError, ValueError, RecursionError) as error:
        text = error.problem if isinstance(error, LazymergeError) else str(error)[:200]
        return ManifestReport(0, 0, 0, (Problem(MANIFEST, f"not what was written ({text})"),))
    problems = [Problem(name, "is not in the manifest") for name in _loadable(folder) if name not in recorded]
    parts: dict[_Part, str] = {}  # what to read -> its digest
    pool = Descriptors()
    for name, entry in recorded.items():
        try:
            file = LocalFile(folder / name, pool)
        except LazymergeError:
            problems.append(Problem(name, "is missing, or cannot be read"))
            continue
        if _is_kept_by_a_tool(folder, name):
            problems.append(Problem(name, f"is a link into a folder of tools: {os.readlink(folder / name)}"))
        elif file.size != entry["size"]:
            problems.append(Problem(name, f"{file.size} bytes, expected {entry['size']}"))
        elif "tensors" not in entry:
            parts[_Part(file, name, None, 0, file.size)] = entry["xxh3_128"]
        else:
            problems += _check_header(file, name, entry, parts)
    checked = 0
    for part, digest in _digests(list(parts), workers, on_bytes):
        checked += part.size
        if digest != parts[part]:
            text = "its bytes are not those that were written"
            of_header = part.tensor is None and part.name.endswith(SAFETENSORS)
            problems.append(Problem(part.name, f"header: {text}" if of_header else text, part.tensor))
    problems.sort(key=lambda problem: (problem.file, problem.tensor or "", problem.text))
    tensors = sum(part.tensor is not None for part in parts)
    return ManifestReport(len(recorded), tensors, checked, tuple(problems))


def _is_kept_by_a_tool(folder: Path, name: str) -> bool:
    """Whether a file is a link to where a tool may clear it away: it would be whole only as long as that."""
    path, root = folder / name, folder.resolve()
    if not path.is_symlink() or not path.resolve().is_relative_to(root):
        return False
    return not _NOT_OURS.isdisjoint(path.resolve().relative_to(root).parts)


def _check_header(
    file: LocalFile, name: str, entry: Mapping[str, Any], parts: dict[_Part, str]
) -> Iterator[Problem]:
    """Compare the tensors of a weight file with the manifest's, and add what has to be read to `parts`."""
    try:
        regions = read_safetensors(file)
    except LazymergeError as error:
        yield Problem(name, error.problem.removeprefix(f"{file.path}: "))
        return
    recorded = entry["tensors"]
    for each in recorded.keys() - regions.keys():
        yield Problem(name, "is missing", each)
    for each in regions.keys() - recorded.keys():
        yield Problem(name, "is not in the manifest", each)
    for each in regions.keys() & recorded.keys():
        kind = _kind(regions[each])
        expected = {key: recorded[each][key] for key in kind}
        if kind != expected:
            yield Problem(
                name,
                f"{kind['dtype']} {kind['shape']}, expected {expected['dtype']} {expected['shape']}",
                each,
            )
    parts[_Part(file, name, None, 0, _data_start(file, regions))] = entry["header"]
    for each, region in regions.items():
        if each in recorded:
            parts[_Part(file, name, each, region.offset, region.extent)] = recorded[each]["xxh3_128"]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The files of the manifest, name -> entry; `ValueError` or `LazymergeError` if it is not as written."""
    file = LocalFile(folder / MANIFEST)
    if file.size > _LARGEST:
        raise ValueError(f"{file.size} bytes")
    raw = file.read(0, file.size)
    content = json.loads(bounded(raw))
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    unsealed = {key: value for key, value in content.items() if key != "checksum"}
    if _sealed(unsealed) != raw:
        raise ValueError("its checksum is another")
    if content.get("manifest") != _VERSION:
        raise ValueError(f"of version {content.get('manifest')!r:.50}, expected {_VERSION}")
    files = content.get("files")
    if not isinstance(files, dict) or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise ValueError("an entry that is none")
    return files


def _is_entry(name: str, entry: Any) -> bool:
    if not isinstance(entry, dict) or not _is_inside(name):
        return False
    if type(entry.get("size")) is not int:
        return False
    if "tensors" not in entry:
        return isinstance(entry.get("xxh3_128"), str)
    tensors = entry["tensors"]
    return (
        isinstance(entry.get("header"), str)
        and isinstance(tensors, dict)
        and all(
            isinstance(each, dict) and {"dtype", "shape", "xxh3_128"} <= each.keys()
            for each in tensors.values()
        )
    )


def _is_inside(name: str) -> bool:
    """Whether a name is that of a file in the folder or below, in the one form that it has."""
    path = PurePosixPath(name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    within = not path.is_absolute() and bool(path.parts) and ".." not in path.parts
    return within and path.as_posix() == name and "\0" not in name


def _loadable(folder: Path) -> Iterator[str]:
    """The files in the folder and below that a loader might take for weights, config or code, by name.

    A folder that is a link is named itself: what is in it is not this result's.
    """
    found = []
    for path, folders, names in os.walk(folder):
        where = Path(path).relative_to(folder)
        folders[:] = [name for name in folders if name not in _NOT_OURS]
        linked = [name for name in folders if (Path(path) / name).is_symlink()]
        for name in names:
            relative = (where / name).as_posix()
            if _LOADED.search(name) or is_sidecar(name) or is_sidecar(relative):
                found.append(relative)
        found += [(where / name).as_posix() for name in linked]
    return iter(sorted(set(found) - {MANIFEST}))


# ------------------------------------------------------------------------------------- reading


class _Part(NamedTuple):
    """Bytes of a file that have a digest of their own: a tensor, a header or all of it."""

    file: LocalFile
    name: str
    tensor: str | None
    offset: int
    size: int


def drop_cached(file: LocalFile) -> None:
    """Have the kernel write the file out and drop it from the page cache, so that the disk is read next."""
    with file.opened() as fd:
        os.fsync(fd)
    file.forget(0, file.size)


def _digests(parts: list[_Part], workers: int, on_bytes: OnBytes | None) -> list[tuple[_Part, str]]:
    """The xxh3_128 of each part, read from the disk."""
    for file in {id(part.file): part.file for part in parts}.values():
        drop_cached(file)
    total = sum(part.size for part in parts)
    found: list[tuple[_Part, str]] = []
    lock = threading.Lock()

    def work(units: Iterator[_Part]) -> None:
        buffer = np.empty(BLOCK, np.uint8).data
        for part in units:
            digest = xxhash.xxh3_128()
            for at in range(0, part.size, BLOCK):
                block = buffer[: min(BLOCK, part.size - at)]
                part.file.read_into(part.offset + at, block)
                digest.update(block)
                if on_bytes is not None:
                    on_bytes(len(block), total, part.tensor or part.name)
            if part.size >= BLOCK:
                part.file.forget(part.offset, part.size)
            with lock:
                found.append((part, digest.hexdigest()))

    share(parts, work, workers)
    return found
