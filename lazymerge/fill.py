"""Windows of a gather in memory: an array filled piece by piece, from reads that are few and bounded.

A piece whose bytes lie in one run on both sides is read straight into the array. Everything else
is read into a scratch buffer of at most `limit` bytes, as the hull of a part of the region, and
copied from there with strides; where the hull would be mostly gaps, the part is made smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazymerge.boxes import Box, Piece, Shape
from lazymerge.computation import LONG_RUN
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.gather import Gather

SCRATCH = 1 << 20
"""Bytes of scratch that a worker of a merge reads strided pieces through."""

_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Arrays that hold elements as mere bytes, by item size."""


def scratch(pieces: Iterable[Piece], shape: Shape, nbytes: int) -> int:
    """Bytes of scratch that filling blocks of `nbytes` takes, each a run of a tensor of `shape`.

    0 where every piece is one run on both sides, which is read straight into its place.
    """
    return 0 if all(_is_run(region, shape) for _, region in pieces) else min(SCRATCH, nbytes)


def _is_run(region: Region, shape: Shape) -> bool:
    if region.shape[1:] == shape[1:] and region.strides == contiguous_strides(region.shape):
        return True  # as most are: rows
    first = next((dim for dim, size in enumerate(region.shape) if size > 1), len(shape))
    if region.shape[first + 1 :] != shape[first + 1 :]:
        return False
    strides = contiguous_strides(region.shape)
    return all(size == 1 or region.strides[dim] == strides[dim] for dim, size in enumerate(region.shape))


def raw_array(shape: Shape, itemsize: int, buffer: memoryview | None = None) -> NDArray[np.generic]:
    """An array of `shape` whose elements are `itemsize` bytes without meaning, over `buffer` or new."""
    if buffer is None:
        return np.empty(shape, _RAW[itemsize])
    return np.frombuffer(buffer, _RAW[itemsize], math.prod(shape)).reshape(shape)


def fill(gather: Gather, window: Box, buffer: memoryview, limit: int) -> None:
    """Fill `buffer` with the elements of `window`, row-major; at most `limit` bytes of scratch.

    `buffer` holds exactly the window's bytes. The pieces must have passed `tiling.check`: what no
    piece covers stays as it was. Raises what the sources' reads raise.
    """
    if window.numel == 0:
        return
    array = raw_array(window.shape, gather.dtype.itemsize, buffer)
    for start, region in gather.pieces(window):
        inside = tuple(at - low for at, low in zip(start, window.start, strict=True))
        # the ellipsis keeps a 0-d selection a view
        index: tuple[Any, ...] = (*Box(inside, region.shape).slices, ...)
        _copy(array[index], region, limit)


def _copy(target: NDArray[np.generic], region: Region, limit: int) -> None:
    """Copy a region into an array of its shape."""
    if 0 in region.shape:
        return
    target, region = _simplify(target, region)
    itemsize = region.dtype.itemsize
    if region.strides == contiguous_strides(region.shape) and target.flags.c_contiguous:
        region.source.read_into(region.offset, _bytes_of(target))
        return
    if region.extent <= limit and _dense(region.shape, region.strides, itemsize):
        scratch = np.empty(region.extent, np.uint8)
        region.source.read_into(region.offset, scratch.data)
        steps = [stride * itemsize for stride in region.strides]
        target[...] = np.ndarray(region.shape, target.dtype, scratch, 0, steps)
        return
    if len(region.shape) == 2 and region.strides[1] == 1:
        _copy_runs(target, region, limit)
        return
    for part, smaller in _split(target, region, limit):
        _copy(part, smaller, limit)


def _copy_runs(target: NDArray[np.generic], region: Region, limit: int) -> None:
    """Copy a region of far-apart runs: a read for each, and one copy for as many as fit the limit."""
    count, width = region.shape
    run = width * region.dtype.itemsize
    if run > limit:
        longest = max(1, limit // region.dtype.itemsize)
        for row in range(count):
            for at in range(0, width, longest):
                size = min(longest, width - at)
                offset = region.offset + (row * region.strides[0] + at) * region.dtype.itemsize
                part = Region(region.source, offset, region.dtype, (size,), (1,))
                _copy(target[row, at : at + size], part, limit)
        return
    step = region.strides[0] * region.dtype.itemsize
    together = max(1, min(count, limit // run))
    scratch = np.empty((together, width), target.dtype)
    buffer = _bytes_of(scratch)
    for first in range(0, count, together):
        rows = min(together, count - first)
        at = region.offset + first * step
        if step == run:
            region.source.read_into(at, buffer[: rows * run])
        else:
            for row in range(rows):
                region.source.read_into(at + row * step, buffer[row * run : (row + 1) * run])
        target[first : first + rows] = scratch[:rows]


def _simplify(target: NDArray[np.generic], region: Region) -> tuple[NDArray[np.generic], Region]:
    """Without dimensions of size 1, repeated ones read once, neighbours joined, largest stride first."""
    keep = [d for d, size in enumerate(region.shape) if size > 1]
    order = sorted(keep, key=lambda d: -region.strides[d])
    target = target.transpose([*order, *(d for d in range(target.ndim) if d not in keep)])
    target = target.reshape([region.shape[d] for d in order])
    shape = [region.shape[d] for d in order]
    strides = [region.strides[d] for d in order]
    at = 0
    while at + 1 < len(shape):
        inner = shape[at + 1]
        joined = strides[at] == strides[at + 1] * inner
        if joined and strides[at] and target.strides[at] == target.strides[at + 1] * inner:
            shape[at : at + 2] = [shape[at] * inner]
            del strides[at]
            target = target.reshape(shape)
        else:
            at += 1
    return target, Region(region.source, region.offset, region.dtype, tuple(shape), tuple(strides))


def _dense(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Whether reading the hull of such a region is cheaper than reading its runs one by one."""
    runs = math.prod(shape[:-1]) if strides and strides[-1] == 1 else math.prod(shape)
    hull = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return (hull - math.prod(shape)) * itemsize <= runs * LONG_RUN


def _split(
    target: NDArray[np.generic], region: Region, limit: int
) -> Iterator[tuple[NDArray[np.generic], Region]]:
    """The region in parts along its longest stride: one index each, or as many as are dense and fit."""
    count, stride = region.shape[0], region.strides[0] * region.dtype.itemsize
    shape, strides = region.shape[1:], region.strides[1:]
    inner = Region(region.source, region.offset, region.dtype, shape, strides)
    rows = min(count - 1, (limit - inner.extent) // stride) if stride else 1
    if rows < 2 or not _dense((rows, *shape), region.strides, region.dtype.itemsize):
        rows = 1
    for at in range(0, count, rows):
        size = min(rows, count - at)
        offset = region.offset + at * stride
        if size == 1:
            yield target[at, ...], Region(region.source, offset, region.dtype, shape, strides)
        else:
            part = Region(region.source, offset, region.dtype, (size, *shape), region.strides)
            yield target[at : at + size], part


def alike(one: Gather, other: Gather) -> bool:
    """Whether both have one shape, one type and the same bytes."""
    return one.shape == other.shape and one.dtype is other.dtype and equal(one, other)


def equal(one: Gather, other: Gather, limit: int = 256 << 10) -> bool:
    """Whether two gathers of one shape and dtype hold the same bytes; reads them in blocks of `limit` bytes.

    Nothing is read where both are the same bytes of the same files.
    """
    if _places(one) == _places(other):
        return True
    for window in windows(one.shape, one.dtype.itemsize, limit):
        buffers = [bytearray(window.numel * one.dtype.itemsize) for _ in range(2)]
        for gather, buffer in zip((one, other), buffers, strict=True):
            fill(gather, window, memoryview(buffer), limit)
        if buffers[0] != buffers[1]:
            return False
    return True


def _places(gather: Gather) -> list[tuple[object, ...]]:
    return [(start, id(r.source), r.offset, r.shape, r.strides) for start, r in gather.pieces()]


def _bytes_of(array: NDArray[np.generic]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def windows(shape: Shape, itemsize: int, limit: int) -> Iterator[Box]:
    """Windows of a tensor in row-major order, each one run of at most `limit` bytes (or one element).

    A window spans whole inner dimensions and a part of one; together they are the tensor.
    """
    row = math.prod(shape[1:]) * itemsize
    if not shape or math.prod(shape) * itemsize <= limit:
        yield Box.whole(shape)
    elif row <= limit:
        rows = limit // row if row else shape[0]
        for at in range(0, shape[0], rows):
            size = min(rows, shape[0] - at)
            yield Box((at, *(0,) * (len(shape) - 1)), (size, *shape[1:]))
    else:
        for at in range(shape[0]):
            for inner in windows(shape[1:], itemsize, limit):
                yield Box((at, *inner.start), (1, *inner.shape))
