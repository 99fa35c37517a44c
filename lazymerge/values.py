"""Elements as raw bytes: which of two blocks differ and by how much, NaN and infinity. numpy, no torch.

Differences are taken in a type that holds every value of both sides exactly: float64, and for 64-bit
integers numpy's longdouble. Complex numbers are compared part by part. Types without arithmetic
(quantised and packed ones) are compared as codes.

    NaN         equals NaN at the same place, whatever its payload
    infinity    equals infinity of the same sign
    -0.0        equals 0.0
    exact       none of this: the bytes are equal or they are not
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lazymerge.files.dtype import DType

CHUNK = 1 << 16
"""Elements that are widened at a time, where bytes differ: some 2 MB of temporaries."""

_PARTS = {"complex32": 2, "complex64": 2, "complex128": 2}
_PART_TYPES: dict[str, Any] = {
    "bool": np.bool_,
    "complex32": np.float16,
    "complex64": np.float32,
    "complex128": np.float64,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "qint8": np.int8,
    "quint8": np.uint8,
    "qint32": np.int32,
}
"""What an element, or a part of it, is to numpy, where its name is not numpy's own."""

_CODES = {"float4_e2m1fn_x2", "quint4x2", "quint2x4"}
"""Several values in a byte."""

_FIRST_NONFINITE = {
    "float64": 0x7FF0 << 48,
    "float32": 0x7F80 << 16,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,  # has no infinity
    "complex32": 0x7C00,
    "complex64": 0x7F80 << 16,
    "complex128": 0x7FF0 << 48,
}
"""Bits, without the sign, from which on a value is infinite or no number."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Two values are close where ``|a - b| <= atol + rtol * |b|``."""

    atol: float
    rtol: float


@dataclass(slots=True)
class Found:
    """What comparing two blocks, or many, has found; `add` takes the next one in.

    `mismatches` counts elements; `largest` is the largest difference of any two elements (infinite where
    one is NaN or infinite and the other is not the same); `first` is the index, counted in row-major
    order, of the first mismatch, and `values` and `bits` are what stands there on both sides. `nan` and
    `inf` count elements of both sides. `identical` says that no byte differs.
    """

    identical: bool = True
    mismatches: int = 0
    largest: float = 0.0
    first: int | None = None
    values: tuple[Any, Any] | None = None
    bits: tuple[str, str] | None = None
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)

    def add(self, other: Found, at: int = 0) -> None:
        """Take in what was found in a block whose first element has the index `at`."""
        self.identical = self.identical and other.identical
        self.mismatches += other.mismatches
        self.largest = max(self.largest, other.largest)
        self.nan = self.nan[0] + other.nan[0], self.nan[1] + other.nan[1]
        self.inf = self.inf[0] + other.inf[0], self.inf[1] + other.inf[1]
        if other.first is not None and (self.first is None or at + other.first < self.first):
            self.first, self.values, self.bits = at + other.first, other.values, other.bits


def compare_blocks(
    one: NDArray[np.uint8], other: NDArray[np.uint8], types: tuple[DType, DType], tolerance: Tolerance | None
) -> Found:
    """Compare two blocks of as many elements; without a tolerance (of one type then) bytewise."""
    with np.errstate(all="ignore"):  # signalling NaNs, and differences beyond any float
        if types[0] == types[1] and same_bytes(one, other):
            nan, inf = nonfinite(one, types[0])
            return Found(nan=(nan, nan), inf=(inf, inf))
        found = Found()
        widths = types[0].itemsize, types[1].itemsize
        for at in range(0, one.size // widths[0], CHUNK):
            parts = one[at * widths[0] :][: CHUNK * widths[0]], other[at * widths[1] :][: CHUNK * widths[1]]
            found.add(_compare_chunk(parts, types, tolerance), at)
        return found


def same_bytes(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    """Whether two runs of as many bytes are the same."""
    whole = one.size - one.size % 8
    words = one[:whole].view(np.uint64), other[:whole].view(np.uint64)
    return bool((words[0] == words[1]).all() and (one[whole:] == other[whole:]).all())


def _compare_chunk(
    parts: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    types: tuple[DType, DType],
    tolerance: Tolerance | None,
) -> Found:
    counts = [nonfinite(part, dtype) for part, dtype in zip(parts, types, strict=True)]
    found = Found(nan=(counts[0][0], counts[1][0]), inf=(counts[0][1], counts[1][1]))
    if types[0] == types[1] and same_bytes(*parts):
        return found
    found.identical = False
    one, other = (_exactly(part, dtype) for part, dtype in zip(parts, types, strict=True))
    difference = np.abs(one - other)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    difference[same] = 0
    difference[np.isnan(difference)] = np.inf
    found.largest = float(difference.max())
    if tolerance is None:
        differs = (_rows(parts[0], types[0]) != _rows(parts[1], types[1])).any(axis=1)
    else:
        close = difference <= tolerance.atol + tolerance.rtol * np.abs(other)
        close &= np.isfinite(one) & np.isfinite(other)
        differs = _any_part(~(same | close), types[0])
    found.mismatches = int(np.count_nonzero(differs))
    if found.mismatches:
        at = int(np.argmax(differs))
        places = [_rows(part, dtype)[at] for part, dtype in zip(parts, types, strict=True)]
        found.first = at
        found.values = _value(places[0], types[0]), _value(places[1], types[1])
        found.bits = places[0][::-1].tobytes().hex(), places[1][::-1].tobytes().hex()
    return found


def nonfinite(raw: NDArray[np.uint8], dtype: DType) -> tuple[int, int]:
    """(NaNs, infinities) among the elements; a complex number with a NaN in any part is a NaN."""
    if not _is_float(dtype) or not raw.size:
        return 0, 0
    first = _FIRST_NONFINITE.get(dtype.name)
    if first is not None:
        width = dtype.itemsize // _PARTS.get(dtype.name, 1)
        signed, unsigned = raw.view(f"i{width}"), raw.view(f"u{width}")
        sign = 1 << (8 * width - 1)
        if signed.max() < first and unsigned.max() < first | sign:  # two passes without temporaries
            return 0, 0
    nan = inf = 0
    for chunk in _chunks(raw, dtype):
        values = chunk.view(_numpy_type(dtype))
        no_numbers = _any_part(np.isnan(values), dtype)
        nan += int(np.count_nonzero(no_numbers))
        inf += int(np.count_nonzero(_any_part(np.isinf(values), dtype) & ~no_numbers))
    return nan, inf


def rounding(types: tuple[DType, DType]) -> Tolerance | None:
    """What rounding to the coarser of two floating-point types explains; None for other types."""
    if not all(_is_float(dtype) for dtype in types):
        return None
    limits = [ml_dtypes.finfo(_numpy_type(dtype)) for dtype in types]  # type: ignore[no-untyped-call]
    return Tolerance(
        max(float(limit.smallest_subnormal) for limit in limits), max(float(limit.eps) for limit in limits)
    )


def is_complex(dtype: DType) -> bool:
    """Whether its elements are complex numbers."""
    return dtype.name in _PARTS


def has_values(dtype: DType) -> bool:
    """Whether its elements mean numbers by themselves, so that they can be compared with another type's."""
    return dtype.name not in _CODES and not dtype.name.startswith("q")


def _is_float(dtype: DType) -> bool:
    return dtype.name.startswith(("float", "bfloat", "complex")) and dtype.name not in _CODES


def _numpy_type(dtype: DType) -> np.dtype[Any]:
    if dtype.name in _CODES:
        return np.dtype(np.uint8)
    found: np.dtype[Any] = np.dtype(_PART_TYPES.get(dtype.name, dtype.name))
    return found


def _exactly(raw: NDArray[np.uint8], dtype: DType) -> NDArray[np.floating[Any]]:
    """The elements (or their parts) in a type that holds them exactly."""
    if dtype.name == "bool":
        return raw.astype(bool).astype(np.float64)  # any byte but 0 is true
    values = raw.view(_numpy_type(dtype))
    wide: NDArray[np.floating[Any]] = values.astype(
        np.longdouble if dtype.name in {"int64", "uint64"} else np.float64
    )
    return wide


def _rows(raw: NDArray[np.uint8], dtype: DType) -> NDArray[np.uint8]:
    """The bytes of each element."""
    return raw.reshape(-1, dtype.itemsize)


def _any_part(flags: NDArray[np.bool_], dtype: DType) -> NDArray[np.bool_]:
    """For each element, whether the flag of any of its parts is set."""
    parts = _PARTS.get(dtype.name, 1)
    if parts == 1:
        return flags
    found: NDArray[np.bool_] = np.logical_or.reduce(flags.reshape(-1, parts), axis=1)
    return found


def _chunks(raw: NDArray[np.uint8], dtype: DType) -> Iterator[NDArray[np.uint8]]:
    size = CHUNK * dtype.itemsize
    return (raw[at : at + size] for at in range(0, raw.size, size))


def _value(row: NDArray[np.uint8], dtype: DType) -> Any:
    """One element as a number of Python's."""
    if is_complex(dtype):
        real, imaginary = row.view(_numpy_type(dtype)).astype(np.float64).tolist()
        return complex(real, imaginary)
    if dtype.name == "bool":
        return bool(row[0])
    if _is_float(dtype):
        return float(row.view(_numpy_type(dtype)).astype(np.float64)[0])
    return int(row.view(_numpy_type(dtype))[0])
