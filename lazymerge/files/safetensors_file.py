"""The safetensors container: eight bytes of header length, a JSON header, the tensors back to back.

    <u64 little-endian: n> <n bytes of JSON, padded with spaces to a multiple of 8> <data>

The layout here is that of the library's own writer: tensors by element type (largest first, in
the order of `lazymerge.files.dtype`), then by name, without gaps; ``__metadata__`` holds the one key
``format``. A file laid out so is byte for byte what ``safetensors.torch.save_file`` writes.

What is read may have been written by anyone: tensors in any order, but back to back from the first byte
of the data to the last byte of the file, as the library itself demands.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from lazymerge.errors import DamagedFile, LazymergeError, UnsupportedCheckpoint
from lazymerge.files.dtype import DTYPES, DType
from lazymerge.files.json_text import strict
from lazymerge.files.local import LocalFile
from lazymerge.files.region import Region, contiguous_strides

_ALIGNMENT = 8
LARGEST_HEADER = 100_000_000
"""Bytes of a header at most; the library's own limit."""

_MAX_DIMS = 64  # torch itself stops there

_CODES = {dtype.code: dtype for dtype in DTYPES.values() if dtype.code is not None}
_COPY_AGAIN = "the file is truncated or overwritten; copy it again"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything in a file goes: `offsets` are bytes from its start, `size` its length in bytes."""

    header: bytes
    offsets: dict[str, int]
    size: int


def safetensors_layout(tensors: Mapping[str, tuple[DType, tuple[int, ...], int]]) -> Layout:
    """The layout of a file of these tensors, name -> (dtype, shape, bytes); offsets in file order.

    Every dtype has a safetensors code (the caller has checked).
    """
    ordered = sorted(tensors, key=lambda name: (tensors[name][0].order, name.encode()))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    offsets = {}
    for name in ordered:
        dtype, shape, nbytes = tensors[name]
        if dtype.code == "F4":  # two elements in a byte; the header counts elements
            shape = (*shape[:-1], shape[-1] * 2) if shape else shape
        header[name] = {"dtype": dtype.code, "shape": shape, "data_offsets": [at, at + nbytes]}
        offsets[name] = at
        at += nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    return Layout(
        struct.pack("<Q", len(text)) + text,
        {name: start + offset for name, offset in offsets.items()},
        start + at,
    )


def read_safetensors(file: LocalFile) -> dict[str, Region]:
    """Name -> where its elements are, in the order of the header; nothing but the header is read.

    Raises `DamagedFile` for a header that is none, or is not that of a file of this size, and
    `UnsupportedCheckpoint` for an element type that is not known.
    """
    start, entries = _header(file)
    regions: dict[str, Region] = {}
    places: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        _refuse_no_text(file, name)
        dtype, shape, begin, end = _entry(file, name, entry)
        regions[name] = Region(file, start + begin, dtype, shape, contiguous_strides(shape))
        places.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(places):
        if begin != at:
            raise _damaged(file, f"{name!r:.200} begins at byte {begin} of the data, expected {at}")
        at = end
    if start + at != file.size:
        raise DamagedFile(f"{file.path}: {file.size} bytes, expected {start + at} by its header", _COPY_AGAIN)
    return regions


def read_metadata(file: LocalFile) -> dict[str, object]:
    """What the header says of the file itself, such as its format; `DamagedFile` if it is no header."""
    _, entries = _header(file)
    metadata = entries.get("__metadata__")
    return metadata if type(metadata) is dict else {}


def _header(file: LocalFile) -> tuple[int, dict[str, object]]:
    """Where the data begins, and the header's entries."""
    size = int.from_bytes(file.read(0, 8), "little") if file.size >= 8 else -1
    if not 2 <= size <= min(LARGEST_HEADER, file.size - 8):
        raise _damaged(file, f"no safetensors file, or cut within its header ({file.size} bytes)")
    try:
        entries = strict(file.read(8, size).decode())
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"a header that is not JSON ({str(error)[:100]})") from None
    if type(entries) is not dict:
        raise _damaged(file, "a header that is no JSON object")
    return 8 + size, entries


def _entry(file: LocalFile, name: str, entry: object) -> tuple[DType, tuple[int, ...], int, int]:
    """Element type, shape, and the bytes of the data from and to which a tensor goes."""
    shown = f"{name!r:.200}"
    fields = entry if type(entry) is dict else {}
    code, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or type(code) is not str:
        raise _damaged(file, f"{shown} without a proper dtype, shape and data_offsets")
    if len(shape) > _MAX_DIMS:
        raise _damaged(file, f"{shown} has {len(shape)} dimensions")
    dtype = _CODES.get(code)
    if dtype is None:
        raise UnsupportedCheckpoint(
            f"{file.path}: {shown} is of the type {code!r:.50}, which is not known",
            "convert it with the tool that wrote it",
        )
    if code == "F4":
        shape = [*shape[:-1], shape[-1] // 2] if shape else shape
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise _damaged(file, f"{shown} has {end - begin} bytes, expected {math.prod(shape) * dtype.itemsize}")
    return dtype, tuple(shape), begin, end


def _refuse_no_text(file: LocalFile, name: str) -> None:
    """JSON can hold half of a surrogate pair, which no text is."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise _damaged(file, f"a tensor named {name!r:.200}, which is no text") from None


def _counts(value: object) -> TypeGuard[list[int]]:
    return type(value) is list and all(type(each) is int and 0 <= each < 1 << 63 for each in value)


def _damaged(file: LocalFile, what: str) -> LazymergeError:
    return DamagedFile(f"{file.path}: {what}", _COPY_AGAIN)
