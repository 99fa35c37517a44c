"""Gemma 2 and 3, their text part: four norms a layer, centred at zero on both sides; tied by default.

The norms after attention and feed-forward are called after the projection before them by
Megatron-Bridge, and as on the hub by mbridge.
"""

from __future__ import annotations

from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.family import Family, Rule
from lazymerge.conversions.megatron.tables.common import ATTENTION, MLP, decoder, layer_norms, qk_norms

_AFTER_ATTENTION, _AFTER_MLP = "post_attention_layernorm.weight", "post_feedforward_layernorm.weight"

_GEMMA2_LAYER = (
    *ATTENTION,
    *MLP,
    *layer_norms("pre_feedforward_layernorm", layouts.centred_norm),
    Rule("self_attention.linear_proj.post_layernorm.weight", _AFTER_ATTENTION, layouts.centred_norm),
    Rule("post_attention_layernorm.weight", _AFTER_ATTENTION, layouts.centred_norm),
    Rule("mlp.linear_fc2.post_layernorm.weight", _AFTER_MLP, layouts.centred_norm),
    Rule("post_feedforward_layernorm.weight", _AFTER_MLP, layouts.centred_norm),
)
_GEMMA3_LAYER = _GEMMA2_LAYER + qk_norms(layouts.centred_norm)

GEMMA2 = Family("gemma2", ("gemma2",), decoder(_GEMMA2_LAYER, norm=layouts.centred_norm), tied=True)
GEMMA3_TEXT = Family(
    "gemma3_text", ("gemma3_text",), decoder(_GEMMA3_LAYER, norm=layouts.centred_norm), tied=True
)
GEMMA3 = Family(
    "gemma3",
    ("gemma3",),
    decoder(
        _GEMMA3_LAYER,
        hf="language_model.model.",
        head="language_model.lm_head.weight",
        norm=layouts.centred_norm,
    ),
    tied=True,
)
