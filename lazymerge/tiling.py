"""The proof that a tensor's pieces hold each of its elements exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from lazymerge.boxes import Box, Piece, replaced
from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint
from lazymerge.gather import Gather


def check(name: str, gather: Gather, pieces: Iterable[Piece] | None = None) -> None:
    """Prove that the pieces hold each element of the tensor exactly once, and in its dtype.

    `pieces` are the gather's, where the caller has them already. Raises `IncompleteCheckpoint` for a
    hole and `InconsistentCheckpoint` for an overlap, a box outside the tensor or another dtype,
    naming `name` and the first such place.
    """
    boxes = []
    for start, region in gather.pieces() if pieces is None else pieces:
        outside = any(
            at < 0 or at + size > limit
            for at, size, limit in zip(start, region.shape, gather.shape, strict=True)
        )
        if outside:
            raise InconsistentCheckpoint(
                f"{name}: a shard at {start} of shape {region.shape} is outside of {gather.shape}",
                "the rank files do not belong together; check that they come from one save",
            )
        if region.dtype is not gather.dtype:
            raise InconsistentCheckpoint(
                f"{name}: a shard in {region.source.name} is {region.dtype}, expected {gather.dtype}",
                "the rank files do not belong together; check that they come from one save",
            )
        if 0 not in region.shape:
            boxes.append(Box(start, region.shape))
    if gather.numel:
        _check_tiles(name, boxes, Box.whole(gather.shape), 0)


def _check_tiles(name: str, boxes: list[Box], space: Box, dim: int) -> None:
    """Prove that `boxes`, all of which span `space` before `dim`, fill it once: slab by slab along `dim`."""
    if len(boxes) == 1 and boxes[0][0][dim:] == space.start[dim:] and boxes[0][1][dim:] == space.shape[dim:]:
        return
    if dim == len(space.shape):
        raise InconsistentCheckpoint(
            f"{name}: {len(boxes)} shards hold the elements at {space.start} of shape {space.shape}",
            "the rank files overlap; check that they come from one save",
        )
    low = space.start[dim]
    high = low + space.shape[dim]
    cuts = sorted({low, high, *(b.start[dim] for b in boxes), *(b.start[dim] + b.shape[dim] for b in boxes)})
    slabs: dict[int, list[Box]] = {cut: [] for cut in cuts[:-1]}
    ends = dict(pairwise(cuts))
    for box in boxes:
        at, end = box.start[dim], box.start[dim] + box.shape[dim]
        while at < end:  # once, unless the shards are cut unevenly along this dimension
            slabs[at].append(box)
            at = ends[at]
    for at, inside in slabs.items():
        slab = Box(replaced(space.start, dim, at), replaced(space.shape, dim, ends[at] - at))
        if not inside:
            raise IncompleteCheckpoint(
                f"{name}: no shard holds the elements at {slab.start} of shape {slab.shape}",
                "rank files are missing or cut; pass every folder that holds ranks of this save",
            )
        _check_tiles(name, inside, slab, dim + 1)
