"""Qwen 2, 2.5 and 3, dense and MoE, and MiMo, a Qwen2 with multi-token prediction."""

from __future__ import annotations

from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.family import Family, Rule, under
from lazymerge.conversions.megatron.tables.common import (
    ATTENTION,
    EXPERTS,
    MLP,
    ROUTER,
    SHARED_EXPERT,
    decoder,
    layer_norms,
    qk_norms,
    qwen_mtp,
)

QWEN2_LAYER = ATTENTION + MLP + layer_norms()
QWEN3_LAYER = QWEN2_LAYER + qk_norms()
_MOE = EXPERTS + ROUTER

QWEN2 = Family("qwen2", ("qwen2",), decoder(QWEN2_LAYER))
QWEN3 = Family("qwen3", ("qwen3",), decoder(QWEN3_LAYER) + qwen_mtp(QWEN3_LAYER))
QWEN2_MOE = Family("qwen2_moe", ("qwen2_moe",), decoder(QWEN2_LAYER + _MOE + SHARED_EXPERT))
QWEN3_MOE = Family("qwen3_moe", ("qwen3_moe",), decoder(QWEN3_LAYER + _MOE))

_MIMO_MTP = under(
    "mtp.layers.{K}.",
    "model.mtp_layers.{K}.",
    (
        Rule("enorm.weight", "token_layernorm.weight", layouts.norm),
        Rule("hnorm.weight", "hidden_layernorm.weight", layouts.norm),
        Rule("eh_proj.weight", "input_proj.weight", layouts.swapped_halves),
        Rule("final_layernorm.weight", "final_layernorm.weight", layouts.norm),
        *under("transformer_layer.", "", QWEN2_LAYER),
    ),
)
MIMO = Family("mimo", ("mimo",), decoder(QWEN2_LAYER) + _MIMO_MTP)
