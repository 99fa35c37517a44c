"""Checkpoints of torch FSDP2 (`fully_shard`), with hybrid sharding and tensor parallelism, in verl's layout.

A mesh is written `(("ddp", 2), ("fsdp", 2))`. The dimension "tp" is for `parallelize_module`; of the others
the last one shards and one before it, if there is one, replicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.makers.layout import Made, rank_file, verl_leaf, write_huggingface_dir, write_verl_surroundings
from tests.makers.models import build_model, hub_state
from tests.makers.ranks import run_ranks

Mesh = tuple[tuple[str, int], ...]
TP_PLAN = {
    "q_proj": ColwiseParallel,
    "k_proj": ColwiseParallel,
    "v_proj": ColwiseParallel,
    "o_proj": RowwiseParallel,
    "gate_proj": ColwiseParallel,
    "up_proj": ColwiseParallel,
    "down_proj": RowwiseParallel,
    "embed_tokens": RowwiseParallel,
    "lm_head": ColwiseParallel,
}


@dataclass(frozen=True)
class Facts:
    """What rank 0 tells: the whole tensors before sharding, how torch placed them, how the hub has them."""

    truth: dict[str, torch.Tensor]
    placements: dict[str, str]
    tied: tuple[tuple[str, ...], ...]
    saved: dict[str, torch.Tensor] | None = None


def fsdp2(
    root: Path,
    model_name: str = "qwen2",
    mesh: Mesh = (("fsdp", 4),),
    *,
    dtype: torch.dtype = torch.float32,
    shard_rule: str = "verl",
    offload: bool = False,
    zip_format: bool = True,
    step: int = 7,
    role: str = "actor",
    config_file: bool = True,
    remote_code: bool = False,
    seed: int = 0,
) -> Made:
    """A model sharded by `fully_shard`, every rank's `model.state_dict()` in its own file.

    `shard_rule`: "verl" shards the first dimension that the shard count divides, else dimension 0 (uneven);
    "rows" always shards dimension 0, as plain torch does.
    """
    leaf, world_size = verl_leaf(root, step, role), mesh_size(mesh)
    options: dict[str, Any] = {"dtype": dtype, "shard_rule": shard_rule, "offload": offload}
    options |= {"zip_format": zip_format, "seed": seed, "remote_code": remote_code}
    facts = run_ranks(_fsdp2_rank, world_size, leaf, model_name, mesh, options)[0]
    version = 2 if config_file else 0
    write_verl_surroundings(root, leaf, world_size, version)
    return Made(root, leaf, facts.truth, world_size, mesh, version, facts.placements, facts.tied, facts.saved)


def save_rank(leaf: Path, rank: int, world_size: int, state: dict[str, Any], zip_format: bool = True) -> None:
    """Writes one rank's state dict under verl's name."""
    path = rank_file(leaf, world_size, rank)
    torch.save(state, path, _use_new_zipfile_serialization=zip_format)


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a model's state dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The groups of names that belong to one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def mesh_size(mesh: Mesh) -> int:
    """How many ranks it has."""
    size = 1
    for _, length in mesh:
        size *= length
    return size


# ---- in the ranks ----------------------------------------------------------------------------------------


def _fsdp2_rank(rank: int, leaf: Path, model_name: str, mesh: Mesh, options: dict[str, Any]) -> Facts | None:
    model = build_model(model_name, options["dtype"], options["seed"])
    truth, tied = whole_state(model), tied_names(model)
    saved = None
    if rank == 0:
        saved = hub_state(model)
        write_huggingface_dir(model, leaf / "huggingface", remote_code=options["remote_code"])
    device_mesh = open_mesh(mesh)
    apply_fsdp2(model, device_mesh, options["shard_rule"], options["offload"])
    state = model.state_dict()
    save_rank(leaf, rank, device_mesh.size(), state, options["zip_format"])
    check_gathered(state, truth)
    placements = {name: str(t.placements) for name, t in state.items() if isinstance(t, DTensor)}
    return Facts(truth, placements, tied, saved) if rank == 0 else None


def open_mesh(mesh: Mesh) -> DeviceMesh:
    """The mesh on CPU."""
    return init_device_mesh("cpu", tuple(n for _, n in mesh), mesh_dim_names=tuple(name for name, _ in mesh))


def apply_fsdp2(model: nn.Module, mesh: DeviceMesh, shard_rule: str, offload: bool = False) -> None:
    """Tensor parallelism over "tp" if the mesh has it, then `fully_shard` per layer and for the rest."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        apply_tensor_parallel(model, mesh["tp"])
    data_mesh = mesh[tuple(name for name in names if name != "tp")]
    rule = _placement_rule(shard_rule, data_mesh)
    settings: dict[str, Any] = {"mesh": data_mesh, "shard_placement_fn": rule}
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in layers_of(model):
        fully_shard(layer, **settings)
    fully_shard(model, **settings)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Column- and row-wise layers by the names that Llama-like models give them; norms stay plain."""
    plan = {
        name: TP_PLAN[leaf]()
        for name, module in model.named_modules()
        if (leaf := name.rpartition(".")[2]) in TP_PLAN and isinstance(module, nn.Linear | nn.Embedding)
    }
    parallelize_module(model, mesh, plan)


def _placement_rule(shard_rule: str, mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None] | None:
    """The dimension that the rule shards of a parameter, by its whole shape."""
    if shard_rule == "rows":
        return None
    shards = mesh.size(mesh.ndim - 1)

    def first_divisible(parameter: nn.Parameter) -> Shard:
        return Shard(next((i for i, length in enumerate(parameter.shape) if length % shards == 0), 0))

    return first_divisible


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, which are sharded as units."""
    return [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "GPT2Block"))]


def check_gathered(state: dict[str, Any], truth: dict[str, torch.Tensor]) -> None:
    """Raises unless torch's own gathering gives the truth back, name by name."""
    assert list(state) == list(truth), sorted(set(state) ^ set(truth))
    for name, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert whole.dtype == truth[name].dtype, name
        assert torch.equal(whole, truth[name]), name
