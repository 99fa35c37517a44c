"""`LazyTensor`: a `torch.Tensor` that records what is done to it.

It has a shape, strides and a dtype, and no data. ATen operators that move elements become a new
gather; arithmetic becomes a `Computed` block; anything else reads its operands into memory and
runs as usual, and says so once in the log. So code that was written for real state dicts runs on
lazy ones unchanged, and what it leaves behind is a plan.

    x = checkpoint["model.layers.0.self_attn.qkv_proj.weight"]     # nothing is read
    q, k, v = x.view(8, 3, 64, 512).unbind(1)                        # nothing is read
    real.copy_(q.reshape(512, 512))                                  # read, a block at a time
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from lazymerge.compute import Computed, cast, read, read_blocks
from lazymerge.elements import dtype_of, in_memory, torch_dtype
from lazymerge.gather import Gather, cat
from lazymerge.moves import MOVES
from lazymerge.operators import OPERATORS, Operand, aten

log = logging.getLogger(__name__)

COPY_BLOCK = 8 << 20
"""Bytes that ``real.copy_(lazy)`` reads at a time."""

_OF_STORAGE = {
    getattr(torch.ops.aten, name)
    for name in ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
}
"""Operators whose values depend on where the first operand's elements are in memory."""


class LazyTensor(torch.Tensor):
    """A tensor whose elements have not been read: its `lazy_gather` says where they are."""

    lazy_gather: Gather  # torch.Tensor.gather is an operator

    @staticmethod
    def __new__(cls, gather: Gather, strides: Sequence[int] | None = None) -> LazyTensor:
        """A lazy tensor over `gather`; `strides` (elements) are what it pretends, default row-major."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            gather.shape,
            strides=strides or torch.empty(gather.shape, device="meta").stride(),
            dtype=torch_dtype(gather.dtype),
            device=torch.device("cpu"),
        )
        made.lazy_gather = gather
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _OF_STORAGE and isinstance(args[0], LazyTensor):
            raise TypeError(
                f"{func}: a LazyTensor has no storage whose elements could be counted; materialize() it first"
            )
        if func is torch.ops.aten.copy_.default:
            return _copy_blocks(*args)
        if func is torch.ops.aten.squeeze_.dim:
            return _squeeze_in_place(*args)
        if func._schema.is_mutable:
            _refuse_changing(func, args, kwargs)
            return _materialized(func, args, kwargs)
        record = _RECORDED.get(func)
        if record is not None:
            return record(func, *args, **kwargs)
        deferred = _defer(func, args, kwargs)
        return _materialized(func, args, kwargs) if deferred is None else deferred

    def materialize(self) -> torch.Tensor:
        """The elements, read into a new contiguous tensor."""
        return read(self.lazy_gather)

    def blocks(self, max_bytes: int) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """(index, elements) pairs in row-major order, each of at most `max_bytes` (or one element)."""
        for window, block in read_blocks(self.lazy_gather, max_bytes):
            yield window.slices, block

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    # `x.data = y` passes no operator either: it would change what torch thinks x is, and not x.

    @property
    def data(self) -> LazyTensor:
        """The tensor itself."""
        return self

    @data.setter
    def data(self, value: object) -> None:
        raise TypeError("data: a LazyTensor cannot be changed in place; materialize() it first")

    def share_memory_(self) -> Any:
        """Not possible without data: raises `TypeError`."""
        raise TypeError("share_memory_: a LazyTensor has no memory to share; materialize() it first")

    # What reaches for the data without passing an operator gets it read first.

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialize().__dlpack__(*args, **kwargs)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and not self.dim() else repr(self)

    def numpy(self, *, force: bool = False) -> Any:
        """The elements as a numpy array."""
        return self.materialize().numpy(force=force)

    def tolist(self) -> Any:
        """The elements as nested lists."""
        return self.materialize().tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialize().__array__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a LazyTensor cannot be pickled: it holds no data, and files that only this process has open."
            " materialize() it first; open the checkpoint again, or send a plan as JSON, in another process"
        )

    def __copy__(self) -> LazyTensor:
        return LazyTensor(self.lazy_gather, self.stride())

    def __deepcopy__(self, memo: Any) -> LazyTensor:
        return self.__copy__()  # a gather never changes, so that it can be shared


def _copy_blocks(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``target.copy_(source)``, a block at a time."""
    if isinstance(target, LazyTensor):
        raise TypeError("copy_: a LazyTensor cannot be changed in place; copy into a real tensor")
    assert isinstance(source, LazyTensor)
    _meta(target).copy_(_meta(source))  # torch's own complaint about shapes that do not fit
    spread = source.lazy_gather.expand(tuple(target.shape))
    for window, block in read_blocks(spread, COPY_BLOCK):
        target[window.slices].copy_(block, non_blocking)
    return target


def _squeeze_in_place(x: LazyTensor, dim: int) -> LazyTensor:
    """``x.squeeze_(dim)``: torch's own matmul of a vector does this to the product that it has just made.

    No element changes, only the shape; torch is told of it as it tells its own wrappers.
    """
    with no_dispatch():
        torch.ops.aten.squeeze_.dim(x, dim)
    gather = x.lazy_gather
    if gather.shape:
        x.lazy_gather = gather.squeeze([dim % len(gather.shape)])
    return x


def _refuse_changing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `TypeError` if the operator would write into a lazy tensor; into real ones it may."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(each, LazyTensor) for each in written):
            raise TypeError(
                f"{func}: a LazyTensor cannot be changed in place; use the form without underscore"
            )


# ---------------------------------------------------------------- operators that move elements


_RECORDED: dict[Any, Callable[..., Any]] = {}


def _record_move(func: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of an operator of `MOVES`: torch checks the arguments, on the meta device."""
    if not isinstance(source, LazyTensor) or any(isinstance(each, LazyTensor) for each in args):
        return _materialized(func, (source, *args), kwargs)
    shape = func(_meta(source), *args, **kwargs)
    return _wrap(_RULES[func](source.lazy_gather, shape, *args, **kwargs), shape)


def _wrap(gather: Gather | list[Gather], like: Any) -> Any:
    if isinstance(gather, list):
        return [LazyTensor(part, shape.stride()) for part, shape in zip(gather, like, strict=True)]
    assert gather.shape == tuple(like.shape), (gather.shape, like.shape)
    return LazyTensor(gather, like.stride())


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


_RULES = {aten(name): rule for name, rule in MOVES.items()}
_RECORDED.update(dict.fromkeys(_RULES, _record_move))


def _concatenate(func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """``cat`` and ``stack``: the parts in one dtype, one after the other along a dimension."""
    like = func([_meta(tensor) for tensor in tensors], dim)
    dtype = dtype_of(like.dtype)
    parts = [cast(_gather_of(tensor), dtype) for tensor in tensors]
    dim %= like.dim()
    if func is torch.ops.aten.stack.default:
        parts = [part.unsqueeze(dim) for part in parts]
    else:  # torch lets an empty vector stand for nothing, whatever the others' rank
        parts = [part for part in parts if part.shape != (0,)] or parts[:1]
    return LazyTensor(cat(parts, dim), like.stride())


_RECORDED[torch.ops.aten.cat.default] = _concatenate
_RECORDED[torch.ops.aten.stack.default] = _concatenate


def _filled_anew(func: Any, like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``new_zeros`` and ``new_ones``: a real tensor, for which only the dtype of the lazy one matters."""
    made: torch.Tensor = func(torch.empty(0, dtype=like.dtype), *args, **kwargs)
    return made


_RECORDED[torch.ops.aten.new_zeros.default] = _filled_anew
_RECORDED[torch.ops.aten.new_ones.default] = _filled_anew


def _gather_of(tensor: torch.Tensor) -> Gather:
    return tensor.lazy_gather if isinstance(tensor, LazyTensor) else in_memory(tensor)


def _index(func: Any, source: Any, indices: Sequence[torch.Tensor | None]) -> Any:
    """``x[:, [0, 3]]``: one list of indices is `index_select`; anything else of this kind is not recorded."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    dim, index = given[0]
    if (
        len(given) > 1
        or not isinstance(source, LazyTensor)
        or isinstance(index, LazyTensor)
        or index.dim() != 1
        or index.dtype not in {torch.int64, torch.int32}
    ):
        return _materialized(func, (source, indices), {})
    return torch.index_select(source, dim, torch.where(index < 0, index + source.shape[dim], index))


_RECORDED[torch.ops.aten.index.Tensor] = _index


# ---------------------------------------------------------------- arithmetic, and everything else


def _defer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The operator as a deferred computation; None if it cannot be one."""
    name = f"{func._schema.name.removeprefix('aten::')}.{func._overloadname}"
    if name not in OPERATORS or any(_leaves_memory(value) for value in kwargs.values()):
        return None
    operands: list[Gather] = []
    recorded: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if arg.device.type != "cpu" or (arg.requires_grad and not isinstance(arg, LazyTensor)):
                return None
            recorded.append(Operand(len(operands)))
            operands.append(_gather_of(arg))
        else:
            recorded.append(arg)
    kept = {key: value for key, value in kwargs.items() if value is not None and key in {"dtype", "alpha"}}
    metas = tree_map(lambda arg: _meta(arg) if isinstance(arg, torch.Tensor) else arg, args)
    format_ = {key: value for key, value in kwargs.items() if key == "memory_format"}
    like = func(*metas, **kept, **format_)
    if name == "_to_copy.default" and not kept:
        return LazyTensor(operands[0], like.stride())
    shape, dtype = tuple(like.shape), dtype_of(like.dtype)
    computed = Computed(name, tuple(operands), tuple(recorded), kept, shape, dtype)
    return LazyTensor(computed.gather(), like.stride())


def _leaves_memory(value: Any) -> bool:
    """Whether an argument asks for another device or layout than a lazy tensor has."""
    if isinstance(value, torch.device):
        return value.type != "cpu"
    return isinstance(value, torch.layout) and value is not torch.strided


def _materialized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on real operands."""
    _say_once(str(func))
    args, kwargs = tree_map(
        lambda arg: arg.materialize() if isinstance(arg, LazyTensor) else arg, (args, kwargs)
    )
    return func(*args, **kwargs)


@functools.cache
def _say_once(name: str) -> None:
    log.info("%s has no lazy form: its operands are read into memory", name)
