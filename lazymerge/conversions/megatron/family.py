"""What a model family's table is made of.

A rule says which Hugging Face tensors come of which Megatron tensors, both by canonical name
(lazymerge.formats.megatron), and how their layout changes:

    Rule("decoder.layers.{L}.self_attention.linear_qkv.{p}",
         ("model.layers.{L}.self_attn.q_proj.{p}", "model.layers.{L}.self_attn.k_proj.{p}", ...),
         layouts.split_qkv)

Placeholders: ``{L}`` a layer, ``{E}`` an expert, ``{K}`` an MTP depth, ``{N}`` a block of the vision
tower, ``{D}`` one of its deepstack mergers (all numbers), ``{p}`` is ``weight`` or ``bias``. On the
Hugging Face side ``{M}`` is num_hidden_layers + K. A placeholder that only the Megatron side has is
collected: the layout gets the list of those tensors in the order of their numbers, which are 0, 1,
... without a gap.

A layout is plain PyTorch on whole tensors: ``layout(config, *tensors)`` returns one tensor for one
Hugging Face name, or as many as there are names. It is called with lazy tensors, so that it costs
nothing and what it does becomes a part of the plan. It raises `Misfit` for a tensor that is not what
the config says. Where it is marked with `moves` it is called with `lazymerge.arrays.Array`, which has the
methods of a tensor that move elements: a merge with such layouts alone does without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Layout = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]"]
Made = TypeVar("Made")

LARGEST = 1 << 31
"""What a number in a config is at most; more is a mistake, and would cost memory."""


def moves(layout: Callable[..., Made]) -> Callable[..., Made]:
    """Mark a layout that is written with what an `Array` can do."""
    layout.moves = True  # type: ignore[attr-defined]
    return layout


class Misfit(Exception):
    """A tensor is not as the config says; whoever called the layout adds the tensor's name.

    `problem` goes on after the name ("has 60 rows, expected 64"); `fields` are those of config.json
    that may be wrong.
    """

    def __init__(self, problem: str, *fields: str) -> None:
        super().__init__(problem, fields)
        self.problem = problem
        self.fields = fields


@dataclass(frozen=True, slots=True)
class Config:
    """What decides a layout: config.json's values for the text model, and Megatron's own settings.

    `hf` is the config (its text part, where it has several) as it stands in the file, `whole` all of
    config.json, `megatron` the trainer's arguments (empty where it recorded none).
    """

    hf: Mapping[str, Any]
    whole: Mapping[str, Any]
    megatron: Mapping[str, Any]

    def count(self, *names: str) -> int:
        """The positive number in the first of these fields that the text config has; else `Misfit`."""
        found = self.count_or_none(*names)
        if found is None:
            raise Misfit(f"needs {names[0]}, which config.json does not have", names[0])
        return found

    def count_or_none(self, *names: str) -> int | None:
        """The same, None where none of the fields is there (or all are null)."""
        return positive(self.hf, *names)

    @property
    def layers(self) -> int:
        """Decoder layers of the text model."""
        return self.count("num_hidden_layers", "n_layer", "num_layers")

    @property
    def experts(self) -> int | None:
        """Routed experts of a layer; None for a model without."""
        return self.count_or_none("num_experts", "n_routed_experts", "num_local_experts")

    @property
    def vision(self) -> Mapping[str, Any]:
        """The vision tower's config; empty where there is none."""
        part = self.whole.get("vision_config")
        return part if isinstance(part, dict) else {}


def positive(config: Mapping[str, Any], *names: str) -> int | None:
    """The positive number in the first of the fields that is there and not null; None without any.

    Raises `Misfit` for a value that is no such number.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < LARGEST:
            raise Misfit(f"needs {name}, which is {value!r:.60} in config.json, expected a number", name)
        return value
    return None


@dataclass(frozen=True, slots=True)
class Rule:
    """Hugging Face tensors and the Megatron tensors that they come of; without a layout, a copy.

    With `dropped`, the reason, the Megatron tensor is left out and `hf` is empty.
    """

    megatron: str | tuple[str, ...]
    hf: str | tuple[str, ...]
    layout: Layout | None = None
    dropped: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """A table: the rules for models of these types. The first rule that fits a name is taken.

    `tied` is what the config class has for ``tie_word_embeddings`` where config.json does not say.
    `interleaved` is whether the hub's model rotates pairs of neighbouring dimensions (GLM-4, Llama 4)
    rather than halves; Megatron calls that ``rotary_interleaved``.
    """

    name: str
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    tied: bool = False
    interleaved: bool = False


def under(megatron: str, hf: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules with prefixes before all names of either side: a layer's table under a layer's name."""

    def prefixed(prefix: str, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return prefix + names if isinstance(names, str) else tuple(prefix + name for name in names)

    return tuple(Rule(prefixed(megatron, r.megatron), prefixed(hf, r.hf), r.layout, r.dropped) for r in rules)
