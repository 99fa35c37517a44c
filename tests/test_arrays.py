"""Arrays against eager torch on the same elements, bit for bit; and that they need no torch."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazymerge import arrays
from lazymerge.arrays import Array
from lazymerge.compute import read
from lazymerge.elements import in_memory


def both(*shape):
    eager = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    return Array(in_memory(eager)), eager


def assert_same(array, eager):
    assert array.shape == tuple(eager.shape)
    assert array.dim() == eager.dim()
    assert torch.equal(read(array.gather), eager)


def divisions(size):
    return [n for n in range(1, size + 1) if size % n == 0]


@st.composite
def steps(draw, shape):
    """A method with arguments that fit the shape."""
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    size = shape[dim]
    kind = draw(st.sampled_from(["view", "flatten", "unflatten", "permute", "transpose", "get", "take"]))
    if kind == "view":
        sizes = [draw(st.sampled_from(divisions(math.prod(shape)))), -1]
        return lambda x: x.view(*sizes)
    if kind == "flatten":
        start = draw(st.integers(0, len(shape) - 1))
        end = draw(st.integers(start, len(shape) - 1))
        return lambda x: x.flatten(start, end)
    if kind == "unflatten":
        sizes = (draw(st.sampled_from(divisions(size))), -1)
        return lambda x: x.unflatten(dim, sizes)
    if kind == "permute":
        dims = draw(st.permutations(range(len(shape))))
        return lambda x: x.permute(*dims)
    if kind == "transpose":
        other = draw(st.integers(-len(shape), len(shape) - 1))
        return lambda x: x.transpose(dim, other)
    first = draw(st.slices(shape[0]).filter(lambda s: (s.step or 1) > 0 and range(shape[0])[s]))
    if kind == "get" or len(shape) == 1:
        return lambda x: x[first]
    index = (first, draw(st.integers(-shape[1], shape[1] - 1)))
    return lambda x: x[index]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_chains(data):
    array, eager = both(*data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    for _ in range(data.draw(st.integers(1, 5))):
        step = data.draw(steps(array.shape))
        eager = step(eager.contiguous())
        array = step(array)
        if not eager.dim():
            break
    assert_same(array, eager)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts(dim):
    array, eager = both(6, 4)
    for method in (
        lambda x: x.chunk(3, dim),
        lambda x: x.unbind(dim),
        lambda x: x.split([1, x.shape[dim] - 1], dim),
    ):
        ours, theirs = method(array), method(eager)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)

    def pieces(x):
        return [x, x[:, :], x]

    assert_same(arrays.cat(pieces(array), dim), torch.cat(pieces(eager), dim))
    assert_same(arrays.stack(pieces(array), dim), torch.stack(pieces(eager), dim))
    assert torch.equal(arrays.cat(pieces(eager), dim), torch.cat(pieces(eager), dim))
    assert torch.equal(arrays.stack(pieces(eager), dim), torch.stack(pieces(eager), dim))


def test_sums_are_those_of_torch():
    array, eager = both(3, 5)
    assert_same(array + 1, eager + 1)
    assert_same(array.transpose(0, 1) - 1, eager.t() - 1)
    half = torch.tensor([0.001, 1000.0]).bfloat16()
    assert_same(Array(in_memory(half)) + 1, half + 1)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.view(5, -1),
        lambda x: x.view(-1, -1),
        lambda x: x.view(7),
        lambda x: x.unflatten(0, (4, -1)),
        lambda x: x.transpose(0, 2),
        lambda x: x.split([1, 1]),
        lambda x: x[6],
        lambda x: x[:, -5],
        lambda x: x.unbind(2),
        lambda x: arrays.cat([x, x[:, :2]]),
        lambda x: arrays.cat([x, Array(x.gather)], 2),
        lambda x: arrays.stack([x, x[:2]]),
        lambda x: arrays.cat([x, Array(in_memory(torch.zeros(6, 4, dtype=torch.int64)))]),
    ],
)
def test_what_torch_refuses_is_refused(wrong):
    with pytest.raises((ValueError, IndexError)):
        wrong(both(6, 4)[0])


def test_nothing_of_it_needs_torch():
    script = (
        "import sys\n"
        "from lazymerge.conversions.megatron import layouts, convert\n"
        "from lazymerge.conversions.megatron.tables import FAMILIES\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
