"""The entries of a rank's state dict: plain tensors, DTensors and ShardedTensors, from inert records.

The classes are known by their last name, since their modules have moved between releases
(torch.distributed._tensor.api.DTensor up to 2.4, torch.distributed.tensor.DTensor since 2.5), and
state keys that are not known are ignored. See shared/formats/fsdp-dcp.md, sections 2 and 3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from lazymerge.errors import DamagedFile, UnsupportedCheckpoint
from lazymerge.files.inert_pickle import Global, Record
from lazymerge.files.region import Region
from lazymerge.files.torch_file import StoredTensor
from lazymerge.formats.placement import Layout, Partial, Placement, Replicate, Shard
from lazymerge.gather import Box, Piece, Shape

MAX_MESH = 1 << 20
"""Ranks of the largest mesh that is believed."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor that is whole in this file."""

    region: Region


@dataclass(frozen=True, slots=True)
class Distributed:
    """A DTensor: this rank's local tensor, and how the whole is spread over the mesh.

    `old` is whether torch 2.4 or older wrote it, whose FSDP2 left the order of cuts out.
    `names` are those of the mesh dimensions, where it has any; `ranks` the mesh's ranks, row-major.
    """

    layout: Layout
    coordinate: Shape
    region: Region
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    old: bool = False


@dataclass(frozen=True, slots=True)
class Sharded:
    """A ShardedTensor: the boxes that this rank holds, and those that anybody holds."""

    shape: Shape
    pieces: tuple[Piece, ...]
    boxes: frozenset[Box]


Entry = Plain | Distributed | Sharded


class EntryReader:
    """Reads the entries of one checkpoint's files; what ranks have in common is kept once."""

    def __init__(self) -> None:
        self._interned: dict[Any, Any] = {}
        self._meshes: dict[int, tuple[Record, Mesh]] = {}

    def read(self, file: str, rank: int, name: str, value: object) -> Entry | None:
        """The entry of a name; None for what is no tensor. `UnsupportedCheckpoint` for other tensors."""
        if isinstance(value, StoredTensor):
            return Plain(self._region(value))
        if not isinstance(value, Record):
            return None
        kind = _tensor_class(value)
        if kind == "DTensor":
            return self._distributed(file, rank, name, value)
        if kind == "ShardedTensor":
            return self._sharded(file, name, value)
        if kind is not None:
            raise UnsupportedCheckpoint(
                f"{name} in {file} is a {kind}, which is no plain tensor, DTensor or ShardedTensor",
                "leave it out with --exclude, or save the checkpoint with plain tensors",
            )
        return None

    def forget_meshes(self) -> None:
        """To be called between files: meshes are recognised by their record, which goes with its file."""
        self._meshes.clear()

    def _region(self, tensor: StoredTensor) -> Region:
        region = tensor.region()
        shape, strides = self._once(region.shape), self._once(region.strides)
        return Region(region.source, region.offset, region.dtype, shape, strides)

    def _once(self, value: Any) -> Any:
        return self._interned.setdefault(value, value)

    def _distributed(self, file: str, rank: int, name: str, record: Record) -> Distributed:
        state = _state(record)
        local, spec = state.get("_local_tensor"), state.get("_spec")
        if not isinstance(local, StoredTensor) or not isinstance(spec, Record):
            raise _odd(file, name, "a DTensor without a local tensor and a spec")
        attrs = spec.attrs()
        mesh_record = attrs.get("mesh", attrs.get("device_mesh"))
        if not isinstance(mesh_record, Record):
            raise _odd(file, name, "a DTensor without a device mesh")
        cached = self._meshes.get(id(mesh_record))
        if cached is None:
            cached = self._meshes[id(mesh_record)] = (mesh_record, read_mesh(file, name, rank, mesh_record))
        mesh = cached[1]
        placements = attrs.get("placements")
        if not isinstance(placements, tuple) or len(placements) != len(mesh.shape):
            raise _odd(
                file, name, f"a DTensor with placements that do not match its mesh of shape {mesh.shape}"
            )
        shape = _global_shape(file, name, record, attrs)
        layout = Layout(
            self._once(shape),
            mesh.shape,
            self._once(tuple(_placement(file, name, p, len(shape)) for p in placements)),
            _shard_order(attrs.get("shard_order"), len(shape), len(mesh.shape)),
        )
        old = "._tensor." in f"{record.args[1]}."
        region = self._region(local)
        return Distributed(self._once(layout), mesh.coordinate, region, mesh.names, mesh.ranks, old)

    def _sharded(self, file: str, name: str, record: Record) -> Sharded:
        state = record.args[3]
        if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[1], Record):
            raise _odd(file, name, "a ShardedTensor without shards and metadata")
        metadata = state[1].attrs()
        shape = metadata.get("size")
        described = metadata.get("shards_metadata")
        if not is_shape(shape) or not isinstance(described, list) or not isinstance(state[0], list):
            raise _odd(file, name, "a ShardedTensor without shards and metadata")
        pieces = []
        for shard in state[0]:
            attrs = shard.attrs() if isinstance(shard, Record) else {}
            tensor, box = attrs.get("tensor"), _box(attrs.get("metadata"), len(shape))
            if not isinstance(tensor, StoredTensor) or box is None or tensor.shape != box.shape:
                raise _odd(file, name, "a ShardedTensor with a shard that is not what its metadata says")
            pieces.append(Piece(box.start, self._region(tensor)))
        boxes = [_box(shard, len(shape)) for shard in described]
        if None in boxes:
            raise _odd(file, name, "a ShardedTensor with damaged metadata")
        return Sharded(shape, tuple(pieces), self._once(frozenset(box for box in boxes if box is not None)))


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh as this rank sees it: `ranks` are row-major, and empty where they are not recorded."""

    shape: Shape
    coordinate: Shape
    names: tuple[str, ...]
    ranks: tuple[int, ...]


def read_mesh(file: str, name: str, rank: int, record: Record) -> Mesh:
    """The mesh of any release of torch: its shape, and where this rank stands in it."""
    attrs = record.attrs()
    names = attrs.get("mesh_dim_names", attrs.get("_mesh_dim_names"))
    names = names if isinstance(names, tuple) and all(isinstance(n, str) for n in names) else ()
    ranks: tuple[int, ...] = ()
    if isinstance(mesh := attrs.get("mesh", attrs.get("_mesh")), StoredTensor):  # up to 2.9
        shape = mesh.shape
        ranks = _integers(file, name, mesh)
    else:  # since 2.10; a sub-mesh has its own layout and its root's rank map
        axes = _layout_axes(attrs.get("_layout"))
        if axes is None:
            raise _odd(file, name, "a device mesh of an unknown form")
        shape = tuple(size for size, _ in axes)
        rank_map = attrs.get("_rank_map")
        if isinstance(rank_map, StoredTensor) and axes:
            ranks = _sub_ranks(_integers(file, name, rank_map), axes, rank)
    size = 1
    for n in shape:
        size *= n
    if not 0 < size <= MAX_MESH:
        raise _odd(file, name, f"a device mesh of shape {shape}")
    coordinate = attrs.get("_coordinate_on_dim")
    if isinstance(coordinate, (list, tuple)):
        coordinate = tuple(coordinate)
    elif rank in ranks:
        coordinate = _unravel(ranks.index(rank), shape)
    else:
        raise UnsupportedCheckpoint(
            f"{name} in {file}: rank {rank} is not on the device mesh of its own DTensor ({shape})",
            "its values are on other ranks; leave it out with --exclude if it is not wanted",
        )
    inside = len(coordinate) == len(shape) and all(
        isinstance(at, int) and 0 <= at < n for at, n in zip(coordinate, shape, strict=False)
    )
    if not inside:
        raise _odd(file, name, f"a coordinate {coordinate} outside its mesh of shape {shape}")
    return Mesh(shape, coordinate, names, ranks)


def _layout_axes(layout: object) -> list[tuple[int, int]] | None:
    """(size, stride) of each dimension of a ``_MeshLayout``: shape and stride up to 2.12, axes in 2.13."""
    if not isinstance(layout, Record):
        return None
    attrs = layout.attrs()
    if isinstance(axes := attrs.get("axes"), tuple):
        found = [_flat_axis(axis) for axis in axes]
        return None if None in found else [axis for axis in found if axis is not None]
    shape, stride = attrs.get("shape"), attrs.get("stride")
    if isinstance(shape, int) and isinstance(stride, int):
        return [(shape, stride)]
    if is_shape(shape) and is_shape(stride) and len(shape) == len(stride):
        return list(zip(shape, stride, strict=True))
    return None


def _flat_axis(axis: object) -> tuple[int, int] | None:
    """One dimension of a mesh: a flattened one has several sizes, whose product it is (its last stride)."""
    attrs = axis.attrs() if isinstance(axis, Record) else {}
    shape, stride = attrs.get("shape"), attrs.get("stride")
    shape = (shape,) if isinstance(shape, int) else shape
    stride = (stride,) if isinstance(stride, int) else stride
    if not is_shape(shape) or not is_shape(stride) or len(shape) != len(stride):
        return None
    size = 1
    for n in shape:
        size *= n
    return size, stride[-1] if stride else 1


def _sub_ranks(root: tuple[int, ...], axes: list[tuple[int, int]], rank: int) -> tuple[int, ...]:
    """The ranks of the slice that holds `rank`, of a mesh with `axes` in its root's flat rank map."""
    offsets = [0]
    for size, stride in axes:
        offsets = [at + i * stride for at in offsets for i in range(min(size, MAX_MESH))]
        if len(offsets) > MAX_MESH:
            return ()
    if rank not in root:
        return ()
    for base in range(len(root)):
        ranks = tuple(root[base + at] for at in offsets if base + at < len(root))
        if len(ranks) == len(offsets) and rank in ranks:
            return ranks
    return ()


def _unravel(index: int, shape: Shape) -> Shape:
    coordinate = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        coordinate.append(at)
    return tuple(reversed(coordinate))


def _integers(file: str, name: str, tensor: StoredTensor) -> tuple[int, ...]:
    """The elements of a small integer tensor, read from the file."""
    region = tensor.region()
    code = {"int32": "i", "int64": "q"}.get(region.dtype.name)
    count = 1
    for n in region.shape:
        count *= n
    if code is None or count > MAX_MESH or region.extent > MAX_MESH * 8:
        raise _odd(file, name, f"a device mesh of shape {region.shape} and dtype {region.dtype}")
    if not count:
        return ()
    raw = tensor.storage.file.read(region.offset, region.extent)
    flat = struct.unpack(f"<{len(raw) // region.dtype.itemsize}{code}", raw)
    return tuple(flat[at] for at in _offsets(region.shape, region.strides))


def _offsets(shape: Shape, strides: Shape) -> Iterator[int]:
    offsets = [0]
    for size, stride in zip(shape, strides, strict=True):
        offsets = [at + i * stride for at in offsets for i in range(size)]
    return iter(offsets)


def _tensor_class(record: Record) -> str | None:
    """The last name of the tensor class that a record rebuilds; None if it is no tensor."""
    function = record.cls.name if isinstance(record.cls, Global) else ""
    if (
        function.startswith("_rebuild_from_type")
        and len(record.args) == 4
        and isinstance(record.args[1], Global)
    ):
        return record.args[1].name.rpartition(".")[2]
    return function if function.startswith("_rebuild_") else None


def _state(record: Record) -> dict[str, Any]:
    state = record.args[3]
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        return state[1]
    return state if isinstance(state, dict) else {}


def _global_shape(file: str, name: str, record: Record, spec: dict[str, Any]) -> Shape:
    """The shape that the wrapper and the spec's tensor_meta record; they have to agree."""
    inner = record.args[2]
    shape = inner[2] if isinstance(inner, tuple) and len(inner) > 2 else None
    meta = spec.get("tensor_meta")
    if isinstance(meta, Record):
        recorded = meta.args[0] if meta.args else meta.attrs().get("shape")
        if is_shape(recorded) and is_shape(shape) and recorded != shape:
            raise _odd(file, name, f"a DTensor of shape {shape} whose spec says {recorded}")
    if not is_shape(shape):
        raise _odd(file, name, "a DTensor without a shape")
    return shape


def _placement(file: str, name: str, record: object, rank: int) -> Placement:
    kind = record.cls.name if isinstance(record, Record) and isinstance(record.cls, Global) else ""
    attrs = record.attrs() if isinstance(record, Record) else {}
    if kind in {"Shard", "_StridedShard"}:
        dim = attrs.get("dim")
        factor = attrs.get("split_factor") if kind == "_StridedShard" else None
        if (
            not isinstance(dim, int)
            or not -rank <= dim < rank
            or (kind != "Shard" and not isinstance(factor, int))
        ):
            raise _odd(file, name, f"a DTensor of {rank} dimensions that is cut along dimension {dim}")
        return Shard(dim % rank, factor)
    if kind == "Replicate":
        return Replicate()
    if kind in {"Partial", "_Partial"}:
        operation = attrs.get("reduce_op", "sum")
        if isinstance(operation, Record):  # 2.1 pickled torch.distributed.ReduceOp.RedOpType
            operation = "sum"
        return Partial(str(operation))
    raise UnsupportedCheckpoint(
        f"{name} in {file}: unknown placement {kind or type(record).__name__}",
        "it was written by a newer torch or a plugin; report it with the versions that wrote it",
    )


def _shard_order(order: object, rank: int, mesh_rank: int) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """(tensor dimension, mesh dimensions) pairs of a spec's shard_order; None before 2.10."""
    if not isinstance(order, tuple) or not order:
        return None
    entries = []
    for entry in order:
        attrs = entry.attrs() if isinstance(entry, Record) else {}
        args = entry.args if isinstance(entry, Record) else ()
        dim = attrs.get("tensor_dim", args[0] if args else None)
        mesh_dims = attrs.get("mesh_dims", args[1] if len(args) > 1 else None)
        if not isinstance(dim, int) or not is_shape(mesh_dims):
            return None
        entries.append((dim % max(rank, 1), mesh_dims))
    return tuple(entries)


def _box(metadata: object, rank: int) -> Box | None:
    attrs = metadata.attrs() if isinstance(metadata, Record) else {}
    start, shape = attrs.get("shard_offsets"), attrs.get("shard_sizes")
    if not isinstance(start, (list, tuple)) or not isinstance(shape, (list, tuple)):
        return None
    box = Box(tuple(start), tuple(shape))
    return (
        box
        if is_shape(box.start) and is_shape(box.shape) and len(box.start) == len(box.shape) == rank
        else None
    )


def is_shape(value: object) -> TypeGuard[Shape]:
    """Whether a value is a tuple of numbers that are not negative."""
    return isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)


def _odd(file: str, name: str, what: str) -> DamagedFile:
    return DamagedFile(
        f"{name} in {file}: {what}", "the file is damaged, or written by something unknown; report it"
    )
