"""Llama 2 and 3, Mistral, Mixtral, Phi-3 and Phi-4."""

from __future__ import annotations

from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.family import Family, Rule
from lazymerge.conversions.megatron.tables.common import ATTENTION, MLP, PROJECTION, decoder, layer_norms

LLAMA = Family("llama", ("llama",), decoder(ATTENTION + MLP + layer_norms()))
MISTRAL = Family("mistral", ("mistral",), LLAMA.rules)

_MIXTRAL_MOE = (
    Rule("mlp.router.weight", "block_sparse_moe.gate.weight"),
    Rule(
        "mlp.experts.local_experts.{E}.linear_fc1.weight",
        ("block_sparse_moe.experts.{E}.w1.weight", "block_sparse_moe.experts.{E}.w3.weight"),
        layouts.split_gate_up,
    ),
    Rule(
        "mlp.experts.local_experts.{E}.linear_fc2.weight",
        "block_sparse_moe.experts.{E}.w2.weight",
    ),
)
MIXTRAL = Family("mixtral", ("mixtral",), decoder(ATTENTION + _MIXTRAL_MOE + layer_norms()))

_PHI3_FUSED = (
    Rule("self_attention.linear_qkv.{p}", "self_attn.qkv_proj.{p}", layouts.joined_qkv),
    Rule("mlp.linear_fc1.{p}", "mlp.gate_up_proj.{p}"),
    Rule("mlp.linear_fc2.{p}", "mlp.down_proj.{p}"),
)
PHI3 = Family("phi3", ("phi3",), decoder(_PHI3_FUSED + PROJECTION + layer_norms()))
