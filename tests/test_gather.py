"""The gather's algebra against numpy on the same data, and the proof that a gather is complete."""

from __future__ import annotations

import math
import tracemalloc
import weakref
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazymerge import fill as fill_module
from lazymerge import gather as gather_module
from lazymerge.boxes import Box, Piece
from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint
from lazymerge.files.dtype import DTYPES
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.fill import equal, fill, windows
from lazymerge.gather import Constant, Gather, Shards, cat, of_region
from lazymerge.tiling import check

INT = DTYPES["int32"]


@dataclass
class Bytes:
    """A source that counts how much is read of it."""

    content: bytes
    reads: int = 0
    name: str = "bytes"

    @property
    def size(self) -> int:
        return len(self.content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        assert 0 <= offset <= offset + len(buffer) <= self.size
        self.reads += 1
        buffer[:] = self.content[offset : offset + len(buffer)]


def region_of(array: np.ndarray) -> Region:
    array = np.ascontiguousarray(array, np.int32)
    return Region(Bytes(array.tobytes()), 0, INT, array.shape, contiguous_strides(array.shape))


def sharded(array: np.ndarray, dim: int, sizes: list[int]) -> Gather:
    """The array as shards of these sizes along a dimension."""
    pieces, at = [], 0
    for size in sizes:
        part = array.take(range(at, at + size), axis=dim)
        start = tuple(at if d == dim else 0 for d in range(array.ndim))
        pieces.append(Piece(start, region_of(part)))
        at += size
    return Shards(array.shape, INT, Constant(pieces))


def content(gather: Gather, block: int = 1 << 20, limit: int = 1 << 20) -> np.ndarray:
    """All elements, read in blocks."""
    raw = bytearray()
    for window in windows(gather.shape, 4, block):
        buffer = bytearray(window.numel * 4)
        fill(gather, window, memoryview(buffer), limit)
        raw += buffer
    return np.frombuffer(bytes(raw), np.int32).reshape(gather.shape)


def test_runs_longer_than_the_scratch_take_no_more_of_it():
    """Two halves of long rows: each read is one of rows that are apart in the result."""
    array = np.arange(1 << 16, dtype=np.int32).reshape(4, -1)
    gather = sharded(array, 1, [1 << 13, 1 << 13])  # runs of 32 kB
    read = np.zeros(array.shape, np.int32)
    tracemalloc.start()
    fill(gather, Box.whole(array.shape), memoryview(read).cast("B"), 4096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(read, array)
    assert peak < 16 << 10


@st.composite
def chains(draw: st.DrawFn) -> tuple[Gather, np.ndarray]:
    """A sharded array after a random chain of operations: as a gather, and as numpy has it."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    dim = draw(st.integers(0, len(shape) - 1))
    first = draw(st.integers(0, shape[dim]))
    gather = sharded(array, dim, [first, shape[dim] - first])
    for _ in range(draw(st.integers(0, 6))):
        gather, array = draw(st.sampled_from(STEPS))(draw, gather, array)
        assert gather.shape == array.shape
    return gather, array


def _narrow(draw, gather, array):
    if not array.ndim:
        return gather, array
    dim = draw(st.integers(0, array.ndim - 1))
    start, step = draw(st.integers(0, array.shape[dim] - 1)), draw(st.integers(1, 3))
    size = draw(st.integers(1, -(-(array.shape[dim] - start) // step)))
    indices = range(start, start + size * step, step)
    return gather.narrow(dim, start, size, step), array.take(indices, axis=dim)


def _select(draw, gather, array):
    if not array.ndim:
        return gather, array
    dim = draw(st.integers(0, array.ndim - 1))
    index = draw(st.integers(0, array.shape[dim] - 1))
    return gather.select(dim, index), array.take(index, axis=dim)


def _permute(draw, gather, array):
    dims = draw(st.permutations(range(array.ndim)))
    return gather.permute(dims), array.transpose(dims)


def _view(draw, gather, array):
    shape, rest = [], array.size
    for _ in range(draw(st.integers(0, 3))):
        shape.append(draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= shape[-1]
    shape = tuple(draw(st.permutations([*shape, rest])))
    return gather.view(shape), array.reshape(shape)


def _unsqueeze(draw, gather, array):
    dim = draw(st.integers(0, array.ndim))
    return gather.unsqueeze(dim), np.expand_dims(array, dim)


def _squeeze(draw, gather, array):
    dims = tuple(d for d in range(array.ndim) if array.shape[d] == 1)
    return gather.squeeze(dims), array.squeeze(dims)


def _cat(draw, gather, array):
    if not array.ndim or array.size > 500:
        return gather, array
    dim = draw(st.integers(0, array.ndim - 1))
    first = array.take([0], axis=dim)
    return cat([gather, gather.narrow(dim, 0, 1)], dim), np.concatenate([array, first], dim)


def _expand(draw, gather, array):
    shape = (draw(st.integers(1, 2)), *(draw(st.sampled_from([2, 3])) if n == 1 else n for n in array.shape))
    if math.prod(shape) > 500:
        return gather, array
    return gather.expand(shape), np.broadcast_to(array, shape)


STEPS = [_narrow, _select, _permute, _view, _unsqueeze, _squeeze, _cat, _expand]


@settings(max_examples=400, deadline=None)
@given(
    chains(),
    st.sampled_from([4, 20, 100, 10**6]),
    st.sampled_from([4, 16, 64, 10**6]),
    st.sampled_from([0, 8, 16 << 10]),
)
def test_chains_are_what_numpy_says(chain, block, limit, gap):
    """Whatever the blocks, the scratch, and the gap from which on runs are read one by one."""
    gather, array = chain
    check("t", gather)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill_module, "LONG_RUN", gap)
        np.testing.assert_array_equal(content(gather, block, limit), array)


@settings(max_examples=200, deadline=None)
@given(chains(), st.data(), st.sampled_from([1, 16]))
def test_windows_are_parts_of_the_whole(chain, data, many):
    """Whether pieces are gone through or kept in order."""
    gather, array = chain
    sizes = [data.draw(st.integers(1, n)) for n in array.shape]
    starts = [data.draw(st.integers(0, n - size)) for n, size in zip(array.shape, sizes, strict=True)]
    window = Box(tuple(starts), tuple(sizes))
    buffer = bytearray(window.numel * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_module, "_MANY", many)
        fill(gather, window, memoryview(buffer), 64)
    expected = np.ascontiguousarray(array[window.slices])
    np.testing.assert_array_equal(np.frombuffer(bytes(buffer), np.int32).reshape(sizes), expected)


def test_many_ranks_are_not_gone_through_for_every_block():
    """Nor kept when the tensor is gone."""
    array = np.arange(600 * 4).reshape(600, 4)
    cuts = [0, *range(7, 600, 13), 600]
    pieces = [Piece((low, 0), region_of(array[low:high])) for low, high in pairwise(cuts)]
    calls = []
    gather = Shards(array.shape, INT, lambda: calls.append(1) or pieces[::-1])
    np.testing.assert_array_equal(content(gather, block=3 * 16), array)
    assert len(calls) == 1
    source = weakref.ref(gather)
    del gather
    assert source() is None


def test_a_sparse_region_is_not_read_as_a_hull():
    source = Bytes(bytes(4 << 20))
    column = of_region(Region(source, 0, INT, (8,), (1 << 17,)))  # 8 elements, half a megabyte apart
    fill(column, Box.whole((8,)), memoryview(bytearray(32)), 8 << 20)
    assert source.reads == 8


def test_a_dense_region_is_read_at_once():
    source = Bytes(bytes(4096))
    columns = of_region(Region(source, 0, INT, (16, 2), (4, 1)))
    fill(columns, Box.whole((16, 2)), memoryview(bytearray(128)), 4096)
    assert source.reads == 1


def test_views_of_views_and_picks_of_picks_are_one():
    gather = of_region(region_of(np.zeros((4, 6))))
    assert gather.view((24,)).view((4, 6)) is gather
    assert gather.permute([1, 0]).permute([1, 0]) is gather
    assert gather.unsqueeze(0).squeeze([0]) is gather


def pieces_at(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Constant:
    return Constant(Piece(start, region_of(np.zeros(shape))) for start, shape in boxes)


def test_a_hole_is_found():
    gather = Shards((4, 4), INT, pieces_at(((0, 0), (2, 4)), ((3, 0), (1, 4))))
    with pytest.raises(IncompleteCheckpoint, match=r"w: no shard holds .* at \(2, 0\) of shape \(1, 4\)"):
        check("w", gather)


def test_a_hole_in_the_middle_of_rows_is_found():
    gather = Shards((2, 6), INT, pieces_at(((0, 0), (2, 2)), ((0, 3), (2, 3))))
    with pytest.raises(IncompleteCheckpoint, match=r"at \(0, 2\) of shape \(2, 1\)"):
        check("w", gather)


def test_an_overlap_is_found_although_the_counts_add_up():
    gather = Shards((4, 4), INT, pieces_at(((0, 0), (2, 4)), ((1, 0), (2, 4))))
    with pytest.raises((InconsistentCheckpoint, IncompleteCheckpoint)):
        check("w", gather)


def test_the_same_box_twice_is_an_overlap():
    gather = Shards((2,), INT, pieces_at(((0,), (2,)), ((0,), (2,))))
    with pytest.raises(InconsistentCheckpoint, match="2 shards hold the elements"):
        check("w", gather)


def test_a_box_outside_is_found():
    with pytest.raises(InconsistentCheckpoint, match="outside"):
        check("w", Shards((4,), INT, pieces_at(((2,), (3,)))))


def test_another_dtype_is_found():
    gather = Shards((2,), DTYPES["float32"], pieces_at(((0,), (2,))))
    with pytest.raises(InconsistentCheckpoint, match="int32, expected float32"):
        check("w", gather)


@given(st.integers(0, 200), st.integers(1, 60), st.integers(1, 5))
def test_windows_tile_a_tensor_in_row_major_order(limit, rows, columns):
    shape = (rows, columns, 3)
    flat = np.arange(math.prod(shape)).reshape(shape)
    parts = [flat[window.slices].reshape(-1) for window in windows(shape, 4, limit)]
    assert all(part.size * 4 <= max(limit, 4) for part in parts)
    np.testing.assert_array_equal(np.concatenate(parts), flat.reshape(-1))


def test_equal_reads_nothing_where_the_bytes_are_the_same_ones():
    region = region_of(np.arange(12).reshape(3, 4))
    assert equal(of_region(region), of_region(region))
    assert isinstance(region.source, Bytes)
    assert region.source.reads == 0


def test_equal_sees_one_element():
    one, other = np.arange(1000), np.arange(1000)
    other[777] = -1
    assert equal(of_region(region_of(one)), of_region(region_of(one)), limit=64)
    assert not equal(of_region(region_of(one)), of_region(region_of(other)), limit=64)
