"""The entries of all ranks under one name, put together to one gather."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from lazymerge.boxes import Box, Piece, Shape
from lazymerge.checkpoint import Copy
from lazymerge.errors import InconsistentCheckpoint, UnsupportedCheckpoint
from lazymerge.files.dtype import FLOATS, DType
from lazymerge.files.region import Region
from lazymerge.formats.entries import Distributed, Entry, Plain, Sharded
from lazymerge.formats.placement import Layout, Partial, Shard, box_of, cuts, filled
from lazymerge.gather import Constant, Gather, Shards, of_region
from lazymerge.tiling import check

SUMMED = (*FLOATS, "int64", "int32", "int16", "int8", "uint8", "complex64", "complex128")
"""Element types of partial values that are summed; averages are of the first four only."""

T = TypeVar("T")

Ranked = tuple[int, Entry]
"""A rank and its entry under the name in question."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """One tensor out of the entries of all ranks that are here.

    `missing` are boxes that no rank here holds, or one coordinate: the gather is incomplete then.
    `copies` are pairs of regions that should hold the same bytes.
    """

    gather: Gather
    missing: tuple[str, ...]
    copies: tuple[Copy, ...]


def assemble(name: str, entries: list[Ranked], fsdp_version: int | None) -> Assembled:
    """The tensor of that name; `entries` are in the order of the ranks.

    `fsdp_version` decides the order of cuts where torch 2.4 and older did not record it; without it such
    tensors are refused. Raises
    `InconsistentCheckpoint` where ranks disagree on what the tensor is.
    """
    kinds = {type(entry) for _, entry in entries}
    if len(kinds) > 1:
        raise InconsistentCheckpoint(
            f"{name}: {' and '.join(sorted(kind.__name__.lower() for kind in kinds))} on different ranks",
            "the rank files do not belong together; check that they come from one save",
        )
    if kinds == {Plain}:
        return _plain(name, [(rank, entry.region) for rank, entry in entries if isinstance(entry, Plain)])
    if kinds == {Distributed}:
        spread = [(rank, entry) for rank, entry in entries if isinstance(entry, Distributed)]
        return _distributed(name, spread, fsdp_version)
    return _sharded(name, [(rank, entry) for rank, entry in entries if isinstance(entry, Sharded)])


def settled_version(entries: Mapping[str, list[Ranked]]) -> int | None:
    """The FSDP version that the shapes of a save by torch 2.4 or older give away; None if none does.

    One tensor that can only have been cut in one order settles it for all of them. Raises
    `InconsistentCheckpoint` where two tensors contradict each other.
    """
    settled: dict[int, str] = {}
    for name, ranked in entries.items():
        spread = [(rank, entry) for rank, entry in ranked if isinstance(entry, Distributed)]
        if spread and _is_unordered(spread[0][1]):
            _agreed(name, ((rank, entry.layout) for rank, entry in spread), "a DTensor laid out as")
            _check_layout(name, spread[0][1].layout)
            ways = _fitting(spread)
            if len(ways) == 1:
                settled.setdefault(2 if ways[0].right_to_left else 1, name)
    if len(settled) > 1:
        raise InconsistentCheckpoint(
            f"{settled[1]} was cut in the order of FSDP1 and {settled[2]} in that of FSDP2",
            "the rank files do not belong together; check that they come from one save",
        )
    return next(iter(settled), None)


def _plain(name: str, regions: list[tuple[int, Region]]) -> Assembled:
    """Whole on every rank: the first one's; nothing is ever concatenated for being alike or not."""
    first_rank, first = regions[0]
    for rank, region in regions[1:]:
        if region.shape != first.shape or region.dtype is not first.dtype:
            raise InconsistentCheckpoint(
                f"{name}: a plain tensor of shape {first.shape} ({first.dtype}) on rank {first_rank}"
                f" and of shape {region.shape} ({region.dtype}) on rank {rank}",
                "the files do not say how these parts belong together; save them as DTensors",
            )
    copies = tuple(Copy(name, first, region) for _, region in regions[1:])
    return Assembled(of_region(first), (), copies)


def _sharded(name: str, entries: list[tuple[int, Sharded]]) -> Assembled:
    """The boxes of ShardedTensors: each says where its shards are."""
    shape = _agreed(name, ((rank, entry.shape) for rank, entry in entries), "a ShardedTensor of shape")
    held: dict[Box, Region] = {}
    copies = []
    for _, entry in entries:
        for piece in entry.pieces:
            if piece.box in held:
                copies.append(Copy(name, held[piece.box], piece.region))
            else:
                held[piece.box] = piece.region
    described = frozenset(box for _, entry in entries for box in entry.boxes)
    missing = tuple(
        f"the shard at {box.start} of shape {box.shape}"
        for box in sorted(described)
        if box.numel and box not in held
    )
    pieces = [Piece(box.start, region) for box, region in held.items() if box.numel]
    gather = Shards(shape, entries[0][1].dtype, Constant(pieces))
    if not missing:
        check(name, gather)  # the metadata itself may leave holes
    return Assembled(gather, missing, tuple(copies))


@dataclass(frozen=True, slots=True)
class _Held:
    """The local tensors that are used, by the coordinate that decides which box they fill."""

    layout: Layout
    regions: dict[Shape, Region]

    def pieces(self) -> Iterator[Piece]:
        for coordinate, region in self.regions.items():
            box = box_of(self.layout, coordinate)
            if box.numel:
                yield Piece(box.start, region)


def _distributed(name: str, entries: list[tuple[int, Distributed]], fsdp_version: int | None) -> Assembled:
    """DTensors: mesh coordinates decide; replicas are copies, partial ones are summed."""
    _agreed(name, ((rank, entry.layout) for rank, entry in entries), "a DTensor laid out as")
    _agreed(name, ((rank, entry.region.dtype) for rank, entry in entries), "a DTensor of")
    layout = _ordered(name, entries, fsdp_version)
    _check_layout(name, layout)
    deciding = [isinstance(placement, Shard | Partial) for placement in layout.placements]
    regions: dict[Shape, Region] = {}
    copies = []
    for rank, entry in entries:
        if entry.coordinate is None:
            continue
        coordinate = tuple(
            at if decides else 0 for at, decides in zip(entry.coordinate, deciding, strict=True)
        )
        _check_local(name, rank, entry.region, layout, entry.coordinate)
        if coordinate in regions:
            if 0 not in entry.region.shape:
                copies.append(Copy(name, regions[coordinate], entry.region))
        else:
            regions[coordinate] = entry.region
    lost = next((coordinate for coordinate in filled(layout) if coordinate not in regions), None)
    missing = () if lost is None else (f"mesh coordinate {lost}",)
    held = _Held(layout, regions)
    dtype = entries[0][1].region.dtype
    if any(isinstance(placement, Partial) for placement in layout.placements):
        partial = Shards(layout.shape, dtype, held.pieces) if missing else _summed(name, held, dtype)
        return Assembled(partial, missing, tuple(copies))
    return Assembled(Shards(layout.shape, dtype, held.pieces), missing, tuple(copies))


def _ordered(name: str, entries: list[tuple[int, Distributed]], fsdp_version: int | None) -> Layout:
    """The layout with the order of its cuts, which torch 2.4 and older did not record for FSDP2.

    FSDP2 over tensor parallelism cut right to left there and said nothing of it; FSDP1 and everything
    else cuts left to right (2.4.1's fully_shard, _fsdp_param.py).
    """
    layout = entries[0][1].layout
    if not _is_unordered(entries[0][1]):
        return layout
    if fsdp_version is not None:
        return replace(layout, right_to_left=fsdp_version == 2)
    raise UnsupportedCheckpoint(
        f"{name}: written by torch 2.4 or older, which did not record the order in which"
        f" mesh dimensions cut it ({layout.placements} on {layout.mesh})",
        "say which FSDP wrote it with --fsdp-version 1 or 2 (verl records it in fsdp_config.json)",
    )


def _is_unordered(entry: Distributed) -> bool:
    return entry.old and entry.layout.cut_twice and not entry.layout.strided


def _fitting(entries: list[tuple[int, Distributed]]) -> list[Layout]:
    """The orders of cuts that all local shapes agree with."""
    layout = entries[0][1].layout
    ways = (layout, replace(layout, right_to_left=True))
    return [way for way in ways if all(_fits(entry, way) for _, entry in entries)]


def _fits(entry: Distributed, layout: Layout) -> bool:
    return entry.coordinate is None or box_of(layout, entry.coordinate).shape == entry.region.shape


def _check_layout(name: str, layout: Layout) -> None:
    try:
        sequences = cuts(layout)
    except ValueError as error:
        raise InconsistentCheckpoint(
            f"{name}: {error}", "the rank files are damaged, or of an unknown layout"
        ) from None
    claimed = {at for at, placement in enumerate(layout.placements) if isinstance(placement, Shard)}
    ordered = sorted(at for sequence in sequences.values() for at in sequence)
    if ordered != sorted(claimed):
        raise InconsistentCheckpoint(
            f"{name}: its shard order {layout.order} does not match its placements {layout.placements}",
            "the rank files are damaged, or of an unknown layout",
        )


def _check_local(name: str, rank: int, region: Region, layout: Layout, coordinate: Shape) -> None:
    box = box_of(layout, coordinate)
    if box.shape != region.shape and (box.numel or 0 not in region.shape):
        raise InconsistentCheckpoint(
            f"{name}: rank {rank} holds a shard of shape {region.shape}, expected {box.shape}"
            f" of the tensor's {layout.shape} at mesh coordinate {coordinate} of {layout.mesh}",
            "the rank files do not belong together; check that they come from one save",
        )


def _agreed(name: str, values: Iterable[tuple[int, T]], what: str) -> T:
    """The value that all ranks have in common."""
    (first_rank, first), *others = values
    for rank, value in others:
        if value != first:
            raise InconsistentCheckpoint(
                f"{name}: {what} {first} on rank {first_rank} and {value} on rank {rank}",
                "the rank files do not belong together; check that they come from one save",
            )
    return first


def _summed(name: str, held: _Held, dtype: DType) -> Gather:
    """A tensor's partial values, put together in the order of the ranks."""
    layout = held.layout
    operations = {p.reduce_op for p in layout.placements if isinstance(p, Partial)}
    if operations not in ({"sum"}, {"avg"}):
        raise UnsupportedCheckpoint(
            f"{name}: partial values to be reduced by {' and '.join(sorted(operations))[:100]}",
            "only sums and averages are put together; call full_tensor() before saving",
        )
    summands: dict[Shape, dict[Shape, Region]] = {}
    for coordinate, region in held.regions.items():  # in the order of the ranks
        summand = tuple(
            at
            for at, placement in zip(coordinate, layout.placements, strict=True)
            if isinstance(placement, Partial)
        )
        summands.setdefault(summand, {})[coordinate] = region
    if not (operations == {"sum"} and dtype.name in SUMMED) and dtype.name not in FLOATS:
        raise UnsupportedCheckpoint(
            f"{name}: {dtype} values to be reduced by {' and '.join(sorted(operations))}",
            "torch has no such sum; call full_tensor() before saving",
        )
    from lazymerge.compute import total  # which imports torch

    parts = [Shards(layout.shape, dtype, _Held(layout, regions).pieces) for regions in summands.values()]
    return total(name, parts, average=operations == {"avg"})
