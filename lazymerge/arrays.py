"""Gathers with the methods that tensors have for moving elements: code for either needs no torch.

Torch takes a second and 200 MB to import, and as much again for the first operator of a tensor subclass.
Code that only moves elements (the layouts of model families) is written with the methods below, which
mean what they mean in PyTorch, and runs on a `torch.Tensor` and on an `Array` alike:

    query, key = fused.view(8, 2, 64, -1).unbind(1)
    joined = cat([query.flatten(0, 1), key.flatten(0, 1)])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from lazymerge.boxes import Shape
from lazymerge.gather import Gather
from lazymerge.gather import cat as _cat

Tensor = TypeVar("Tensor")
"""An `Array` or a `torch.Tensor`."""


class Array:
    """A gather under the methods of a tensor; each returns another Array over the same bytes."""

    __slots__ = ("gather",)

    def __init__(self, gather: Gather) -> None:
        self.gather = gather

    @property
    def shape(self) -> Shape:
        """Its shape, in elements."""
        return self.gather.shape

    def dim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def view(self, *shape: int) -> Array:
        """Its elements in row-major order under another shape, of which one size may be -1.

        Raises `ValueError` for another number of elements.
        """
        known = math.prod(size for size in shape if size != -1)
        if -1 in shape and (shape.count(-1) > 1 or not known or self.gather.numel % known):
            raise ValueError(f"a tensor of shape {self.shape} has no view of shape {shape}")
        return Array(
            self.gather.view(tuple(self.gather.numel // known if size == -1 else size for size in shape))
        )

    reshape = view

    def flatten(self, start: int = 0, end: int = -1) -> Array:
        """The dimensions from `start` to `end` as one."""
        start, end = self._dim(start), self._dim(end)
        return self.view(*self.shape[:start], math.prod(self.shape[start : end + 1]), *self.shape[end + 1 :])

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Array:
        """One dimension as several, of which one size may be -1."""
        dim = self._dim(dim)
        if -1 in sizes:
            known = math.prod(size for size in sizes if size != -1)
            sizes = [self.shape[dim] // known if size == -1 else size for size in sizes]
        return self.view(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def permute(self, *dims: int) -> Array:
        """The dimensions in another order."""
        return Array(self.gather.permute([self._dim(dim) for dim in dims]))

    def transpose(self, first: int, second: int) -> Array:
        """Two dimensions exchanged."""
        dims = list(range(self.dim()))
        first, second = self._dim(first), self._dim(second)
        dims[first], dims[second] = dims[second], dims[first]
        return self.permute(*dims)

    def split(self, sizes: Sequence[int], dim: int = 0) -> tuple[Array, ...]:
        """Parts of these sizes, which add up to the dimension's."""
        dim = self._dim(dim)
        if sum(sizes) != self.shape[dim]:
            raise ValueError(f"parts of {list(sizes)} of a dimension of size {self.shape[dim]}")
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        return tuple(Array(self.gather.narrow(dim, at, size)) for at, size in zip(starts, sizes, strict=True))

    def chunk(self, count: int, dim: int = 0) -> tuple[Array, ...]:
        """Parts of one size, the last perhaps smaller."""
        size = self.shape[self._dim(dim)]
        each = max(1, -(-size // count))
        return self.split([min(each, size - at) for at in range(0, size, each)] or [0] * count, dim)

    def unbind(self, dim: int = 0) -> tuple[Array, ...]:
        """One part for each index of a dimension, without it."""
        dim = self._dim(dim)
        return tuple(Array(self.gather.select(dim, index)) for index in range(self.shape[dim]))

    def __getitem__(self, index: Any) -> Array:
        """Integers and slices with positive steps, for the first dimensions."""
        gather, dim = self.gather, 0
        for each in index if isinstance(index, tuple) else (index,):
            size = gather.shape[dim]
            if isinstance(each, slice):
                start, stop, step = each.indices(size)
                if step < 1:
                    raise ValueError("a slice with a negative step")
                gather = gather.narrow(dim, start, len(range(start, stop, step)), step)
                dim += 1
            elif -size <= each < size:
                gather = gather.select(dim, each % size)
            else:
                raise IndexError(f"index {each} of a dimension of size {size}")
        return Array(gather)

    def __add__(self, value: float) -> Array:
        """The sum, which is computed by torch when it is read."""
        from lazymerge.tensor import LazyTensor

        result = LazyTensor(self.gather) + value
        assert isinstance(result, LazyTensor)
        return Array(result.lazy_gather)

    def __sub__(self, value: float) -> Array:
        """The difference, likewise."""
        return self + -value

    def _dim(self, dim: int) -> int:
        if not -self.dim() <= dim < self.dim():
            raise IndexError(f"dimension {dim} of a tensor of shape {self.shape}")
        return dim % self.dim()


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The parts, all Arrays or all tensors, one after the other along a dimension."""
    if not isinstance(parts[0], Array):
        import torch

        return torch.cat(list(parts), dim)  # type: ignore[arg-type, return-value]
    gathers = [part.gather for part in parts if isinstance(part, Array)]
    dim = parts[0]._dim(dim)
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in (gather.shape for gather in gathers)}
    if len(others) > 1 or len({gather.dtype.name for gather in gathers}) > 1:
        raise ValueError(f"parts that do not go together: {[gather.shape for gather in gathers][:4]}")
    return Array(_cat(gathers, dim))  # type: ignore[return-value]


def stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The parts, which have one shape, along a new dimension."""
    if not isinstance(parts[0], Array):
        import torch

        return torch.stack(list(parts), dim)  # type: ignore[arg-type, return-value]
    at = dim % (parts[0].dim() + 1)
    return cat([Array(part.gather.unsqueeze(at)) for part in parts if isinstance(part, Array)], at)  # type: ignore[return-value]
