"""Deferred computations: tensors that are the result of arithmetic over gathers, block by block.

A `Computed` is a source of bytes like a file: a gather's region can lie in it, and so what was
computed can be sliced, transposed and concatenated like what was read. It is data (the name of
an ATen operator, its operands as gathers, its other arguments), so a plan can carry it.

How much of the operands a window of the result needs:

    elementwise    the same window, cut where an operand is broadcast
    rows           the same rows of the first operand, all of the others; in blocks of a fixed
                   size, since a matrix product or a sum may round differently in other blocks
                   and the result may not depend on the budget
    whole          everything: the operator does not go by rows
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from lazymerge.boxes import Box, Shape
from lazymerge.computation import Computation, bytes_read, check_effort, computations, long_runs_from
from lazymerge.elements import in_memory, raw_bytes, torch_dtype
from lazymerge.errors import PlanError
from lazymerge.files.dtype import DTYPES, DType
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.fill import SCRATCH, fill, windows
from lazymerge.gather import Gather, of_region
from lazymerge.operators import Operand, aten, goes_by
from lazymerge.reshape import boxes_of_run

_ROWS_BLOCK = 4 << 20
"""Bytes of result and first operand that an operator by rows holds at a time, whatever the budget."""


_DEPTH = 8
"""Frames of the stack that an operator takes at most."""

_STRAIGHT = ("_to_copy.default", "total")
"""Operators whose result is made where it is wanted, with buffers that are used again."""


Known = TypeVar("Known")


def _remembered(method: Callable[..., Known]) -> Callable[..., Known]:
    """The method, worked out once for each of its arguments: a tensor may be an operand many times over."""

    @functools.wraps(method)
    def once(self: Computed, *args: int) -> Known:
        key = (method.__name__, *args)
        if key not in self.known:
            self.known[key] = method(self, *args)
        found: Known = self.known[key]
        return found

    return once


class Computed:
    """The result of one operator over gathers, as a source of row-major bytes.

    `args` and `kwargs` are the operator's, with an `Operand` for each tensor. `size` is in bytes.
    """

    __slots__ = (
        "args",
        "by",
        "checked",
        "depth",
        "dtype",
        "known",
        "kwargs",
        "op",
        "operands",
        "shape",
        "steps",
    )

    def __init__(
        self,
        op: str,
        operands: tuple[Gather, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shape: Shape,
        dtype: DType,
        checked: str | None = None,
    ) -> None:
        self.op = op
        self.operands = operands
        self.args = args
        self.kwargs = kwargs
        self.shape = shape
        self.dtype = dtype
        self.checked = checked  # the tensor to name if a finite value overflows
        self.by = goes_by(op, args, kwargs, operands[0].shape, shape)
        self.depth = _DEPTH + max(operand.depth for operand in operands)
        self.steps = 1 + sum(operand.steps for operand in self._different())
        check_effort(self.depth, self.steps)
        self.known: dict[tuple[Any, ...], Any] = {}  # what has been worked out about it

    @property
    def name(self) -> str:
        return f"computed by {self.op}"

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    @_remembered
    def whole(self) -> bool:
        return self.by == "whole" or any(source.whole for source in self._inner())

    @property
    @_remembered
    def reads(self) -> int:
        return sum(bytes_read(operand.pieces()) for operand in self._different())

    def _different(self) -> list[Gather]:
        """The operands, each of them once: x + x reads x once."""
        return list({id(operand): operand for operand in self.operands}.values())

    def _inner(self) -> list[Computation]:
        return [source for operand in self.operands for source in computations(operand.pieces())]

    def gather(self) -> Gather:
        """The whole result as a gather."""
        return of_region(Region(self, 0, self.dtype, self.shape, contiguous_strides(self.shape)))

    @_remembered
    def working_set(self, nbytes: int) -> int:
        """Bytes that computing `nbytes` of the result takes at most, the result and scratch included."""
        if self.by == "whole":
            parts = [operand.nbytes for operand in self.operands]
            return self.size + sum(map(_held, self.operands, parts)) + self._widened(parts)
        if self.by == "elementwise":
            share = nbytes / self.dtype.itemsize
            parts = [
                min(operand.nbytes, math.ceil(share * operand.dtype.itemsize)) for operand in self.operands
            ]
        else:
            rows = self._grain()
            nbytes = rows * self._row()
            first = self.operands[0]
            parts = [rows * first.nbytes // max(1, first.shape[0])]
            parts += [self._share(operand, rows) for operand in self.operands[1:]]
        held = {(id(o), part): _held(o, part) for o, part in zip(self.operands, parts, strict=True)}
        if self.op in _STRAIGHT:
            return nbytes + max(held.values())
        return nbytes + sum(held.values()) + self._widened(parts)

    def _widened(self, parts: Sequence[int]) -> int:
        """Bytes of the copies that torch makes of operands in a wider type, in which it computes."""
        widest = max(self.dtype.itemsize, *(operand.dtype.itemsize for operand in self.operands))
        return sum(
            part // operand.dtype.itemsize * widest
            for operand, part in zip(self.operands, parts, strict=True)
            if operand.dtype.itemsize < widest
        )

    @property
    def step(self) -> int:
        if self.by == "whole" or not self.shape:
            return 0
        return self._step_rows() * self._row()

    @property
    @_remembered
    def long_runs_from(self) -> int:
        if self.by != "elementwise":
            return 0
        return max(
            long_runs_from(operand.pieces(), operand.shape) // operand.dtype.itemsize * self.dtype.itemsize
            for operand in self.operands
        )

    @_remembered
    def _step_rows(self) -> int:
        """Rows of the result that are computed together; 0: any number."""
        if self.by == "rows":
            return self._grain()
        inner = [source for source in self._inner() if isinstance(source, Computed) and source.shape]
        return max((source._step_rows() for source in inner), default=0)

    def _row(self) -> int:
        """Bytes of a row of the result."""
        return max(1, self.size // max(1, self.shape[0]))

    def _grain(self) -> int:
        """Rows that an operator by rows computes at a time: the same whatever the budget."""
        first = self.operands[0]
        together = self._row() + first.nbytes // max(1, first.shape[0])
        return max(1, min(self.shape[0], _ROWS_BLOCK // together))

    def _share(self, operand: Gather, rows: int) -> int:
        """Bytes of a further operand that `rows` rows of the result need."""
        if self.op.startswith("bmm"):
            return rows * operand.nbytes // max(1, operand.shape[0])
        return operand.nbytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the result's bytes from `offset` on."""
        itemsize = self.dtype.itemsize
        if self.op in _STRAIGHT and offset % itemsize == 0 == len(buffer) % itemsize:
            self._into(offset // itemsize, buffer)
            return
        first, last = offset // itemsize, -(-(offset + len(buffer)) // itemsize)
        done = -(offset % itemsize)
        for box in boxes_of_run(first, last - first, self.shape):
            for raw in self._blocks(box):
                low, high = max(0, done), min(len(buffer), done + len(raw))
                buffer[low:high] = raw[low - done : high - done]
                done += len(raw)

    def _into(self, first: int, buffer: memoryview) -> None:
        """Fill `buffer` with elements from `first` on, rounded or added up straight in it."""
        target = torch.frombuffer(buffer, dtype=torch.uint8).view(torch_dtype(self.dtype))
        done = 0
        for box in boxes_of_run(first, target.numel(), self.shape):
            part = target[done : done + box.numel]
            for number, operand in enumerate(self.operands):
                with _borrowed(box.numel * operand.dtype.itemsize) as raw:
                    fill(operand, box, raw.numpy().data, SCRATCH)
                    block = raw.view(torch_dtype(operand.dtype))
                    if number == 0:
                        part.copy_(block)
                    else:
                        _add(part, block)
                    if self.checked is not None and not _finite(part):
                        self._refuse_overflow(block, part)
            done += box.numel

    def _blocks(self, box: Box) -> Iterator[memoryview]:
        """The bytes of a box that is one run, computed in as many steps as the operator wants."""
        if self.by == "elementwise":
            yield raw_bytes(self._evaluate([self._same_window(operand, box) for operand in self.operands]))
        elif self.by == "whole":
            result = self._evaluate([Box.whole(operand.shape) for operand in self.operands])
            yield raw_bytes(result[box.slices])
        else:
            yield from self._row_blocks(box)

    def _row_blocks(self, box: Box) -> Iterator[memoryview]:
        grain = self._grain()
        first, last = box.start[0], box.start[0] + box.shape[0]
        for at in range(first - first % grain, last, grain):
            size = min(grain, self.shape[0] - at)
            result = self._evaluate([self._rows_window(i, at, size) for i in range(len(self.operands))])
            low, high = max(first, at), min(last, at + size)
            yield raw_bytes(result[(slice(low - at, high - at), *box.slices[1:])])

    def _same_window(self, operand: Gather, box: Box) -> Box:
        """The part of an elementwise operand that the box needs: dimensions of size 1 are broadcast."""
        skip = len(box.shape) - len(operand.shape)
        start = tuple(0 if n == 1 else at for at, n in zip(box.start[skip:], operand.shape, strict=True))
        shape = tuple(1 if n == 1 else k for k, n in zip(box.shape[skip:], operand.shape, strict=True))
        return Box(start, shape)

    def _rows_window(self, index: int, at: int, size: int) -> Box:
        shape = self.operands[index].shape
        if index == 0 or self.op.startswith("bmm"):
            return Box((at, *(0,) * (len(shape) - 1)), (size, *shape[1:]))
        return Box.whole(shape)

    def _evaluate(self, needed: list[Box]) -> torch.Tensor:
        if self.op == "total":
            return self._total(needed)
        once: dict[tuple[int, Box], torch.Tensor] = {}
        for operand, box in zip(self.operands, needed, strict=True):
            if (id(operand), box) not in once:
                once[id(operand), box] = read(operand, box)
        blocks = [once[id(operand), box] for operand, box in zip(self.operands, needed, strict=True)]
        args = [blocks[arg.index] if isinstance(arg, Operand) else arg for arg in self.args]
        result: torch.Tensor = aten(self.op)(*args, **self.kwargs)
        if result.dtype != torch_dtype(self.dtype):
            raise PlanError(
                f"{self.name}: gave {result.dtype}, expected {self.dtype}", "report it; the plan is wrong"
            )
        if self.checked is not None and not _finite(result):
            self._refuse_overflow(blocks[0], result)
        return result

    def _total(self, needed: list[Box]) -> torch.Tensor:
        """The operands' boxes added up; no more than the sum and one of them in memory."""
        result = read(self.operands[0], needed[0]).to(torch_dtype(self.dtype))
        for operand, box in zip(self.operands[1:], needed[1:], strict=True):
            result.add_(read(operand, box))
        return result

    def _refuse_overflow(self, block: torch.Tensor, result: torch.Tensor) -> None:
        overflown = block[torch.isinf(result) & torch.isfinite(block)]
        if overflown.numel():
            raise PlanError(
                f"{self.checked}: {overflown.numel()} of its values, such as {overflown[0]:g},"
                f" do not fit {self.dtype}",
                "save it again in a wider dtype: the ranks' values add up to more"
                if any(isinstance(source, Computed) and source.op == "total" for source in self._inner())
                else "choose --dtype bfloat16, or keep the dtype",
            )


def _finite(values: torch.Tensor) -> bool:
    """Whether all are finite; False also where only their sum is not, which the caller looks into.

    A sum that meets an infinity or a NaN never becomes finite again, and it is three times as fast as
    looking for the largest value, fifty times as fast as `isfinite`.
    """
    return bool(torch.isfinite(values.sum()))


def _add(total: torch.Tensor, block: torch.Tensor) -> None:
    """Add a block of the same or a narrower type, which torch would widen into fresh memory."""
    if block.dtype == total.dtype:
        total.add_(block)
        return
    with _borrowed(total.nbytes) as raw:
        total.add_(raw.view(total.dtype).copy_(block))


def _held(operand: Gather, nbytes: int) -> int:
    """Bytes in memory while `nbytes` of an operand are read: they, scratch, and what computes them."""
    return nbytes + min(SCRATCH, nbytes) + working_set(operand, nbytes)


def working_set(gather: Gather, nbytes: int) -> int:
    """Bytes beyond a block's own that producing `nbytes` of the gather takes: 0 for mere files."""
    sources = computations(gather.pieces())
    return max((source.working_set(min(nbytes, source.size)) for source in sources), default=0)


def read(gather: Gather, window: Box | None = None) -> torch.Tensor:
    """A window of a gather (default: all of it) as a new contiguous tensor of the window's shape."""
    window = window or Box.whole(gather.shape)
    dtype = torch_dtype(gather.dtype)
    raw = torch.empty(window.numel * gather.dtype.itemsize, dtype=torch.uint8)
    fill(gather, window, raw.numpy().data, SCRATCH)
    return raw.view(dtype).view(window.shape)


_spare = threading.local()


@contextmanager
def _borrowed(nbytes: int) -> Iterator[torch.Tensor]:
    """Bytes that the thread's later calls use again: fresh pages cost as much as a cast.

    A call within a call gets others. What fits no more is let go.
    """
    spare: list[torch.Tensor] = _spare.__dict__.setdefault("raws", [])
    fitting = [raw for raw in spare if nbytes <= raw.numel() <= max(4 * nbytes, SCRATCH)]
    if fitting:
        raw = min(fitting, key=torch.Tensor.numel)
        spare[:] = [each for each in spare if each is not raw]
    else:
        spare.clear()
        raw = torch.empty(nbytes, dtype=torch.uint8)
    try:
        yield raw[:nbytes]
    finally:
        spare.append(raw)


def read_blocks(gather: Gather, max_bytes: int) -> Iterator[tuple[Box, torch.Tensor]]:
    """The gather in windows of at most `max_bytes`, in row-major order, each with its elements."""
    for window in windows(gather.shape, gather.dtype.itemsize, max_bytes):
        yield window, read(gather, window)


def cast(gather: Gather, dtype: DType, name: str | None = None) -> Gather:
    """The gather's elements in another dtype, rounded as torch rounds them.

    With a `name`, reading it raises `PlanError` where a finite value of the tensor becomes infinite.
    """
    if gather.dtype is dtype:
        return gather
    kwargs = {"dtype": torch_dtype(dtype)}
    computed = Computed("_to_copy.default", (gather,), (Operand(0),), kwargs, gather.shape, dtype, name)
    return computed.gather()


def total(name: str, parts: Sequence[Gather], *, average: bool = False) -> Gather:
    """The elementwise sum (or average) of gathers of one shape and dtype, in their order.

    Half types are added in fp32 and rounded once at the end. Reading it raises `PlanError` where that makes
    a finite value of the tensor `name` infinite.
    """
    dtype = parts[0].dtype
    wide = DTYPES["float32"] if dtype.name in {"float16", "bfloat16"} else dtype
    result = Computed("total", tuple(parts), (), {}, parts[0].shape, wide).gather()
    if average:
        result = _binary("div.Tensor", result, in_memory(torch.tensor(len(parts), dtype=torch_dtype(wide))))
    return cast(result, dtype, name)


def _binary(op: str, one: Gather, other: Gather) -> Gather:
    return Computed(op, (one, other), (Operand(0), Operand(1)), {}, one.shape, one.dtype).gather()
