"""Casts between float32 and bfloat16 of what lies in files: the casts that merges make, without torch.

torch takes a second to import and 200 MB; ml_dtypes (JAX's types for numpy) takes 10 ms. Both round to
nearest, ties to even, and agree on all 2^32 floats but NaNs: those of ml_dtypes are 0x7fc0 with the sign
that they had, torch's are 0xffff or 0x7fff where its vector unit made them. Every other cast is
torch's (lazymerge.compute).
"""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lazymerge.computation import bytes_read, computations, long_runs_from
from lazymerge.errors import PlanError
from lazymerge.files.dtype import DType
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.fill import SCRATCH, fill, scratch
from lazymerge.gather import Gather, of_region
from lazymerge.reshape import boxes_of_run

_TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

_INFINITE, _NEGATIVE = 0x7F80, 0x8000
"""Bits of a bfloat16: from the first on, without its sign, it is infinite or no number."""


def casts(gather: Gather, dtype: DType) -> bool:
    """Whether `cast` takes this gather to this type."""
    return {gather.dtype.name, dtype.name} == _TYPES.keys() and not computations(gather.pieces())


def cast(gather: Gather, dtype: DType, tensor: str) -> Gather:
    """The gather's elements in another type; reading them raises as `Cast` says."""
    source = Cast(gather, dtype, tensor)
    return of_region(Region(source, 0, dtype, gather.shape, contiguous_strides(gather.shape)))


class Cast:
    """The elements of `operand` as `dtype`, a source of row-major bytes.

    Reading it raises `PlanError` naming `tensor` where a finite value becomes infinite.
    """

    __slots__ = ("dtype", "operand", "tensor", "through")

    name = "a cast"
    steps = 1
    whole = False
    step = 0

    def __init__(self, operand: Gather, dtype: DType, tensor: str) -> None:
        self.operand = operand
        self.dtype = dtype
        self.tensor = tensor
        self.through = scratch(operand.pieces(), operand.shape, SCRATCH)

    @property
    def depth(self) -> int:
        return self.operand.depth + 8

    @property
    def size(self) -> int:
        return self.operand.numel * self.dtype.itemsize

    @property
    def reads(self) -> int:
        return bytes_read(self.operand.pieces())

    @property
    def long_runs_from(self) -> int:
        source = long_runs_from(self.operand.pieces(), self.operand.shape)
        return source // self.operand.dtype.itemsize * self.dtype.itemsize

    def working_set(self, nbytes: int) -> int:
        """What `nbytes` are cast from, and scratch to read that."""
        source = nbytes // self.dtype.itemsize * self.operand.dtype.itemsize
        return source + min(self.through, source)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the result's bytes from `offset` on, both of whole elements."""
        if offset % self.dtype.itemsize or len(buffer) % self.dtype.itemsize:
            raise PlanError(
                f"{self.tensor}: a cast that is read from within an element", "make the plan again"
            )
        target = np.frombuffer(buffer, _TYPES[self.dtype.name])
        wide = _TYPES[self.operand.dtype.name]
        done = 0
        for box in boxes_of_run(offset // self.dtype.itemsize, target.size, self.operand.shape):
            part = target[done : done + box.numel]
            raw = _spare_bytes(box.numel * wide.itemsize)
            fill(self.operand, box, raw.data, SCRATCH)
            values = raw.view(wide)
            if part.itemsize > values.itemsize:  # a bfloat16 is the upper half of a float32
                np.left_shift(raw.view(np.uint16), 16, out=part.view(np.uint32), dtype=np.uint32)
            else:
                self._round(values, part)
            done += box.numel

    def _round(self, values: NDArray[np.generic], result: NDArray[np.generic]) -> None:
        with np.errstate(all="ignore"):  # infinities are looked for below, NaNs are allowed
            np.copyto(result, values, casting="unsafe")
        bits = result.view(np.uint16)
        if result.size and (result.view(np.int16).max() >= _INFINITE or bits.max() >= _NEGATIVE | _INFINITE):
            self._refuse_overflow(values, bits)

    def _refuse_overflow(self, values: NDArray[np.generic], bits: NDArray[np.uint16]) -> None:
        overflown = values[(bits & ~np.uint16(_NEGATIVE) == _INFINITE) & np.isfinite(values)]
        if overflown.size:
            raise PlanError(
                f"{self.tensor}: {overflown.size} of its values, such as {overflown[0]:g},"
                f" do not fit {self.dtype}",
                "choose --dtype float32, or keep the dtype",
            )


_spare = threading.local()


def _spare_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Bytes that the thread's next call uses again: fresh pages cost as much as a cast."""
    raw: NDArray[np.uint8] | None = getattr(_spare, "raw", None)
    if raw is None or raw.size < nbytes:
        raw = _spare.raw = np.empty(nbytes, np.uint8)
    return raw[:nbytes]
