"""Element types by name, without torch: how many bytes, and what safetensors calls them.

Names are torch's (``"bfloat16"`` is ``torch.bfloat16``). The table stands in the order in
which safetensors' writer lays tensors out (its ``Dtype`` variants, descending; read off what
``safetensors.torch.save`` 0.8 writes), types that it cannot hold last.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: torch's name, bytes per element, safetensors' code (None: it has none)."""

    name: str
    itemsize: int
    code: str | None
    order: int

    def __str__(self) -> str:
        return self.name


_TABLE = (
    ("uint64", 8, "U64"),
    ("int64", 8, "I64"),
    ("float64", 8, "F64"),
    ("complex64", 8, "C64"),
    ("float32", 4, "F32"),
    ("uint32", 4, "U32"),
    ("int32", 4, "I32"),
    ("bfloat16", 2, "BF16"),
    ("float16", 2, "F16"),
    ("uint16", 2, "U16"),
    ("int16", 2, "I16"),
    ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    ("float8_e8m0fnu", 1, "F8_E8M0"),
    ("float8_e4m3fn", 1, "F8_E4M3"),
    ("float8_e5m2", 1, "F8_E5M2"),
    ("int8", 1, "I8"),
    ("uint8", 1, "U8"),
    ("float4_e2m1fn_x2", 1, "F4"),
    ("bool", 1, "BOOL"),
    ("complex32", 4, None),
    ("complex128", 16, None),
    ("qint8", 1, None),
    ("quint8", 1, None),
    ("qint32", 4, None),
    ("quint4x2", 1, None),
    ("quint2x4", 1, None),
)

DTYPES: dict[str, DType] = {
    name: DType(name, size, code, order) for order, (name, size, code) in enumerate(_TABLE)
}

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Floating-point types that are computed in."""
