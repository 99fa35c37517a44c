"""GLM-4 (dense) and GLM-4.5, 4.6 (MoE)."""

from __future__ import annotations

from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.family import Family, Rule
from lazymerge.conversions.megatron.tables.common import (
    ATTENTION,
    EXPERTS,
    MLP,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    decoder,
    layer_norms,
    mtp,
    qk_norms,
)

_GLM4_LAYER = (
    *ATTENTION,
    *layer_norms(),
    Rule("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight", layouts.norm),
    Rule("post_mlp_layernorm.weight", "post_mlp_layernorm.weight", layouts.norm),
    Rule("mlp.linear_fc1.{p}", "mlp.gate_up_proj.{p}"),
    Rule("mlp.linear_fc2.{p}", "mlp.down_proj.{p}"),
)
GLM4 = Family("glm4", ("glm4",), decoder(_GLM4_LAYER), interleaved=True)

_GLM4_MOE_LAYER = (
    *ATTENTION,
    *qk_norms(),
    *layer_norms(),
    *MLP,
    *EXPERTS,
    *ROUTER,
    *ROUTER_BIAS,
    *SHARED_EXPERTS,
)
GLM4_MOE = Family("glm4_moe", ("glm4_moe",), decoder(_GLM4_MOE_LAYER) + mtp(_GLM4_MOE_LAYER))
