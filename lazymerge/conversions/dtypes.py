"""Casts that the user asks for: floating-point weights only, and not those that have to stay fp32."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from lazymerge import casting
from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.errors import PlanError
from lazymerge.files.dtype import DTYPES, DType
from lazymerge.gather import Gather

FLOATS = ("float64", "float32", "float16", "bfloat16")
_ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}

KEPT = ("e_score_correction_bias", "expert_bias")
"""Router biases: hub models keep them in fp32, and a rounded one routes tokens elsewhere."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def parse_dtype(name: str) -> DType:
    """The floating-point type of that name ("bf16", "torch.float32", ...); `PlanError` for any other."""
    plain = name.lower().removeprefix("torch.")
    plain = _ALIASES.get(plain, plain)
    if plain not in FLOATS:
        raise PlanError(f"--dtype {name!r} is not a type to cast to", f"choose one of {', '.join(FLOATS)}")
    return DTYPES[plain]


def cast_to(
    checkpoint: Checkpoint, dtype: DType, wide: Mapping[str, Collection[str]] | None = None
) -> Checkpoint:
    """The checkpoint with its floating-point tensors in `dtype`; the others as they are.

    `wide` has the names of what the model's class keeps in float32, as `Architecture` has them.
    """
    gathers, kept = {}, []
    stays = frozenset((wide or {}).get(dtype.name, ()))
    for name, gather in checkpoint.gathers.items():
        floating = gather.dtype.name in FLOATS
        stay = name.rpartition(".")[2] in KEPT or without_numbers(name) in stays
        if floating and stay and dtype.itemsize < gather.dtype.itemsize:
            kept.append(name)
        elif floating:
            gather = cast(gather, dtype, name)
        gathers[name] = gather
    text = f"{len(kept)} tensors stay in their type, as the model keeps them (router biases and the like)"
    notes = [Note("info", f"{text}, for example {kept[0]}")] if kept else []
    return checkpoint.with_gathers(gathers, *notes)


def without_numbers(name: str) -> str:
    """The name that alike tensors of all layers and experts have in common."""
    return _NUMBER.sub("0", name)


def cast(gather: Gather, dtype: DType, name: str) -> Gather:
    """The elements of the tensor `name` in another type; reading them raises where one does not fit."""
    if gather.dtype is dtype:
        return gather
    if casting.casts(gather, dtype):
        return casting.cast(gather, dtype, name)
    from lazymerge import compute  # torch, only where nothing else will do

    return compute.cast(gather, dtype, name)
