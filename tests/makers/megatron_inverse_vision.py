"""Vision towers of Qwen2.5-VL and Qwen3-VL in Megatron's form.

Two arrangements are in use. Megatron-Bridge's qwen25_vl_bridge.py keeps Hugging Face's module whole, under
`visual.`; so did its Qwen3-VL bridge up to 0.3, under `vision_model.`. mbridge (models/qwen2_5_vl) and the
bridge's later qwen3_vl_bridge.py build a transformer of Megatron's, whose linear_qkv has one group per head.
"""

from __future__ import annotations

from typing import Any

from tests.makers.megatron_inverse import Hub, Megatron
from tests.makers.megatron_rows import per_head_qkv

QWEN2_BLOCK = {
    "attn.proj.weight": "self_attention.linear_proj.weight",
    "attn.proj.bias": "self_attention.linear_proj.bias",
    "norm1.weight": "self_attention.linear_qkv.layer_norm_weight",
    "norm2.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.down_proj.bias": "mlp.linear_fc2.bias",
}
QWEN3_BLOCK = {
    "attn.proj.weight": "self_attention.linear_proj.weight",
    "attn.proj.bias": "self_attention.linear_proj.bias",
    "norm1.weight": "self_attention.linear_qkv.layer_norm_weight",
    "norm1.bias": "self_attention.linear_qkv.layer_norm_bias",
    "norm2.weight": "mlp.linear_fc1.layer_norm_weight",
    "norm2.bias": "mlp.linear_fc1.layer_norm_bias",
    "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias": "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight": "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias": "mlp.linear_fc2.bias",
}
QWEN2_REST = {
    "patch_embed.proj.weight": "patch_embed.proj.weight",
    "merger.ln_q.weight": "decoder.final_layernorm.weight",
    "merger.mlp.0.weight": "projection.encoder.linear_fc1.weight",
    "merger.mlp.0.bias": "projection.encoder.linear_fc1.bias",
    "merger.mlp.2.weight": "projection.encoder.linear_fc2.weight",
    "merger.mlp.2.bias": "projection.encoder.linear_fc2.bias",
}


def put_vision(hub: Hub, out: Megatron, config: dict[str, Any], tower: str) -> None:
    """Moves all that is left on the hub's side under a vision prefix, if there is a tower."""
    at = next((p for p in ("model.visual.", "visual.") if hub.has(f"{p}patch_embed.proj.weight")), None)
    if at is None:
        return
    qwen2 = hub.has(f"{at}merger.ln_q.weight")
    if tower == "module":
        for name in [name for name in hub.left if name.startswith(at)]:
            own = ("visual." if qwen2 else "vision_model.") + name.removeprefix(at)
            out.put(own, hub.take(name))
            out.whole.add(own)
        return
    vision = config["vision_config"]
    for number in range(vision["depth"]):
        _move_block(
            hub, out, f"{at}blocks.{number}.", f"vision_model.decoder.layers.{number}.", vision["num_heads"]
        )
    rest = QWEN2_REST if qwen2 else _qwen3_rest(len(vision["deepstack_visual_indexes"]))
    for hub_name, name in rest.items():
        out.put(f"vision_model.{name}", hub.take(at + hub_name))


def _move_block(hub: Hub, out: Megatron, at: str, to: str, heads: int) -> None:
    qwen2 = hub.has(f"{at}mlp.gate_proj.weight")
    for part in ("weight", "bias"):
        qkv = hub.take(f"{at}attn.qkv.{part}")
        out.put(f"{to}self_attention.linear_qkv.{part}", per_head_qkv(qkv, heads))
        if qwen2:
            gate, up = (hub.take(f"{at}mlp.{name}_proj.{part}") for name in ("gate", "up"))
            out.put_gated(f"{to}mlp.linear_fc1.{part}", gate, up)
    for hub_name, name in (QWEN2_BLOCK if qwen2 else QWEN3_BLOCK).items():
        out.put(to + name, hub.take(at + hub_name))


def _qwen3_rest(mergers: int) -> dict[str, str]:
    names = {
        "patch_embed.proj.weight": "patch_embed.proj.weight",
        "patch_embed.proj.bias": "patch_embed.proj.bias",
        "pos_embed.weight": "pos_embed.weight",
    }
    places = {"merger.": "merger."}
    places |= {f"deepstack_merger_list.{i}.": f"decoder.deepstack_merger_list.{i}." for i in range(mergers)}
    for at, to in places.items():
        for hub_name, name in (
            ("norm", "patch_norm"),
            ("linear_fc1", "linear_fc1"),
            ("linear_fc2", "linear_fc2"),
        ):
            names |= {f"{at}{hub_name}.{part}": f"{to}{name}.{part}" for part in ("weight", "bias")}
    return names
