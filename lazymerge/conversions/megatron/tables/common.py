"""What most decoders share: the names of a layer's parts on either side.

Tables of a layer (`ATTENTION`, `gated_mlp`, ...) have names without the layer's prefix; `decoder`
puts them into a whole model. Megatron calls the norms by two names, as they are fused with the
projection after them or not, and which it is depends on its version, its implementation and the kind
of layer: either is taken, for every layer.
"""

from __future__ import annotations

from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.family import Layout, Rule, under

DROPPED = (
    Rule("rotary_pos_emb.inv_freq", (), dropped="computed from the config when a model is built"),
    Rule("decoder.layers.{L}.self_attention.rotary_emb.inv_freq", (), dropped="computed from the config"),
    Rule("decoder.layers.{L}.mlp.router.local_tokens_per_expert", (), dropped="a counter of training"),
)
"""What is no weight of any model on the hub."""

QKV = (
    Rule(
        "self_attention.linear_qkv.{p}",
        ("self_attn.q_proj.{p}", "self_attn.k_proj.{p}", "self_attn.v_proj.{p}"),
        layouts.split_qkv,
    ),
)
PROJECTION = (Rule("self_attention.linear_proj.{p}", "self_attn.o_proj.{p}"),)
ATTENTION = QKV + PROJECTION


def qk_norms(norm: Layout = layouts.norm) -> tuple[Rule, ...]:
    """Norms of q and k, of the size of a head."""
    return (
        Rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", norm),
        Rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", norm),
    )


def layer_norms(
    before_mlp: str = "post_attention_layernorm", norm: Layout = layouts.norm
) -> tuple[Rule, ...]:
    """The norms before attention and before the feed-forward; the hub's name of the latter varies."""
    return (
        Rule("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", norm),
        Rule("input_layernorm.weight", "input_layernorm.weight", norm),
        Rule("mlp.linear_fc1.layer_norm_weight", f"{before_mlp}.weight", norm),
        Rule("pre_mlp_layernorm.weight", f"{before_mlp}.weight", norm),
    )


def gated_mlp(megatron: str = "", hf: str = "") -> tuple[Rule, ...]:
    """A gated feed-forward under these prefixes."""
    return under(
        megatron,
        hf,
        (
            Rule("linear_fc1.{p}", ("gate_proj.{p}", "up_proj.{p}"), layouts.split_gate_up),
            Rule("linear_fc2.{p}", "down_proj.{p}"),
        ),
    )


MLP = gated_mlp("mlp.", "mlp.")
EXPERTS = gated_mlp("mlp.experts.local_experts.{E}.", "mlp.experts.{E}.")
ROUTER = (Rule("mlp.router.weight", "mlp.gate.weight"),)
SHARED_EXPERTS = gated_mlp("mlp.shared_experts.", "mlp.shared_experts.")
SHARED_EXPERT = (
    *gated_mlp("mlp.shared_experts.", "mlp.shared_expert."),
    Rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)
"""The same where the hub has one with a gate of its own."""

ROUTER_BIAS = (Rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),)


def decoder(
    layer: tuple[Rule, ...],
    *,
    hf: str = "model.",
    head: str = "lm_head.weight",
    norm: Layout = layouts.norm,
) -> tuple[Rule, ...]:
    """A whole text model of such layers: `hf` is before all names of the hub but the output layer's."""
    return (
        Rule("embedding.word_embeddings.weight", f"{hf}embed_tokens.weight"),
        Rule("decoder.final_layernorm.weight", f"{hf}norm.weight", norm),
        Rule("output_layer.weight", head),
        *under("decoder.layers.{L}.", f"{hf}layers.{{L}}.", layer),
        *DROPPED,
    )


def mtp(layer: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Multi-token prediction as DeepSeek has it: more layers behind the last.

    Embedding and output head are the main model's, and are not stored again.
    """
    return under(
        "mtp.layers.{K}.",
        "model.layers.{M}.",
        (
            Rule("enorm.weight", "enorm.weight", layouts.norm),
            Rule("hnorm.weight", "hnorm.weight", layouts.norm),
            Rule("eh_proj.weight", "eh_proj.weight"),
            Rule("final_layernorm.weight", "shared_head.norm.weight", layouts.norm),
            *under("transformer_layer.", "", layer),
        ),
    )


def qwen_mtp(layer: tuple[Rule, ...], norm: Layout = layouts.norm) -> tuple[Rule, ...]:
    """Multi-token prediction as Qwen has it from 3 on: layers of their own behind one projection."""
    return (
        Rule("mtp.layers.0.enorm.weight", "mtp.pre_fc_norm_embedding.weight", norm),
        Rule("mtp.layers.0.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", norm),
        Rule("mtp.layers.0.eh_proj.weight", "mtp.fc.weight"),
        Rule("mtp.layers.0.final_layernorm.weight", "mtp.norm.weight", norm),
        *under("mtp.layers.{K}.transformer_layer.", "mtp.layers.{K}.", layer),
    )
