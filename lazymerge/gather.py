"""Gathers: which bytes of which files make up a tensor. No torch, no data.

A gather is an expression of four kinds, closed under everything that moves elements around:

    Shards   boxes of the tensor <- regions of files       what a format reads
    Pick     every dimension of the result walks one       narrow, steps, select, permute,
             dimension of the base: start, step, size      transpose, squeeze, unsqueeze, expand
    Cat      parts one after the other along a dimension   cat, stack, index_select
    View     the same elements in row-major order,         view, reshape, flatten, unflatten
             another shape

`Gather.pieces` turns the expression into (box <- region) pairs on demand, for the whole tensor
or for a window of it; nothing is stored for a whole model. That the pieces hold each element
exactly once is proved in lazymerge.tiling.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from lazymerge.boxes import Box, Piece, Shape, cut, replaced
from lazymerge.computation import check_effort
from lazymerge.files.dtype import DType
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.reshape import matching_dims, reshaped


class Gather:
    """A tensor as boxes filled by regions of files. Immutable.

    `shape` is in elements; `nbytes` is what the whole tensor takes; `depth` is how many frames of the
    stack reading it takes, about, and `steps` how many computations. The four kinds are `Shards`,
    `Pick`, `Cat` and `View`; the methods here choose between them.
    """

    __slots__ = ("depth", "dtype", "shape", "steps")
    shape: Shape
    dtype: DType
    depth: int
    steps: int

    def pieces(self, window: Box | None = None) -> Iterator[Piece]:
        """The pieces, cut to `window`, with their starts in this tensor's own coordinates."""
        raise NotImplementedError

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.dtype.itemsize

    def narrow(self, dim: int, start: int, size: int, step: int = 1) -> Gather:
        """`size` indices of one dimension: start, start + step, ..."""
        axes = self._axes()
        axes[dim] = Axis(dim, start, step, size)
        return pick(self, axes)

    def select(self, dim: int, index: int) -> Gather:
        """One index of one dimension, which goes away."""
        axes = self._axes()
        del axes[dim]
        return pick(self, axes, {dim: index})

    def permute(self, dims: Sequence[int]) -> Gather:
        """The dimensions in another order."""
        axes = self._axes()
        return pick(self, [axes[dim] for dim in dims])

    def expand(self, shape: Shape) -> Gather:
        """Dimensions of size 1 repeated, and new ones in front, without copies."""
        new = len(shape) - len(self.shape)
        axes = [Axis(None, 0, 0, size) for size in shape[:new]]
        fixed = {}
        for axis, size in zip(self._axes(), shape[new:], strict=True):
            if axis.size != size and axis.dim is not None:
                if axis.size != 1:
                    raise ValueError(f"a tensor of shape {self.shape} does not expand to {shape}")
                fixed[axis.dim] = 0
                axis = Axis(None, 0, 0, size)
            axes.append(axis)
        return pick(self, axes, fixed)

    def unsqueeze(self, dim: int) -> Gather:
        """A new dimension of size 1 before `dim`."""
        axes = self._axes()
        axes.insert(dim, Axis(None, 0, 0, 1))
        return pick(self, axes)

    def squeeze(self, dims: Iterable[int]) -> Gather:
        """Without those of `dims` that have size 1."""
        gone = {dim: 0 for dim in dims if self.shape[dim] == 1}
        return pick(self, [axis for axis in self._axes() if axis.dim not in gone], gone)

    def view(self, shape: Shape) -> Gather:
        """The same elements in row-major order under another shape of as many elements."""
        if math.prod(shape) != self.numel:
            raise ValueError(f"a tensor of shape {self.shape} has no view of shape {shape}")
        base = self.base if isinstance(self, View) else self
        return base if base.shape == shape else View(base, shape)

    def _goes_over(self, bases: Iterable[Gather]) -> None:
        """Set what reading takes; a block lies in one of the bases at a time."""
        self.depth = 1 + max(base.depth for base in bases)
        self.steps = max(base.steps for base in bases)
        check_effort(self.depth, self.steps)

    def _axes(self) -> list[Axis]:
        return [Axis(dim, 0, 1, size) for dim, size in enumerate(self.shape)]


class Shards(Gather):
    """A leaf: boxes and the regions that fill them, as a format read them.

    `parts` is called each time that the pieces are wanted, so that they need not be kept.
    """

    __slots__ = ("__weakref__", "_parts")

    def __init__(
        self,
        shape: Shape,
        dtype: DType,
        parts: Callable[[], Iterable[Piece]],
        depth: int = 0,
        steps: int = 0,
    ) -> None:
        self.depth = depth
        self.steps = steps
        self.shape = shape
        self.dtype = dtype
        self._parts = parts

    def pieces(self, window: Box | None = None) -> Iterator[Piece]:
        if window is None:
            yield from self._parts()
            return
        for piece in self._near(window):
            part = cut(piece, window)
            if part is not None:
                yield part

    def _near(self, window: Box) -> Iterable[Piece]:
        """The pieces that may be in the window; those of many are found without going through all of them."""
        recent: WeakKeyDictionary[Shards, _Rows] = _recent.__dict__.setdefault("rows", WeakKeyDictionary())
        rows = recent.get(self)
        if rows is None:
            pieces = list(self._parts())
            if not self.shape or not _MANY <= len(pieces) <= _TOO_MANY:
                return pieces
            if len(recent) >= _RECENT:
                recent.clear()
            rows = recent[self] = _Rows(pieces)
        return rows.near(window)


class _Rows:
    """Pieces in the order of their first rows."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece.start[0])
        self._starts = [piece.start[0] for piece in self._pieces]
        self._longest = max(piece.region.shape[0] for piece in self._pieces)

    def near(self, window: Box) -> list[Piece]:
        """Those that may have rows of the window."""
        low = window.start[0]
        first = bisect_right(self._starts, low - self._longest)
        return self._pieces[first : bisect_left(self._starts, low + window.shape[0])]


_recent = threading.local()
_RECENT = 4
"""Gathers whose pieces a thread keeps while it reads one block after the other: of both sides that are
compared, or of what a block is computed from."""
_MANY, _TOO_MANY = 16, 4096
"""Pieces from which on they are kept, and up to which: 4,096 of them take 2 MB."""


class Constant:
    """A fixed sequence of pieces, as the `parts` of `Shards`."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = tuple(pieces)

    def __call__(self) -> tuple[Piece, ...]:
        return self._pieces


def of_region(region: Region) -> Gather:
    """The gather of one region: the whole tensor is in one place."""
    effort = (getattr(region.source, name, 0) for name in ("depth", "steps"))  # of a computation
    return Shards(region.shape, region.dtype, Constant([Piece((0,) * len(region.shape), region)]), *effort)


class Axis(NamedTuple):
    """A dimension of a `Pick`: base index start + i * step for i < size; dim None repeats."""

    dim: int | None
    start: int
    step: int
    size: int


class Pick(Gather):
    """Every dimension of the result walks along one dimension of the base, or repeats it."""

    __slots__ = ("axes", "base", "fixed")

    def __init__(self, base: Gather, axes: tuple[Axis, ...], fixed: dict[int, int]) -> None:
        self._goes_over([base])
        self.shape = tuple(axis.size for axis in axes)
        self.dtype = base.dtype
        self.base = base
        self.axes = axes
        self.fixed = fixed  # base dimensions that no axis walks: the one index taken

    def pieces(self, window: Box | None = None) -> Iterator[Piece]:
        window = window or Box.whole(self.shape)
        if 0 in window.shape:
            return
        for piece in self.base.pieces(self._base_window(window)):
            yield from self._map(piece, window)

    def _base_window(self, window: Box) -> Box:
        starts = [self.fixed.get(dim, 0) for dim in range(len(self.base.shape))]
        sizes = [1] * len(starts)
        for axis, at, size in zip(self.axes, window.start, window.shape, strict=True):
            if axis.dim is not None:
                starts[axis.dim] = axis.start + at * axis.step
                sizes[axis.dim] = (size - 1) * axis.step + 1
        return Box(tuple(starts), tuple(sizes))

    def _map(self, piece: Piece, window: Box) -> Iterator[Piece]:
        region = piece.region
        offset = 0  # in elements
        for dim, index in self.fixed.items():
            offset += (index - piece.start[dim]) * region.strides[dim]
        start, shape, strides = [], [], []
        for axis, at, size in zip(self.axes, window.start, window.shape, strict=True):
            first, last, stride = at, at + size - 1, 0
            if axis.dim is not None:
                low = piece.start[axis.dim] - axis.start
                first = max(first, -(-low // axis.step))
                last = min(last, (low + region.shape[axis.dim] - 1) // axis.step)
                if first > last:
                    return
                stride = region.strides[axis.dim]
                offset += (first * axis.step - low) * stride
                stride *= axis.step
            start.append(first)
            shape.append(last - first + 1)
            strides.append(stride)
        where = region.offset + offset * region.dtype.itemsize
        yield Piece(tuple(start), Region(region.source, where, region.dtype, tuple(shape), tuple(strides)))


def pick(base: Gather, axes: Sequence[Axis], fixed: dict[int, int] | None = None) -> Gather:
    """`Pick`, simplified: a pick of a pick is one pick, and a pick of everything is the base."""
    fixed = fixed or {}
    if isinstance(base, Pick):
        inner = base
        merged = dict(inner.fixed)
        outer: list[Axis] = []
        for axis in axes:
            below = inner.axes[axis.dim] if axis.dim is not None else None
            if below is None or below.dim is None:
                outer.append(Axis(None, 0, 0, axis.size))
            else:
                outer.append(
                    Axis(below.dim, below.start + axis.start * below.step, axis.step * below.step, axis.size)
                )
        for dim, index in fixed.items():
            below = inner.axes[dim]
            if below.dim is not None:
                merged[below.dim] = below.start + index * below.step
        return pick(inner.base, outer, merged)
    whole = not fixed and len(axes) == len(base.shape)
    if whole and all(axis == (dim, 0, 1, base.shape[dim]) for dim, axis in enumerate(axes)):
        return base
    return Pick(base, tuple(axes), fixed)


class Cat(Gather):
    """Parts one after the other along `dim`; they agree in every other dimension."""

    __slots__ = ("dim", "parts")

    def __init__(self, parts: tuple[Gather, ...], dim: int) -> None:
        self._goes_over(parts)
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        self.shape = tuple(shape)
        self.dtype = parts[0].dtype
        self.parts = parts
        self.dim = dim

    def pieces(self, window: Box | None = None) -> Iterator[Piece]:
        window = window or Box.whole(self.shape)
        dim = self.dim
        low, high = window.start[dim], window.start[dim] + window.shape[dim]
        at = 0
        for part in self.parts:
            size = part.shape[dim]
            first, last = max(low, at), min(high, at + size)
            if first < last:
                inside = Box(
                    replaced(window.start, dim, first - at), replaced(window.shape, dim, last - first)
                )
                for start, region in part.pieces(inside):
                    yield Piece(replaced(start, dim, start[dim] + at), region)
            at += size


def cat(parts: Sequence[Gather], dim: int) -> Gather:
    """The parts one after the other along `dim`; parts without elements are left out.

    What is such a sequence itself is taken apart, so that one that grows by steps does not grow deep.
    """
    full = [part for part in parts if part.shape[dim]] or [parts[0]]
    nested = [part.parts if isinstance(part, Cat) and part.dim == dim else (part,) for part in full]
    full = [part for parts in nested for part in parts]
    return full[0] if len(full) == 1 else Cat(tuple(full), dim)


class View(Gather):
    """The base's elements in row-major order, counted off into another shape."""

    __slots__ = ("base",)

    def __init__(self, base: Gather, shape: Shape) -> None:
        self._goes_over([base])
        self.shape = shape
        self.dtype = base.dtype
        self.base = base

    def pieces(self, window: Box | None = None) -> Iterator[Piece]:
        if self.numel == 0:
            return
        groups = matching_dims(self.base.shape, self.shape)
        for piece in self.base.pieces(None if window is None else self._base_window(window)):
            if 0 in piece.region.shape:
                continue  # nothing, which a view could make something of
            for renamed in reshaped(piece, self.base.shape, self.shape, groups):
                part = renamed if window is None else cut(renamed, window)
                if part is not None:
                    yield part

    def _base_window(self, window: Box) -> Box:
        """The rows of the base that hold the window: a hull, cut exactly afterwards."""
        base = self.base.shape
        if not base or 0 in window.shape:
            return Box.whole(base)
        strides = contiguous_strides(self.shape)
        first = sum(at * step for at, step in zip(window.start, strides, strict=True))
        last = first + sum((size - 1) * step for size, step in zip(window.shape, strides, strict=True))
        row = math.prod(base[1:])
        return Box((first // row, *(0,) * (len(base) - 1)), (last // row - first // row + 1, *base[1:]))
