"""Sums of a matrix and low-rank products, without torch: what folding an adapter computes.

    result = round(W + scale_1 * (left_1 @ right_1) + scale_2 * (left_2 @ right_2) + ...)

in float32 (float64 where anything is), from left to right, rounded once to the result's type. With a
`magnitude` (DoRA) the sum's rows, or columns, are brought to these lengths before it is rounded.

Everything is computed in grains of rows that do not depend on the budget, and products in tiles of a fixed
size, so that blocks and workers change no bit. The tiles are also small enough for OpenBLAS to compute each
in the thread that asks for it: its own threads spin, and make several workers a hundred times slower.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lazymerge.boxes import Box
from lazymerge.computation import bytes_read, check_effort, computations, long_runs_from
from lazymerge.errors import PlanError
from lazymerge.files.dtype import DType
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.fill import SCRATCH, fill, scratch
from lazymerge.gather import Gather, of_region

Floats = NDArray[np.floating[Any]]

_NUMPY = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Types that a sum can be of, and its operands."""

_FIRST_NONFINITE = {"float64": 0x7FF0 << 48, "float32": 0x7F80 << 16, "float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits, without the sign, from which on a value is infinite or no number."""

_GRAIN = 1 << 17
"""Elements that are computed together: they, and a product of their size, stay in a processor's cache."""

_TOGETHER = 16
"""Grains that are read together, of the base and where columns are measured: a call for each costs as much
as what is computed of it."""

_TILE_ROWS = 32
_TILE_WORK = 1 << 17
"""Multiplications of a tile; from twice as many on OpenBLAS uses threads of its own."""


@dataclass(frozen=True, slots=True)
class Term:
    """A product to add: `left` is [rows, rank], `right` [rank, columns], and None where left is all."""

    left: Gather
    right: Gather | None
    scale: float

    @property
    def operands(self) -> tuple[Gather, ...]:
        """What it is computed from."""
        return (self.left,) if self.right is None else (self.left, self.right)


def add_products(
    base: Gather,
    terms: Sequence[Term],
    tensor: str,
    magnitude: Gather | None = None,
    *,
    columns: bool = False,
    dtype: DType | None = None,
) -> Gather:
    """The matrix `base` with the terms added, of the type `dtype` or its own.

    Reading it raises as `LowRank` says.
    """
    source = LowRank(base, tuple(terms), tensor, magnitude, columns, dtype or base.dtype)
    return of_region(Region(source, 0, source.dtype, base.shape, contiguous_strides(base.shape)))


class LowRank:
    """The sum as a source of row-major bytes of elements of `dtype`; the shapes of its parts go together.

    `magnitude` holds a length for each row (or column, with `columns`) of the result. Reading raises
    `PlanError` naming `tensor` where a finite element of the base becomes infinite or no number.
    """

    __slots__ = ("_lock", "_norms", "base", "columns", "dtype", "magnitude", "tensor", "terms", "wide")

    name = "a sum with low-rank products"
    whole = False

    def __init__(
        self,
        base: Gather,
        terms: tuple[Term, ...],
        tensor: str,
        magnitude: Gather | None,
        columns: bool,
        dtype: DType,
    ) -> None:
        self.base = base
        self.terms = terms
        self.tensor = tensor
        self.magnitude = magnitude
        self.columns = columns
        self.dtype = dtype
        self._check()
        doubles = "float64" in {dtype.name, *(operand.dtype.name for operand in self._operands())}
        self.wide = _NUMPY["float64" if doubles else "float32"]
        self._lock = threading.Lock()
        self._norms: Floats | None = None
        check_effort(self.depth, self.steps)

    def _check(self) -> None:
        """Raise `PlanError` where shapes or types do not go together: a plan may come out of a file."""
        rows, columns = self.base.shape if len(self.base.shape) == 2 else (-1, -1)
        good = all(each.name in _NUMPY for each in [self.dtype, *(x.dtype for x in self._operands())])
        for term in self.terms:
            rank = term.left.shape[1:]
            good = good and term.left.shape == (rows, *rank) and len(rank) == 1 and 0 not in rank
            if term.right is None:
                good = good and rank == (columns,)
            else:
                good = good and term.right.shape == (*rank, columns)
        if self.magnitude is not None:
            good = good and self.magnitude.shape == (columns if self.columns else rows,)
        if not good:
            shapes = [(str(operand.dtype), operand.shape) for operand in self._operands()]
            raise PlanError(
                f"{self.tensor}: matrices that make no sum of products: {str(shapes)[:300]}",
                "make the plan again",
            )

    @property
    def depth(self) -> int:
        return 8 + max(operand.depth for operand in self._operands())

    @property
    def steps(self) -> int:
        return 1 + sum(operand.steps for operand in self._operands())

    @property
    def size(self) -> int:
        return self.base.numel * self.dtype.itemsize

    @property
    def reads(self) -> int:
        """Bytes of files; the base twice where columns are measured first."""
        first = bytes_read(self.base.pieces()) if self.magnitude is not None and self.columns else 0
        return first + sum(bytes_read(operand.pieces()) for operand in self._operands())

    @property
    def step(self) -> int:
        return self._grain() * self.base.shape[1] * self.dtype.itemsize

    @property
    def long_runs_from(self) -> int:
        source = long_runs_from(self.base.pieces(), self.base.shape)
        return source // self.base.dtype.itemsize * self.dtype.itemsize

    def working_set(self, nbytes: int) -> int:
        """Two grains in the wide type, several in the base's, and the operands of as many rows."""
        columns = max(1, self.base.shape[1])
        least = _TOGETHER * self._grain() if self.magnitude is not None and self.columns else self._grain()
        rows = max(least, nbytes // (columns * self.dtype.itemsize))
        together = min(rows, _TOGETHER * self._grain())
        held: int = 2 * self._grain() * columns * self.wide.itemsize
        held += together * columns * self.base.dtype.itemsize
        most = together * columns * self.base.dtype.itemsize  # bytes of an operand that are read at a time
        for term in self.terms:
            held += rows * term.left.shape[1] * 2 * self.wide.itemsize
            most = max(most, rows * term.left.shape[1] * term.left.dtype.itemsize)
            if term.right is not None:
                held += term.right.numel * 2 * self.wide.itemsize
                most = max(most, term.right.nbytes)
        if self.magnitude is not None:
            held += 4 * self.magnitude.numel * 8
        read = [(list(operand.pieces()), operand.shape) for operand in self._operands()]
        through = max(scratch(pieces, shape, SCRATCH) for pieces, shape in read)
        inner = [source for pieces, _ in read for source in computations(pieces)]
        below = max((source.working_set(min(most, source.size)) for source in inner), default=0)
        return held + through + below

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the result's bytes from `offset` on, both of whole elements."""
        itemsize, columns = self.dtype.itemsize, self.base.shape[1]
        if offset % itemsize or len(buffer) % itemsize:
            raise PlanError(f"{self.tensor}: a sum read from within an element", "make the plan again")
        target = np.frombuffer(buffer, _NUMPY[self.dtype.name])
        if not target.size:
            return
        factors = self._factors()
        first, last = offset // itemsize, offset // itemsize + target.size
        grain = self._grain()
        begin = first // columns // grain * grain
        end = min(self.base.shape[0], -(-last // columns))
        sums = _Sums(self, begin, min(self.base.shape[0], -(-end // grain) * grain))
        for at in range(begin, end, grain):
            rows = min(grain, self.base.shape[0] - at)
            block = sums.rows(at, rows)
            if self.magnitude is not None:
                block *= self._factors_of_rows(block, at) if factors is None else factors
            low, high = max(first, at * columns), min(last, (at + rows) * columns)
            self._round(block, target[low - first : high - first], at, low - at * columns)

    def _operands(self) -> list[Gather]:
        magnitude = [] if self.magnitude is None else [self.magnitude]
        return [self.base, *(operand for term in self.terms for operand in term.operands), *magnitude]

    def _grain(self) -> int:
        """Rows that are computed together."""
        rows = _GRAIN // max(1, self.base.shape[1])
        whole: int = rows - rows % _TILE_ROWS or rows
        return min(max(1, whole), max(1, self.base.shape[0]))

    def _factors(self) -> Floats | None:
        """What columns are multiplied with; None where rows are, or nothing is."""
        if self.magnitude is None or not self.columns:
            return None
        with self._lock:  # one worker measures, the others wait for it
            if self._norms is None:
                self._norms = self._measure_columns()
        wanted = _read(self.magnitude, Box.whole(self.magnitude.shape), self.wide)
        with np.errstate(all="ignore"):
            factors: Floats = wanted / self._norms
        return factors

    def _factors_of_rows(self, block: Floats, at: int) -> Floats:
        assert self.magnitude is not None
        wanted = _read(self.magnitude, Box((at,), (len(block),)), self.wide)
        norms = np.sqrt(np.einsum("ij,ij->i", block, block, dtype=np.float64)).astype(self.wide)
        with np.errstate(all="ignore"):
            factors: Floats = (wanted / norms)[:, np.newaxis]
        return factors

    def _measure_columns(self) -> Floats:
        rows, columns = self.base.shape
        grain = self._grain()
        squares = np.zeros(columns, np.float64)
        for first in range(0, rows, _TOGETHER * grain):
            sums = _Sums(self, first, min(rows, first + _TOGETHER * grain))
            for at in range(first, sums.end, grain):
                block = sums.rows(at, min(grain, rows - at))
                squares += np.einsum("ij,ij->j", block, block, dtype=np.float64)
        norms: Floats = np.sqrt(squares).astype(self.wide)
        return norms

    def _round(self, block: Floats, result: Floats, at: int, skip: int) -> None:
        """Round the block's elements from `skip` on into `result`; the block begins with row `at`."""
        with np.errstate(all="ignore"):  # what overflows is looked for below
            np.copyto(result, block.reshape(-1)[skip : skip + result.size], casting="unsafe")
        first = _FIRST_NONFINITE[self.dtype.name]
        width = self.dtype.itemsize
        sign = 1 << (8 * width - 1)
        if result.view(f"i{width}").max() < first and result.view(f"u{width}").max() < first | sign:
            return
        was = _read(self.base, Box((at, 0), block.shape), self.wide).reshape(-1)[skip : skip + result.size]
        broken = np.isfinite(was) & ~np.isfinite(result)
        if broken.any():
            raise PlanError(
                f"{self.tensor}: with the adapter {np.count_nonzero(broken)} of its values are infinite or no"
                f" numbers in {self.dtype}, such as the one that was {was[broken][0]:g}",
                "the adapter is damaged, or its scale is too large for this type",
            )


class _Sums:
    """The sums of rows between `begin` and `end`, with the operands of all these rows read once."""

    def __init__(self, source: LowRank, begin: int, end: int) -> None:
        self.source = source
        self.begin = begin
        self.end = end
        grain = (source._grain(), source.base.shape[1])
        self._block = np.empty(grain, source.wide)
        self._product = np.empty(grain, source.wide)
        together = (min(end - begin, _TOGETHER * grain[0]), grain[1])
        self._base = np.empty(together, _NUMPY[source.base.dtype.name])
        self._base_at = self._base_end = begin
        self._pairs: list[tuple[Floats, Floats | None, float]] = []
        for term in source.terms:
            window = Box((begin, 0), (end - begin, term.left.shape[1]))
            left = _read(term.left, window, source.wide)
            right = None
            scale = term.scale
            if term.right is not None:
                right = _read(term.right, Box.whole(term.right.shape), source.wide)
                if abs(math.frexp(scale)[0]) == 0.5:  # a power of two, which changes no digit wherever it is
                    left *= scale
                    scale = 1.0
            self._pairs.append((left, right, scale))

    def rows(self, at: int, count: int) -> Floats:
        """The sums of at most a grain of rows from `at` on, valid until the next call."""
        block, product = self._block[:count], self._product[:count]
        _widen(self._rows_of_base(at, count), block)
        for left, right, scale in self._pairs:
            part = left[at - self.begin : at - self.begin + count]
            if right is None:
                product[...] = part
            else:
                _multiply(part, right, product)
            if scale != 1:
                product *= scale
            block += product
        return block

    def _rows_of_base(self, at: int, count: int) -> Floats:
        """Rows of the base in its own type; those behind them are read with them."""
        if not self._base_at <= at <= at + count <= self._base_end:
            self._base_at = at
            self._base_end = min(self.end, at + len(self._base))
            rows = self._base[: self._base_end - at]
            fill(self.source.base, Box((at, 0), rows.shape), rows.reshape(-1).view(np.uint8).data, SCRATCH)
        return self._base[at - self._base_at : at - self._base_at + count]


def _multiply(left: Floats, right: Floats, result: Floats) -> None:
    """``result[...] = left @ right``, in tiles: all whole ones in one call, and what is left at the edges."""
    (rows, rank), columns = left.shape, right.shape[1]
    height = _TILE_ROWS if rank <= 256 else _TILE_ROWS // 4
    width = max(16, 1 << (_TILE_WORK // (height * rank)).bit_length() - 1)
    for top, bottom, high in _spans(rows, height):
        for start, stop, wide in _spans(columns, width):
            a = left[top:bottom].reshape(-1, 1, high, rank)
            b = right[:, start:stop].reshape(rank, -1, wide).transpose(1, 0, 2)
            c = result[top:bottom, start:stop].reshape((bottom - top) // high, high, -1, wide)
            np.matmul(a, b, out=c.transpose(0, 2, 1, 3))


def _spans(size: int, tile: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, size of a tile) of the part that is whole tiles, and of the one tile that is left."""
    whole = size - size % tile
    if whole:
        yield 0, whole, tile
    if whole < size:
        yield whole, size, size - whole


def _read(gather: Gather, window: Box, wide: np.dtype[Any]) -> Floats:
    """A window of a gather in the wide type."""
    result = np.empty(window.shape, wide)
    _read_into(gather, window, result, np.empty(window.numel * gather.dtype.itemsize, np.uint8))
    return result


def _read_into(gather: Gather, window: Box, result: Floats, scratch: NDArray[np.uint8]) -> None:
    """Fill `result` with a window of a gather; what has to be widened is read into `scratch` first."""
    narrow = _NUMPY[gather.dtype.name]
    if narrow == result.dtype:
        fill(gather, window, result.reshape(-1).view(np.uint8).data, SCRATCH)
        return
    raw = scratch[: window.numel * narrow.itemsize]
    fill(gather, window, raw.data, SCRATCH)
    _widen(raw.view(narrow).reshape(window.shape), result)


def _widen(values: NDArray[Any], result: Floats) -> None:
    """``result[...] = values``"""
    if values.dtype == _NUMPY["bfloat16"] and result.itemsize == 4:  # the upper half of a float32
        np.left_shift(values.view(np.uint16), 16, out=result.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(result, values)
