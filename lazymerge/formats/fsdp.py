"""FSDP checkpoints as rank files: one ``torch.save`` of a state dict for each rank, or one for all.

    model_world_size_{N}_rank_{R}.pt    verl; fsdp_config.json beside since 0.4, huggingface/ with the config
    rank_{R}.pt                         older verl and forks; fsdp_config.json says how many
    pytorch_model_fsdp_{I}_rank{R}.bin  accelerate without DCP
    pytorch_model.bin, model.pt, ...    a full state dict, saved by rank 0 alone

Optimizer and extra-state files stand beside them and are never opened. What a rank's entries are is
read from each of them (lazymerge.formats.entries); how they make up a tensor is worked out in
lazymerge.formats.assemble.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Checkpoint, Copy, Note, Topology
from lazymerge.errors import (
    AmbiguousCheckpoint,
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from lazymerge.files.inert_pickle import Record
from lazymerge.files.local import Descriptors, LocalFile
from lazymerge.files.torch_file import StoredTensor, read_torch_file
from lazymerge.formats.assemble import Ranked, assemble
from lazymerge.formats.entries import Distributed, EntryReader
from lazymerge.formats.registry import OpenOptions, sidecar_folders
from lazymerge.gather import Gather

_RANKED = (
    re.compile(r"model_world_size_(?P<world>\d{1,9})_rank_(?P<rank>\d{1,9})\.pt"),
    re.compile(r"rank_(?P<rank>\d{1,9})\.pt"),
    re.compile(r"pytorch_model_fsdp(?P<set>_\d{1,9})?_rank_?(?P<rank>\d{1,9})\.bin"),
)
_FULL = ("pytorch_model.bin", "model.pt", "pytorch_model_fsdp.bin", "pytorch_model.pt", "model.pth")
_FULL_SUFFIXES = (".pt", ".pth", ".bin")
_WRAPPERS = ("model", "state_dict", "module", "model_state_dict")
_CONFIG = "fsdp_config.json"
_MAX_WORLD = 1 << 20


@dataclass(slots=True)
class RankSet:
    """Files of one save: rank -> file. `world_size` is None where nothing says how many there should be."""

    pattern: str
    world_size: int | None
    files: dict[int, Path] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether a file of every rank is here."""
        return len(self.files) == (self.world_size or max(self.files) + 1)

    def __str__(self) -> str:
        count = f"{len(self.files)} of {self.world_size}" if self.world_size else str(len(self.files))
        return f"{self.pattern.replace('{N}', str(self.world_size))} ({count} ranks)"


class FsdpFormat:
    """Opens FSDP rank files and full state dicts."""

    name = "fsdp"
    looks_for = (
        "model_world_size_{N}_rank_{R}.pt, rank_{R}.pt, pytorch_model_fsdp_{I}_rank{R}.bin,"
        " or a full state dict (pytorch_model.bin, model.pt)"
    )

    def recognises(self, path: Path) -> bool:
        """Whether the folder holds such files, or the path is a file that could be a full state dict."""
        if path.is_file():
            return path.suffix in _FULL_SUFFIXES
        return path.is_dir() and (bool(_rank_sets([path])) or _full_file(path) is not None)

    def open(self, paths: Sequence[Path], options: OpenOptions) -> Checkpoint:
        """The checkpoint in these folders (or in one file); nothing but metadata is read."""
        notes: list[Note] = []
        chosen = _choose(paths, options, notes)
        version = options.fsdp_version or _fsdp_version(paths, chosen)
        pool = Descriptors()
        found = _read_ranks(chosen, pool)
        tensors = _Tensors(chosen, found, version)
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
            files=tuple(found.files),
        )


FORMAT = FsdpFormat()


# ------------------------------------------------------------------------------ which files


def _choose(paths: Sequence[Path], options: OpenOptions, notes: list[Note]) -> RankSet:
    """The files to open: the one complete set, or the only set there is."""
    if len(paths) == 1 and paths[0].is_file():
        return RankSet(paths[0].name, 1, {0: paths[0]})
    if len(paths) > 1:
        _refuse_full(paths)
    sets = _rank_sets(paths)
    if options.world_size is not None:
        sets = [each for each in sets if each.world_size == options.world_size]
        if not sets:
            raise IncompleteCheckpoint(
                f"{paths[0]}: no rank files of a world of {options.world_size}", "check --world-size"
            )
    if not sets:
        full = _full_file(paths[0])
        assert full is not None, "recognised"
        return RankSet(full.name, 1, {0: full})
    complete = [each for each in sets if each.complete]
    if len(sets) > 1 and len(complete) != 1:
        raise AmbiguousCheckpoint(
            f"{paths[0]}: holds {' and '.join(map(str, sets))}, {len(complete)} of them complete",
            "say which one with --world-size, or move the others away",
        )
    chosen = complete[0] if complete else sets[0]
    for other in sets:
        if other is not chosen:
            notes.append(Note("warning", f"taking {chosen}; {other} is incomplete and was left alone"))
    return chosen


def _refuse_full(paths: Sequence[Path]) -> None:
    """Several paths hold the ranks of one save; a full state dict is one already."""
    for path in paths:
        full = path if path.is_file() else None if _rank_sets([path]) else _full_file(path)
        if full is not None:
            raise AmbiguousCheckpoint(
                f"{full}: a full state dict among {len(paths)} sources",
                "give it alone, or only folders with the rank files of one save",
            )


def _rank_sets(paths: Iterable[Path]) -> list[RankSet]:
    """The sets of rank files in the folders taken together."""
    sets: dict[tuple[int, str], RankSet] = {}
    for folder in paths:
        world = _config(folder).get("world_size")
        for path in sorted(folder.iterdir()):
            for kind, pattern in enumerate(_RANKED):
                match = pattern.fullmatch(path.name)
                if match is None or not path.is_file():
                    continue
                names = match.groupdict()
                size = int(names["world"]) if "world" in names else world
                key = (kind, names.get("world") or names.get("set") or "")
                found = sets.setdefault(key, RankSet(_readable(path.name, names), size))
                _add(found, int(names["rank"]), path)
    return list(sets.values())


def _readable(filename: str, names: dict[str, Any]) -> str:
    return re.sub(rf"{names['rank']}(\.\w+)$", r"{R}\1", filename)


def _add(found: RankSet, rank: int, path: Path) -> None:
    if rank in found.files and not found.files[rank].samefile(path):
        raise AmbiguousCheckpoint(
            f"rank {rank} is in {found.files[rank].parent} and in {path.parent}",
            "give each rank once",
        )
    if found.world_size is not None and rank >= found.world_size:
        raise InconsistentCheckpoint(
            f"{path}: rank {rank} of a world of {found.world_size}",
            "the file does not belong here; move it away",
        )
    found.files[rank] = path


def _full_file(folder: Path) -> Path | None:
    found = [folder / name for name in _FULL if (folder / name).is_file()]
    if len(found) > 1:
        raise AmbiguousCheckpoint(
            f"{folder}: holds {' and '.join(path.name for path in found)}",
            "give the file itself",
        )
    return found[0] if found else None


def _config(folder: Path) -> dict[str, Any]:
    """fsdp_config.json, if there is one; its numbers are checked."""
    path = folder / _CONFIG
    if not path.is_file():
        return {}
    try:
        config = json.loads(LocalFile(path).read(0, min(path.stat().st_size, 1 << 16)))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise DamagedFile(
            f"{path}: not a JSON object", "restore it, or remove it where file names say enough"
        )
    world = config.get("world_size")
    if world is not None and (type(world) is not int or not 0 < world <= _MAX_WORLD):
        raise DamagedFile(f"{path}: a world size of {str(world)[:40]}", "restore it, or remove it")
    return config


def _fsdp_version(paths: Sequence[Path], chosen: RankSet) -> int | None:
    """The FSDP that fsdp_config.json names; checks that its world size is that of the files."""
    for folder in paths:
        config = _config(folder) if folder.is_dir() else {}
        world = config.get("world_size")
        if world is not None and chosen.world_size is not None and world != chosen.world_size:
            raise InconsistentCheckpoint(
                f"{folder / _CONFIG}: a world of {world}, but the files are named for {chosen.world_size}",
                "the folder mixes two saves; move one away, or remove the config",
            )
        version = config.get("FSDP_version")
        if version in (1, 2):
            return int(version)
    return None


# ------------------------------------------------------------------------------ what is in them


@dataclass(slots=True)
class _Found:
    """The entries of all ranks by name, in the order of the first rank that has the name."""

    entries: dict[str, list[Ranked]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    files: list[LocalFile] = field(default_factory=list)
    mesh: tuple[tuple[str, int], ...] = ()


def _read_ranks(chosen: RankSet, pool: Descriptors) -> _Found:
    found = _Found()
    reader = EntryReader()
    for rank in sorted(chosen.files):
        file = LocalFile(chosen.files[rank], pool)
        found.files.append(file)
        state = _state_dict(file, read_torch_file(file), found)
        _refuse_flat(file, state)
        for name, value in state.items():
            entry = reader.read(file.name, rank, name, value) if isinstance(name, str) else None
            if entry is None:
                found.left_out[str(name)[:200]] = f"no tensor but {_kind(value)}"
                continue
            found.entries.setdefault(name, []).append((rank, entry))
            if isinstance(entry, Distributed) and len(entry.names) > len(found.mesh):
                found.mesh = tuple(zip(entry.names, entry.layout.mesh, strict=False))
        reader.forget_meshes()
    if not found.entries:
        raise UnsupportedCheckpoint(
            f"{next(iter(chosen.files.values()))}: holds no tensors",
            "give a file or folder with a state dict",
        )
    return found


def _state_dict(file: LocalFile, value: object, found: _Found) -> dict[Any, Any]:
    """The state dict, taken out of what it is wrapped in."""
    if not isinstance(value, dict):
        raise UnsupportedCheckpoint(
            f"{file.path}: holds {_kind(value)}, expected a state dict",
            "save model.state_dict(), not the model",
        )
    if any(isinstance(item, StoredTensor) for item in value.values()) or any(map(_is_tensor, value.values())):
        return value
    wrapped = [key for key in _WRAPPERS if isinstance(value.get(key), dict) and value[key]]
    if len(wrapped) > 1:
        raise AmbiguousCheckpoint(
            f"{file.path}: holds state dicts under {' and '.join(wrapped)}", "save only one of them"
        )
    if not wrapped:
        return value
    for key in value:
        if key != wrapped[0]:
            found.left_out[str(key)[:200]] = "beside the state dict"
    return _state_dict(file, value[wrapped[0]], found)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Record) and "_rebuild_" in str(value.cls)


def _refuse_flat(file: LocalFile, state: dict[Any, Any]) -> None:
    for name in state:
        if isinstance(name, str) and name.rpartition(".")[2] in {"_flat_param", "flat_param"}:
            raise UnsupportedCheckpoint(
                f"{name} in {file.path}: a flat parameter (LOCAL_STATE_DICT): what is in it is not said",
                "load it into the model that wrote it and save a SHARDED_STATE_DICT or FULL_STATE_DICT",
            )


def _kind(value: object) -> str:
    if isinstance(value, StoredTensor):
        return "a tensor"
    return str(value.cls)[:100] if isinstance(value, Record) else type(value).__name__


class _Tensors:
    """The tensors of all names, and what is missing for them."""

    def __init__(self, chosen: RankSet, found: _Found, version: int | None) -> None:
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
                what += f", nor all of {len(self.missing) - 1} other tensors"
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
