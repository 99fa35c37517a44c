"""The arguments of deferred computations as plain data for JSON, and back."""

from __future__ import annotations

from typing import Any

import torch

from lazymerge.boxes import Shape
from lazymerge.compute import Computed
from lazymerge.elements import dtype_of, torch_dtype
from lazymerge.errors import PlanError
from lazymerge.files.dtype import DTYPES, DType
from lazymerge.gather import Gather
from lazymerge.operators import OPERATORS, Operand


def arguments_to_json(computed: Computed) -> dict[str, Any]:
    """The arguments of a computation as plain data: operands by number, dtypes by name."""

    def plain(value: Any) -> Any:
        if isinstance(value, Operand):
            return {"operand": value.index}
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_of(value).name}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise PlanError(
            f"{computed.name}: its argument {value!r} is no plain data", "execute it in this process"
        )

    return {
        "args": plain(computed.args),
        "kwargs": {key: plain(value) for key, value in computed.kwargs.items()},
    }


def computed_from_json(
    op: str,
    operands: tuple[Gather, ...],
    arguments: dict[str, Any],
    shape: Shape,
    dtype: DType,
    checked: str | None,
) -> Computed:
    """The computation whose arguments `arguments_to_json` gave; `PlanError` for an unknown operator."""
    if op not in OPERATORS:
        raise PlanError(f"a plan with the unknown operator {op!r}", "make the plan again with this version")

    def rich(value: Any) -> Any:
        if isinstance(value, dict):
            return Operand(value["operand"]) if "operand" in value else torch_dtype(DTYPES[value["dtype"]])
        return [rich(item) for item in value] if isinstance(value, list) else value

    args = tuple(rich(arguments["args"]))
    kwargs = {key: rich(value) for key, value in arguments["kwargs"].items()}
    return Computed(op, operands, args, kwargs, shape, dtype, checked)
