"""Whether config.json and the trainer's arguments mean one model, above all where shapes alone cannot tell.

Twice as many heads of half the width give tensors of the same shapes with their rows in another order. So
what decides the order of rows is compared wherever Megatron recorded it. That the arguments are those of
the tensors is known before (lazymerge.formats.megatron.told), but for the hidden size so is that they fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lazymerge.conversions.megatron.family import Config, Family
from lazymerge.errors import InconsistentCheckpoint, UnsupportedCheckpoint
from lazymerge.formats.megatron.grid import size

_DELTA_NET = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


def check_agreement(config: Config, family: Family) -> None:
    """Raise `InconsistentCheckpoint` for a number that differs, and `UnsupportedCheckpoint` where rotary
    dimensions are in another order than in the family's model on the hub.
    """
    for argument, recorded, field, said in _pairs(config):
        if recorded is not None and said is not None and recorded != said:
            raise InconsistentCheckpoint(
                f"config.json: {field} is {said!r:.40}, but the checkpoint was trained with {argument}"
                f" = {recorded!r:.40}",
                "give the config.json of the model that was trained by --hf-config",
            )
    rotary = config.megatron.get("rotary_interleaved")
    latent = config.megatron.get("multi_latent_attention") is True  # has an order of its own
    if isinstance(rotary, bool) and rotary is not family.interleaved and not latent:
        raise UnsupportedCheckpoint(
            f"the checkpoint was trained with rotary_interleaved = {rotary}: its rotary dimensions are in"
            f" another order than those of {family.name} on the hub",
            "no table permutes them yet: give one of your own by --family FILE.py",
        )


def _pairs(config: Config) -> Iterator[tuple[str, Any, str, Any]]:
    """(argument, its value, field, its value), None where one is not recorded."""
    args = config.megatron
    yield "hidden_size", size(args, "hidden_size", None), "hidden_size", config.count_or_none("hidden_size")
    heads = config.count_or_none("num_attention_heads")
    yield "num_attention_heads", size(args, "num_attention_heads", None), "num_attention_heads", heads
    if args.get("multi_latent_attention") is not True:
        groups = config.count_or_none("num_key_value_heads") or heads
        yield (*_groups(args), "num_key_value_heads", groups)
        head_dim = config.count_or_none("head_dim")
        yield "kv_channels", size(args, "kv_channels", None), "head_dim", head_dim
    for name in _DELTA_NET:
        said = config.count_or_none(name)
        yield name, None if said is None else size(args, name, None), name, said


def _groups(args: Mapping[str, Any]) -> tuple[str, int | None]:
    """How many key and value heads Megatron had: without groups, one for each query head."""
    if args.get("group_query_attention") is False:
        return "num_attention_heads (and no groups)", size(args, "num_attention_heads", None)
    if args.get("group_query_attention") is True:
        return "num_query_groups", size(args, "num_query_groups", None)
    return "num_query_groups", None
