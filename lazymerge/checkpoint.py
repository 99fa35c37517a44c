"""A checkpoint: names of tensors that have not been read, and what is known about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from lazymerge.errors import InconsistentCheckpoint
from lazymerge.files.local import LocalFile
from lazymerge.files.region import Region
from lazymerge.gather import Gather

if TYPE_CHECKING:  # torch takes a second to import, and most merges do not need it
    from lazymerge.tensor import LazyTensor


@dataclass(frozen=True, slots=True)
class Topology:
    """Who wrote the checkpoint: how many ranks, which of them are here, on which mesh."""

    world_size: int = 1
    ranks: tuple[int, ...] = (0,)
    mesh: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh)
        ranks = f"{self.world_size} rank{'s' if self.world_size != 1 else ''}"
        return f"{ranks} ({axes})" if axes else ranks


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the user should know: `level` is "info" or "warning", `tensor` what it is about.

    `lossy` says that the checkpoint holds values that may be trained ones and are not in the result.
    """

    level: str
    text: str
    tensor: str | None = None
    lossy: bool = False


class Copy(NamedTuple):
    """Two regions that should hold the same bytes: the one that is used and another rank's.

    `name` is the tensor that they are in; `source` what the ranks call it, where that is another name.
    """

    name: str
    used: Region
    other: Region
    source: str | None = None


def _no_copies() -> Iterator[Copy]:
    return iter(())


@dataclass(frozen=True, eq=False)
class Checkpoint(Mapping[str, "LazyTensor"]):
    """A mapping of names to lazy tensors; conversions make new ones from it with `with_gathers`.

    gathers     name -> gather, in the order of the checkpoint; what the mapping is made of
    format      the name of the format that opened it
    sidecars    folders that may hold config.json, the tokenizer and the like, the best first
    left_out    what of the source is not among the gathers -> why
    copies      makes the pairs of regions that should be equal (replicas); read only when asked
    files       the files that were opened; a resumed merge checks that they are still the same
    settings    what the trainer recorded of its own arguments (Megatron's args), as plain values
    """

    gathers: dict[str, Gather]
    format: str
    topology: Topology = Topology()
    sidecars: tuple[Path, ...] = ()
    notes: tuple[Note, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    copies: Callable[[], Iterator[Copy]] = _no_copies
    files: tuple[LocalFile, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LazyTensor:
        from lazymerge.tensor import LazyTensor

        return LazyTensor(self.gathers[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.gathers)

    def __len__(self) -> int:
        return len(self.gathers)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.format}, {len(self)} tensors, {self.nbytes:,} bytes, {self.topology}>"

    def __copy__(self) -> Checkpoint:
        return replace(self, gathers=dict(self.gathers), left_out=dict(self.left_out))

    def __deepcopy__(self, memo: object) -> Checkpoint:
        return self.__copy__()  # gathers and files never change, so that they can be shared

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Checkpoint cannot be pickled: it holds files that only this process has open."
            " Open it again, or send a plan as JSON, in another process"
        )

    @property
    def warnings(self) -> tuple[Note, ...]:
        """The notes that the user should not miss."""
        return tuple(note for note in self.notes if note.level == "warning")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(gather.nbytes for gather in self.gathers.values())

    def with_gathers(
        self,
        gathers: dict[str, Gather],
        *notes: Note,
        left_out: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """The same checkpoint with other tensors; `notes` and `left_out` are added to what it has."""
        return replace(
            self,
            gathers=gathers,
            notes=(*self.notes, *notes),
            left_out={**self.left_out, **(left_out or {})},
        )

    def renamed(self, names: Mapping[str, str]) -> Checkpoint:
        """The same tensors under other names: `names` has one for each, old -> new, all different.

        Raises `InconsistentCheckpoint` where two would have one name.
        """
        owners: dict[str, str] = {}
        for name in self.gathers:
            other = owners.setdefault(names[name], name)
            if other != name:
                raise InconsistentCheckpoint(
                    f"{other} and {name} would both be {names[name]}",
                    "save it again with one of them renamed, or leave one out with --exclude",
                )
        copies = self.copies
        return replace(
            self,
            gathers={names[name]: gather for name, gather in self.gathers.items()},
            copies=lambda: (copy._replace(name=names.get(copy.name, copy.name)) for copy in copies()),
        )

    def with_notes(self, *notes: Note) -> Checkpoint:
        """The same checkpoint with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def with_sidecars(self, *folders: Path) -> Checkpoint:
        """The same checkpoint with more folders to look for sidecars in, after those that it has."""
        more = [folder for folder in folders if folder.is_dir() and folder not in self.sidecars]
        return replace(self, sidecars=(*self.sidecars, *more))
