"""Which files of a folder make up one FSDP save: a set of rank files, or one full state dict.

    model_world_size_{N}_rank_{R}.pt    verl; fsdp_config.json beside since 0.4, huggingface/ with the config
    rank_{R}.pt                         older verl and forks; fsdp_config.json says how many
    pytorch_model_fsdp_{I}_rank{R}.bin  accelerate without DCP
    pytorch_model.bin, model.pt, ...    a full state dict, saved by rank 0 alone

Only names are looked at, and fsdp_config.json: ``{"FSDP_version": 1 or 2, "world_size": N}``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.errors import (
    AmbiguousCheckpoint,
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
)
from lazymerge.files.json_text import read_object
from lazymerge.files.local import LocalFile, refuse_no_file

_RANKED = (
    re.compile(r"model_world_size_(?P<world>\d{1,9})_rank_(?P<rank>\d{1,9})\.pt"),
    re.compile(r"rank_(?P<rank>\d{1,9})\.pt"),
    re.compile(r"pytorch_model_fsdp(?P<set>_\d{1,9})?_rank_?(?P<rank>\d{1,9})\.bin"),
)
_FULL = ("pytorch_model.bin", "model.pt", "pytorch_model_fsdp.bin", "pytorch_model.pt", "model.pth")
_FULL_SUFFIXES = (".pt", ".pth", ".bin")
_CONFIG = "fsdp_config.json"
_LARGEST_CONFIG = 1 << 16  # bytes; usual are 40
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


def holds_ranks(path: Path) -> bool:
    """Whether a folder holds such files, or the path is a file that could be a full state dict.

    Raises `SourceError` for a pipe and its kind, under the name of such a file too: no format reads one.
    """
    if path.is_dir():
        return bool(_rank_sets([path])) or (not _holds_safetensors(path) and _full_file(path) is not None)
    if not path.exists():
        return False
    refuse_no_file(path)
    return path.suffix in _FULL_SUFFIXES


def _holds_safetensors(folder: Path) -> bool:
    """Whether a full state dict is the second best here: transformers too takes the safetensors beside it."""
    return any(
        os.path.lexists(folder / name) for name in ("model.safetensors", "model.safetensors.index.json")
    )


def choose_ranks(paths: Sequence[Path], world_size: int | None, notes: list[Note]) -> RankSet:
    """The files to open: the one complete set, or the only set there is; notes on what was passed over.

    `world_size` is the one that the user has named, if any. Raises `AmbiguousCheckpoint` where nothing
    decides between several, and `IncompleteCheckpoint` where the one that was named is not there.
    """
    if len(paths) == 1 and paths[0].is_file():
        _refuse_one_rank(paths[0])
        return RankSet(paths[0].name, 1, {0: paths[0]})
    if len(paths) > 1:
        _refuse_full(paths)
    sets = _rank_sets(paths)
    if world_size is not None:
        sets = [each for each in sets if each.world_size == world_size]
        if not sets:
            raise IncompleteCheckpoint(
                f"{paths[0]}: no rank files of a world of {world_size}", "check --world-size"
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
    for folder in paths:
        for full in _full_files(folder):
            notes.append(Note("warning", f"taking {chosen}; {full} beside it was left alone"))
    return chosen


def _refuse_one_rank(path: Path) -> None:
    """A rank's file alone looks like a full state dict where its tensors are plain."""
    match = next((m for pattern in _RANKED if (m := pattern.fullmatch(path.name))), None)
    if match is not None and match.groupdict().get("world") != "1":
        raise IncompleteCheckpoint(
            f"{path}: the file of rank {match['rank']} alone", f"give the folder of all ranks, {path.parent}"
        )


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
        world = _config(folder)[0].get("world_size")
        for path in sorted(folder.iterdir()):
            for kind, pattern in enumerate(_RANKED):
                match = pattern.fullmatch(path.name)
                if match is None:
                    continue
                refuse_no_file(path)
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
    if max(rank + 1, found.world_size or 1) > _MAX_WORLD:
        raise InconsistentCheckpoint(
            f"{path}: more than {_MAX_WORLD} ranks, which nobody has",
            "the file does not belong here; move it away",
        )
    if found.world_size is not None and rank >= found.world_size:
        raise InconsistentCheckpoint(
            f"{path}: rank {rank} of a world of {found.world_size}",
            "the file does not belong here; move it away",
        )
    found.files[rank] = path


def _full_file(folder: Path) -> Path | None:
    """The only full state dict of a folder; None if it has none."""
    found = _full_files(folder)
    if len(found) > 1:
        raise AmbiguousCheckpoint(
            f"{folder}: holds {' and '.join(path.name for path in found)}",
            "give the file itself",
        )
    for path in found:
        refuse_no_file(path)
    return found[0] if found else None


def _full_files(folder: Path) -> list[Path]:
    """What has the name of a full state dict and is no folder."""
    return [path for name in _FULL if os.path.lexists(path := folder / name) and not path.is_dir()]


def _config(folder: Path) -> tuple[dict[str, Any], LocalFile | None]:
    """fsdp_config.json, if there is one; its numbers are checked."""
    path = folder / _CONFIG
    if not os.path.lexists(path):
        return {}, None
    refuse_no_file(path)
    file = LocalFile(path)
    try:
        config = read_object(file, _LARGEST_CONFIG)
    except ValueError as error:
        raise DamagedFile(
            f"{path}: not what verl writes ({error})", "restore it, or remove it where file names say enough"
        ) from None
    world = config.get("world_size")
    if world is not None and (type(world) is not int or not 0 < world <= _MAX_WORLD):
        raise DamagedFile(f"{path}: a world size of {str(world)[:40]}", "restore it, or remove it")
    return config, file


def recorded_version(paths: Sequence[Path], chosen: RankSet) -> tuple[int | None, list[LocalFile]]:
    """The FSDP that fsdp_config.json names, and the files that say so.

    Raises `InconsistentCheckpoint` where its world size is not that of the rank files.
    """
    files = []
    for folder in paths:
        config, file = _config(folder) if folder.is_dir() else ({}, None)
        files += [file] if file else []
        world = config.get("world_size")
        if world is not None and chosen.world_size is not None and world != chosen.world_size:
            raise InconsistentCheckpoint(
                f"{folder / _CONFIG}: a world of {world}, but the files are named for {chosen.world_size}",
                "the folder mixes two saves; move one away, or remove the config",
            )
        version = config.get("FSDP_version")
        if version in (1, 2):
            return int(version), files
    return None, files
