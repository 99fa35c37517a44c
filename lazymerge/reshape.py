"""A box of a tensor under another shape: the same elements in row-major order, counted off anew.

The dimensions of both shapes fall into groups that hold as many elements, (6, 4) and (2, 3, 4) into
[0 | 0, 1] and [1 | 2]. Within a group a box is flattened into runs, and each run is cut into boxes of
the new dimensions; a piece becomes the product of what its groups become.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from lazymerge.boxes import Box, Piece, Shape
from lazymerge.files.region import Region, contiguous_strides


@dataclass(frozen=True, slots=True)
class _Run:
    """A part of a box within one group of dimensions: where, how far, how to step, from where."""

    start: Shape
    shape: Shape
    strides: Shape
    offset: int  # in elements, from the piece's first one


def reshaped(piece: Piece, old: Shape, new: Shape, groups: list[tuple[range, range]]) -> Iterator[Piece]:
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


def matching_dims(old: Shape, new: Shape) -> list[tuple[range, range]]:
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
    steps = contiguous_strides(dims)
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
            strides = tuple(stride * step for step in contiguous_strides(dims))
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
