"""The ``.metadata`` file of a torch DCP folder: which tensors there are, and which record holds each chunk.

It is a pickle of ``torch.distributed.checkpoint.metadata.Metadata`` (or of a subclass that a trainer
made of it), read inertly. What is used of it:

    state_dict_metadata   name -> TensorStorageMetadata(properties, size, chunks)
                          or BytesStorageMetadata, for an object
    storage_data          MetadataIndex(fqn, offset, index) -> _StorageInfo(relative_path, offset,
                          length, transform_descriptors)

    chunks                list of ChunkStorageMetadata(offsets, sizes)
    properties            TensorProperties, whose state is a tuple that starts with the dtype; up to
                          torch 2.2 a class of torch.distributed._shard

A chunk is found in storage_data by its name and offset: `index` is only a hint. An object has no
offset. ``transform_descriptors`` (torch 2.7 on) says how a record was compressed. What else is there
(planner_data, all_local_plans, mcore_data) says how it was saved, and is not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from lazymerge.boxes import Box, Shape
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from lazymerge.files.dtype import DTYPES, DType
from lazymerge.files.inert_pickle import LARGE, START, Record, load, refuse_other
from lazymerge.files.local import LocalFile
from lazymerge.formats.stacks import check_boxes

MAX_METADATA = 1 << 30  # bytes; a hundred thousand chunks take 15 to 30 million
_LEAST_CHUNK = 16  # bytes of the file that a chunk takes at least, unless it is there by reference again
_MAX_DIMS = 64
_MAX_NUMBER = 1 << 63
_COPY_AGAIN = "the file is truncated or overwritten; copy it again"


@dataclass(frozen=True, slots=True)
class Place:
    """A record: `length` bytes from byte `offset` of the file at `path`, which is inside the folder."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the metadata has it: the box of every chunk that has elements, and its record."""

    dtype: DType
    shape: Shape
    boxes: tuple[Box, ...]
    places: tuple[Place, ...]


@dataclass(slots=True)
class DcpMetadata:
    """What is in a DCP folder: the tensors that were wanted, the names of the others, the objects."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    objects: dict[str, Place | None] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    """Of all files that are named, also for what was not wanted."""


def read_metadata(file: LocalFile, wanted: Callable[[str], bool]) -> DcpMetadata:
    """What the file says, in its order; tensors that are not `wanted` are only named.

    Raises `DamagedFile` for a file that is none, `InconsistentCheckpoint` and `IncompleteCheckpoint` for
    chunks that do not fit their tensor or have no record, `UnsupportedCheckpoint` for compressed records
    and unknown element types.
    """
    entries, storage = _tables(file)
    places: dict[str, dict[Shape | None, Place]] = {}
    found = DcpMetadata()
    for name, entry in entries.items():
        if type(name) is not str or not name or not name.isprintable() or type(entry) is not Record:
            raise _damaged(file, "an entry without a proper name, or of no kind")
        kind = _kind(entry)
        if kind == "BytesStorageMetadata":
            found.objects[name] = None
            places[name] = {}
        elif kind == "TensorStorageMetadata":
            if wanted(name):
                places[name] = {}
            else:
                found.others.append(name)
        else:
            raise _damaged(file, f"{_shown(name)} as a {kind[:100]}, which is neither tensor nor object")
    _add_places(file, storage, entries, places, found.paths)
    chunks = 0
    for name, of_chunks in places.items():
        if name in found.objects:
            found.objects[name] = of_chunks.get(None)
            continue
        attrs = entries[name].attrs()
        chunks += len(attrs["chunks"]) if type(attrs.get("chunks")) is list else 0
        if chunks * _LEAST_CHUNK > file.size:
            raise _damaged(file, f"{chunks} chunks up to {_shown(name)}, which {file.size} bytes cannot hold")
        found.tensors[name] = _tensor(file, name, attrs, of_chunks)
    return found


def _tables(file: LocalFile) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The two tables of the file: entries by name, and places by index."""
    if file.size > MAX_METADATA:
        raise UnsupportedCheckpoint(
            f"{file.name}: {file.size} bytes, where {MAX_METADATA} are read at most",
            "save the model without its optimizer",
        )
    known: dict[str, object] = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
    known["torch.Size"] = _size
    if file.size > LARGE:
        refuse_other(file.read(0, START), name=file.name)
    value, _ = load(file.read(0, file.size), name=file.name, known=known)
    attrs = value.attrs() if type(value) is Record else {}
    entries, storage = attrs.get("state_dict_metadata"), attrs.get("storage_data")
    if type(entries) is not dict or type(storage) is not dict:
        raise _damaged(file, "no metadata of torch.distributed.checkpoint")
    return entries, storage


def _size(args: tuple[Any, ...]) -> object:
    return args[0] if len(args) == 1 and type(args[0]) is tuple else None


def _add_places(
    file: LocalFile,
    storage: dict[Any, Any],
    entries: dict[Any, Any],
    places: dict[str, dict[Shape | None, Place]],
    paths: set[str],
) -> None:
    """Add the record of each chunk to the names that have an entry in `places`, by the chunk's offset."""
    for key, info in storage.items():
        if type(key) is not Record or type(info) is not Record:
            raise _damaged(file, "a record whose place is not given")
        index, where = key.attrs(), info.attrs()
        name, path = index.get("fqn"), where.get("relative_path")
        if type(name) is not str or type(path) is not str or not path.isprintable():
            raise _damaged(file, "a record without a proper name and file")
        paths.add(path)
        of_chunks = places.get(name)
        if of_chunks is None:
            if name not in entries:
                raise _damaged(file, f"a record of {_shown(name)}, and no entry that says what that is")
            continue
        offset, length = where.get("offset"), where.get("length")
        if not _is_count(offset) or not _is_count(length):
            raise _damaged(file, f"a record of {_shown(name)} without a proper offset and length")
        transforms = where.get("transform_descriptors")
        if transforms:
            named = transforms if type(transforms) is list else []
            said = ", ".join(each[:40] for each in named[:5] if type(each) is str)
            raise UnsupportedCheckpoint(
                f"{_shown(name)}: compressed in {path[:200]} ({said or 'in an unknown way'})",
                "save the checkpoint without a compressing extension",
            )
        start = index.get("offset")
        at = None if start is None else _shape(start)
        if at in of_chunks or (start is not None and at is None):
            raise _damaged(file, f"two records, or a damaged one, for the chunk of {_shown(name)} at {at}")
        of_chunks[at] = Place(path, offset, length)


def _tensor(
    file: LocalFile, name: str, attrs: dict[str, Any], of_chunks: dict[Shape | None, Place]
) -> TensorEntry:
    dtype, shape, chunks = _dtype(attrs.get("properties")), _shape(attrs.get("size")), attrs.get("chunks")
    if dtype is None:
        raise UnsupportedCheckpoint(
            f"{_shown(name)}: in {file.name} with an element type that is not known",
            "convert the tensor to a usual dtype and save the checkpoint again",
        )
    if shape is None or type(chunks) is not list or math.prod(shape) * dtype.itemsize >= _MAX_NUMBER:
        raise _damaged(file, f"{_shown(name)} without a proper shape and chunks")
    boxes = [_box(file, name, chunk) for chunk in chunks]
    full = tuple(box for box in boxes if box.numel)
    check_boxes(_shown(name), shape, full)
    missing = next((box for box in full if box.start not in of_chunks), None)
    if missing is not None:
        raise IncompleteCheckpoint(
            f"{_shown(name)}: {file.name} has no record for its chunk at {missing.start}",
            "the metadata is damaged, or of another save; copy the checkpoint again",
        )
    for box in full:
        place = of_chunks[box.start]
        if box.numel * dtype.itemsize > place.length:
            raise InconsistentCheckpoint(
                f"{_shown(name)}: a record of {place.length} bytes in {place.path[:200]} for a chunk of shape"
                f" {box.shape} in {dtype}, which takes {box.numel * dtype.itemsize}",
                "the metadata is damaged, or of another save; copy the checkpoint again",
            )
    return TensorEntry(dtype, shape, full, tuple(of_chunks[box.start] for box in full))


def _box(file: LocalFile, name: str, chunk: object) -> Box:
    attrs = chunk.attrs() if type(chunk) is Record else {}
    start, shape = _shape(attrs.get("offsets")), _shape(attrs.get("sizes"))
    if start is None or shape is None:
        raise _damaged(file, f"a chunk of {_shown(name)} without proper offsets and sizes")
    return Box(start, shape)


def _dtype(properties: object) -> DType | None:
    """The element type that a record of TensorProperties names."""
    if type(properties) is not Record:
        return None
    state = properties.state
    first = state[0] if type(state) is tuple and state else properties.attrs().get("dtype")
    return first if type(first) is DType else None


def _shape(value: object) -> Shape | None:
    """A tuple of numbers that can be a shape or an offset; None for anything else."""
    if type(value) is list:
        value = tuple(value)
    if type(value) is not tuple or len(value) > _MAX_DIMS or not all(_is_count(part) for part in value):
        return None
    return value


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _kind(entry: Record) -> str:
    return str(entry.cls).rpartition(".")[2]


def _shown(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]}..."


def _damaged(file: LocalFile, what: str) -> DamagedFile:
    return DamagedFile(f"{file.name}: {what}", _COPY_AGAIN)
