"""Boxes of tensors, and the pieces that fill them."""

from __future__ import annotations

import math
from typing import NamedTuple

from lazymerge.files.region import Region

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A hyper-rectangle of a tensor: where it starts and how far it goes in each dimension."""

    start: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """The box of a whole tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements inside."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into an array."""
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.shape, strict=True))


class Piece(NamedTuple):
    """A box of a tensor and the region that fills it: `region.shape` is the box's shape."""

    start: Shape
    region: Region

    @property
    def box(self) -> Box:
        """The box that the region fills."""
        return Box(self.start, self.region.shape)


def replaced(values: Shape, at: int, value: int) -> Shape:
    """The values with another one at `at`."""
    return (*values[:at], value, *values[at + 1 :])


def cut(piece: Piece, window: Box) -> Piece | None:
    """The part of a piece inside the window; None if there is none."""
    region = piece.region
    start, shape, offset = [], [], region.offset
    for at, size, stride, low, extent in zip(
        piece.start, region.shape, region.strides, window.start, window.shape, strict=True
    ):
        first, last = max(at, low), min(at + size, low + extent)
        if first >= last:
            return None
        start.append(first)
        shape.append(last - first)
        offset += (first - at) * stride * region.dtype.itemsize
    return Piece(tuple(start), Region(region.source, offset, region.dtype, tuple(shape), region.strides))
