"""What a model family's table is made of.

A rule says which Hugging Face tensors come of which Megatron tensors, both by canonical name
(lazymerge.formats.megatron), and how their layout changes:

    Rule("decoder.layers.{L}.self_attention.linear_qkv.{p}",
         ("model.layers.{L}.self_attn.q_proj.{p}", "model.layers.{L}.self_attn.k_proj.{p}", ...),
         layouts.split_qkv)

Placeholders: ``{L}`` a layer, ``{E}`` an expert, ``{K}`` an MTP depth (all numbers), ``{p}`` is
``weight`` or ``bias``. On the Hugging Face side ``{M}`` is num_hidden_layers + K. A placeholder that
only the Megatron side has is collected: the layout gets the list of those tensors in the order of
their numbers, which are 0, 1, ... without a gap.

A layout is plain PyTorch on whole tensors: ``layout(config, *tensors)`` returns one tensor for one
Hugging Face name, or as many as there are names. It is called with lazy tensors, so that it costs
nothing and what it does becomes a part of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Layout = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]"]


@dataclass(frozen=True, slots=True)
class Config:
    """What decides a layout: config.json's values for the text model, and Megatron's own settings.

    `hf` is the config (of the text part, where there are several) with the defaults of its class,
    `whole` all of config.json, `megatron` the trainer's arguments (empty where it recorded none).
    """

    hf: Mapping[str, Any]
    whole: Mapping[str, Any]
    megatron: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """Hugging Face tensors and the Megatron tensors that they come of; without a layout, a copy."""

    megatron: str | tuple[str, ...]
    hf: str | tuple[str, ...]
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A table: the rules for models of these types. The first rule that fits a name is taken."""

    name: str
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]


def under(megatron: str, hf: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules with prefixes before all names of either side: a layer's table under a layer's name."""

    def prefixed(prefix: str, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return prefix + names if isinstance(names, str) else tuple(prefix + name for name in names)

    return tuple(Rule(prefixed(megatron, r.megatron), prefixed(hf, r.hf), r.layout) for r in rules)
