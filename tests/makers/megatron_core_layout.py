"""The weights of a Hugging Face model as Megatron lays them out, whole, written from Megatron's own sources.

Nothing of lazymerge is used, and everything is done in loops: tests compare lazymerge's way back with this.
That it is right is seen in Megatron's logits (see `megatron_core_ranks.check_rank`).
"""

from __future__ import annotations

from typing import Any

import torch

PADDED_VOCAB = 32  # rows of the tables of words: Megatron rounds up, and says nothing of the added rows
GARBAGE = 12345.0


def megatron_weights(hub: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """All weights whole, under Megatron's module names with the numbers of layers and experts in the whole
    model. A norm stands under its own name and under that of the linear layer that Transformer Engine fuses
    it into. `hub`: the tensors of model.safetensors, all of which are used.
    """
    left = dict(hub)
    weights = {
        "embedding.word_embeddings.weight": _padded(left.pop("model.embed_tokens.weight")),
        "decoder.final_layernorm.weight": left.pop("model.norm.weight"),
    }
    if config.tie_word_embeddings:
        weights["output_layer.weight"] = weights["embedding.word_embeddings.weight"]
    else:
        weights["output_layer.weight"] = _padded(left.pop("lm_head.weight"))
    for number in range(config.num_hidden_layers):
        source = f"model.layers.{number}."
        layer = {name[len(source) :]: left.pop(name) for name in list(left) if name.startswith(source)}
        target = f"decoder.layers.{number}."
        weights |= {target + name: tensor for name, tensor in _layer(layer, config).items()}
        assert not layer, f"not laid out: {sorted(layer)}"
    assert not left, f"not laid out: {sorted(left)}"
    return weights


def _padded(table: torch.Tensor) -> torch.Tensor:
    rows = table.new_full((PADDED_VOCAB - len(table), table.shape[1]), GARBAGE)
    return torch.cat([table, rows])


def _layer(layer: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """One layer's weights in Megatron's names and layout; takes what it uses out of `layer`."""
    out = {}
    out["input_layernorm.weight"] = layer.pop("input_layernorm.weight")
    out["self_attention.linear_qkv.layer_norm_weight"] = out["input_layernorm.weight"]
    out["pre_mlp_layernorm.weight"] = layer.pop("post_attention_layernorm.weight")
    out["mlp.linear_fc1.layer_norm_weight"] = out["pre_mlp_layernorm.weight"]
    out["self_attention.linear_proj.weight"] = layer.pop("self_attn.o_proj.weight")
    if "self_attn.kv_b_proj.weight" in layer:
        out |= _latent_attention(layer)
    else:
        out |= _grouped_attention(layer, config)
    out |= _experts(layer) if any("gate.weight" in name for name in layer) else _gated(layer, "mlp.", "mlp.")
    return out


def _latent_attention(layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """DeepSeek's attention: other names, the same tensors. The two norms as those of a layer, above."""
    names = {
        "q_a_proj.weight": ["linear_q_down_proj.weight"],
        "q_a_layernorm.weight": ["q_layernorm.weight", "linear_q_up_proj.layer_norm_weight"],
        "q_b_proj.weight": ["linear_q_up_proj.weight"],
        "kv_a_proj_with_mqa.weight": ["linear_kv_down_proj.weight"],
        "kv_a_layernorm.weight": ["kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight"],
        "kv_b_proj.weight": ["linear_kv_up_proj.weight"],
    }
    out = {}
    for hub_name, megatron_names in names.items():
        tensor = layer.pop(f"self_attn.{hub_name}")
        for name in megatron_names:
            out[f"self_attention.{name}"] = tensor
    return out


def _grouped_attention(layer: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """`linear_qkv`: for each group of query heads that share a key head, its queries, its key, its value."""
    groups = config.num_key_value_heads
    per_group = config.num_attention_heads // groups
    out = {}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" not in layer:
            continue
        q, k, v = (layer.pop(f"self_attn.{letter}_proj.{kind}") for letter in "qkv")
        size = len(k) // groups  # rows of a head
        rows = []
        for group in range(groups):
            for head in range(group * per_group, (group + 1) * per_group):
                rows.append(q[head * size : (head + 1) * size])
            rows.append(k[group * size : (group + 1) * size])
            rows.append(v[group * size : (group + 1) * size])
        out[f"self_attention.linear_qkv.{kind}"] = torch.cat(rows)
    for letter in "qk":
        if f"self_attn.{letter}_norm.weight" in layer:
            norm = layer.pop(f"self_attn.{letter}_norm.weight")
            out[f"self_attention.{letter}_layernorm.weight"] = norm
    return out


def _experts(layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The router, the experts and what all tokens share."""
    hub = "block_sparse_moe." if "block_sparse_moe.gate.weight" in layer else "mlp."  # the first is Mixtral
    out = {"mlp.router.weight": layer.pop(f"{hub}gate.weight")}
    if f"{hub}gate.e_score_correction_bias" in layer:
        out["mlp.router.expert_bias"] = layer.pop(f"{hub}gate.e_score_correction_bias")
    count = len(out["mlp.router.weight"])
    for expert in range(count):
        target = f"mlp.experts.local_experts.{expert}."
        out |= _gated(layer, f"{hub}experts.{expert}.", target)
    if "mlp.shared_experts.gate_proj.weight" in layer:
        out |= _gated(layer, "mlp.shared_experts.", "mlp.shared_experts.")
    return out


def _gated(layer: dict[str, torch.Tensor], source: str, target: str) -> dict[str, torch.Tensor]:
    """`linear_fc1` is the gate's rows, then those of the other factor."""
    mixtral = f"{source}w1.weight" in layer
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    gate_up = [layer.pop(f"{source}{gate}.weight"), layer.pop(f"{source}{up}.weight")]
    return {
        f"{target}linear_fc1.weight": torch.cat(gate_up),
        f"{target}linear_fc2.weight": layer.pop(f"{source}{down}.weight"),
    }
