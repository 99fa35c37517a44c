"""Gathers: which bytes of which files make up a tensor. No torch, no data.

A gather is an expression of four kinds, closed under everything that moves elements around:

    Shards   boxes of the tensor <- regions of files       what a format reads
    Pick     every dimension of the result walks one       narrow, steps, select, permute,
             dimension of the base: start, step, size      transpose, squeeze, unsqueeze, expand
    Cat      parts one after the other along a dimension   cat, stack, index_select
    View     the same elements in row-major order,         view, reshape, flatten, unflatten
             another shape

`Gather.pieces` turns the expression into (box <- region) pairs on demand, for the whole tensor
or for a window of it; nothing is stored for a whole model. `check` proves that the pieces hold
each element exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple, Protocol, cast

from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint
from lazymerge.files.dtype import DType
from lazymerge.files.local import Source
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


class Computation(Source, Protocol):
    """A source whose bytes are computed from other gathers when they are read."""

    @property
    def whole(self) -> bool:
        """Whether any of it can only be computed together with all of it."""
        ...

    @property
    def reads(self) -> int:
        """Bytes of files that all of it is made of."""
        ...

    def working_set(self, nbytes: int) -> int:
        """Bytes of memory that computing `nbytes` of it takes, the result included."""
        ...


def computations(pieces: Iterable[Piece]) -> list[Computation]:
    """The different computations that the pieces lie in; none where all bytes come from files."""
    sources = {id(region.source): region.source for _, region in pieces}
    return [cast(Computation, source) for source in sources.values() if hasattr(source, "working_set")]


class Gather:
    """A tensor as boxes filled by regions of files. Immutable.

    `shape` is in elements; `nbytes` is what the whole tensor takes. The four kinds are `Shards`,
    `Pick`, `Cat` and `View`; the methods here choose between them.
    """

    __slots__ = ("dtype", "shape")
    shape: Shape
    dtype: DType

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

    def _axes(self) -> list[Axis]:
        return [Axis(dim, 0, 1, size) for dim, size in enumerate(self.shape)]


class Shards(Gather):
    """A leaf: boxes and the regions that fill them, as a format read them.

    `parts` is called each time that the pieces are wanted, so that they need not be kept.
    """

    __slots__ = ("_parts",)

    def __init__(self, shape: Shape, dtype: DType, parts: Callable[[], Iterable[Piece]]) -> None:
        self.shape = shape
        self.dtype = dtype
        self._parts = parts

    def pieces(self, window: Box | None = None) -> Iterator[Piece]:
        if window is None:
            yield from self._parts()
            return
        for piece in self._parts():
            cut = _cut(piece, window)
            if cut is not None:
                yield cut


class Constant:
    """A fixed sequence of pieces, as the `parts` of `Shards`."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = tuple(pieces)

    def __call__(self) -> tuple[Piece, ...]:
        return self._pieces


def of_region(region: Region) -> Gather:
    """The gather of one region: the whole tensor is in one place."""
    return Shards(region.shape, region.dtype, Constant([Piece((0,) * len(region.shape), region)]))


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
                    _replace(window.start, dim, first - at), _replace(window.shape, dim, last - first)
                )
                for start, region in part.pieces(inside):
                    yield Piece(_replace(start, dim, start[dim] + at), region)
            at += size


def cat(parts: Sequence[Gather], dim: int) -> Gather:
    """The parts one after the other along `dim`; parts without elements are left away."""
    full = [part for part in parts if part.shape[dim]] or [parts[0]]
    return full[0] if len(full) == 1 else Cat(tuple(full), dim)


class View(Gather):
    """The base's elements in row-major order, counted off into another shape."""

    __slots__ = ("base",)

    def __init__(self, base: Gather, shape: Shape) -> None:
        self.shape = shape
        self.dtype = base.dtype
        self.base = base

    def pieces(self, window: Box | None = None) -> Iterator[Piece]:
        if self.numel == 0:
            return
        groups = _matching_dims(self.base.shape, self.shape)
        for piece in self.base.pieces(None if window is None else self._base_window(window)):
            for renamed in _regroup(piece, self.base.shape, self.shape, groups):
                cut = renamed if window is None else _cut(renamed, window)
                if cut is not None:
                    yield cut

    def _base_window(self, window: Box) -> Box:
        """The rows of the base that hold the window: a hull, cut exactly afterwards."""
        base = self.base.shape
        if not base or 0 in window.shape:
            return Box.whole(base)
        strides = _row_major(self.shape)
        first = sum(at * step for at, step in zip(window.start, strides, strict=True))
        last = first + sum((size - 1) * step for size, step in zip(window.shape, strides, strict=True))
        row = math.prod(base[1:])
        return Box((first // row, *(0,) * (len(base) - 1)), (last // row - first // row + 1, *base[1:]))


@dataclass(frozen=True, slots=True)
class _Run:
    """A part of a box within one group of dimensions: where, how far, how to step, from where."""

    start: Shape
    shape: Shape
    strides: Shape
    offset: int  # in elements, from the piece's first one


def _regroup(piece: Piece, old: Shape, new: Shape, groups: list[tuple[range, range]]) -> Iterator[Piece]:
    """A piece of a tensor of shape `old` as pieces of its view of shape `new`."""
    region = piece.region
    choices: list[list[_Run]] = []
    for before, after in groups:
        box = _Run(
            tuple(piece.start[d] for d in before),
            tuple(region.shape[d] for d in before),
            tuple(region.strides[d] for d in before),
            0,
        )
        if tuple(old[d] for d in before) == tuple(new[d] for d in after):
            choices.append([box])
        else:
            target = tuple(new[d] for d in after)
            choices.append(
                [
                    part
                    for flat in _flatten(box, tuple(old[d] for d in before))
                    for part in _unflatten(flat, target)
                ]
            )
    for parts in product(*choices):
        start = tuple(n for part in parts for n in part.start)
        shape = tuple(n for part in parts for n in part.shape)
        strides = tuple(n for part in parts for n in part.strides)
        offset = region.offset + sum(part.offset for part in parts) * region.dtype.itemsize
        yield Piece(start, Region(region.source, offset, region.dtype, shape, strides))


def _matching_dims(old: Shape, new: Shape) -> list[tuple[range, range]]:
    """Groups of neighbouring dimensions of both shapes that hold as many elements.

    (6, 4) and (2, 3, 4) give [0 | 0, 1] and [1 | 2]. Both shapes have the same product, not 0.
    """
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        first, second = i, j
        left = right = 1
        while True:
            if left <= right and i < len(old) and (left < right or i == first):
                left *= old[i]
                i += 1
            elif j < len(new) and (right < left or j == second):
                right *= new[j]
                j += 1
            else:
                break
        groups.append((range(first, i), range(second, j)))
    return groups


def _flatten(box: _Run, dims: Shape) -> Iterator[_Run]:
    """The box as runs along the row-major order of `dims`: few where the inner dimensions are whole."""
    inner = len(dims)  # box dimensions from here on make one run
    size, stride = 1, 1
    for at in range(len(dims) - 1, -1, -1):
        whole = all(box.shape[d] == dims[d] for d in range(at + 1, len(dims)))
        joins = size == 1 or box.shape[at] == 1 or box.strides[at] == stride * size
        if not (whole and joins):
            break
        stride = box.strides[at] if size == 1 else stride
        size *= box.shape[at]
        inner = at
    steps = _row_major(dims)
    base = sum(at * step for at, step in zip(box.start, steps, strict=True))
    for index in product(*(range(n) for n in box.shape[:inner])):
        flat = base + sum(i * step for i, step in zip(index, steps, strict=False))
        offset = sum(i * s for i, s in zip(index, box.strides, strict=False))
        yield _Run((flat,), (size,), (stride,), box.offset + offset)


def _unflatten(run: _Run, dims: Shape) -> Iterator[_Run]:
    """A run along the row-major order of `dims` as boxes: a head, whole rows, a tail, in each dimension."""
    (at,), (size,), (stride,) = run.start, run.shape, run.strides
    if not dims:
        yield _Run((), (), (), run.offset)
        return
    row = math.prod(dims[1:])
    done = 0
    while done < size:
        index, inside = divmod(at + done, row)
        rows = (size - done) // row if inside == 0 else 0
        if rows:
            count = rows * row
            strides = tuple(stride * step for step in _row_major(dims))
            yield _Run(
                (index, *(0,) * (len(dims) - 1)), (rows, *dims[1:]), strides, run.offset + done * stride
            )
        else:
            count = min(row - inside, size - done)
            piece = _Run((inside,), (count,), (stride,), run.offset + done * stride)
            for part in _unflatten(piece, dims[1:]):
                yield _Run((index, *part.start), (1, *part.shape), (0, *part.strides), part.offset)
        done += count


def boxes_of_run(start: int, size: int, shape: Shape) -> Iterator[Box]:
    """The boxes of a tensor of `shape` that `size` elements in row-major order from `start` on fill."""
    for part in _unflatten(_Run((start,), (size,), (1,), 0), shape):
        yield Box(part.start, part.shape)


def _row_major(shape: Shape) -> Shape:
    steps = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * shape[dim + 1]
    return tuple(steps)


def _replace(values: Shape, at: int, value: int) -> Shape:
    return (*values[:at], value, *values[at + 1 :])


def _cut(piece: Piece, window: Box) -> Piece | None:
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


def check(name: str, gather: Gather, pieces: Iterable[Piece] | None = None) -> None:
    """Prove that the pieces hold each element of the tensor exactly once, and in its dtype.

    `pieces` are the gather's, where the caller has them already. Raises `IncompleteCheckpoint` for a
    hole and `InconsistentCheckpoint` for an overlap, a box outside the tensor or another dtype,
    naming `name` and the first such place.
    """
    boxes = []
    for start, region in gather.pieces() if pieces is None else pieces:
        outside = any(
            at < 0 or at + size > limit
            for at, size, limit in zip(start, region.shape, gather.shape, strict=True)
        )
        if outside:
            raise InconsistentCheckpoint(
                f"{name}: a shard at {start} of shape {region.shape} is outside of {gather.shape}",
                "the rank files do not belong together; check that they come from one save",
            )
        if region.dtype is not gather.dtype:
            raise InconsistentCheckpoint(
                f"{name}: a shard in {region.source.name} is {region.dtype}, expected {gather.dtype}",
                "the rank files do not belong together; check that they come from one save",
            )
        if 0 not in region.shape:
            boxes.append(Box(start, region.shape))
    if gather.numel:
        _check_tiles(name, boxes, Box.whole(gather.shape), 0)


def _check_tiles(name: str, boxes: list[Box], space: Box, dim: int) -> None:
    """Prove that `boxes`, all of which span `space` before `dim`, fill it once: slab by slab along `dim`."""
    if len(boxes) == 1 and boxes[0][0][dim:] == space.start[dim:] and boxes[0][1][dim:] == space.shape[dim:]:
        return
    if dim == len(space.shape):
        raise InconsistentCheckpoint(
            f"{name}: {len(boxes)} shards hold the elements at {space.start} of shape {space.shape}",
            "the rank files overlap; check that they come from one save",
        )
    low = space.start[dim]
    high = low + space.shape[dim]
    cuts = sorted({low, high, *(b.start[dim] for b in boxes), *(b.start[dim] + b.shape[dim] for b in boxes)})
    slabs: dict[int, list[Box]] = {cut: [] for cut in cuts[:-1]}
    ends = dict(pairwise(cuts))
    for box in boxes:
        at, end = box.start[dim], box.start[dim] + box.shape[dim]
        while at < end:  # once, unless the shards are cut unevenly along this dimension
            slabs[at].append(box)
            at = ends[at]
    for at, inside in slabs.items():
        slab = Box(_replace(space.start, dim, at), _replace(space.shape, dim, ends[at] - at))
        if not inside:
            raise IncompleteCheckpoint(
                f"{name}: no shard holds the elements at {slab.start} of shape {slab.shape}",
                "rank files are missing or cut; pass every folder that holds ranks of this save",
            )
        _check_tiles(name, inside, slab, dim + 1)
