"""Folders of zarr arrays (version 2 of its specification), as Megatron's old backend writes them.

    <name>/.zarray     JSON: shape, chunks (the shape of each), dtype, order, compressor, filters
    <name>/2.0.1       the elements of the chunk at that place of the grid, as they are

Chunks are all of one size: those at the end of an axis are stored whole, with what is beyond the
array in them. A chunk without a file would be all `fill_value`: here it was never written.
``"bfloat16"`` is no type of numpy, but the one in which models are saved. Folders without a
``.zarray`` hold objects, one in each file (``<name>/shard_0_4.pt``).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from lazymerge.boxes import Box, Shape
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from lazymerge.files.dtype import DTYPES, DType
from lazymerge.files.json_text import read_object
from lazymerge.files.local import Descriptors, LocalFile, refuse_no_file
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.formats.stacks import Allowance, Index, unstack
from lazymerge.gather import Gather

ARRAY = ".zarray"
_MAX_HEADER = 1 << 16  # bytes of a .zarray
_MAX_DIMS = 32
_MAX_NUMBER = 1 << 63
_TYPES = {
    "bfloat16": "bfloat16",
    "<f8": "float64",
    "<f4": "float32",
    "<f2": "float16",
    "<i8": "int64",
    "<i4": "int32",
    "<i2": "int16",
    "|i1": "int8",
    "|u1": "uint8",
    "|b1": "bool",
}
_CHUNK = re.compile(r"[0-9]+(\.[0-9]+)*")
_COPY_AGAIN = "the file is truncated or overwritten; copy it again"


def holds_zarr(path: Path) -> bool:
    """Whether a folder holds arrays, each in a folder of its own; looks at names only."""
    return path.is_dir() and any(os.path.lexists(entry / ARRAY) for entry in path.iterdir())


def read_zarr(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> ZarrFolder:
    """The arrays in a folder, unread; those that are not `wanted` are only named.

    Raises `DamagedFile` for a header that is none, `UnsupportedCheckpoint` for arrays that are compressed,
    in Fortran order or of another type, and `IncompleteCheckpoint` for chunks that are not there.
    """
    return ZarrFolder(folder, wanted)


class ZarrFolder:
    """The arrays of a folder: `tensors` by name, the names of `others` that were not wanted, of `objects`."""

    def __init__(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        self.folder = folder
        self._pool = Descriptors()
        self._stacks = Allowance()
        self.tensors: dict[str, ZarrTensor] = {}
        others, objects = [], []
        for path in sorted(path for path in folder.iterdir() if path.is_dir()):
            if not path.name.isprintable():
                raise DamagedFile(
                    f"{folder}: a folder without a proper name, {path.name[:100]!r}", _COPY_AGAIN
                )
            if not os.path.lexists(path / ARRAY):
                objects.append(path.name)
            elif wanted(path.name):
                self.tensors[path.name] = ZarrTensor(path, self._pool)
            else:
                others.append(path.name)
        self.others, self.objects = tuple(others), tuple(objects)
        self._check_files()

    def _check_files(self) -> None:
        """Raise `InconsistentCheckpoint` where one file is there as two chunks."""
        names: dict[int, LocalFile] = {}
        for file in (file for tensor in self.tensors.values() for file in tensor.files):
            other = names.setdefault(file.inode, file)
            if other is not file:
                raise InconsistentCheckpoint(
                    f"{file.name}: the same file as {other.name}, where each chunk has its own",
                    "copy the checkpoint again, without links",
                )

    @property
    def files(self) -> list[LocalFile]:
        """The files of all headers and chunks."""
        tensors = self.tensors.values()
        return [
            *(tensor.header for tensor in tensors),
            *(file for tensor in tensors for file in tensor.files),
        ]

    def gather(self, name: str) -> Gather:
        """The whole tensor of that name."""
        return self.unstacked(name, 0)[()]

    def unstacked(self, name: str, axes: int) -> dict[Index, Gather]:
        """The tensors at each index of the first `axes` axes (lazymerge.formats.stacks)."""
        return unstack(name, self.tensors[name], axes, self._stacks)


class ZarrTensor:
    """One array: its element type, shape, the boxes that its chunks fill, and their files."""

    __slots__ = ("_strides", "boxes", "dtype", "files", "header", "shape")

    def __init__(self, path: Path, pool: Descriptors) -> None:
        refuse_no_file(path / ARRAY)
        self.header = LocalFile(path / ARRAY, pool)
        header = _header(self.header)
        self.dtype, self.shape = _dtype(path, header), _shape(path, header, "shape")
        chunk = _shape(path, header, "chunks")
        if len(chunk) != len(self.shape) or 0 in chunk:
            raise _damaged(path, f"chunks of shape {chunk} for an array of shape {self.shape}")
        self._strides = contiguous_strides(chunk)
        nbytes = math.prod(chunk) * self.dtype.itemsize
        grid = [-(-size // step) for size, step in zip(self.shape, chunk, strict=True)]
        there = {entry.name for entry in path.iterdir()}
        boxes: list[Box] = []
        self.files: list[LocalFile] = []
        # Stops at the first chunk that is not there: of a grid that cannot be, a row is never walked whole.
        for at in product(*(range(min(count, len(there) + 1)) for count in grid)):
            name = ".".join(map(str, at)) or "0"
            if name not in there:
                raise IncompleteCheckpoint(
                    f"{path.name}: no chunk {name} in {path}, of {math.prod(grid)}",
                    "the save did not finish, or files were lost; copy the checkpoint again",
                )
            self.files.append(_chunk_file(path, name, nbytes, pool))
            start = tuple(index * step for index, step in zip(at, chunk, strict=True))
            ends = zip(start, chunk, self.shape, strict=True)
            boxes.append(Box(start, tuple(min(step, size - first) for first, step, size in ends)))
        self.boxes = tuple(boxes)
        _check_inside(path, there, grid)

    def region(self, chunk: int) -> Region:
        """Where the bytes of a chunk are."""
        return Region(self.files[chunk], 0, self.dtype, self.boxes[chunk].shape, self._strides)


def _check_inside(path: Path, names: Iterable[str], grid: Sequence[int]) -> None:
    """Refuse chunks that the array does not have: then its header is another one's."""
    for name in names:
        if _CHUNK.fullmatch(name) is None:
            continue
        at = name.split(".")
        inside = len(at) == max(len(grid), 1) and all(
            len(number) <= len(str(count)) and int(number) < count
            for number, count in zip(at, grid or [1], strict=True)
        )
        if not inside:
            raise InconsistentCheckpoint(
                f"{path.name}: chunk {name[:100]} in {path}, whose {ARRAY} makes a grid of {tuple(grid)}",
                f"the {ARRAY} is that of another array, or files were mixed: copy the checkpoint again",
            )


def _chunk_file(path: Path, name: str, nbytes: int, pool: Descriptors) -> LocalFile:
    place = path / name
    if place.is_symlink() or path.is_symlink():
        raise DamagedFile(f"{path.name}: {place} is a link", "put the file itself there")
    file = LocalFile(place, pool)
    if file.size != nbytes:
        raise DamagedFile(
            f"{path.name}: {place} has {file.size} bytes, expected {nbytes} for a chunk", _COPY_AGAIN
        )
    return file


def _header(file: LocalFile) -> dict[str, Any]:
    try:
        header = read_object(file, _MAX_HEADER)
        if header.get("zarr_format") != 2:
            raise ValueError("another version")
    except ValueError as error:
        raise DamagedFile(
            f"{file.name}: no header of a zarr array, version 2 ({error})", _COPY_AGAIN
        ) from None
    return header


def _dtype(path: Path, header: dict[str, Any]) -> DType:
    """The element type, if the chunks are plain arrays of it."""
    if header.get("compressor") is not None or header.get("filters"):
        raise _unsupported(path, "compressed or filtered chunks")
    if header.get("order") != "C" or header.get("dimension_separator", ".") != ".":
        raise _unsupported(path, "chunks in Fortran order, or in folders of their own")
    name = header.get("dtype")
    known = _TYPES.get(name) if isinstance(name, str) else None
    if known is None:
        raise _unsupported(path, f"elements of the type {str(name)[:100]!r}")
    return DTYPES[known]


def _shape(path: Path, header: dict[str, Any], key: str) -> Shape:
    value = header.get(key)
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        raise _damaged(path, f"no proper {key!r}")
    if not all(type(size) is int and 0 <= size < _MAX_NUMBER for size in value):
        raise _damaged(path, f"no proper {key!r}")
    return tuple(value)


def _damaged(path: Path, what: str) -> DamagedFile:
    return DamagedFile(f"{path / ARRAY}: {what}", _COPY_AGAIN)


def _unsupported(path: Path, what: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{path / ARRAY}: {what}", "convert the checkpoint with the Megatron that wrote it"
    )
