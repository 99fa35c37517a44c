"""Tensors that are stored in chunks, and stacks of them taken apart along their leading axes.

A trainer may store what belongs to all layers, or to all experts of all layers, as one tensor with a
leading axis for each. The tensor at one index of such a stack is made of the chunks that reach it:
they are sorted by index once, so that a stack of thousands costs what its chunks cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Protocol

from lazymerge.boxes import Box, Piece, Shape
from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint, UnsupportedCheckpoint
from lazymerge.files.dtype import DType
from lazymerge.files.region import Region
from lazymerge.gather import Gather, Shards

MAX_STACK = 1 << 19
"""Tensors that the stacks of a checkpoint may hold together; the largest models have a tenth of it."""

Index = tuple[int, ...]


class Allowance:
    """How many tensors may still come out of the stacks of a checkpoint: a few bytes can claim any number."""

    def __init__(self, limit: int = MAX_STACK) -> None:
        self.left = limit

    def take(self, name: str, count: int) -> None:
        """Count tensors, or pieces of them; `UnsupportedCheckpoint` where they are more than any model's."""
        self.left -= count
        if self.left < 0:
            raise UnsupportedCheckpoint(
                f"{name}: stacks of more than {MAX_STACK} tensors, with those before it",
                "the checkpoint is damaged, or written by something unknown; please report it",
            )


class Chunked(Protocol):
    """A tensor in chunks: which box each of them fills, and where its bytes are."""

    @property
    def dtype(self) -> DType:
        """Its element type."""
        ...

    @property
    def shape(self) -> Shape:
        """Its shape, in elements."""
        ...

    @property
    def boxes(self) -> Sequence[Box]:
        """What the chunks fill; those without elements may be left out."""
        ...

    def region(self, chunk: int) -> Region:
        """Where the bytes of a chunk are: an array of the shape of its box."""
        ...


def check_boxes(name: str, shape: Shape, boxes: Sequence[Box]) -> None:
    """Refuse chunks that cannot tile a tensor of this shape, in time linear in their number.

    Raises `InconsistentCheckpoint` for a chunk outside the tensor or more elements than it has, and
    `IncompleteCheckpoint` for fewer. That none overlaps where the numbers agree is proved by the plan.
    """
    found = 0
    for box in boxes:
        inside = len(box.start) == len(box.shape) == len(shape) and all(
            at + size <= limit for at, size, limit in zip(box.start, box.shape, shape, strict=True)
        )
        if not inside:
            raise InconsistentCheckpoint(
                f"{name}: a chunk at {box.start} of shape {box.shape} is outside of its shape {shape}",
                "the metadata is damaged, or of another save; copy the checkpoint again",
            )
        found += box.numel
    if found > math.prod(shape):
        raise InconsistentCheckpoint(
            f"{name}: its chunks overlap: they hold {found} elements, expected {math.prod(shape)}",
            "the metadata is damaged, or of another save; copy the checkpoint again",
        )
    if found < math.prod(shape):
        raise IncompleteCheckpoint(
            f"{name}: its chunks hold {found} of {math.prod(shape)} elements",
            "the save did not finish, or chunks were lost; take another step of the run",
        )


def unstack(name: str, tensor: Chunked, axes: int, allowance: Allowance) -> dict[Index, Gather]:
    """The tensors at every index of the first `axes` axes, which they do not have any more.

    With no axes that is the whole tensor, at the index (). `allowance` is that of all stacks together. Raises
    `UnsupportedCheckpoint` for more than it has, a tensor that has no such axes, or a stack of nothing.
    """
    sizes = tensor.shape[:axes]
    if len(sizes) < axes or (axes and 0 in tensor.shape):
        raise UnsupportedCheckpoint(
            f"{name}: a tensor of shape {tensor.shape}, expected {axes} leading axes for layers or experts,"
            " and elements in it",
            "the checkpoint is damaged, or written by something unknown; please report it",
        )
    if axes:
        allowance.take(name, math.prod(sizes))
    members: dict[Index, list[int]] = {index: [] for index in product(*map(range, sizes))}
    for chunk, box in enumerate(tensor.boxes):
        allowance.take(name, math.prod(box.shape[:axes]) - 1)
        spans = zip(box.start[:axes], box.shape[:axes], strict=True)
        for index in product(*(range(at, at + size) for at, size in spans)):
            members[index].append(chunk)
    return {
        index: Shards(tensor.shape[axes:], tensor.dtype, _Parts(tensor, tuple(chunks), index))
        for index, chunks in members.items()
    }


class _Parts:
    """The pieces of the tensor at one index of a stack."""

    __slots__ = ("_chunks", "_index", "_tensor")

    def __init__(self, tensor: Chunked, chunks: tuple[int, ...], index: Index) -> None:
        self._tensor = tensor
        self._chunks = chunks
        self._index = index

    def __call__(self) -> Iterator[Piece]:
        axes = len(self._index)
        for chunk in self._chunks:
            start = self._tensor.boxes[chunk].start
            region = self._tensor.region(chunk)
            skipped = sum(
                (at - first) * stride
                for at, first, stride in zip(self._index, start[:axes], region.strides[:axes], strict=True)
            )
            offset = region.offset + skipped * region.dtype.itemsize
            inner = Region(region.source, offset, region.dtype, region.shape[axes:], region.strides[axes:])
            yield Piece(start[axes:], inner)
