"""Settings that change no weight and what is computed with them: where config.json and the trainer differ.

    rotary_base              rope_theta              (also within rope_parameters)
    rotary_percent           partial_rotary_factor   (also there)
    norm_epsilon             rms_norm_eps
    swiglu, ...              hidden_act

Only plain numbers are compared, and only where both say one: several families have one for each kind of
layer, and leave one to the class. gpt-oss's ``hidden_act`` does not say what Megatron's `quick_geglu` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.conversions.megatron.family import LARGEST, Config

_ROTARY = ("rope", "mrope", "yarn")
_SILU = ("silu", "swish")


def differing(config: Config) -> list[Note]:
    """A warning for each setting that differs."""
    notes = []
    for argument, trained, field, said in _pairs(config):
        numbers = isinstance(trained, float) and isinstance(said, float)
        if not (math.isclose(trained, said, rel_tol=1e-6) if numbers else trained == said):
            text = f"config.json: {field} is {said!r:.40}, but the checkpoint was trained with {argument}"
            text += f" = {trained!r:.40}: the weights are right, and the model computes something else"
            notes.append(Note("warning", text))
    return notes


def _pairs(config: Config) -> Iterator[tuple[str, Any, str, Any]]:
    """(argument, its value, field, its value) of what both say."""
    args, hf = config.megatron, config.hf
    numbers = [("norm_epsilon", "rms_norm_eps", hf)]
    if args.get("position_embedding_type") in (None, *_ROTARY):
        rotary = _rotary(hf)
        numbers.append(("rotary_base", "rope_theta", rotary))
        if args.get("multi_latent_attention") is not True:  # all of its rotary part is turned
            numbers.append(("rotary_percent", "partial_rotary_factor", rotary))
    for argument, field, part in numbers:
        trained, said = _number(args.get(argument)), _number(part.get(field))
        if trained is not None and said is not None:
            yield argument, trained, field, said
    act = hf.get("hidden_act")
    if isinstance(act, str) and args.get("quick_geglu") is not True:
        if args.get("swiglu") is True and act not in _SILU:
            yield "swiglu", True, "hidden_act", act
        elif args.get("swiglu") is False and args.get("gated_linear_unit") is True and act in _SILU:
            yield "swiglu", False, "hidden_act", act


def _rotary(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the rotary settings are; nowhere if each kind of layer has its own."""
    parts = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    own = "rope_local_base_freq" in hf or not isinstance(parts, dict)
    if own or any(isinstance(value, dict) for value in parts.values()):
        return {}
    return {**hf, **parts}


def _number(value: object) -> float | None:
    """The value, if it is a number that a model may have."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None
    return float(value)
