"""Gathers over named tensors as plain data, and back over the tensors themselves: how a conversion travels.

    "name"                                               the tensor of that name
    ["pick", base, [axis, ...], [[dim, index], ...]]     an axis is [dim, start, step, size], or all of dim
    ["cat", dim, [part, ...]]
    ["view", base, shape]
    ["zeros", shape]                                     of the dtype of the tensors beside it

What travels is the expression and not the pieces that it makes, so it is exact whatever the tensors' files
look like, and a tensor that only changes its name is the very same gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lazymerge.gather import Axis, Cat, Gather, Pick, Shards, View, cat, pick

Expression = Any
"""Plain data in one of the forms above."""

_DEEPEST = 100
"""Forms in one another; transformers' conversions have three."""


class Named:
    """Stands for the bytes of a tensor that is somewhere else: a source with a name and no data."""

    __slots__ = ("name", "size")

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Raise `NotMoved`: whoever wants the values does more than move them."""
        raise NotMoved(f"the values of {self.name} are read")


class NotMoved(Exception):
    """A gather is not elements of named tensors in another order; the text says what it is."""


def to_plain(gather: Gather) -> Expression:
    """The expression of a gather over `Named` sources. Raises `NotMoved` where it computes anything."""
    if isinstance(gather, Pick):
        whole = [Axis(dim, 0, 1, size) for dim, size in enumerate(gather.base.shape)]
        axes = [axis.dim if axis in whole else list(axis) for axis in gather.axes]
        return ["pick", to_plain(gather.base), axes, [list(each) for each in gather.fixed.items()]]
    if isinstance(gather, Cat):
        return ["cat", gather.dim, [to_plain(part) for part in gather.parts]]
    if isinstance(gather, View):
        return ["view", to_plain(gather.base), list(gather.shape)]
    assert isinstance(gather, Shards)
    ((_, region),) = gather.pieces()
    if isinstance(region.source, Named):
        return region.source.name
    if hasattr(region.source, "working_set"):
        raise NotMoved(f"it is {region.source.name}")
    content = bytearray(region.source.size)
    region.source.read_into(0, memoryview(content))
    if any(content):
        raise NotMoved("it has constants of its own")
    return ["zeros", list(gather.shape)]


def names_in(expression: Expression) -> Iterator[str]:
    """The names of the tensors that an expression is made of, each as often as it is used.

    Raises `ValueError` for what is no expression, as all functions here, or one that is far too deep.
    """
    yield from _names_in(expression, _DEEPEST)


def _names_in(expression: Expression, depth: int) -> Iterator[str]:
    if isinstance(expression, str):
        yield expression
        return
    match expression:
        case ["pick", base, _, _] | ["view", base, _] if depth:
            yield from _names_in(base, depth - 1)
        case ["cat", _, list(parts)] if depth:
            for part in parts:
                yield from _names_in(part, depth - 1)
        case ["zeros", _]:
            pass
        case _:
            raise ValueError("no expression")


def from_plain(expression: Expression, tensors: Mapping[str, Gather]) -> Gather:
    """The gather of an expression over these tensors.

    Raises `KeyError` for a name that is not among them, and `ValueError` where it does not fit their shapes
    or mixes their dtypes.
    """
    if isinstance(expression, str):
        return tensors[expression]
    match expression:
        case ["pick", base, [*axes], [*fixed]]:
            return _pick(from_plain(base, tensors), axes, dict(fixed))
        case ["cat", int(dim), [_, *_] as parts]:
            return _cat(parts, dim, tensors)
        case ["view", base, shape]:
            return from_plain(base, tensors).view(shape_of(shape))
    raise ValueError("no expression")


def _pick(base: Gather, axes: list[Any], fixed: dict[int, int]) -> Gather:
    shape = base.shape
    walked = [Axis(axis, 0, 1, shape[axis]) if isinstance(axis, int) else Axis(*axis) for axis in axes]
    if not all(type(each) is int for axis in walked for each in axis if each is not None):
        raise ValueError(f"no axes: {axes}")
    taken = [*fixed, *(axis.dim for axis in walked if axis.dim is not None)]
    fits = (
        sorted(taken) == list(range(len(shape)))
        and all(0 <= index < shape[dim] for dim, index in fixed.items())
        and all(axis.size >= 0 for axis in walked)
        and all(
            axis.start >= 0 and axis.step >= 1 and axis.start + (axis.size - 1) * axis.step < shape[axis.dim]
            for axis in walked
            if axis.dim is not None and axis.size
        )
    )
    if not fits:
        raise ValueError(f"a tensor of shape {shape} has no {axes} of {fixed}")
    return pick(base, walked, fixed)


def _cat(parts: list[Expression], dim: int, tensors: Mapping[str, Gather]) -> Gather:
    made = [None if part[0] == "zeros" else from_plain(part, tensors) for part in parts]
    first = next((part for part in made if part is not None), None)
    if first is None:
        raise ValueError("nothing but zeros")
    gathers = [
        _zeros(shape_of(part[1]), first) if gather is None else gather
        for part, gather in zip(parts, made, strict=True)
    ]
    if any(part.dtype is not first.dtype for part in gathers):
        raise ValueError(f"parts of different types: {sorted({str(part.dtype) for part in gathers})}")
    others = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in gathers}
    if len(others) != 1 or not 0 <= dim < len(first.shape):
        raise ValueError(f"parts of shapes {[part.shape for part in gathers]} along dimension {dim}")
    return cat(gathers, dim)


def _zeros(shape: tuple[int, ...], like: Gather) -> Gather:
    """Zeros in the dtype of another tensor: one element, repeated without copies."""
    import torch

    from lazymerge.elements import in_memory, torch_dtype

    zero = in_memory(torch.zeros((1,) * len(shape), dtype=torch_dtype(like.dtype)))
    return zero.expand(shape)


def shape_of(values: Any) -> tuple[int, ...]:
    """A shape out of plain data."""
    if not isinstance(values, list) or not all(type(each) is int and each >= 0 for each in values):
        raise ValueError(f"no shape: {values}")
    return tuple(values)
