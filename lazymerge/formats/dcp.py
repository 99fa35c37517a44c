"""Folders of torch.distributed.checkpoint: a ``.metadata`` file and the records of all ranks.

    .metadata        which tensors there are, in which chunks, and where their records are
    __R_W.distcp     what writer W of rank R wrote: records one after the other

A record is a whole archive of ``torch.save`` (lazymerge.formats.dcp_records), of one tensor (the chunk,
and nothing else of its storage) or one object. Records are read when a tensor's pieces are first wanted.
``.metadata`` is written last: without it the save did not finish. Saved without collectives, each rank
has its own (``__R.metadata``), which nothing puts together.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from lazymerge.boxes import Box, Shape
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from lazymerge.files.dtype import DType
from lazymerge.files.local import Descriptors, LocalFile
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.formats.dcp_distinct import check_distinct
from lazymerge.formats.dcp_metadata import Place, TensorEntry, read_metadata
from lazymerge.formats.dcp_records import Records, read_object
from lazymerge.formats.stacks import Allowance, Index, unstack
from lazymerge.gather import Gather

METADATA = ".metadata"


def holds_dcp(path: Path) -> bool:
    """Whether a folder is a DCP folder, finished or not; looks at names only."""
    return (path / METADATA).is_file() or (path.is_dir() and any(path.glob("*.distcp")))


def read_dcp(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> DcpFolder:
    """The tensors of a DCP folder, unread; those that are not `wanted` are only named.

    Raises `IncompleteCheckpoint` where the save did not finish, `UnsupportedCheckpoint` for metadata of each
    rank apart, and what `lazymerge.formats.dcp_metadata.read_metadata` raises.
    """
    there = os.path.lexists(folder / METADATA)  # if it is no file, that is said when it is opened
    if not there and any(folder.glob(f"__*{METADATA}")):
        raise UnsupportedCheckpoint(
            f"{folder}: holds the metadata of each rank apart (saved with use_collectives=False)",
            "save the checkpoint with collectives, or load it with torch and save it again",
        )
    if not there:
        raise IncompleteCheckpoint(
            f"{folder}: holds .distcp files and no {METADATA}: the save did not finish",
            f"{METADATA} is written last; take another step of the run, or copy the folder again",
        )
    return DcpFolder(folder, wanted)


class DcpTensor:
    """One tensor: its element type, shape, and the boxes that its chunks fill."""

    __slots__ = ("_entry", "_folder", "_found", "_strides", "name")

    def __init__(self, folder: DcpFolder, name: str, entry: TensorEntry) -> None:
        self.name = name
        self._folder = folder
        self._entry = entry
        self._found = array("q", [-1]) * len(entry.boxes)  # where the elements start in the file
        self._strides: dict[int, Shape] = {}  # of chunks that are not contiguous

    @property
    def dtype(self) -> DType:
        """Its element type."""
        return self._entry.dtype

    @property
    def shape(self) -> Shape:
        """Its shape, in elements."""
        return self._entry.shape

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes that the chunks with elements fill."""
        return self._entry.boxes

    def region(self, chunk: int) -> Region:
        """Where the bytes of a chunk are; its record's headers are read when they are first wanted."""
        place, shape = self._entry.places[chunk], self._entry.boxes[chunk].shape
        file = self._folder.file_at(place, self.name)
        if self._found[chunk] < 0:
            at, strides = self._folder.records.find(self.name, file, place, self.dtype, shape)
            if strides != contiguous_strides(shape):
                self._strides[chunk] = strides
            self._found[chunk] = at
        strides = self._strides.get(chunk) or contiguous_strides(shape)
        return Region(file, self._found[chunk], self.dtype, shape, strides)


class DcpFolder:
    """A DCP folder: `tensors` by name, the names of `others` that were not wanted, and of `objects`.

    `paths` are the files that it names, relative to the folder; `files` those that were opened so far.
    """

    def __init__(self, folder: Path, wanted: Callable[[str], bool]) -> None:
        self.folder = folder
        self._pool = Descriptors()
        self._stacks = Allowance()
        self._metadata_file = LocalFile(folder / METADATA, self._pool)
        metadata = read_metadata(self._metadata_file, wanted)
        self._opened: dict[str, LocalFile] = {}
        self.records = Records()
        self._objects = metadata.objects
        self.paths = metadata.paths
        self.others = tuple(metadata.others)
        self.objects = tuple(metadata.objects)
        self.tensors = {name: DcpTensor(self, name, entry) for name, entry in metadata.tensors.items()}
        self._check_places(metadata.tensors)
        check_distinct(self._chunks(metadata.tensors))

    @property
    def files(self) -> list[LocalFile]:
        """The files that were opened."""
        return [self._metadata_file, *self._opened.values()]

    def gather(self, name: str) -> Gather:
        """The whole tensor of that name."""
        return self.unstacked(name, 0)[()]

    def unstacked(self, name: str, axes: int) -> dict[Index, Gather]:
        """The tensors at each index of the first `axes` axes (lazymerge.formats.stacks)."""
        return unstack(name, self.tensors[name], axes, self._stacks)

    def load_object(self, name: str) -> Any:
        """The object of that name, read inertly; `IncompleteCheckpoint` where it has no record."""
        place = self._objects[name]
        if place is None:
            raise IncompleteCheckpoint(
                f"{name}: {self._metadata_file.name} has no record for it", "copy the checkpoint again"
            )
        return read_object(name, self.file_at(place, name), place)

    def file_at(self, place: Place, name: str) -> LocalFile:
        """The file of a record, which lies in it; `name` is whose record it is, for messages."""
        file = self._opened.get(place.path)
        if file is None:
            file = self._opened[place.path] = self._open(place.path, name)
        if place.offset + place.length > file.size:
            raise DamagedFile(
                f"{name}: {file.name} has {file.size} bytes, but its record is at bytes {place.offset} to"
                f" {place.offset + place.length}",
                "the file is truncated; copy it again",
            )
        return file

    def _check_places(self, tensors: dict[str, TensorEntry]) -> None:
        """Raise `InconsistentCheckpoint` where two chunks are said to be in the same bytes."""
        records = [
            (self.file_at(place, name).inode, place.offset, place.length, name, chunk)
            for name, entry in tensors.items()
            for chunk, place in enumerate(entry.places)
        ]
        records.sort()
        for (inode, start, length, name, chunk), (other_inode, at, _, other, other_chunk) in pairwise(
            records
        ):
            if inode == other_inode and at < start + length:
                one, two = tensors[name], tensors[other]
                raise InconsistentCheckpoint(
                    f"{self._metadata_file.name}: has the chunks of {name} at {one.boxes[chunk].start} and of"
                    f" {other} at {two.boxes[other_chunk].start} in the same bytes ({at} to"
                    f" {start + length}) of {one.places[chunk].path[:200]}",
                    "the metadata is damaged, or of another save; copy the checkpoint again",
                )

    def _chunks(self, tensors: dict[str, TensorEntry]) -> dict[LocalFile, list[tuple[DcpTensor, int]]]:
        """The chunks in each file."""
        chunks: dict[LocalFile, list[tuple[DcpTensor, int]]] = {}
        for name, entry in tensors.items():
            for chunk, place in enumerate(entry.places):
                chunks.setdefault(self.file_at(place, name), []).append((self.tensors[name], chunk))
        return chunks

    def _open(self, relative: str, name: str) -> LocalFile:
        path = self.folder / relative
        if not _is_inside(path, self.folder):
            raise DamagedFile(
                f"{name}: {self._metadata_file.name} puts it into {relative[:200]!r}, outside of its folder",
                "this is no checkpoint to be trusted; if the file is a link, put the file itself there",
            )
        if not os.path.exists(path):  # false also for a name that is too long
            raise IncompleteCheckpoint(
                f"{name}: its bytes are in {relative[:200]}, which {self.folder} does not hold",
                "copy all files of the save; they may be on several nodes",
            )
        return LocalFile(path, self._pool)


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a name that cannot be one, a loop of links
        return False
