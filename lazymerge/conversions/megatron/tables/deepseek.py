"""DeepSeek-V2 and V3, Moonlight, Kimi-K2, GLM-4.7-Flash: multi-head latent attention (MLA), MoE.

Heads are in order on both sides and the rotary part is not permuted: the tensors of MLA are copies.
"""

from __future__ import annotations

from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.family import Family, Rule, under
from lazymerge.conversions.megatron.tables.common import (
    EXPERTS,
    MLP,
    PROJECTION,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    decoder,
    layer_norms,
    mtp,
)

_Q_NORM, _KV_NORM = "q_a_layernorm.weight", "kv_a_layernorm.weight"
_MLA = under(
    "self_attention.",
    "self_attn.",
    (
        Rule("linear_q_proj.weight", "q_proj.weight"),
        Rule("linear_q_down_proj.{p}", "q_a_proj.{p}"),
        Rule("linear_q_up_proj.layer_norm_weight", _Q_NORM, layouts.norm),
        Rule("q_layernorm.weight", _Q_NORM, layouts.norm),
        Rule("linear_q_up_proj.weight", "q_b_proj.weight"),
        Rule("linear_kv_down_proj.{p}", "kv_a_proj_with_mqa.{p}"),
        Rule("linear_kv_up_proj.layer_norm_weight", _KV_NORM, layouts.norm),
        Rule("kv_layernorm.weight", _KV_NORM, layouts.norm),
        Rule("linear_kv_up_proj.weight", "kv_b_proj.weight"),
        Rule(
            "linear_qkv_down_proj.weight",
            ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
            layouts.split_mla_down,
        ),
    ),
)

_FUSED_NORM = (
    Rule("self_attention.linear_qkv_down_proj.layer_norm_weight", "input_layernorm.weight", layouts.norm),
)
"""The norm before attention, fused with the down projection where that is fused itself (0.17 on)."""

_V2_LAYER = _MLA + _FUSED_NORM + PROJECTION + layer_norms() + MLP + EXPERTS + ROUTER + SHARED_EXPERTS
_V3_LAYER = _V2_LAYER + ROUTER_BIAS

DEEPSEEK_V2 = Family("deepseek_v2", ("deepseek_v2",), decoder(_V2_LAYER))
DEEPSEEK_V3 = Family("deepseek_v3", ("deepseek_v3", "kimi_k2"), decoder(_V3_LAYER) + mtp(_V3_LAYER))
GLM4_MOE_LITE = Family("glm4_moe_lite", ("glm4_moe_lite",), DEEPSEEK_V3.rules)
