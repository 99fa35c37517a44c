"""The operators of ATen that can be deferred, and how much of their operands a part of the result needs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from lazymerge.boxes import Shape


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands in a computation's arguments for its operand of that number."""

    index: int


@functools.cache
def aten(name: str) -> Any:
    """torch's operator of that name, as in "add.Tensor"."""
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


OPERATORS = {
    "_to_copy.default": "elementwise",
    "add.Tensor": "elementwise",
    "sub.Tensor": "elementwise",
    "mul.Tensor": "elementwise",
    "div.Tensor": "elementwise",
    "neg.default": "elementwise",
    "rsub.Scalar": "elementwise",
    "mm.default": "rows",
    "bmm.default": "rows",
    "mv.default": "rows",
    "sum.dim_IntList": "reduced",  # by rows, unless the first dimension is reduced
    "linalg_vector_norm.default": "reduced",
    "sum.default": "whole",
    "total": "elementwise",
}
"""What can be deferred, by ATen name, and how much of its operands a window needs.

`total` is our own: its operands added up in their order, in the result's type, one at a time.
"""


def goes_by(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], operand: Shape, result: Shape) -> str:
    """ "elementwise", "rows" or "whole"."""
    if OPERATORS[op] != "reduced":
        return OPERATORS[op]
    at = 2 if op.startswith("linalg") else 1
    dims = args[at] if len(args) > at else kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or not result or 0 in [dim % len(operand) for dim in dims]:
        return "whole"
    return "rows"
