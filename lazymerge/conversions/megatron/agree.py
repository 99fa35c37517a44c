"""Whether config.json and the trainer's arguments mean one model, above all where shapes alone cannot tell.

Twice as many heads of half the width give tensors of the same shapes with their rows in another order. So
what decides the order of rows is compared wherever Megatron recorded it. That the arguments are those of
the tensors is known before (lazymerge.formats.megatron.told), but for the hidden size so is that they fit.
What Megatron recorded nowhere is named in a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.conversions.megatron.family import Config, Family, positive
from lazymerge.conversions.megatron.layouts import DELTA, HEADS, is_centred
from lazymerge.errors import InconsistentCheckpoint, UnsupportedCheckpoint
from lazymerge.formats.megatron.grid import size


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
    if config.hf.get("kv_lora_rank") is not None and config.hf.get("rope_interleave") is False:
        raise UnsupportedCheckpoint(
            "config.json: rope_interleave is false, and Megatron's latent attention always has its rotary"
            " dimensions interleaved",
            "give the config.json of the model that was trained by --hf-config, or mend rope_interleave",
        )


def unconfirmed(config: Config, *, tower: bool) -> Note | None:
    """What only config.json and the family's usual way say of the order of rows and of norms, if anything.

    `tower` says whether a vision tower's heads are among it: no trainer records them.
    """
    said = [
        f"{field} = {value}"
        for _, recorded, field, value in _pairs(config)
        if recorded is None and value is not None and field in (*HEADS, *DELTA)
    ]
    heads = positive(config.vision, "num_heads", "num_attention_heads") if tower else None
    said += [] if heads is None else [f"vision_config.num_heads = {heads}"]
    if not config.megatron:
        shown = f" ({', '.join(said)})" if said else ""
        text = (
            "the trainer's arguments are not recorded: that norms are not centred, and the order of heads and"
            f" rotary dimensions, are taken from config.json{shown} and the usual way of the family"
        )
        return Note("info", text)
    if is_centred(config) is None:
        said.append("whether norms are centred")
    latent = config.megatron.get("multi_latent_attention") is True
    if not isinstance(config.megatron.get("rotary_interleaved"), bool) and not latent:
        said.append("the order of rotary dimensions")
    if not said:
        return None
    text = (
        f"the trainer's arguments do not record {', '.join(said)}: taken from config.json and the usual way"
    )
    return Note("info", f"{text} of the family")


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
    for name in DELTA:
        said = config.count_or_none(name)
        yield name, None if said is None else size(args, name, None), name, said


def _groups(args: Mapping[str, Any]) -> tuple[str, int | None]:
    """How many key and value heads Megatron had: without groups, one for each query head."""
    if args.get("group_query_attention") is False:
        return "num_attention_heads (and no groups)", size(args, "num_attention_heads", None)
    if args.get("group_query_attention") is True:
        return "num_query_groups", size(args, "num_query_groups", None)
    return "num_query_groups", None
