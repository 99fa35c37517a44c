"""Checkpoints of torch FSDP1 (`FullyShardedDataParallel`), which runs on CPU over gloo when told the device.

| kind | what a rank's file holds |
|---|---|
| "dtensor" | SHARDED_STATE_DICT with a device mesh: DTensors (what verl writes) |
| "sharded_tensor" | SHARDED_STATE_DICT without a device mesh: ShardedTensors |
| "no_shard" | NO_SHARD: whole tensors on every rank |
| "local" | LOCAL_STATE_DICT: flat parameters, which nobody can merge |
| "full" | FULL_STATE_DICT: rank 0 writes one file, `full_name`, its dict wrapped under `wrapped` if given |
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor

from tests.makers.fsdp import (
    Facts,
    Mesh,
    apply_tensor_parallel,
    check_gathered,
    layers_of,
    mesh_size,
    open_mesh,
    save_rank,
    tied_names,
    whole_state,
)
from tests.makers.layout import Made, verl_leaf, write_huggingface_dir, write_verl_surroundings
from tests.makers.models import build_model
from tests.makers.ranks import run_ranks

STRATEGIES = {1: ShardingStrategy.FULL_SHARD, 2: ShardingStrategy.HYBRID_SHARD}


def fsdp1(
    root: Path,
    model_name: str = "qwen2",
    mesh: Mesh = (("fsdp", 4),),
    *,
    kind: str = "dtensor",
    dtype: torch.dtype = torch.float32,
    full_name: str = "pytorch_model.bin",
    wrapped: str | None = None,
    zip_format: bool = True,
    use_orig_params: bool = False,
    step: int = 7,
    role: str = "actor",
    seed: int = 0,
) -> Made:
    """A model wrapped by FSDP1 and saved as `kind` says; two mesh dimensions make it HYBRID_SHARD, a last
    dimension "tp" makes tensor parallelism under it.
    """
    leaf, world_size = verl_leaf(root, step, role), mesh_size(mesh)
    options = {"kind": kind, "dtype": dtype, "full_name": full_name, "wrapped": wrapped, "seed": seed}
    options |= {"zip_format": zip_format, "use_orig_params": use_orig_params}
    facts = run_ranks(_fsdp1_rank, world_size, leaf, model_name, mesh, options)[0]
    version = 0 if kind == "full" else 1
    if version:
        write_verl_surroundings(root, leaf, world_size, version)
    return Made(root, leaf, facts.truth, world_size, mesh, version, facts.placements, facts.tied)


# ---- in the ranks ----------------------------------------------------------------------------------------


def _fsdp1_rank(rank: int, leaf: Path, model_name: str, mesh: Mesh, options: dict[str, Any]) -> Facts | None:
    model = build_model(model_name, options["dtype"], options["seed"])
    truth, tied = whole_state(model), tied_names(model)
    if rank == 0:
        write_huggingface_dir(model, leaf / "huggingface")
    wrapped = _wrap(model, mesh, options)
    with _state_dict_type(wrapped, options["kind"]):
        state = wrapped.state_dict()
    if options["kind"] == "full":
        if rank == 0:
            check_gathered(state, truth)
            whole = {options["wrapped"]: state} if options["wrapped"] else state
            path, zip_format = leaf / options["full_name"], options["zip_format"]
            torch.save(whole, path, _use_new_zipfile_serialization=zip_format)
    else:
        save_rank(leaf, rank, mesh_size(mesh), state, options["zip_format"])
    if options["kind"] in {"dtensor", "no_shard"}:
        check_gathered(state, truth)
    if options["kind"] == "sharded_tensor":
        _check_sharded_tensors(rank, state, truth)
    placements = {name: str(t.placements) for name, t in state.items() if isinstance(t, DTensor)}
    return Facts(truth, placements, tied) if rank == 0 else None


def _check_sharded_tensors(rank: int, state: dict[str, Any], truth: dict[str, torch.Tensor]) -> None:
    """Raises unless `ShardedTensor.gather` gives the truth back on rank 0."""
    for name, tensor in state.items():
        if isinstance(tensor, ShardedTensor):
            out = torch.empty(tensor.size(), dtype=tensor.dtype) if rank == 0 else None
            if dist.get_process_group_ranks(tensor._process_group)[0] == 0:
                tensor.gather(0, out)
            tensor = out
        assert rank != 0 or torch.equal(tensor, truth[name]), name


def _wrap(model: nn.Module, mesh: Mesh, options: dict[str, Any]) -> FullyShardedDataParallel:
    """The model with each decoder layer as a unit of its own, as verl's wrap policy has it."""
    inner = layers_of(model)
    strategy = STRATEGIES[min(len(mesh), 2)]
    settings: dict[str, Any] = {"device_id": torch.device("cpu")}
    settings["use_orig_params"] = options["use_orig_params"]
    if options["kind"] == "no_shard":
        strategy = ShardingStrategy.NO_SHARD
    if options["kind"] == "dtensor":
        settings["device_mesh"] = device_mesh = open_mesh(mesh)
        if mesh[-1][0] == "tp":
            apply_tensor_parallel(model, device_mesh["tp"])
            data = tuple(name for name, _ in mesh[:-1])
            settings["device_mesh"], strategy = device_mesh[data], STRATEGIES[len(data)]
    elif len(mesh) == 2:
        settings["process_group"] = _hybrid_groups(mesh)
    policy = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in inner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(
            model, sharding_strategy=strategy, auto_wrap_policy=policy, **settings
        )


def _hybrid_groups(mesh: Mesh) -> tuple[Any, Any]:
    """The sharding and the replicating process group of this rank."""
    device_mesh = open_mesh(mesh)
    return device_mesh.get_group(1), device_mesh.get_group(0)


@contextmanager
def _state_dict_type(model: FullyShardedDataParallel, kind: str) -> Iterator[None]:
    """verl's settings of FSDP1's state dict, and those of the other kinds."""
    kinds = {
        "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig()),  # offload_to_cpu fails on a CPU
        "local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(offload_to_cpu=True)),
    }
    sharded = (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True))
    state_type, config = kinds.get(kind, sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(model, state_type, config):
            yield
