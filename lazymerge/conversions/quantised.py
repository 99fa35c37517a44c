"""Models that are quantised: what can be checked of them, and why they are not cast.

A folder of the hub may hold a layer's weight in a packed form, with tensors beside it that no class names:

    FP8                   weight (fp8)           weight_scale_inv
    GPTQ, AWQ             qweight (int32)        qzeros, scales, g_idx
    MXFP4                 gate_up_proj_blocks    gate_up_proj_scales
    bitsandbytes          weight (uint8)         weight.absmax, weight.quant_map, ...

config.json says so in quantization_config. Which names and shapes there are then is the method's own matter:
they are written as they are. A module counts as quantised if one of its tensors has such a type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.errors import PlanError
from lazymerge.files.dtype import DType

if TYPE_CHECKING:
    from lazymerge.conversions.architecture import Architecture, Differences

FIELD = "quantization_config"


def quantised_name(checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> str | None:
    """A tensor that is quantised, where config.json says that the model is; else None."""
    if not isinstance((config or {}).get(FIELD), dict):
        return None
    return next((name for name, gather in checkpoint.gathers.items() if _is_packed(gather.dtype)), None)


def refuse_cast(checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> None:
    """Raise `PlanError` for a model that is quantised: its scales are no floats to round."""
    name = quantised_name(checkpoint, config)
    if name is not None:
        raise PlanError(
            f"--dtype: {name} is {checkpoint.gathers[name].dtype}, quantised ({_method(config)}), and its"
            " scales have to stay as they are",
            "leave out --dtype; to have another type, dequantise the model first",
        )


def without_quantised(
    found: Differences, checkpoint: Checkpoint, architecture: Architecture
) -> tuple[Differences, list[Note]]:
    """The differences that are not of quantised modules, and what is said of these."""
    config = architecture.config
    if not isinstance(config.get(FIELD), dict):
        return found, []
    outer = {module for name in architecture.shapes for module in list(_modules(name))[1:]}
    modules = {
        module
        for name, gather in checkpoint.gathers.items()
        if _is_packed(gather.dtype)
        for module in _modules(name)
        if module not in outer
    }
    if not modules:
        text = (
            f"config.json has {FIELD} ({_method(config)}), and no tensor is quantised: a loader that goes by"
            " it takes them for what they are not; take it out of config.json"
        )
        return found, [Note("warning", text)]

    def is_plain(name: str) -> bool:
        return modules.isdisjoint(_modules(name))

    left = replace(
        found,
        missing=tuple(filter(is_plain, found.missing)),
        misshapen={name: sizes for name, sizes in found.misshapen.items() if is_plain(name)},
        surplus=tuple(filter(is_plain, found.surplus)),
        unknown=tuple(filter(is_plain, found.unknown)),
    )
    count = sum(not is_plain(name) for name in checkpoint.gathers)
    text = f"{count} tensors are quantised ({_method(config)}) or go with one: they are written unchecked"
    return left, [Note("info", text)]


def _is_packed(dtype: DType) -> bool:
    return dtype.name.startswith(("float8", "float4", "int8", "uint8", "int32"))


def _modules(name: str) -> Iterator[str]:
    """The modules that a tensor of this name is in, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _method(config: Mapping[str, Any] | None) -> str:
    return str((config or {})[FIELD].get("quant_method"))[:40]
