"""How Megatron cuts a model: layers over pipeline stages, experts over ranks, tensors over TP.

Followed: megatron/core/transformer/transformer_layer.py, get_transformer_layer_offset (which layers a chunk
has); megatron/core/tensor_parallel/layers.py, ColumnParallelLinear and RowParallelLinear (which axis is cut);
megatron/core/transformer/mlp.py, where one rank's linear_fc1 is [its gate rows; its up rows].
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.makers.megatron_inverse import Megatron

COLUMN = (
    "linear_qkv",
    "linear_q_proj",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "linear_fc1",
    "word_embeddings",
    "output_layer",
    "eh_proj",
)
ROW = ("linear_proj", "linear_fc2", "out_proj")
BY_HEAD = ("A_log", "dt_bias", "core_attention.softmax_offset")
ZERO_CENTERED = ("gemma2", "gemma3_text", "qwen3_next")  # as the bridge's provider of each has it
INTERLEAVED = ("glm4", "llama4_text")  # as transformers rotates them
DELTA_PARTS = re.compile(r"(.*\.(?:in_proj|conv1d)\.weight)\.(\w+)")
DOWN = re.compile(r"linear_(q|kv)_down_proj\.weight$")
EXPERT = re.compile(r"(.*\.mlp\.experts\.)local_experts\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Parallel:
    """Sizes of a training run. `first` and `last`: layers of the outer pipeline stages, if uneven."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None  # of experts; as tp if not given
    dp: int = 1
    first: int | None = None
    last: int | None = None

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def chunks(self, layers: int) -> list[list[list[int]]]:
        """The layers' numbers as `[pipeline rank][virtual stage]`."""
        per_rank = self._layers_per_rank(layers)
        chunks: list[list[list[int]]] = [[] for _ in range(self.pp)]
        number = 0
        for _ in range(self.vpp):
            for rank in range(self.pp):
                count = per_rank[rank] // self.vpp
                chunks[rank].append(list(range(number, number + count)))
                number += count
        assert number == layers, (number, layers)
        return chunks

    def _layers_per_rank(self, layers: int) -> list[int]:
        rest = self.pp - (self.first is not None) - (self.last is not None)
        middle = layers - (self.first or 0) - (self.last or 0)
        counts = [middle // rest if rest else 0] * self.pp
        if self.first is not None:
            counts[0] = self.first
        if self.last is not None:
            counts[-1] = self.last
        return counts

    def files(self) -> Iterator[tuple[int, int, int, int]]:
        """(tp rank, ep rank, expert tp rank, number in its stage) of the rank that writes each file.

        save_checkpoint of megatron/training/checkpointing.py: those ranks write that are first in their
        data-parallel or in their expert-data-parallel group. So a rank pair of TP and EP may not exist.
        """
        written = set()
        for rank in range(self.tp * self.dp):
            tp_rank, ep_rank = rank % self.tp, rank // self.expert_tp % self.ep
            first_of_data = rank // self.tp == 0
            first_of_expert_data = rank // (self.expert_tp * self.ep) == 0
            if (first_of_data or first_of_expert_data) and (tp_rank, ep_rank) not in written:
                written.add((tp_rank, ep_rank))
                yield tp_rank, ep_rank, rank % self.expert_tp, rank
        assert self.tp % self.expert_tp == 0, "files of one name would differ"
        assert {ep_rank for _, ep_rank in written} == set(range(self.ep)), "too few ranks for the experts"


def cut_axis(name: str) -> int | None:
    """Along which axis tensor parallelism cuts the tensor of that canonical name; None: every rank has it."""
    module, _, part = name.rpartition(".")
    if DELTA_PARTS.fullmatch(name) or name.endswith(BY_HEAD):
        return 0
    leaf = module.rpartition(".")[2]
    if part == "weight" and leaf in ROW:
        return 1
    return 0 if part in {"weight", "bias"} and leaf in COLUMN else None


def pieces(model: Megatron, name: str, size: int) -> list[list[tuple[int, torch.Tensor]]]:
    """Each rank's parts of a tensor, with their offsets on the axis that is cut: one part, or gate and up."""
    tensor, axis = model.tensors[name], None if name in model.whole else cut_axis(name)
    if model.down_cut and DOWN.search(name):
        axis = 0
    if axis is None:
        return [[(0, tensor)] for _ in range(size)]
    halves = 2 if name in model.gated else 1
    length = tensor.shape[axis] // halves
    assert length % size == 0, f"{name}: {length} over {size} ranks"
    step = length // size
    starts = [[half * length + rank * step for half in range(halves)] for rank in range(size)]
    return [[(start, tensor.narrow(axis, start, step)) for start in of_rank] for of_rank in starts]


def shard(model: Megatron, name: str, rank: int, size: int) -> torch.Tensor:
    """One rank's tensor: of a gated one its gate rows, then its up rows."""
    parts = [tensor for _, tensor in pieces(model, name, size)[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, cut_axis(name) or 0)


def with_blocks(fc1: torch.Tensor, block: int) -> torch.Tensor:
    """[gate; up] as blocks of that many rows in turn: what TEGroupedMLP._remove_glu_interleaving undoes."""
    gate, up = fc1.chunk(2)
    return torch.cat([rows for pair in zip(gate.split(block), up.split(block), strict=True) for rows in pair])


def experts_of(model: Megatron) -> int:
    """How many experts a layer has, 0 if none."""
    numbers = [int(found[2]) for name in model.tensors if (found := EXPERT.fullmatch(name))]
    return max(numbers) + 1 if numbers else 0


def arguments(model: Megatron, parallel: Parallel, rank: int = 0, **others: Any) -> argparse.Namespace:
    """The trainer's arguments, as megatron/training/arguments.py leaves them in `args`.

    `vocab_size` is the tokenizer's, one less than the model's; `num_query_groups` counts only with
    `group_query_attention`; sizes of features that are off have Megatron's defaults.
    """
    config, latent = model.config, model.config.get("kv_lora_rank") is not None
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    grouped = groups != heads and not latent
    experts = experts_of(model)
    values: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config.get("intermediate_size_mlp", config["intermediate_size"]),
        "num_attention_heads": heads,
        "group_query_attention": grouped,
        "num_query_groups": groups if grouped else 1,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "num_experts": experts or None,
        "moe_ffn_hidden_size": config.get("moe_intermediate_size", config["intermediate_size"])
        if experts
        else None,
        "multi_latent_attention": latent,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"] if latent else 32,
        "qk_head_dim": config["qk_nope_head_dim"] if latent else 128,
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"] if latent else 64,
        "v_head_dim": config["v_head_dim"] if latent else 128,
        "linear_conv_kernel_dim": config.get("linear_conv_kernel_dim", 4),
        "linear_key_head_dim": config.get("linear_key_head_dim", 128),
        "linear_value_head_dim": config.get("linear_value_head_dim", 128),
        "linear_num_key_heads": config.get("linear_num_key_heads", 16),
        "linear_num_value_heads": config.get("linear_num_value_heads", 32),
        "attention_output_gate": "linear_num_key_heads" in config,
        "mtp_num_layers": 1 if any(name.startswith("mtp.") for name in model.tensors) else None,
        "padded_vocab_size": len(model.tensors["embedding.word_embeddings.weight"]),
        "vocab_size": config["vocab_size"] - 1,
        "make_vocab_size_divisible_by": 128,
        "untie_embeddings_and_output_weights": not model.tied,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp,
        "data_parallel_size": parallel.dp,
        "context_parallel_size": 1,
        "decoder_first_pipeline_num_layers": parallel.first,
        "decoder_last_pipeline_num_layers": parallel.last,
        "pipeline_model_parallel_layout": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "swiglu": True,
        "quick_geglu": False,
        "layernorm_zero_centered_gamma": config["model_type"] in ZERO_CENTERED,
        "rotary_interleaved": config["model_type"] in INTERLEAVED,
        "moe_grouped_gemm": bool(experts),
        "moe_mlp_glu_interleave_size": None,
        "use_legacy_models": False,
        "params_dtype": torch.bfloat16,
        "rank": rank,
        "world_size": parallel.tp * parallel.pp * parallel.dp,
    }
    return argparse.Namespace(**values | others)
