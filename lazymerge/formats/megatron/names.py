"""Names of Megatron's modules: without what wraps the model, and those of a pipeline chunk.

mcore's names are canonical but for what wraps the model. Megatron's own models before mcore
(``--use-legacy-models``) are nested dicts under ``language_model`` with names of their own:

    embedding.word_embeddings.weight, output_layer.weight, word_embeddings_for_head.weight (a copy)
    encoder.layers.N.input_norm.weight                    transformer.layers.N.input_layernorm.weight
    encoder.layers.N.self_attention.query_key_value.*     transformer.layers.N.attention.query_key_value.*
    encoder.layers.N.self_attention.dense.*               ...
    encoder.layers.N.post_attention_norm.weight           ...post_attention_layernorm.weight
    encoder.layers.N.mlp.dense_h_to_4h.*, .dense_4h_to_h.*
    encoder.final_norm.weight                             transformer.final_layernorm.weight
"""

from __future__ import annotations

import re

HEAD_COPY = "word_embeddings_for_head.weight"
"""The last stage's copy of a tied embedding, in models before mcore."""

_WRAPPERS = re.compile(r"(?:(?:model|module|language_model)\.)+")
_ADAPTER = re.compile(r"\.(adapter|to_wrap|lora_[ab])\.")
_LEGACY = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^(?:encoder|transformer)\.final_(?:layer)?norm\.", "decoder.final_layernorm."),
        (r"^(?:encoder|transformer)\.layers\.", "decoder.layers."),
        (r"(\.layers\.[0-9]+)\.input_norm\.", r"\1.input_layernorm."),
        (r"(\.layers\.[0-9]+)\.post_attention_(?:layer)?norm\.", r"\1.pre_mlp_layernorm."),
        (r"(\.layers\.[0-9]+)\.attention\.", r"\1.self_attention."),
        (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.mlp\.local_experts\.", ".mlp.experts.local_experts."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
    )
)


def chunk_name(name: str, *, legacy: bool) -> str:
    """mcore's name of a tensor in its chunk; `legacy` if the model is one from before mcore."""
    name = without_wrappers(name)
    if legacy:
        for pattern, new in _LEGACY:
            name = pattern.sub(new, name)
    return name


def without_wrappers(name: str) -> str:
    """The name without what wraps the model, and with the older name of a layer of MTP (0.17 renamed it)."""
    match = _WRAPPERS.match(name)
    name = name[match.end() :] if match else name
    return name.replace(".mtp_model_layer.", ".transformer_layer.")


def is_adapter(name: str) -> bool:
    """Whether a name is that of a part of an adapter, or of a layer that one wraps."""
    return _ADAPTER.search(name) is not None


STACKS = ("decoder.layers.", "mtp.layers.")
"""What the names of tensors in a layer begin with."""

_NUMBERED = re.compile(r"(decoder|mtp)\.layers\.(0|[1-9][0-9]{0,5})\.")


def layer_of(name: str) -> tuple[str, int] | None:
    """The stack of layers that a tensor is in and its layer's number there; None if it is in none.

    A number has one spelling, so that no two names are one tensor's.
    """
    match = _NUMBERED.match(name)
    return (match[1], int(match[2])) if match else None


def with_layer(name: str, number: int) -> str:
    """The name with another number of its layer."""
    return _NUMBERED.sub(lambda match: f"{match[1]}.layers.{number}.", name, count=1)
