"""The operators of ATen that move elements, each as a change of a gather: no torch is imported for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lazymerge.gather import Gather, cat

if TYPE_CHECKING:
    import torch

Move = Callable[..., Gather | list[Gather]]

MOVES: dict[str, Move] = {}
"""ATen name -> its rule: called with the gather of the first argument and the result's shape(s) on the meta
device, then with the operator's other arguments, which torch has checked."""


def _moves(*names: str) -> Callable[[Move], Move]:
    def register(rule: Move) -> Move:
        MOVES.update(dict.fromkeys(names, rule))
        return rule

    return register


@_moves("detach.default", "alias.default", "clone.default", "lift_fresh.default")
def _same(x: Gather, like: Any, **kwargs: Any) -> Gather:
    return x


@_moves(
    "view.default",
    "_unsafe_view.default",
    "reshape.default",
    "_reshape_alias.default",
    "_reshape_copy.default",
)
def _view(x: Gather, like: torch.Tensor, *args: Any) -> Gather:
    return x.view(tuple(like.shape))


@_moves("permute.default")
def _permute(x: Gather, like: torch.Tensor, dims: list[int]) -> Gather:
    return x.permute([dim % len(x.shape) for dim in dims])


@_moves("transpose.int")
def _transpose(x: Gather, like: torch.Tensor, first: int, second: int) -> Gather:
    dims = list(range(len(x.shape)))
    if dims:
        dims[first], dims[second] = dims[second], dims[first]
    return x.permute(dims)


@_moves("t.default")
def _t(x: Gather, like: torch.Tensor) -> Gather:
    return x.permute(range(len(x.shape))[::-1])


@_moves("slice.Tensor")
def _slice(
    x: Gather,
    like: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Gather:
    first, _, _ = slice(start, end, step).indices(x.shape[dim])
    return x.narrow(dim % len(x.shape), first, like.shape[dim], step)


@_moves("select.int")
def _select(x: Gather, like: torch.Tensor, dim: int, index: int) -> Gather:
    dim %= len(x.shape)
    return x.select(dim, index % x.shape[dim])


@_moves("index_select.default")
def _index_select(x: Gather, like: torch.Tensor, dim: int, index: torch.Tensor) -> Gather:
    x = x if x.shape else x.unsqueeze(0)
    dim %= len(x.shape)
    parts = [x.narrow(dim, *run) for run in _runs([int(i) for i in index.reshape(-1).tolist()], x.shape[dim])]
    return cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def _runs(indices: list[int], limit: int) -> Iterator[tuple[int, int, int]]:
    """(start, size, step) of the runs of equal positive steps in a list of indices."""
    for index in indices:
        if not 0 <= index < limit:
            raise IndexError(f"index {index} is out of bounds for a dimension of size {limit}")
    at = 0
    while at < len(indices):
        step = indices[at + 1] - indices[at] if at + 1 < len(indices) else 0
        size = 1
        while step > 0 and at + size < len(indices) and indices[at + size] - indices[at + size - 1] == step:
            size += 1
        yield indices[at], size, max(step, 1)
        at += size


@_moves("split.Tensor", "split_with_sizes.default")
def _split(x: Gather, like: list[torch.Tensor], sizes: Any, dim: int = 0) -> list[Gather]:
    dim %= len(x.shape)
    parts, at = [], 0
    for part in like:
        parts.append(x.narrow(dim, at, part.shape[dim]))
        at += part.shape[dim]
    return parts


@_moves("unbind.int")
def _unbind(x: Gather, like: list[torch.Tensor], dim: int = 0) -> list[Gather]:
    dim %= len(x.shape)
    return [x.select(dim, index) for index in range(x.shape[dim])]


@_moves("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(x: Gather, like: torch.Tensor, dims: Any = None) -> Gather:
    rank = len(x.shape)
    if dims is None:
        dims = range(rank)
    elif isinstance(dims, int):
        dims = [dims]
    return x.squeeze(dim % rank for dim in dims) if rank else x


@_moves("unsqueeze.default")
def _unsqueeze(x: Gather, like: torch.Tensor, dim: int) -> Gather:
    return x.unsqueeze(dim % (len(x.shape) + 1))


@_moves("expand.default")
def _expand(x: Gather, like: torch.Tensor, size: list[int], implicit: bool = False) -> Gather:
    return x.expand(tuple(like.shape))
