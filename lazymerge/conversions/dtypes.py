"""Casts that the user asks for: floating-point weights only, and not those that have to stay fp32."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from lazymerge import casting
from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.errors import PlanError
from lazymerge.files.dtype import DTYPES, FLOATS, DType
from lazymerge.gather import Gather

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
    wanted = Wanted(dtype, wide or {})
    for name, gather in checkpoint.gathers.items():
        if wanted.stays(name, gather.dtype):
            kept.append(name)
        gathers[name] = cast(gather, wanted.of(name, gather.dtype), name)
    text = f"{len(kept)} tensors stay in their type, as the model keeps them (router biases and the like)"
    notes = [Note("info", f"{text}, for example {kept[0]}")] if kept else []
    return checkpoint.with_gathers(gathers, *notes)


class Wanted:
    """The type that each tensor has to have; floating-point ones are wanted in `dtype` (None: as they are).

    `wide` is as in `cast_to`.
    """

    def __init__(self, dtype: DType | None, wide: Mapping[str, Collection[str]]) -> None:
        self._dtype = dtype
        self._wide = frozenset() if dtype is None else frozenset(wide.get(dtype.name, ()))

    def of(self, name: str, dtype: DType) -> DType:
        """The type for the tensor of this name, which has `dtype`."""
        if self._dtype is None or dtype.name not in FLOATS or self.stays(name, dtype):
            return dtype
        return self._dtype

    def stays(self, name: str, dtype: DType) -> bool:
        """Whether it would be rounded, and the model keeps such tensors wide."""
        if self._dtype is None or dtype.name not in FLOATS or self._dtype.itemsize >= dtype.itemsize:
            return False
        return name.rpartition(".")[2] in KEPT or without_numbers(name) in self._wide


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
