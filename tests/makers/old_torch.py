"""A rank file of torch 2.13 rewritten as an earlier release would have written it.

No older torch is at hand here, so the objects that carry layout are replaced by stand-ins with the module
paths and the state of the release, as its source writes them (the table below), and pickled by torch.save
with a pickler that writes those paths. Tensors, storages and the container stay torch's own, but for two
records that came with 2.7.

| release | what changed in it |
|---|---|
| 2.1 | `torch.distributed._tensor`; the mesh there too; tensor_meta is fx's TensorMetadata |
| 2.2 | the mesh in `torch.distributed.device_mesh`; TensorMeta |
| 2.4 | group infos have a name; FSDP2 over TP is plain `[Shard(0), Shard(0)]` |
| 2.5 | `torch.distributed.tensor`; `_StridedShard` |
| 2.8 | group names in place of group infos |
| 2.10 | shard_order; the mesh as `_layout` with `shape` and `stride` |
| 2.11 | use_strided_shard_as_shard_order; `_rank` in the mesh |
| 2.13 | the layout as `axes`: the input |
"""

from __future__ import annotations

import copy
import pickle
import struct
import types
import zipfile
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.makers.layout import Made, copy_of

Release = tuple[int, int]
VERSIONS = ("2.1", "2.2", "2.4", "2.5", "2.7", "2.9", "2.10", "2.12")
NEWER_RECORDS = (".format_version", ".storage_alignment")  # since 2.7


def old_checkpoint(made: Made, root: Path, version: str, **options: Any) -> Made:
    """The same checkpoint in another root, all of its rank files as that torch release wrote them."""
    old = copy_of(made, root)
    for rank in range(made.world_size):
        old_torch(made.rank_file(rank), old.rank_file(rank), version, **options)
    if release_of(version) < (2, 5):
        placements = {name: _plain(text) for name, text in made.placements.items()}
        old = replace(old, placements=placements)
    return old


def old_torch(
    path_in: Path,
    path_out: Path,
    version: str,
    *,
    zip_format: bool = True,
    python: Release = (3, 11),
    cuda: int | None = None,
) -> None:
    """Rewrites one rank file. `python` below 3.11 has another state of objects with slots; `cuda`: as if
    saved from that GPU (the storages' location, the DTensors' device, the mesh's kind), which is the use of
    version 2.13 here.
    """
    release = release_of(version)
    state = torch.load(path_in, weights_only=False)
    old = copy.copy(state)  # with the `_metadata` that a state dict carries
    translate = _Translation(release, python, cuda)
    for name, value in state.items():
        old[name] = translate.tensor(value) if isinstance(value, DTensor) else value
    location = None if cuda is None else f"cuda:{cuda}"
    torch.save(old, path_out, pickle_module=_pickle(location), _use_new_zipfile_serialization=zip_format)
    if zip_format and release < (2, 7):
        _drop_records(path_out, NEWER_RECORDS)


def release_of(version: str) -> Release:
    """(2, 12) of "2.12"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _plain(placements: str) -> str:
    """What torch prints, without strided shards."""
    return placements.replace("_StridedShard", "Shard").replace(", sf=2", "")


# ---- stand-ins: objects of no behaviour that pickle under another name ------------------------------------


class _Pickler(pickle._Pickler):  # the one written in Python, whose steps can be replaced
    """A pickler that writes stand-in classes by the names they stand for, and storages elsewhere."""

    location: str | None = None

    def save_pers(self, pid: Any) -> None:
        """A storage's id: ("storage", type, key, location, size) and more in the legacy container."""
        super().save_pers((*pid[:3], self.location or pid[3], *pid[4:]))

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if pickled_as := getattr(obj, "pickled_as", None):
            module, qualified = pickled_as
            self.write(pickle.GLOBAL + f"{module}\n{qualified}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def _pickle(location: str | None) -> Any:
    """What torch.save takes for the module `pickle`."""
    pickler = type("_Pickler", (_Pickler,), {"location": location})
    return types.SimpleNamespace(__name__="pickle", Pickler=pickler, dump=pickle.dump)


@cache
def _class(module: str, name: str, always_state: bool = False) -> type:
    """A class of that name; `always_state`: an empty state is pickled too, as pybind11's classes do."""
    contents: dict[str, Any] = {"pickled_as": (module, name)}
    if always_state:
        contents["__getstate__"] = lambda self: vars(self)
    return type(name, (), contents)


@cache
def _tuple_class(module: str, name: str, fields: str) -> Callable[..., Any]:
    made = namedtuple(name, fields)
    made.pickled_as = (module, name)  # type: ignore[attr-defined]
    return made


def _object(module: str, name: str, **state: Any) -> Any:
    """An instance with that state, pickled as NEWOBJ and BUILD."""
    made = _class(module, name)()
    vars(made).update(state)
    return made


class _OldDTensor:
    """Pickles as a tensor subclass of wrapper kind does."""

    def __init__(self, cls: type, tensor: DTensor, spec: Any, device: torch.device, python: Release) -> None:
        self.cls, self.tensor, self.spec, self.device, self.python = cls, tensor, spec, device, python

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        t = self.tensor
        size, stride = tuple(t.size()), t.stride()
        device = torch.device(str(self.device))  # a new object for each tensor, as `tensor.device` is
        args = (self.cls, t.dtype, size, stride, 0, t.layout, device, t.requires_grad)
        slots = {"_local_tensor": t._local_tensor, "_spec": self.spec}
        state = (None if self.python >= (3, 11) else {}, slots)
        rebuild = torch._utils._rebuild_wrapper_subclass
        return torch._tensor._rebuild_from_type_v2, (rebuild, self.cls, args, state)


# ---- the layouts ------------------------------------------------------------------------------------------


class _Translation:
    """Objects of torch 2.13 to those of a release; what was one object stays one."""

    def __init__(self, release: Release, python: Release, cuda: int | None) -> None:
        self.release, self.python = release, python
        self.device = torch.device("cpu") if cuda is None else torch.device("cuda", cuda)
        self.specs: dict[int, Any] = {}
        self.meshes: dict[int, Any] = {}
        old = release < (2, 5)
        self.package = "torch.distributed._tensor" if old else "torch.distributed.tensor"
        self.spec_module = f"{self.package}.placement_types" if old else f"{self.package}._dtensor_spec"

    def tensor(self, tensor: DTensor) -> _OldDTensor:
        module = f"{self.package}.api" if self.release < (2, 5) else self.package
        cls, spec = _class(module, "DTensor"), self.spec(tensor._spec)
        return _OldDTensor(cls, tensor, spec, self.device, self.python)

    def spec(self, spec: Any) -> Any:
        if id(spec) not in self.specs:
            self.specs[id(spec)] = self._new_spec(spec)
        return self.specs[id(spec)]

    def _new_spec(self, spec: Any) -> Any:
        state = {
            "mesh": self.mesh(spec.mesh),
            "placements": tuple(self.placement(p) for p in spec.placements),
            "tensor_meta": self.tensor_meta(spec.tensor_meta),
        }
        if self.release >= (2, 10):
            state["shard_order"] = self.shard_order(spec)
        if self.release >= (2, 11):
            state["use_strided_shard_as_shard_order"] = spec.use_strided_shard_as_shard_order
        if self.release >= (2, 2):
            state["_hash"] = None
        return _object(self.spec_module, "DTensorSpec", **state)

    def shard_order(self, spec: Any) -> Any:
        """2.10 kept an order, left to right, beside strided shards also."""
        entries = spec.shard_order or ()
        if self.release == (2, 10) and not entries:
            entries = type(spec).compute_default_shard_order(spec.placements)
        entry_class = _tuple_class(self.spec_module, "ShardOrderEntry", "tensor_dim mesh_dims")
        return tuple(entry_class(*entry) for entry in entries) if entries else spec.shard_order

    def placement(self, placement: Any) -> Any:
        name, state = type(placement).__name__, placement.__reduce_ex__(2)[2] or {}
        if self.release < (2, 5) and name == "_StridedShard":  # 2.4.1, fsdp_param: it had no other word
            name, state = "Shard", {"dim": placement.dim}
        if self.release < (2, 4) and name == "Partial":
            raise NotImplementedError("before 2.4 a Partial held an enumeration of c10d")
        made = _class(f"{self.package}.placement_types", name, self.release >= (2, 10))()  # C++ since 2.10
        vars(made).update(state)
        return made

    def tensor_meta(self, meta: Any) -> Any:
        if self.release < (2, 2):
            fields = "shape dtype requires_grad stride memory_format is_quantized qparams"
            cls = _tuple_class("torch.fx.passes.shape_prop", "TensorMetadata", fields)
            return cls(meta.shape, meta.dtype, False, meta.stride, None, False, {})
        return _tuple_class(self.spec_module, "TensorMeta", "shape stride dtype")(*meta)

    def mesh(self, mesh: Any) -> Any:
        if id(mesh) not in self.meshes:
            module = "torch.distributed.device_mesh"
            if self.release < (2, 2):
                module = "torch.distributed._tensor.device_mesh"
            state = self._layout_state(mesh) if self.release >= (2, 10) else self._ranks_state(mesh)
            self.meshes[id(mesh)] = _object(module, "DeviceMesh", **state)
        return self.meshes[id(mesh)]

    def _ranks_state(self, mesh: Any) -> dict[str, Any]:
        """Up to 2.9: the ranks of this very mesh as a tensor, which is a storage of the file."""
        ranks, names = mesh_ranks(mesh), vars(mesh)["_mesh_dim_names"]
        state: dict[str, Any] = {"device_type": self.device.type, "mesh": ranks, "mesh_dim_names": names}
        if self.release >= (2, 2):
            state["_flatten_mesh_list"] = tuple(ranks.flatten().tolist())
        if self.release[1] == 4:
            state["_parent_mesh"] = None
        if self.release >= (2, 4):
            state["_thread_id"] = 140735
        state["_coordinate_on_dim"] = vars(mesh)["_coordinate_on_dim"]
        if self.release >= (2, 8):
            state["_dim_group_names"] = [str(i) for i in range(ranks.ndim)]
        else:
            state["_dim_group_infos"] = self._group_infos(mesh, ranks)
        if self.release >= (2, 2):
            state["_hash"] = None
        return state

    def _group_infos(self, mesh: Any, ranks: torch.Tensor) -> list[tuple[Any, ...]]:
        """For each dimension: tag, the ranks of this rank's line, and since 2.4 the group's name."""
        infos: list[tuple[Any, ...]] = []
        coordinate = vars(mesh)["_coordinate_on_dim"] or ()
        for dim in range(len(coordinate)):
            line = ranks[tuple(slice(None) if i == dim else at for i, at in enumerate(coordinate))]
            info = (f"ptd:{dim}", line.tolist())
            infos.append((*info, str(dim)) if self.release >= (2, 4) else info)
        return infos

    def _layout_state(self, mesh: Any) -> dict[str, Any]:
        """From 2.10 on: as now, but until 2.12 for the layout and until 2.10 for the rank."""
        state = dict(vars(mesh))
        state.pop("_pg_registry", None)  # loading it made that
        state["_device_type"] = self.device.type
        if state.get("_root_mesh") is not None:
            state["_root_mesh"] = self.mesh(state["_root_mesh"])
        if self.release >= (2, 13):
            return state
        if self.release < (2, 11):
            state.pop("_rank", None)
        shape = tuple(_one_or_tuple(lengths, 1) for lengths, _ in mesh_axes(mesh))
        stride = tuple(_one_or_tuple(strides, 1) for _, strides in mesh_axes(mesh))
        module = "torch.distributed._mesh_layout"
        one = len(shape) == 1 and isinstance(shape[0], int)
        layout = {"shape": shape[0] if one else shape, "stride": stride[0] if one else stride}
        state["_layout"] = _object(module, "_MeshLayout", **layout)
        return state


def _one_or_tuple(values: tuple[int, ...], default: int) -> Any:
    """The layout of 2.10: a number for a plain dimension, a tuple for a flattened one."""
    return values if len(values) > 1 else (*values, default)[0]


def mesh_axes(mesh: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each dimension its lengths and strides in the root's rank map: none for a dimension of size 1,
    several for one that was flattened out of dimensions that are not neighbours.
    """
    return [(axis.shape, axis.stride) for axis in vars(mesh)["_layout"].axes]


def mesh_shape(mesh: Any) -> tuple[int, ...]:
    """The size of each dimension."""
    return tuple(prod(lengths) for lengths, _ in mesh_axes(mesh))


def mesh_ranks(mesh: Any) -> torch.Tensor:
    """The ranks of the mesh that the file's rank belongs to: of a sub-mesh, its own slice."""
    state = vars(mesh)
    rank_map, steps = state["_rank_map"].flatten().tolist(), [_offsets(*axis) for axis in mesh_axes(mesh)]
    base, coordinate = 0, state["_coordinate_on_dim"]
    if coordinate is not None:
        own = sum(offsets[at] for at, offsets in zip(coordinate, steps, strict=True))
        base = rank_map.index(state["_rank"]) - own
    ranks = [rank_map[base + sum(offsets)] for offsets in product(*steps)]
    return torch.tensor(ranks, dtype=torch.int32).reshape(mesh_shape(mesh))


def _offsets(lengths: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Where along the rank map the places of one dimension lie."""
    places = product(*map(range, lengths))
    return [sum(at * stride for at, stride in zip(place, strides, strict=True)) for place in places]


# ---- the container ----------------------------------------------------------------------------------------


def _drop_records(path: Path, names: tuple[str, ...]) -> None:
    """Writes the archive anew without some records, the data of the others at multiples of 64 as before."""
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records:
            if not name.endswith(names):
                info = zipfile.ZipInfo(name)
                start = archive.fp.tell() + 30 + len(name) + 4  # type: ignore[union-attr]
                padding = -start % 64
                info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
                archive.writestr(info, data)
