"""Whether each data file of a DCP folder is another: one that was copied over another has its records.

Records say of what shape and type a tensor is, not which tensor it is of, so a file in the place of
another one of the same shapes is read without a complaint. Two files of the same bytes are one of them
copied, unless all their tensors are honestly alike: norms that are all ones, biases that are all zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from lazymerge.errors import InconsistentCheckpoint
from lazymerge.files.local import LocalFile
from lazymerge.files.region import Region

_SAMPLE = 1 << 12  # bytes at the end of a file: the directory of its last record, with checksums
_BLOCK = 1 << 20


class Chunked(Protocol):
    """A tensor in chunks, by its name."""

    name: str

    def region(self, chunk: int) -> Region:
        """Where the bytes of a chunk are."""
        ...


def check_distinct(chunks: Mapping[LocalFile, Iterable[tuple[Chunked, int]]]) -> None:
    """Raise `InconsistentCheckpoint` for two files of the same bytes with a tensor that is not one value.

    `chunks` are the tensors' chunks that each file holds. Files of one size are compared, by a sample first.
    """
    alike: dict[tuple[int, bytes], list[LocalFile]] = {}
    sizes: dict[int, int] = {}
    for file in chunks:
        sizes[file.size] = sizes.get(file.size, 0) + 1
    for file in chunks:
        if sizes[file.size] < 2:
            continue
        sample = file.read(max(file.size - _SAMPLE, 0), min(file.size, _SAMPLE))
        others = alike.setdefault((file.size, sample), [])
        for other in others:
            if not _same(file, other):
                continue
            varied = next((tensor for tensor, at in chunks[file] if not _one_value(tensor.region(at))), None)
            if varied is not None:
                raise InconsistentCheckpoint(
                    f"{file.name}: holds the same bytes as {other.name}, a part of {varied.name} among them"
                    " which is not one value all over",
                    "one was copied over the other: take the checkpoint from where it was saved",
                )
            break
        else:
            others.append(file)


def _same(one: LocalFile, other: LocalFile) -> bool:
    return all(
        one.read(at, size) == other.read(at, size)
        for at in range(0, one.size, _BLOCK)
        for size in (min(_BLOCK, one.size - at),)
    )


def _one_value(region: Region) -> bool:
    """Whether all elements of a record, which are one after the other, have the same bytes."""
    width = region.dtype.itemsize
    nbytes = width
    for size in region.shape:
        nbytes *= size
    first = bytearray(width)
    region.source.read_into(region.offset, memoryview(first))
    for at in range(0, nbytes, _BLOCK):
        block = bytearray(min(_BLOCK, nbytes - at))
        region.source.read_into(region.offset + at, memoryview(block))
        if block != bytes(first) * (len(block) // width):
            return False
    return True
