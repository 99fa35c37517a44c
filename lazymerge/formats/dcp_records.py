"""The records of ``.distcp`` files: each an archive of ``torch.save``, of one tensor or one object.

Where the elements of a tensor are in its record is what the record's own headers say. A large model
has tens of thousands of chunks, and few kinds of them: chunks of one shape and type are written with
the same bytes before the elements (the pickle, and the header of the storage with its padding), and
behind them the same sizes after a checksum. Where both are those of a record that was read in full, so
is where the elements are; where they are not, the record is read in full too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lazymerge.boxes import Shape
from lazymerge.errors import (
    DamagedFile,
    InconsistentCheckpoint,
    NotACheckpoint,
    SourceError,
    UnsupportedCheckpoint,
)
from lazymerge.files.dtype import DType
from lazymerge.files.local import LocalFile
from lazymerge.files.torch_file import StoredTensor, read_torch_file
from lazymerge.formats.dcp_metadata import Place

_CHECKSUM = slice(4, 8)  # behind the elements: a signature, the checksum, sizes of 4 or 8 bytes
_BEHIND = 24
_MAX_BEFORE = 1 << 14  # bytes before the elements that are remembered; usual are 704


@dataclass(frozen=True, slots=True)
class _Layout:
    """A record that was read in full: where the elements start in it, their strides, what is around them."""

    elements_at: int
    strides: Shape
    around: tuple[bytes, bytes]


class Records:
    """Finds the elements in records, and remembers how records of each kind are laid out."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[DType, Shape, int], _Layout] = {}

    def find(self, name: str, file: LocalFile, place: Place, dtype: DType, shape: Shape) -> tuple[int, Shape]:
        """Where the elements of a chunk start in the file, and their strides.

        Raises `InconsistentCheckpoint` for a record of another shape or type than the metadata says, and
        what `read_object` raises; `name` is whose record it is, for messages.
        """
        kind = (dtype, shape, place.length)
        nbytes = math.prod(shape) * dtype.itemsize
        layout = self._layouts.get(kind)
        if layout is not None and layout.around == _around(file, place, layout.elements_at, nbytes):
            return place.offset + layout.elements_at, layout.strides
        tensor = _read_tensor(name, file, place, dtype, shape)
        offset = tensor.region().offset
        at = offset - place.offset
        if at <= _MAX_BEFORE:
            self._layouts[kind] = _Layout(at, tensor.strides, _around(file, place, at, nbytes))
        return offset, tensor.strides


def read_object(name: str, file: LocalFile, place: Place) -> Any:
    """What a record holds, read inertly; `DamagedFile` and its kin, naming whose record it is."""
    try:
        return read_torch_file(file, start=place.offset, size=place.length)
    except NotACheckpoint as error:
        raise DamagedFile(f"{name}: {error.problem}", "copy the file again") from None
    except SourceError as error:
        raise type(error)(f"{name}: {error.problem}", error.hint) from None


def _around(file: LocalFile, place: Place, elements_at: int, nbytes: int) -> tuple[bytes, bytes]:
    """What is before the elements of a record, and behind them without the checksum."""
    end = elements_at + nbytes
    before = file.read(place.offset, elements_at)
    behind = bytearray(file.read(place.offset + end, min(_BEHIND, place.length - end)))
    del behind[_CHECKSUM]
    return before, bytes(behind)


def _read_tensor(name: str, file: LocalFile, place: Place, dtype: DType, shape: Shape) -> StoredTensor:
    """The tensor in a record, which has all of its storage, and is what the metadata says."""
    value = read_object(name, file, place)
    where = f"{name}: the record at byte {place.offset} of {file.name} holds"
    if type(value) is not StoredTensor:
        raise UnsupportedCheckpoint(
            f"{where} no plain tensor", "convert the tensor to a plain one and save the checkpoint again"
        )
    nbytes = math.prod(shape) * dtype.itemsize
    if (value.dtype, value.shape, value.storage.nbytes) != (dtype, shape, nbytes):
        raise InconsistentCheckpoint(
            f"{where} a tensor of shape {value.shape} in {value.dtype} ({value.storage.nbytes} bytes),"
            f" expected {shape} in {dtype} ({nbytes} bytes)",
            ".metadata and the .distcp files are not of one save; copy the checkpoint again",
        )
    return value
