"""Qwen3-Next: gated attention in some layers, a gated delta net in the others; norms centred at zero.

Which layer is which is known by its names. The delta net's own norm is the one that the hub does not
centre.
"""

from __future__ import annotations

from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.family import Family, Rule
from lazymerge.conversions.megatron.tables.common import (
    EXPERTS,
    MLP,
    PROJECTION,
    ROUTER,
    SHARED_EXPERT,
    decoder,
    layer_norms,
    qk_norms,
    qwen_mtp,
)

_ATTENTION = (
    Rule(
        "self_attention.linear_qkv.{p}",
        ("self_attn.q_proj.{p}", "self_attn.k_proj.{p}", "self_attn.v_proj.{p}"),
        layouts.split_gated_qkv,
    ),
    *PROJECTION,
    *qk_norms(layouts.centred_norm),
)

_PARTS = ("query", "key", "value", "z", "beta", "alpha")
_JOINED = ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight")
_DELTA_NET = (
    Rule(tuple(f"self_attention.in_proj.weight.{part}" for part in _PARTS), _JOINED, layouts.join_delta_net),
    Rule("self_attention.in_proj.weight", _JOINED, layouts.split_delta_net),
    Rule(
        tuple(f"self_attention.conv1d.weight.{part}" for part in _PARTS[:3]),
        "linear_attn.conv1d.weight",
        layouts.join_rows,
    ),
    Rule("self_attention.conv1d.weight", "linear_attn.conv1d.weight"),
    Rule("self_attention.A_log", "linear_attn.A_log"),
    Rule("self_attention.dt_bias", "linear_attn.dt_bias"),
    Rule("self_attention.out_norm.weight", "linear_attn.norm.weight", layouts.uncentred_norm),
    Rule("self_attention.out_proj.weight", "linear_attn.out_proj.weight"),
    Rule("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight", layouts.centred_norm),
)

_LAYER = (
    *_ATTENTION,
    *_DELTA_NET,
    *layer_norms(norm=layouts.centred_norm),
    *MLP,
    *EXPERTS,
    *ROUTER,
    *SHARED_EXPERT,
)

_MTP = qwen_mtp(_LAYER, layouts.centred_norm)

QWEN3_NEXT = Family("qwen3_next", ("qwen3_next",), decoder(_LAYER, norm=layouts.centred_norm) + _MTP)
