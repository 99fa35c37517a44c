"""Llama 4, its text part: experts stacked and transposed, `feed_forward` for `mlp`."""

from __future__ import annotations

from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.family import Family, Rule
from lazymerge.conversions.megatron.tables.common import ATTENTION, decoder, gated_mlp, layer_norms

_LAYER = (
    *ATTENTION,
    *layer_norms(),
    *gated_mlp("mlp.", "feed_forward."),
    Rule("mlp.router.weight", "feed_forward.router.weight"),
    Rule(
        "mlp.experts.local_experts.{E}.linear_fc1.weight",
        "feed_forward.experts.gate_up_proj",
        layouts.stacked_transposed,
    ),
    Rule(
        "mlp.experts.local_experts.{E}.linear_fc2.weight",
        "feed_forward.experts.down_proj",
        layouts.stacked_transposed,
    ),
    *gated_mlp("mlp.shared_experts.", "feed_forward.shared_expert."),
)

LLAMA4_TEXT = Family("llama4_text", ("llama4_text",), decoder(_LAYER), interleaved=True)
LLAMA4 = Family(
    "llama4",
    ("llama4",),
    decoder(_LAYER, hf="language_model.model.", head="language_model.lm_head.weight"),
    interleaved=True,
)
