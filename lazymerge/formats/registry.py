"""The formats there are, and how a path is opened as one of them.

A format is a small module with an object `FORMAT`; third parties register theirs through the entry
point group ``lazymerge.formats``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from lazymerge.checkpoint import Checkpoint
from lazymerge.errors import NotACheckpoint, SourceError
from lazymerge.formats.locate import locate


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """What a user can say about a checkpoint that it does not say itself."""

    component: str = "actor"
    fsdp_version: int | None = None
    world_size: int | None = None
    hf_config: Path | None = None


class Format(Protocol):
    """What recognises a folder and opens it as a checkpoint."""

    name: str
    looks_for: str
    """The files that it is recognised by, for a person."""

    def recognises(self, path: Path) -> bool:
        """Whether this is one of its folders (or files); looks at names only."""
        ...

    def open(self, paths: Sequence[Path], options: OpenOptions) -> Checkpoint:
        """The checkpoint in these folders taken together."""
        ...


def formats() -> list[Format]:
    """The formats that are installed, by name."""
    found: dict[str, Format] = {}
    for entry in sorted(entry_points(group="lazymerge.formats"), key=lambda entry: entry.name):
        found[entry.name] = entry.load()
    if not {"fsdp", "megatron"} <= set(found):  # run from a source tree that is not installed
        from lazymerge.formats import fsdp
        from lazymerge.formats.megatron import format as megatron

        found = {"fsdp": fsdp.FORMAT, "megatron": megatron.FORMAT, **found}
    return list(found.values())


def open_checkpoint(sources: Sequence[str | os.PathLike[str]], options: OpenOptions) -> Checkpoint:
    """The checkpoint at these paths: folders at any level of a run, or one file.

    Raises `SourceError` for paths that cannot be read and `NotACheckpoint`, listing what was looked
    for, where no format knows them.
    """
    paths = [Path(source) for source in sources]
    for path in paths:
        _check_readable(path)
    known_formats = formats()
    for known in known_formats:
        located = [locate(path, options.component, known.recognises) for path in paths]
        if all(located):
            places = [place for place in located if place is not None]
            checkpoint = known.open([place.path for place in places], options)
            notes = tuple(note for place in places for note in place.notes)
            return checkpoint.with_notes(*notes).with_sidecars(*paths)
    unknown = next((path for path in paths if not _is_known(path, known_formats, options)), paths[0])
    raise NotACheckpoint(
        f"{unknown}: {_described(unknown)}",
        "looked here, in the run's step and in actor or critic for: "
        + "; ".join(f"{known.looks_for} ({known.name})" for known in formats()),
    )


def _is_known(path: Path, known: Sequence[Format], options: OpenOptions) -> bool:
    return any(locate(path, options.component, each.recognises) is not None for each in known)


def sidecar_folders(paths: Sequence[Path], options: OpenOptions) -> tuple[Path, ...]:
    """Where config and tokenizer may be: where the user says, in huggingface/, beside the weights."""
    folders = [options.hf_config] if options.hf_config else []
    for path in paths:
        folder = path if path.is_dir() else path.parent
        folders += [folder / "huggingface", folder]
    return tuple(folder for folder in folders if folder.is_dir())


def _check_readable(path: Path) -> None:
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                next(entries, None)
        else:
            path.stat()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}", "check the path and its permissions") from None


def _described(path: Path) -> str:
    if path.is_file():
        return "no checkpoint that any format knows"
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "an empty folder"
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"no checkpoint that any format knows (holds {shown})"
