"""Qwen2.5-VL and Qwen3-VL, dense and MoE: a Qwen text model and a vision tower.

The tower is either the hub's own module, kept whole (Megatron-Bridge, slime), under ``visual.`` or
``vision_model.``, or built of Megatron's layers under ``vision_model.decoder`` (mbridge, which verl
uses, and newer Bridges).
"""

from __future__ import annotations

from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.family import Family, Rule, under
from lazymerge.conversions.megatron.tables.common import ROUTER, decoder
from lazymerge.conversions.megatron.tables.qwen import QWEN2_LAYER, QWEN3_LAYER


def _kept(hf: str, names: tuple[str, ...]) -> tuple[Rule, ...]:
    """The hub's own module, whose names below the tower are the same on both sides."""
    same = tuple(Rule(name, name) for name in names)
    return under("visual.", hf, same) + under("vision_model.", hf, same)


def _blocks(mlp: tuple[Rule, ...], norms: tuple[str, ...]) -> tuple[Rule, ...]:
    """Megatron's layers as blocks of the tower; `norms` are the parameters that its norms have."""
    layer = (
        Rule("self_attention.linear_qkv.{p}", "attn.qkv.{p}", layouts.vision_qkv),
        Rule("self_attention.linear_proj.{p}", "attn.proj.{p}"),
        *mlp,
    )
    for kind in norms:
        layer += (
            Rule(f"self_attention.linear_qkv.layer_norm_{kind}", f"norm1.{kind}"),
            Rule(f"input_layernorm.{kind}", f"norm1.{kind}"),
            Rule(f"mlp.linear_fc1.layer_norm_{kind}", f"norm2.{kind}"),
            Rule(f"pre_mlp_layernorm.{kind}", f"norm2.{kind}"),
        )
    return under("decoder.layers.{N}.", "blocks.{N}.", layer)


# ---- Qwen2.5-VL --------------------------------------------------------------------------------------------

_TOWER_2_5 = under(
    "vision_model.",
    "visual.",
    (
        Rule("patch_embed.proj.weight", "patch_embed.proj.weight"),
        *_blocks(
            (
                Rule("mlp.linear_fc1.{p}", ("mlp.gate_proj.{p}", "mlp.up_proj.{p}"), layouts.split_gate_up),
                Rule("mlp.linear_fc2.{p}", "mlp.down_proj.{p}"),
            ),
            norms=("weight",),
        ),
        Rule("decoder.final_layernorm.weight", "merger.ln_q.weight"),
        Rule("projection.encoder.linear_fc1.{p}", "merger.mlp.0.{p}"),
        Rule("projection.encoder.linear_fc2.{p}", "merger.mlp.2.{p}"),
    ),
)
_KEPT_2_5 = _kept(
    "visual.",
    (
        "patch_embed.proj.weight",
        "blocks.{N}.attn.qkv.{p}",
        "blocks.{N}.attn.proj.{p}",
        "blocks.{N}.mlp.gate_proj.{p}",
        "blocks.{N}.mlp.up_proj.{p}",
        "blocks.{N}.mlp.down_proj.{p}",
        "blocks.{N}.norm1.weight",
        "blocks.{N}.norm2.weight",
        "merger.ln_q.weight",
        "merger.mlp.0.{p}",
        "merger.mlp.2.{p}",
    ),
)
QWEN2_5_VL = Family("qwen2_5_vl", ("qwen2_5_vl",), decoder(QWEN2_LAYER) + _TOWER_2_5 + _KEPT_2_5)

# ---- Qwen3-VL ----------------------------------------------------------------------------------------------

_MERGER = (
    Rule("patch_norm.{p}", "norm.{p}"),
    Rule("linear_fc1.{p}", "linear_fc1.{p}"),
    Rule("linear_fc2.{p}", "linear_fc2.{p}"),
)
_TOWER_3 = under(
    "vision_model.",
    "model.visual.",
    (
        Rule("patch_embed.proj.{p}", "patch_embed.proj.{p}"),
        Rule("pos_embed.weight", "pos_embed.weight"),
        *_blocks(
            (
                Rule("mlp.linear_fc1.{p}", "mlp.linear_fc1.{p}"),
                Rule("mlp.linear_fc2.{p}", "mlp.linear_fc2.{p}"),
            ),
            norms=("weight", "bias"),
        ),
        *under("merger.", "merger.", _MERGER),
        *under("decoder.deepstack_merger_list.{D}.", "deepstack_merger_list.{D}.", _MERGER),
    ),
)
_KEPT_3 = _kept(
    "model.visual.",
    (
        "patch_embed.proj.{p}",
        "pos_embed.weight",
        "blocks.{N}.attn.qkv.{p}",
        "blocks.{N}.attn.proj.{p}",
        "blocks.{N}.mlp.linear_fc1.{p}",
        "blocks.{N}.mlp.linear_fc2.{p}",
        "blocks.{N}.norm1.{p}",
        "blocks.{N}.norm2.{p}",
        "merger.norm.{p}",
        "merger.linear_fc1.{p}",
        "merger.linear_fc2.{p}",
        "deepstack_merger_list.{D}.norm.{p}",
        "deepstack_merger_list.{D}.linear_fc1.{p}",
        "deepstack_merger_list.{D}.linear_fc2.{p}",
    ),
)
_STACKED_EXPERTS = under(
    "mlp.experts.local_experts.{E}.",
    "mlp.experts.",
    (
        Rule("linear_fc1.weight", "gate_up_proj", layouts.published_stacked),
        Rule("linear_fc2.weight", "down_proj", layouts.published_stacked),
    ),
)
_TEXT = "model.language_model."

QWEN3_VL = Family("qwen3_vl", ("qwen3_vl",), decoder(QWEN3_LAYER, hf=_TEXT) + _TOWER_3 + _KEPT_3)
QWEN3_VL_MOE = Family(
    "qwen3_vl_moe",
    ("qwen3_vl_moe",),
    decoder(QWEN3_LAYER + ROUTER + _STACKED_EXPERTS, hf=_TEXT) + _TOWER_3 + _KEPT_3,
)
