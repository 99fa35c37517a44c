"""FSDP checkpoints: rank files, or a full state dict, as one checkpoint.

Which files belong together is found out in lazymerge.formats.rank_sets, what is in them in
rank_files (entry by entry: entries, mesh, alike), and how the entries of a name make up its tensor
in assemble and placement. Optimizer and extra-state files beside them are never opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lazymerge.checkpoint import Checkpoint, Copy, Note, Topology
from lazymerge.errors import IncompleteCheckpoint
from lazymerge.formats.assemble import assemble, settled_version
from lazymerge.formats.rank_files import Found, read_ranks
from lazymerge.formats.rank_sets import RankSet, choose_ranks, holds_ranks, recorded_version
from lazymerge.formats.registry import OpenOptions, sidecar_folders
from lazymerge.gather import Gather


class FsdpFormat:
    """Opens FSDP rank files and full state dicts."""

    name = "fsdp"
    looks_for = (
        "model_world_size_{N}_rank_{R}.pt, rank_{R}.pt, pytorch_model_fsdp_{I}_rank{R}.bin,"
        " or a full state dict (pytorch_model.bin, model.pt)"
    )

    def recognises(self, path: Path) -> bool:
        """Whether the folder holds such files, or the path is a file that could be a full state dict."""
        return holds_ranks(path)

    def open(self, paths: Sequence[Path], options: OpenOptions) -> Checkpoint:
        """The checkpoint in these folders (or in one file); nothing but metadata is read."""
        notes: list[Note] = []
        chosen = choose_ranks(paths, options.world_size, notes)
        recorded, told = recorded_version(paths, chosen)
        version = options.fsdp_version or recorded
        found = read_ranks(chosen)
        tensors = _Tensors(chosen, found, version or settled_version(found.entries))
        tensors.check_missing(notes)
        return Checkpoint(
            gathers=tensors.gathers,
            format=self.name,
            topology=Topology(
                chosen.world_size or len(chosen.files), tuple(sorted(chosen.files)), found.mesh
            ),
            sidecars=sidecar_folders(paths, options),
            notes=tuple(notes),
            left_out=found.left_out,
            copies=tensors.copies,
            files=(*found.files, *told),
        )


FORMAT = FsdpFormat()


class _Tensors:
    """The tensors of all names, and what is missing for them."""

    def __init__(self, chosen: RankSet, found: Found, version: int | None) -> None:
        self.chosen = chosen
        self.gathers: dict[str, Gather] = {}
        self.missing: dict[str, tuple[str, ...]] = {}
        self._copies: list[Copy] = []
        for name, entries in found.entries.items():
            assembled = assemble(name, entries, version)
            self.gathers[name] = assembled.gather
            self._copies += assembled.copies
            if assembled.missing:
                self.missing[name] = assembled.missing

    def copies(self) -> Iterator[Copy]:
        """The pairs of regions that should be equal."""
        return iter(self._copies)

    def check_missing(self, notes: list[Note]) -> None:
        """Refuse what is incomplete; note lost ranks whose shards others hold as well."""
        here, world = sorted(self.chosen.files), self.chosen.world_size or max(self.chosen.files) + 1
        lost = [rank for rank in range(world) if rank not in self.chosen.files]
        if self.missing:
            name = next(iter(self.missing))
            what = f"{name}: {self.missing[name][0]} is not here"
            if len(self.missing) > 1:
                what += f", and {len(self.missing) - 1} more tensors are incomplete"
            if not lost:
                raise IncompleteCheckpoint(
                    f"{what}, though all {world} rank files are",
                    "the rank files do not belong together; check that they come from one save",
                )
            raise IncompleteCheckpoint(
                f"{len(here)} of {world} rank files are here ({ranges(here)}),"
                f" {ranges(lost)} are missing; {what}",
                "other nodes may hold them; give all folders together: lazymerge merge DIR DIR ... OUT",
            )
        if lost:
            notes.append(
                Note(
                    "warning",
                    f"the files of ranks {ranges(lost)} are missing; other ranks hold the same shards",
                )
            )


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as people list them: 0-47, 56-63."""
    parts: list[str] = []
    first = last = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == last + 1:
            last = number
            continue
        parts.append(str(first) if first == last else f"{first}-{last}")
        if number is not None:
            first = last = number
    return ", ".join(parts)
