"""The entries of a rank's state dict: plain tensors, DTensors and ShardedTensors, from inert records.

The classes are known by their last name, since their modules have moved between releases
(torch.distributed._tensor.api.DTensor up to 2.4, torch.distributed.tensor.DTensor since 2.5), and
state keys that are not known are ignored. Read off files of torch 2.13 and the sources of 2.1 to 2.12.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from lazymerge.boxes import Box, Piece, Shape
from lazymerge.errors import DamagedFile, UnsupportedCheckpoint
from lazymerge.files.dtype import DType
from lazymerge.files.inert_pickle import Global, Record
from lazymerge.files.region import Region
from lazymerge.files.stored_tensor import MAX_DIMS, refuse_unresolved
from lazymerge.files.torch_file import StoredTensor
from lazymerge.formats.mesh import Mesh, read_mesh
from lazymerge.formats.placement import Layout, Partial, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor that is whole in this file."""

    region: Region


@dataclass(frozen=True, slots=True)
class Distributed:
    """A DTensor: this rank's local tensor, and how the whole is spread over the mesh.

    `coordinate` is None on ranks that the mesh leaves out; they hold nothing of it. `old` is whether
    torch 2.4 or older wrote it, whose FSDP2 left the order of cuts out. `names` are those of the mesh
    dimensions, where it has any.
    """

    layout: Layout
    coordinate: Shape | None
    region: Region
    names: tuple[str, ...] = ()
    old: bool = False


@dataclass(frozen=True, slots=True)
class Sharded:
    """A ShardedTensor: the boxes that this rank holds, and those that anybody holds."""

    shape: Shape
    dtype: DType
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
        refuse_unresolved(f"{name} in {file}", value)
        if kind is not None:
            raise UnsupportedCheckpoint(
                f"{name} in {file} is a {kind}, which is no plain tensor, DTensor or ShardedTensor",
                "save the checkpoint with plain tensors, or without this one",
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
            cached = self._meshes[id(mesh_record)] = (
                mesh_record,
                read_mesh(f"{name} in {file}", rank, mesh_record),
            )
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
            _shard_order(file, name, attrs.get("shard_order"), len(shape)),
        )
        old = "._tensor." in f"{record.args[1]}."
        region = self._region(local)
        return Distributed(self._once(layout), mesh.coordinate, region, mesh.names, old)

    def _sharded(self, file: str, name: str, record: Record) -> Sharded:
        state = record.args[3]
        if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[1], Record):
            raise _odd(file, name, "a ShardedTensor without shards and metadata")
        metadata = state[1].attrs()
        shape = metadata.get("size")
        described = metadata.get("shards_metadata")
        inner = record.args[2]
        dtype = inner[1] if isinstance(inner, tuple) and len(inner) > 1 else None
        if not isinstance(dtype, DType):
            raise _odd(file, name, "a ShardedTensor without a dtype")
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
        return Sharded(
            shape, dtype, tuple(pieces), self._once(frozenset(box for box in boxes if box is not None))
        )


def local_tensor(value: object) -> StoredTensor | None:
    """The tensor in a rank's file that an entry is made of, if it is made of exactly one."""
    if isinstance(value, StoredTensor):
        return value
    if isinstance(value, Record) and _tensor_class(value) == "DTensor":
        local = _state(value).get("_local_tensor")
        return local if isinstance(local, StoredTensor) else None
    return None


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
            or (kind != "Shard" and not (isinstance(factor, int) and factor > 0))
        ):
            along = f"dimension {dim}" if isinstance(dim, int) else f"a {type(dim).__name__}"
            raise _odd(file, name, f"a DTensor of {rank} dimensions that is cut along {along}")
        return Shard(dim % rank, factor)
    if kind == "Replicate":
        return Replicate()
    if kind in {"Partial", "_Partial"}:
        operation = attrs.get("reduce_op")
        return Partial(operation if isinstance(operation, str) else _red_op(operation))
    raise UnsupportedCheckpoint(
        f"{name} in {file}: unknown placement {kind or type(record).__name__}",
        "it was written by a newer torch or a plugin; report it with the versions that wrote it",
    )


def _red_op(operation: object) -> str:
    """The name of a c10d ``ReduceOp.RedOpType``, which torch up to 2.3 pickled with its number."""
    if isinstance(operation, Record):
        numbers = [n for n in (operation.state, *operation.args) if type(n) is int]
        if len(numbers) == 1 and 0 <= numbers[0] < len(_RED_OPS):
            return _RED_OPS[numbers[0]]
    return "an unknown operation"


_RED_OPS = ("sum", "avg", "product", "min", "max")
"""c10d's enumeration, in its order (torch/csrc/distributed/c10d/Types.hpp)."""


def _shard_order(
    file: str, name: str, order: object, rank: int
) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """(tensor dimension, mesh dimensions) pairs of a spec's shard_order; None before 2.10."""
    if order is None or order == ():
        return None
    entries = []
    if not isinstance(order, tuple):
        raise _odd_order(file, name)
    for entry in order:
        attrs = entry.attrs() if isinstance(entry, Record) else {}
        args = entry.args if isinstance(entry, Record) else ()
        dim = attrs.get("tensor_dim", args[0] if args else None)
        mesh_dims = attrs.get("mesh_dims", args[1] if len(args) > 1 else None)
        if not isinstance(dim, int) or not is_shape(mesh_dims):
            raise _odd_order(file, name)
        entries.append((dim % max(rank, 1), mesh_dims))
    return tuple(entries)


def _odd_order(file: str, name: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{name} in {file}: a shard_order that is not understood",
        "it was written by a newer torch or a plugin; report it with the versions that wrote it",
    )


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
    """Whether a value is a tuple of numbers that a tensor can have for sizes."""
    if not isinstance(value, tuple) or len(value) > MAX_DIMS:
        return False
    return all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _odd(file: str, name: str, what: str) -> DamagedFile:
    return DamagedFile(
        f"{name} in {file}: {what}", "the file is damaged, or written by something unknown; report it"
    )
