"""Hugging Face models laid out in Megatron's form: the opposite direction of what lazymerge converts.

`to_megatron(original)` gives Megatron's whole tensors under canonical names (lazymerge.formats.megatron).
It was written from what Megatron's users do before training, and from nothing of lazymerge:

    rows of linear_qkv    megatron/core/transformer/attention.py, SelfAttention.get_query_key_value_tensors;
                          Megatron-Bridge models/conversion/param_mapping.py, merge_qkv_weights,
                          merge_qkvg_weights (output gate), merge_gdn_linear_weights, ConcatenatedQKVMapping
    names                 the mapping_registry of Megatron-Bridge's models/<family>/<family>_bridge.py
    names of norms        megatron/core/models/gpt/gpt_layer_specs.py, get_gpt_layer_local_spec (with its
                          sharded_state_dict_keys_map) and get_gpt_layer_with_transformer_engine_spec

Rows are moved one head at a time in plain loops. Every tensor of the hub is taken exactly once, or the
inverse fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.makers.megatron_models import Original
from tests.makers.megatron_rows import RowReader, gate_and_up, grouped_qkv, grouped_qkv_with_gate

Tensors = dict[str, torch.Tensor]
TE, LOCAL, LOCAL_DIST = "te", "local", "local in torch_dist"
"""Which names norms have: fused with the linear layer behind them, own modules, or these renamed on save."""


@dataclass
class Megatron:
    """A model in Megatron's form: whole tensors by canonical name, and what its shards depend on.

    `gated` holds the names of tensors that are [gate; up]; those in `whole` are on every rank.
    """

    config: dict[str, Any]  # of the language model, as Hugging Face has it
    tied: bool
    tensors: Tensors = field(default_factory=dict, repr=False)
    gated: set[str] = field(default_factory=set, repr=False)
    whole: set[str] = field(default_factory=set, repr=False)
    layers: int = 0
    down_cut: bool = (
        False  # latent attention's down projections cut by TP, as before 0.14 and in the local spec
    )

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor, which must be new."""
        assert name not in self.tensors, name
        self.tensors[name] = tensor.contiguous()

    def put_gated(self, name: str, gate: torch.Tensor, up: torch.Tensor) -> None:
        """Adds [gate; up]."""
        self.put(name, torch.cat([gate, up]))
        self.gated.add(name)


class Hub:
    """The hub's tensors, each to be taken once."""

    def __init__(self, tensors: Tensors) -> None:
        self.left = dict(tensors)

    def take(self, name: str) -> torch.Tensor:
        return self.left.pop(name)

    def has(self, name: str) -> bool:
        return name in self.left

    def parts(self, at: str) -> list[str]:
        """Which of weight and bias the module has."""
        return [part for part in ("weight", "bias") if f"{at}.{part}" in self.left]


def to_megatron(
    original: Original,
    *,
    norms: str = TE,
    padded_vocabulary: int | None = None,
    post_norms: str = "bridge",
    tower: str = "megatron",
    down_cut: bool = False,
) -> Megatron:
    """The model in Megatron's form.

    norms              `TE`, `LOCAL` (module names, of the `torch` format) or `LOCAL_DIST`
    padded_vocabulary  rows of the embedding and the output layer; those beyond the vocabulary are garbage
    post_norms         Gemma's norms after a block: "bridge" or "mbridge" names
    tower              vision: "megatron" (a transformer of Megatron's) or "module" (Hugging Face's, as it is)
    down_cut           see `Megatron`
    """
    from tests.makers.megatron_inverse_vision import put_vision

    hub = Hub(original.truth)
    config = original.text_config
    out = Megatron(config, tied=bool(original.config.get("tie_word_embeddings")), down_cut=down_cut)
    text = "model.language_model." if hub.has("model.language_model.norm.weight") else "model."
    out.put(
        "embedding.word_embeddings.weight", _padded(hub.take(f"{text}embed_tokens.weight"), padded_vocabulary)
    )
    out.put("decoder.final_layernorm.weight", hub.take(f"{text}norm.weight"))
    if hub.has("score.weight"):
        for part in hub.parts("score"):  # a value head is a plain linear layer, on every rank
            out.put(f"output_layer.{part}", hub.take(f"score.{part}"))
            out.whole.add(f"output_layer.{part}")
    elif not out.tied:
        out.put("output_layer.weight", _padded(hub.take("lm_head.weight"), padded_vocabulary))
    out.layers = config["num_hidden_layers"]
    layer = _Layer(hub, out, norms, post_norms)
    for number in range(out.layers):
        layer.move(f"{text}layers.{number}.", f"decoder.layers.{number}.")
    _move_mtp(hub, out, layer)
    put_vision(hub, out, original.config, tower)
    assert not hub.left, sorted(hub.left)
    return out


def _padded(tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
    """The tensor with rows of garbage behind it."""
    if rows is None:
        return tensor
    generator = torch.Generator().manual_seed(rows)
    garbage = torch.randn(rows - len(tensor), tensor.shape[1], generator=generator)
    return torch.cat([tensor, garbage.to(tensor.dtype)])


def _move_mtp(hub: Hub, out: Megatron, layer: _Layer) -> None:
    """megatron/core/transformer/multi_token_prediction.py, MultiTokenPredictionLayer.

    Hub names: get_common_mapping_list of Megatron-Bridge's deepseek/common.py, and qwen3_next_bridge.py.
    """
    if hub.has("mtp.fc.weight"):  # Qwen3-Next has one
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
        names |= {"eh_proj": "fc", "final_layernorm": "norm"}
        _move_depth(hub, out, layer, 0, names, outer="mtp.", inner="mtp.layers.0.")
    depth = 0
    while hub.has(f"model.layers.{out.layers + depth}.eh_proj.weight"):
        at = f"model.layers.{out.layers + depth}."
        names = {
            "enorm": "enorm",
            "hnorm": "hnorm",
            "eh_proj": "eh_proj",
            "final_layernorm": "shared_head.norm",
        }
        _move_depth(hub, out, layer, depth, names, outer=at, inner=at)
        depth += 1


def _move_depth(
    hub: Hub, out: Megatron, layer: _Layer, depth: int, names: dict[str, str], *, outer: str, inner: str
) -> None:
    for name, hub_name in names.items():
        out.put(f"mtp.layers.{depth}.{name}.weight", hub.take(f"{outer}{hub_name}.weight"))
    layer.move(inner, f"mtp.layers.{depth}.transformer_layer.")


@dataclass
class _Layer:
    """Moves one decoder layer: `at` is its prefix on the hub, `to` in Megatron."""

    hub: Hub
    out: Megatron
    norms: str
    post_norms: str

    def move(self, at: str, to: str) -> None:
        latent = self.hub.has(f"{at}self_attn.kv_b_proj.weight")
        delta = self.hub.has(f"{at}linear_attn.A_log")
        if delta:
            self._move_delta(f"{at}linear_attn.", f"{to}self_attention.")
        elif latent:
            self._move_latent(f"{at}self_attn.", f"{to}self_attention.")
        else:
            self._move_attention(f"{at}self_attn.", f"{to}self_attention.")
        block, moe = self._move_feed_forward(at, to)
        self._move_norms(at, to, block, latent=latent, delta=delta, moe=moe)

    # ---- norms -----------------------------------------------------------------------------------

    def _move_norms(self, at: str, to: str, block: str, *, latent: bool, delta: bool, moe: bool) -> None:
        separate = "input_layernorm.weight"
        if self.norms == LOCAL or latent:
            name = separate
        else:
            name = f"self_attention.{'in_proj' if delta else 'linear_qkv'}.layer_norm_weight"
        self.out.put(to + name, self.hub.take(f"{at}input_layernorm.weight"))
        sandwich = self.hub.has(f"{at}pre_feedforward_layernorm.weight")
        before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        fused, own = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
        name = {
            TE: own if moe else fused,
            LOCAL: own,
            LOCAL_DIST: own
            if latent
            else fused,  # also before experts, which have no linear_fc1 of that name
        }[self.norms]
        self.out.put(to + name, self.hub.take(f"{at}{before_mlp}.weight"))
        if sandwich:  # gemma2_bridge.py, gemma3_bridge.py; the other names are mbridge's
            after = {
                "post_attention_layernorm": "self_attention.linear_proj.post_layernorm",
                "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm",
            }
            for hub_name, bridge_name in after.items():
                name = bridge_name if self.post_norms == "bridge" else hub_name
                self.out.put(f"{to}{name}.weight", self.hub.take(f"{at}{hub_name}.weight"))
        for name in ("post_self_attn_layernorm", "post_mlp_layernorm"):  # GLM-4
            if self.hub.has(f"{at}{name}.weight"):
                self.out.put(f"{to}{name}.weight", self.hub.take(f"{at}{name}.weight"))

    # ---- attention -------------------------------------------------------------------------------

    def _move_attention(self, at: str, to: str) -> None:
        hub, config = self.hub, self.out.config
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        if hub.has(f"{at}qkv_proj.weight"):  # Phi-3: one tensor of all q, all k, all v
            fused = hub.take(f"{at}qkv_proj.weight")
            size = len(fused) // (heads + 2 * groups)
            q, k, v = fused[: heads * size], fused[heads * size : -groups * size], fused[-groups * size :]
            self.out.put(f"{to}linear_qkv.weight", grouped_qkv(q, k, v, heads, groups))
        for part in hub.parts(f"{at}q_proj"):
            q, k, v = (hub.take(f"{at}{x}_proj.{part}") for x in "qkv")
            gated = len(q) // heads == 2 * len(k) // groups
            rows = (
                grouped_qkv_with_gate(q, k, v, heads, groups)
                if gated
                else grouped_qkv(q, k, v, heads, groups)
            )
            self.out.put(f"{to}linear_qkv.{part}", rows)
        for part in hub.parts(f"{at}o_proj"):
            self.out.put(f"{to}linear_proj.{part}", hub.take(f"{at}o_proj.{part}"))
        for x in "qk":
            if hub.has(f"{at}{x}_norm.weight"):
                self.out.put(f"{to}{x}_layernorm.weight", hub.take(f"{at}{x}_norm.weight"))
        if hub.has(f"{at}sinks"):
            self.out.put(f"{to}core_attention.softmax_offset", hub.take(f"{at}sinks"))

    def _move_latent(self, at: str, to: str) -> None:
        """Multi-latent attention: deepseek/common.py of Megatron-Bridge. Nothing is interleaved."""
        fused = self.norms == TE
        names = {
            "q_proj": "linear_q_proj.weight",
            "q_a_proj": "linear_q_down_proj.weight",
            "q_a_layernorm": "linear_q_up_proj.layer_norm_weight" if fused else "q_layernorm.weight",
            "q_b_proj": "linear_q_up_proj.weight",
            "kv_a_proj_with_mqa": "linear_kv_down_proj.weight",
            "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight" if fused else "kv_layernorm.weight",
            "kv_b_proj": "linear_kv_up_proj.weight",
            "o_proj": "linear_proj.weight",
        }
        for hub_name, name in names.items():
            if self.hub.has(f"{at}{hub_name}.weight"):
                self.out.put(to + name, self.hub.take(f"{at}{hub_name}.weight"))

    def _move_delta(self, at: str, to: str) -> None:
        """A gated delta net: megatron/core/ssm/gated_delta_net, and merge_gdn_linear_weights of the bridge.

        The checkpoint has one key for each part of in_proj and conv1d.
        """
        config = self.out.config
        key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key_size, value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
        ratio = value_heads // key_heads
        rows: dict[str, list[torch.Tensor]] = {}
        qkvz = RowReader(self.hub.take(f"{at}in_proj_qkvz.weight"))
        ba = RowReader(self.hub.take(f"{at}in_proj_ba.weight"))
        for _ in range(key_heads):
            rows.setdefault("query", []).append(qkvz.read(key_size))
            rows.setdefault("key", []).append(qkvz.read(key_size))
            rows.setdefault("value", []).append(qkvz.read(ratio * value_size))
            rows.setdefault("z", []).append(qkvz.read(ratio * value_size))
            rows.setdefault("beta", []).append(ba.read(ratio))
            rows.setdefault("alpha", []).append(ba.read(ratio))
        for part, pieces in rows.items():
            self.out.put(f"{to}in_proj.weight.{part}", torch.cat(pieces))
        channels = RowReader(self.hub.take(f"{at}conv1d.weight"))
        sizes = {
            "query": key_heads * key_size,
            "key": key_heads * key_size,
            "value": value_heads * value_size,
        }
        for part, size in sizes.items():
            self.out.put(f"{to}conv1d.weight.{part}", channels.read(size))
        for name in ("A_log", "dt_bias", "out_proj.weight"):
            self.out.put(to + name, self.hub.take(at + name))
        norm = self.hub.take(f"{at}norm.weight")  # RMSNorm2ZeroCenteredRMSNormMapping
        self.out.put(f"{to}out_norm.weight", (norm.float() - 1).to(norm.dtype))

    # ---- feed-forward ----------------------------------------------------------------------------

    def _move_feed_forward(self, at: str, to: str) -> tuple[str, bool]:
        """Returns the hub's name of the block, and whether it has experts."""
        for block in ("mlp.", "block_sparse_moe.", "feed_forward."):
            router = self._router(at + block)
            if router:
                self._move_experts(at + block, f"{to}mlp.", router)
                return block, True
            if self.hub.has(f"{at}{block}down_proj.weight"):
                self._move_mlp(at + block, f"{to}mlp.")
                return block, False
        raise AssertionError(at)

    def _router(self, at: str) -> str | None:
        return next((name for name in ("gate", "router") if self.hub.has(f"{at}{name}.weight")), None)

    def _move_mlp(self, at: str, to: str) -> None:
        if self.hub.has(f"{at}gate_up_proj.weight"):  # GLM-4 and Phi-3 fuse them too
            fused = self.hub.take(f"{at}gate_up_proj.weight")
            half = len(fused) // 2
            self.out.put_gated(f"{to}linear_fc1.weight", fused[:half], fused[half:])
        else:
            gate, up = (self.hub.take(f"{at}{name}_proj.weight") for name in ("gate", "up"))
            self.out.put_gated(f"{to}linear_fc1.weight", gate, up)
        self.out.put(f"{to}linear_fc2.weight", self.hub.take(f"{at}down_proj.weight"))

    def _move_experts(self, at: str, to: str, router: str) -> None:
        hub, out = self.hub, self.out
        for part in hub.parts(at + router):
            out.put(f"{to}router.{part}", hub.take(f"{at}{router}.{part}"))
        if hub.has(f"{at}{router}.e_score_correction_bias"):
            out.put(f"{to}router.expert_bias", hub.take(f"{at}{router}.e_score_correction_bias"))
        for shared in ("shared_experts.", "shared_expert."):
            if hub.has(f"{at}{shared}down_proj.weight"):
                self._move_mlp(at + shared, f"{to}shared_experts.")
        if hub.has(f"{at}shared_expert_gate.weight"):
            out.put(f"{to}shared_experts.gate_weight", hub.take(f"{at}shared_expert_gate.weight"))
        if hub.has(f"{at}experts.gate_up_proj"):
            self._move_stacked(f"{at}experts.", f"{to}experts.local_experts.")
            return
        gate_name, up_name, down_name = ("w1", "w3", "w2") if "block_sparse" in at else GATE_UP_DOWN
        expert = 0
        while hub.has(f"{at}experts.{expert}.{down_name}.weight"):
            source, target = f"{at}experts.{expert}.", f"{to}experts.local_experts.{expert}."
            gate, up = hub.take(f"{source}{gate_name}.weight"), hub.take(f"{source}{up_name}.weight")
            out.put_gated(f"{target}linear_fc1.weight", gate, up)
            out.put(f"{target}linear_fc2.weight", hub.take(f"{source}{down_name}.weight"))
            expert += 1
        assert expert, at

    def _move_stacked(self, at: str, to: str) -> None:
        """All experts in one tensor (E, hidden, 2f), columns [gate; up]; gpt-oss alternates gate and up."""
        alternate = self.hub.has(f"{at}gate_up_proj_bias")
        gate_up, down = self.hub.take(f"{at}gate_up_proj"), self.hub.take(f"{at}down_proj")
        for expert in range(len(gate_up)):
            columns = [gate_up[expert][:, i] for i in range(gate_up.shape[2])]
            gate, up = gate_and_up(columns, alternate)
            self.out.put_gated(f"{to}{expert}.linear_fc1.weight", torch.stack(gate), torch.stack(up))
            rows = [down[expert][:, i] for i in range(down.shape[2])]
            self.out.put(f"{to}{expert}.linear_fc2.weight", torch.stack(rows))
        if not alternate:
            return
        gate_up_bias, down_bias = (
            self.hub.take(f"{at}gate_up_proj_bias"),
            self.hub.take(f"{at}down_proj_bias"),
        )
        for expert in range(len(gate_up_bias)):
            gate, up = gate_and_up(list(gate_up_bias[expert]), alternate)
            self.out.put_gated(f"{to}{expert}.linear_fc1.bias", torch.stack(gate), torch.stack(up))
            self.out.put(f"{to}{expert}.linear_fc2.bias", down_bias[expert])


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
