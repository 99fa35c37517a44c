"""Device meshes of all releases of torch: their shape, and where a rank stands in them.

    up to 2.9    mesh: a tensor of ranks, whose shape is the mesh's
    2.10, 2.11, 2.12  _layout: _MeshLayout with shape and stride; ints where the mesh has one dimension
    2.13         _layout: _MeshLayout with axes, each a _FlatLayout with shape and stride

A dimension made of several (a flattened mesh) has a tuple for its size. Which ranks are where does
not matter: every release records this rank's own place as ``_coordinate_on_dim`` (None: not on this mesh).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from lazymerge.boxes import Shape
from lazymerge.errors import DamagedFile, InconsistentCheckpoint
from lazymerge.files.inert_pickle import Record
from lazymerge.files.torch_file import StoredTensor

MAX_MESH = 1 << 20
"""Ranks of the largest mesh that is believed."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh as one rank sees it; `coordinate` is None where the rank is not on it."""

    shape: Shape
    coordinate: Shape | None
    names: tuple[str, ...]


def read_mesh(where: str, rank: int, record: Record) -> Mesh:
    """The mesh that a record of a DeviceMesh describes; `where` names the tensor and file in messages.

    Raises `DamagedFile` for a mesh that cannot be, and `InconsistentCheckpoint` if another rank wrote it.
    """
    attrs = record.attrs()
    shape = _shape(attrs)
    if shape is None or len(shape) > 16 or not 0 < prod(shape) <= MAX_MESH:
        raise DamagedFile(
            f"{where}: a device mesh of shape {shape}", "the file is damaged, or written by something unknown"
        )
    recorded = attrs.get("_rank")
    if type(recorded) is int and recorded != rank:
        raise InconsistentCheckpoint(
            f"{where}: written by rank {recorded}, but its file is named for rank {rank}",
            "give the files the names that they were saved under",
        )
    names = attrs.get("mesh_dim_names", attrs.get("_mesh_dim_names")) or ()
    names = tuple(name[:40] for name in names if isinstance(name, str)) if isinstance(names, tuple) else ()
    return Mesh(shape, _coordinate(where, shape, attrs.get("_coordinate_on_dim")), names)


def _coordinate(where: str, shape: Shape, recorded: object) -> Shape | None:
    if recorded is None:
        return None
    if isinstance(recorded, list | tuple) and len(recorded) == len(shape):
        inside = (type(at) is int and 0 <= at < size for at, size in zip(recorded, shape, strict=True))
        if all(inside):
            return tuple(recorded)
    raise DamagedFile(
        f"{where}: a coordinate outside its mesh of shape {shape}",
        "the file is damaged, or written by something unknown",
    )


def _shape(attrs: dict[str, object]) -> Shape | None:
    mesh = attrs.get("mesh", attrs.get("_mesh"))
    if isinstance(mesh, StoredTensor):
        return mesh.shape
    layout = attrs.get("_layout")
    if not isinstance(layout, Record):
        return None
    inner = layout.attrs()
    axes = inner.get("axes")
    if isinstance(axes, tuple):
        sizes = [_size(axis.attrs().get("shape")) if isinstance(axis, Record) else None for axis in axes]
    else:
        shape = inner.get("shape")
        sizes = [_size(n) for n in (shape if isinstance(shape, tuple) else (shape,))]
    known = tuple(size for size in sizes if size is not None)
    return known if len(known) == len(sizes) else None


def _size(shape: object, depth: int = 0) -> int | None:
    """Ranks along one dimension: a number, or a tuple of the sizes that it was made of."""
    if type(shape) is int:
        return shape if 0 < shape <= MAX_MESH else None
    if not isinstance(shape, tuple) or len(shape) > 16 or depth > 4:
        return None
    sizes = [_size(n, depth + 1) for n in shape]
    known = [size for size in sizes if size is not None]
    return prod(known) if len(known) == len(sizes) else None
