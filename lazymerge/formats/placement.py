"""How DTensor cuts a tensor over a mesh: which box of it a coordinate holds.

Every tensor dimension is cut by a sequence of mesh dimensions, one after the other; each cut is
``torch.chunk``: pieces of ceil(length / n), a shorter last one, then empty ones. The sequence is

    without a strided shard    the spec's shard order where it has one, else mesh dimensions left to right
    with a strided shard       placements are walked right to left; each is put into the sequence where the
                               mesh dimensions before it multiply up to its split factor (a plain shard: 1)

Read off files of torch 2.13 and the sources of 2.1 to 2.12.
FSDP2 over tensor parallelism in torch 2.4 and older wrote plain shards for a right-to-left cut; that is
`right_to_left`, which the format decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from lazymerge.boxes import Box, Shape

Order = tuple[tuple[int, tuple[int, ...]], ...]
"""(tensor dimension, the mesh dimensions that cut it, in turn) pairs."""


class Shard(NamedTuple):
    """Cut along `dim`; `split_factor` is that of a strided shard, None for a plain one."""

    dim: int
    split_factor: int | None = None


class Replicate(NamedTuple):
    """Whole on every coordinate of the mesh dimension."""


class Partial(NamedTuple):
    """A summand (or another operand of `reduce_op`) on every coordinate of the mesh dimension."""

    reduce_op: str


Placement = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True)
class Layout:
    """How one tensor is spread: the global `shape`, the mesh, a placement for each mesh dimension."""

    shape: Shape
    mesh: Shape
    placements: tuple[Placement, ...]
    order: Order | None = None
    right_to_left: bool = False

    @property
    def strided(self) -> bool:
        """Whether a placement is a strided shard."""
        return any(isinstance(p, Shard) and p.split_factor is not None for p in self.placements)

    @property
    def cut_twice(self) -> bool:
        """Whether a tensor dimension is cut by more than one mesh dimension, so that the order matters."""
        dims = [
            p.dim
            for p, size in zip(self.placements, self.mesh, strict=True)
            if isinstance(p, Shard) and size > 1
        ]
        return len(dims) != len(set(dims))


@lru_cache(maxsize=4096)
def cuts(layout: Layout) -> dict[int, tuple[int, ...]]:
    """Tensor dimension -> the mesh dimensions that cut it, in turn."""
    if layout.order and not layout.strided:
        return dict(layout.order)
    sequences: dict[int, list[int]] = {}
    numbered = list(enumerate(layout.placements))
    if layout.strided:
        for mesh_dim, placement in reversed(numbered):
            if isinstance(placement, Shard):
                _insert(
                    sequences.setdefault(placement.dim, []),
                    mesh_dim,
                    placement.split_factor or 1,
                    layout.mesh,
                )
    else:
        for mesh_dim, placement in reversed(numbered) if layout.right_to_left else numbered:
            if isinstance(placement, Shard):
                sequences.setdefault(placement.dim, []).append(mesh_dim)
    return {dim: tuple(sequence) for dim, sequence in sequences.items()}


def _insert(sequence: list[int], mesh_dim: int, split_factor: int, mesh: Shape) -> None:
    """Put a mesh dimension where those before it multiply up to the split factor (`ValueError`: nowhere)."""
    for at in range(len(sequence) + 1):
        if prod(mesh[dim] for dim in sequence[:at]) == split_factor:
            sequence.insert(at, mesh_dim)
            return
    raise ValueError(f"no place in {sequence} of mesh {mesh} has the split factor {split_factor}")


@lru_cache(maxsize=1 << 16)
def box_of(layout: Layout, coordinate: Shape) -> Box:
    """The box of the tensor that the coordinate holds; empty boxes have a size of 0 and start at the end."""
    start, shape = [0] * len(layout.shape), list(layout.shape)
    for dim, sequence in cuts(layout).items():
        for mesh_dim in sequence:
            length, parts, index = shape[dim], layout.mesh[mesh_dim], coordinate[mesh_dim]
            chunk = -(-length // parts)
            low = min(index * chunk, length)
            start[dim] += low
            shape[dim] = min(low + chunk, length) - low
    return Box(tuple(start), tuple(shape))


def filled(layout: Layout) -> Iterator[Shape]:
    """The coordinates whose boxes have elements, with 0 where a mesh dimension decides nothing.

    A mesh may be far larger than the tensor: the others are not looked at.
    """
    if 0 in layout.shape:
        return
    sequence = [(dim, mesh_dim) for dim, mesh_dims in cuts(layout).items() for mesh_dim in mesh_dims]
    partial = [at for at, placement in enumerate(layout.placements) if isinstance(placement, Partial)]
    yield from _filled(
        layout, [*sequence, *((None, at) for at in partial)], layout.shape, (0,) * len(layout.mesh)
    )


def _filled(
    layout: Layout, sequence: Sequence[tuple[int | None, int]], shape: Shape, coordinate: Shape
) -> Iterator[Shape]:
    """The coordinates below `coordinate`, whose box has `shape` before the cuts in `sequence`."""
    if not sequence:
        yield coordinate
        return
    (dim, mesh_dim), *rest = sequence
    for index in range(layout.mesh[mesh_dim]):
        left = shape
        if dim is not None:
            chunk = -(-shape[dim] // layout.mesh[mesh_dim])
            length = min(chunk, shape[dim] - index * chunk)
            if length <= 0:
                return
            left = (*shape[:dim], length, *shape[dim + 1 :])
        at = (*coordinate[:mesh_dim], index, *coordinate[mesh_dim + 1 :])
        yield from _filled(layout, rest, left, at)
