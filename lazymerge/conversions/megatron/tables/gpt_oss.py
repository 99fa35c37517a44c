"""gpt-oss: attention sinks, biases everywhere, experts stacked with gate and up rows in turns."""

from __future__ import annotations

from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.family import Family, Rule, under
from lazymerge.conversions.megatron.tables.common import ATTENTION, decoder, layer_norms

_EXPERTS = under(
    "mlp.experts.local_experts.{E}.",
    "mlp.experts.",
    (
        Rule("linear_fc1.weight", "gate_up_proj", layouts.interleaved),
        Rule("linear_fc1.bias", "gate_up_proj_bias", layouts.interleaved),
        Rule("linear_fc2.weight", "down_proj", layouts.stacked_transposed),
        Rule("linear_fc2.bias", "down_proj_bias", layouts.stacked),
    ),
)

_LAYER = (
    *ATTENTION,
    *layer_norms(),
    Rule("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
    Rule("mlp.router.{p}", "mlp.router.{p}"),
    *_EXPERTS,
)

GPT_OSS = Family("gpt_oss", ("gpt_oss",), decoder(_LAYER))
