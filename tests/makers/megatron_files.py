"""Checkpoints of Megatron's `torch` format, and the folders that Megatron-LM and verl put around any format.

Followed: megatron/training/checkpointing.py, get_checkpoint_name (folder names), generate_state_dict (the
content of a file: `args`, `checkpoint_version`, `model` or `model0`, `model1`, ...), save_checkpoint (which
ranks write, see `Parallel.files`); names within a file are the modules' own, with the number that a layer or
an expert has in that rank: megatron/core/transformer/moe/experts.py, TEGroupedMLP, SequentialMLP and, up to
0.16, GroupedMLP with its weight1 and weight2.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.makers.layout import JUNK
from tests.makers.megatron_inverse import Megatron
from tests.makers.megatron_shards import (
    DELTA_PARTS,
    EXPERT,
    Parallel,
    arguments,
    experts_of,
    shard,
    with_blocks,
)

ITERATION = 100
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EXTRA_STATES: tuple[Any, ...] = (torch.empty(0, dtype=torch.uint8), None, io.BytesIO(b"fp8 scales"))

State = OrderedDict[str, Any]


def write_torch(
    folder: Path,
    model: Megatron,
    parallel: Parallel = Parallel(),  # noqa: B008 - frozen
    *,
    experts: str = "te",
    mtp_layer: str = "mtp_model_layer",
    block: int | None = None,
    fused_down: bool = False,
    old_names: str | None = None,
) -> None:
    """Writes `folder`/mp_rank_.../model_optim_rng.pt for each rank that writes one.

    experts     "te" (weight0, ...), "single" (all in one weight, 0.20), "local" (local_experts.0, ...) or
                "grouped" (weight1 and weight2)
    mtp_layer   "transformer_layer" before mcore 0.17
    block       moe_mlp_glu_interleave_size: experts' gate and up in turn, so many rows each
    fused_down  latent attention's down projections in one, with the input norm (mla_down_proj_fusion, 0.17)
    old_names   "encoder" or "transformer": the nested names of before mcore, see `_old_names`
    """
    chunks = parallel.chunks(model.layers)
    for pp_rank in range(parallel.pp):
        for tp_rank, ep_rank, etp_rank, number in parallel.files():
            rank = _Rank(model, parallel, tp_rank, ep_rank, etp_rank, experts, mtp_layer, block)
            states = []
            for stage, layers in enumerate(chunks[pp_rank]):
                first = pp_rank == 0 and stage == 0
                last = pp_rank == parallel.pp - 1 and stage == parallel.vpp - 1
                state = rank.state(layers, first=first, last=last)
                state = _fused_down(state) if fused_down else state
                states.append(
                    _old_names(state, old_names, model.tied) if old_names else _with_extra_states(state)
                )
            name = f"mp_rank_{tp_rank:02d}"
            name += f"_{pp_rank:03d}" if parallel.pp > 1 else ""
            name += f"_{ep_rank:03d}" if parallel.ep > 1 else ""
            number += pp_rank * parallel.tp * parallel.dp
            others = {"moe_mlp_glu_interleave_size": block, "use_legacy_models": old_names is not None}
            others["moe_grouped_gemm"] = experts_of(model) > 0 and experts != "local"
            _write_file(folder / name, states, arguments(model, parallel, number, **others))


def megatron_run(root: Path, write: Callable[[Path], None]) -> Path:
    """Megatron-LM's folders: `write` fills iter_0000100, beside the pointer to it. Returns the step."""
    step = root / f"iter_{ITERATION:07d}"
    step.mkdir(parents=True)
    write(step)
    (root / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return step


def verl_run(root: Path, write: Callable[[Path], None], huggingface: Path, schema: int = 1) -> Path:
    """verl's folders (utils/checkpoint/megatron_checkpoint_manager.py); schema 2 since 0.9.

    `write` fills dist_ckpt; config.json is copied from `huggingface`, tokenizer files are stand-ins.
    Returns the folder `actor`.
    """
    actor = root / f"global_step_{ITERATION}" / "actor"
    model = actor / "model" if schema == 2 else actor
    (model / "dist_ckpt").mkdir(parents=True)
    write(model / "dist_ckpt")
    (model / "huggingface").mkdir()
    shutil.copy(huggingface / "config.json", model / "huggingface")
    (model / "huggingface" / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    if schema == 2:
        for other in ("optimizer", "extra"):
            (actor / other / "dist_ckpt").mkdir(parents=True)
            (actor / other / "dist_ckpt" / "__0_0.distcp").write_bytes(JUNK)
        contents = {"model": {"path": "model/dist_ckpt", "format": "megatron_dist_checkpoint"}}
        about = {"schema_version": 2, "framework": "megatron", "global_step": ITERATION, "contents": contents}
        (actor / "ckpt_contents.json").write_text(json.dumps(about))
    else:
        (actor / "transformer_config.json").write_text("{}")
    (root / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return actor


def _write_file(folder: Path, states: list[State], args: Any) -> None:
    """One rank's file, with what a trainer keeps beside the weights."""
    folder.mkdir()
    content: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    if len(states) == 1:
        content["model"] = states[0]
    else:
        content |= {f"model{i}": state for i, state in enumerate(states)}
    flat = torch.full((8,), 7.0)
    content["optimizer"] = {"optimizer": {"state": {0: {"exp_avg": flat}}, "param_groups": [{"lr": 1e-4}]}}
    content["opt_param_scheduler"] = {"num_steps": 800, "max_lr": 1e-4}
    content["rng_state"] = [{"torch_rng_state": torch.get_rng_state(), "random_rng_state": (3, (1, 2), None)}]
    content["num_floating_point_operations_so_far"] = 0
    torch.save(content, folder / "model_optim_rng.pt")
    (folder / "distrib_optim.pt").write_bytes(JUNK)


class _Rank:
    """What one rank of tensor and expert parallelism holds."""

    def __init__(
        self,
        model: Megatron,
        parallel: Parallel,
        tp_rank: int,
        ep_rank: int,
        etp_rank: int,
        experts: str,
        mtp_layer: str,
        block: int | None,
    ) -> None:
        self.model, self.parallel = model, parallel
        self.tp_rank, self.etp_rank = tp_rank, etp_rank
        self.experts, self.mtp_layer, self.block = experts, mtp_layer, block
        per_rank = experts_of(model) // parallel.ep
        self.own_experts = range(ep_rank * per_rank, (ep_rank + 1) * per_rank)
        vision = any(name.startswith(("vision_model.", "visual.")) for name in model.tensors)
        self.text = "language_model." if vision else ""

    def state(self, layers: list[int], *, first: bool, last: bool) -> State:
        """The state dict of a model chunk with these layers."""
        state: State = OrderedDict()
        for name in self.model.tensors:
            local = self._local_name(name, layers, first=first, last=last)
            if local is not None:
                state[local] = self._tensor(name)
        if last and not first:  # copies that are kept equal by an all-reduce of their gradients
            embedding = self._tensor("embedding.word_embeddings.weight")
            if self.model.tied:
                state[f"{self.text}output_layer.weight"] = embedding
            if any(name.startswith("mtp.") for name in self.model.tensors):
                state[f"{self.text}embedding.word_embeddings.weight"] = embedding
        state = _joined_parts(state)
        if self.experts == "grouped":
            state = _grouped_experts(state)
        return _single_experts(state) if self.experts == "single" else state

    def _local_name(self, name: str, layers: list[int], *, first: bool, last: bool) -> str | None:
        """The name in this chunk, None if the tensor is not in it."""
        if name.startswith(("vision_model.", "visual.")):
            return name if first else None
        expert = EXPERT.fullmatch(name)
        if expert:
            number = int(expert[2])
            if number not in self.own_experts:
                return None
            number -= self.own_experts.start
            if self.experts == "te":
                module, _, part = expert[3].rpartition(".")
                name = f"{expert[1]}{module}.{part}{number}"
            else:
                name = f"{expert[1]}local_experts.{number}.{expert[3]}"
        layer = LAYER.fullmatch(name)
        if layer:
            if int(layer[1]) not in layers:
                return None
            name = f"decoder.layers.{layers.index(int(layer[1]))}.{layer[2]}"
        elif not (first if name.startswith("embedding.") else last):
            return None
        return self.text + name.replace("transformer_layer", self.mtp_layer)

    def _tensor(self, name: str) -> torch.Tensor:
        if not EXPERT.fullmatch(name):
            return shard(self.model, name, self.tp_rank, self.parallel.tp).clone()
        tensor = shard(self.model, name, self.etp_rank, self.parallel.expert_tp).clone()
        return with_blocks(tensor, self.block) if self.block and name in self.model.gated else tensor


def _joined_parts(state: State) -> State:
    """A gated delta net's parts in one tensor per rank, as the module has them."""
    joined: State = OrderedDict()
    for name, tensor in state.items():
        found = DELTA_PARTS.fullmatch(name)
        if not found:
            joined[name] = tensor
        elif found[1] in joined:
            joined[found[1]] = torch.cat([joined[found[1]], tensor])
        else:
            joined[found[1]] = tensor
    return joined


def _grouped_experts(state: State) -> State:
    """GroupedMLP: weight1 is the memory of (E, hidden, 2f) as (hidden, ...); weight2 of (E, f, hidden)."""
    layers: dict[str, dict[str, list[torch.Tensor]]] = {}
    rest: State = OrderedDict()
    for name, tensor in state.items():
        found = EXPERT.fullmatch(name)
        if found:
            layers.setdefault(found[1], {}).setdefault(found[3], []).append(tensor.t())
        else:
            rest[name] = tensor
    for at, experts in layers.items():
        first, second = torch.stack(experts["linear_fc1.weight"]), torch.stack(experts["linear_fc2.weight"])
        rest[f"{at}weight1"] = first.reshape(first.shape[1], -1)
        rest[f"{at}weight2"] = second.reshape(-1, second.shape[2])
    return rest


def _single_experts(state: State) -> State:
    """TransformerEngine's GroupedLinear with `single_grouped_weight`: (experts, out, in)."""
    layers: dict[str, list[torch.Tensor]] = {}
    rest: State = OrderedDict()
    for name, tensor in state.items():
        found = EXPERT.fullmatch(name)
        if found:
            layers.setdefault(found[1] + found[3], []).append(tensor)
        else:
            rest[name] = tensor
    rest.update({name: torch.stack(tensors) for name, tensors in layers.items()})
    return rest


def _fused_down(state: State) -> State:
    """megatron/core/models/gpt/gpt_layer_specs.py with mla_down_proj_fusion: FusedMLASelfAttention."""
    fused: State = OrderedDict()
    for name, tensor in state.items():
        if name.endswith("linear_q_down_proj.weight"):
            rest = state[name.replace("linear_q_down", "linear_kv_down")]
            fused[name.replace("linear_q_down", "linear_qkv_down")] = torch.cat([tensor, rest])
        elif name.endswith(".input_layernorm.weight"):
            own = "self_attention.linear_qkv_down_proj.layer_norm_weight"
            fused[name.replace("input_layernorm.weight", own)] = tensor
        elif not name.endswith("linear_kv_down_proj.weight"):
            fused[name] = tensor
    return fused


OLD_NAMES = {  # module of mcore's local spec: that of `encoder`, that of the older `transformer`
    "input_layernorm": ("input_norm", "input_layernorm"),
    "self_attention.linear_qkv": ("self_attention.query_key_value", "attention.query_key_value"),
    "self_attention.linear_proj": ("self_attention.dense", "attention.dense"),
    "pre_mlp_layernorm": ("post_attention_norm", "post_attention_layernorm"),
    "mlp.linear_fc1": ("mlp.dense_h_to_4h", "mlp.dense_h_to_4h"),
    "mlp.linear_fc2": ("mlp.dense_4h_to_h", "mlp.dense_4h_to_h"),
}


def _old_names(state: State, module: str, tied: bool) -> State:
    """megatron/legacy/model of mcore 0.13: state_dict_for_save_checkpoint of GPTModel and of what it holds.

    Modules' states are nested; `word_embeddings_for_head` is the last stage's copy where the output is tied.
    """
    which = ("encoder", "transformer").index(module)
    names = {"decoder.final_layernorm.weight": ("final_norm.weight", "final_layernorm.weight")[which]}
    layers: State = OrderedDict()
    language: State = OrderedDict({module: layers})
    nested: State = OrderedDict(language_model=language)
    for name, tensor in state.items():
        layer = LAYER.fullmatch(name)
        if layer:
            inner, _, part = layer[2].rpartition(".")
            layers[f"layers.{layer[1]}.{OLD_NAMES[inner][which]}.{part}"] = tensor
        elif name == "embedding.word_embeddings.weight":
            language["embedding"] = {"word_embeddings": {"weight": tensor}}
        elif name == "output_layer.weight":
            of, key = (nested, "word_embeddings_for_head") if tied else (language, "output_layer")
            of[key] = {"weight": tensor}
        else:
            layers[names[name]] = tensor
    return nested


def _with_extra_states(state: State) -> State:
    """Each linear module's and norm's `_extra_state`, in turn as versions of TransformerEngine write it."""
    full: State = OrderedDict()
    for number, (name, tensor) in enumerate(state.items()):
        full[name] = tensor
        module = name.rpartition(".")[0]
        if re.search(r"linear_\w+$|layernorm$", module):
            full.setdefault(f"{module}._extra_state", EXTRA_STATES[number % len(EXTRA_STATES)])
    return full
