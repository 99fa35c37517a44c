"""Any tensors as DTensors on any mesh, one file per rank in verl's layout.

dtensors(root, (("a", 2), ("b", 2)), {
    "plain": tensor,                                        # whole on every rank
    "rows": (tensor, (Shard(0), Replicate())),              # distribute_tensor
    "b first": Placed(tensor, (Shard(0), Shard(0)), order={0: (1, 0)}),
    "sum": Placed(integers, (Partial(), Shard(1))),         # what the ranks hold adds up to `integers`
    "sub-mesh": Placed(tensor, (Shard(0),), mesh=("b",)),
    "own mesh": Placed(tensor, (Shard(0), Shard(1)), mesh=Grid(((0, 2), (1, 3)), ("x", "y"))),
    "differs": PerRank((t0, t1, t2, t3)),                   # plain, and not the same everywhere
    "explicit": Local((t0, t1, t2, t3), (Shard(0), Shard(0)), torch.Size([8, 2])),
})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from tests.makers import fsdp
from tests.makers.fsdp import Mesh
from tests.makers.layout import Made, rank_file, verl_leaf, write_huggingface_dir, write_verl_surroundings
from tests.makers.ranks import run_ranks


@dataclass(frozen=True)
class Grid:
    """A mesh by its ranks, nested as deep as it has names; ranks that are left out hold nothing.

    Ranks rise along each dimension: torch sorts them in a process group, so that of other meshes it
    gathers something else than it has distributed.
    """

    ranks: Any
    names: tuple[str, ...]


@dataclass(frozen=True)
class Placed:
    """A whole tensor and how the ranks are to hold it."""

    whole: torch.Tensor
    placements: tuple[Placement, ...]
    order: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # dim: mesh dims, first cut first
    mesh: tuple[str, ...] | Grid | None = None  # a sub-mesh by names, or a mesh of its own
    flatten: bool = False  # the sub-mesh as one dimension, as torchtitan's dp_shard x cp
    view: bool = False  # the shard is a view of the whole tensor: a bigger storage, strides, an offset
    requires_grad: bool = False


@dataclass(frozen=True)
class Local:
    """What each rank holds, taken as it is (`DTensor.from_local` without checks), and the shape to claim."""

    locals: tuple[torch.Tensor, ...]
    placements: tuple[Placement, ...]
    shape: torch.Size
    whole: torch.Tensor | None = None  # the truth, where there is one


@dataclass(frozen=True)
class PerRank:
    """A plain tensor for each rank; the truth is rank 0's."""

    tensors: tuple[torch.Tensor, ...]


Entry = torch.Tensor | Placed | Local | PerRank | tuple[torch.Tensor, tuple[Placement, ...]]


def dtensors(
    root: Path,
    mesh: Mesh | Grid,
    entries: Mapping[str, Entry],
    *,
    zip_format: bool = True,
    fsdp_version: int = 2,
    step: int = 7,
    role: str = "actor",
) -> Made:
    """A checkpoint of these tensors in this order; `truth` has every one that has a whole value."""
    leaf = verl_leaf(root, step, role)
    world_size = prod(n for _, n in mesh) if isinstance(mesh, tuple) else torch.tensor(mesh.ranks).numel()
    placements = run_ranks(_dtensor_rank, world_size, leaf, mesh, dict(entries), zip_format)[0]
    write_verl_surroundings(root, leaf, world_size, fsdp_version)
    write_huggingface_dir(None, leaf / "huggingface")
    whole = {name: _truth(entry) for name, entry in entries.items()}
    truth = {name: tensor for name, tensor in whole.items() if tensor is not None}
    dims = mesh if isinstance(mesh, tuple) else ()
    return Made(root, leaf, truth, world_size, dims, fsdp_version, placements)


def _truth(entry: Entry) -> torch.Tensor | None:
    match entry:
        case torch.Tensor():
            return entry
        case Placed() | Local():
            return entry.whole
        case PerRank():
            return entry.tensors[0]
        case whole, _:
            return whole


# ---- in the ranks ----------------------------------------------------------------------------------------


def _dtensor_rank(
    rank: int, leaf: Path, mesh: Mesh | Grid, entries: dict[str, Entry], zip_format: bool
) -> dict[str, str]:
    root_mesh = open_mesh(mesh)
    state = {name: _make(entry, root_mesh, rank) for name, entry in entries.items()}
    path = rank_file(leaf, torch.distributed.get_world_size(), rank)
    torch.save(state, path, _use_new_zipfile_serialization=zip_format)
    return {name: str(t.placements) for name, t in state.items() if isinstance(t, DTensor)}


def open_mesh(mesh: Mesh | Grid) -> DeviceMesh:
    """The mesh on CPU."""
    if isinstance(mesh, Grid):
        return DeviceMesh("cpu", torch.tensor(mesh.ranks), mesh_dim_names=mesh.names)
    return fsdp.open_mesh(mesh)


def _make(entry: Entry, root_mesh: DeviceMesh, rank: int) -> torch.Tensor:
    match entry:
        case torch.Tensor():
            return entry
        case PerRank():
            return entry.tensors[rank]
        case Local():
            shape, stride = entry.shape, torch.empty(entry.shape, device="meta").stride()
            local = entry.locals[rank]
            return DTensor.from_local(
                local, root_mesh, entry.placements, run_check=False, shape=shape, stride=stride
            )
        case Placed():
            return _place(entry, _mesh_of(entry, root_mesh))
        case whole, placements:
            return _place(Placed(whole, placements), root_mesh)


def _mesh_of(entry: Placed, root_mesh: DeviceMesh) -> DeviceMesh:
    if isinstance(entry.mesh, Grid):
        return open_mesh(entry.mesh)
    sub_mesh = root_mesh[entry.mesh] if entry.mesh else root_mesh
    return sub_mesh._flatten() if entry.flatten else sub_mesh


def _place(entry: Placed, mesh: DeviceMesh) -> DTensor:
    """The entry's DTensor, which torch itself gathers to the whole tensor again."""
    own = _part_of_sum(entry, mesh)
    spec = _spec(entry, mesh, entry.placements)
    outside = mesh.get_coordinate() is None
    local = entry.whole.new_empty(0) if outside else _cut(own, entry, mesh)
    start = local.contiguous().clone() if entry.view else local
    made = DTensor(start, spec, requires_grad=entry.requires_grad)
    made._local_tensor = local  # torch 2.13 cannot pickle a DTensor that was made of a tensor with an offset
    if not outside and _can_gather(entry):
        assert torch.equal(made.full_tensor(), entry.whole), f"torch gathers something else: {entry}"
    return made


def _spec(entry: Placed, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensorSpec:
    meta = TensorMeta(entry.whole.shape, entry.whole.stride(), entry.whole.dtype)
    order = None
    if entry.order:
        order = tuple(ShardOrderEntry(dim, tuple(cuts)) for dim, cuts in sorted(entry.order.items()))
    return DTensorSpec(mesh, placements, meta, shard_order=order)  # type: ignore[arg-type]


def _cut(own: torch.Tensor, entry: Placed, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's shard of the value that it would hold if nothing were sharded."""
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in entry.placements)
    if entry.view:
        return _view(own, entry, mesh)
    if entry.order:
        whole = _spec(Placed(own, ()), mesh, tuple(Replicate() for _ in placements))
        return redistribute_local_tensor(own, whole, _spec(entry, mesh, placements)).clone()
    return distribute_tensor(own, mesh, placements, src_data_rank=None).to_local()


def _view(own: torch.Tensor, entry: Placed, mesh: DeviceMesh) -> torch.Tensor:
    """The shard as `torch.chunk` leaves it."""
    coordinate, own = mesh.get_coordinate(), own.clone()
    assert coordinate is not None
    cuts = dict(entry.order) or DTensorSpec.compute_default_shard_order(entry.placements)
    for dim, mesh_dims in cuts.items() if isinstance(cuts, dict) else cuts:
        for mesh_dim in mesh_dims:
            chunks = own.chunk(mesh.size(mesh_dim), dim)
            at = coordinate[mesh_dim]
            own = chunks[at] if at < len(chunks) else own.narrow(dim, own.shape[dim], 0)
    return own


def _part_of_sum(entry: Placed, mesh: DeviceMesh) -> torch.Tensor:
    """For each `Partial`, values that differ by rank and that its reduction turns into the whole, exactly
    so for integers; the whole where nothing is partial.
    """
    value, coordinate = entry.whole, mesh.get_coordinate()
    for mesh_dim, placement in enumerate(entry.placements):
        if isinstance(placement, Partial) and coordinate is not None:
            value = _term(value, placement.reduce_op, coordinate[mesh_dim], mesh.size(mesh_dim))
    return value


def _term(value: torch.Tensor, operation: str, at: int, count: int) -> torch.Tensor:
    noise = [torch.full_like(value, 3 + i) for i in range(count)]
    total = sum(noise[1:], torch.zeros_like(value))
    match operation:
        case "sum":
            return value - total if at == 0 else noise[at]
        case "avg":
            return value - total if at == 0 else value + noise[at]
        case "max":
            return value if at == count - 1 else value - noise[at]
        case "min":
            return value if at == count - 1 else value + noise[at]
    raise ValueError(f"no terms for {operation}")


def _can_gather(entry: Placed) -> bool:
    """Gloo moves neither float8 nor unsigned 16-bit and wider, and of uneven shards that are not contiguous
    torch 2.13 gathers something else than they hold.
    """
    return entry.whole.is_contiguous() and entry.whole.dtype in {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.int32,
    }
