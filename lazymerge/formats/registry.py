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
from lazymerge.errors import AmbiguousCheckpoint, NotACheckpoint, PlanError, SourceError
from lazymerge.formats.locate import POINTER, Located, locate, pointed_step, two_places

ACTOR = "actor"
"""The model of a run that is taken where nobody says which."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """What a user can say about a checkpoint that it does not say itself."""

    component: str = ACTOR
    fsdp_version: int | None = None
    world_size: int | None = None
    hf_config: Path | None = None
    backend: str | None = None


class Format(Protocol):
    """What recognises a folder and opens it as a checkpoint."""

    name: str
    looks_for: str
    """The files that it is recognised by, for a person."""

    def recognises(self, path: Path) -> bool:
        """Whether this is one of its folders (or files); opens nothing but what is small.

        May raise `SourceError` for a part of such a checkpoint, which nobody should open as if it were whole.
        """
        ...

    def open(self, paths: Sequence[Path], options: OpenOptions) -> Checkpoint:
        """The checkpoint in these folders taken together."""
        ...


def formats() -> list[Format]:
    """The formats that are installed, by name."""
    found: dict[str, Format] = {}
    for entry in sorted(entry_points(group="lazymerge.formats"), key=lambda entry: entry.name):
        found[entry.name] = entry.load()
    if not {"fsdp", "huggingface", "megatron"} <= set(found):  # a source tree that is not installed
        from lazymerge.formats import fsdp, huggingface
        from lazymerge.formats.megatron import format as megatron

        own: list[Format] = [fsdp.FORMAT, huggingface.FORMAT, megatron.FORMAT]
        found = {each.name: each for each in own} | found
    return list(found.values())


def open_checkpoint(sources: Sequence[str | os.PathLike[str]], options: OpenOptions) -> Checkpoint:
    """The checkpoint at these paths: folders at any level of a run, or one file.

    Raises `SourceError` for paths that cannot be read and `NotACheckpoint`, listing what was looked
    for, where no format knows them.
    """
    paths = [Path(source) for source in sources]
    for path in paths:
        _check_readable(path)
        if path.name == ACTOR != options.component:
            raise NotACheckpoint(
                f"{path}: is the {path.name}, and --component says {options.component}",
                "give the folder above it, or leave out --component",
            )
    known_formats = _wanted(options.backend)
    located: dict[str, list[Located | None]] = {}
    other_component: list[NotACheckpoint] = []
    for known in known_formats:
        try:
            located[known.name] = [locate(path, options.component, known.recognises) for path in paths]
        except NotACheckpoint as error:
            located[known.name] = [None] * len(paths)
            other_component.append(error)
    fitting = [known for known in known_formats if all(located[known.name])]
    if len(fitting) > 1:
        raise _two_formats(paths[0], {known.name: located[known.name][0] for known in fitting})
    for known in fitting:
        places = [place for place in located[known.name] if place is not None]
        checkpoint = known.open([place.path for place in places], options)
        notes = tuple(note for place in places for note in place.notes)
        return checkpoint.with_notes(*notes).with_sidecars(*paths)
    if other_component:
        raise other_component[0]
    strange = [path for path, *places in zip(paths, *located.values(), strict=True) if not any(places)]
    raise _unknown(strange[0] if strange else paths[0], known_formats, options)


def recognised(path: Path) -> str | None:
    """The name of the first format that knows a folder at any level of a run; None if none does."""
    for known in formats():
        try:
            if locate(path, ACTOR, known.recognises) is not None:
                return known.name
        except SourceError:  # something of its kind, which it would not open
            return known.name
    return None


def _wanted(backend: str | None) -> list[Format]:
    """The formats that may be taken: all, or the one that the user names."""
    known = formats()
    wanted = [each for each in known if backend in (None, each.name)]
    if not wanted:
        raise PlanError(
            f"--backend {backend}: no such format", f"choose one of {', '.join(each.name for each in known)}"
        )
    return wanted


def _two_formats(source: Path, places: dict[str, Located | None]) -> AmbiguousCheckpoint:
    """The error that a path is a checkpoint of two formats."""
    (name, at), (other, there), *_ = ((name, place.path) for name, place in places.items() if place)
    if at == there:
        return AmbiguousCheckpoint(
            f"{at}: holds two checkpoints, of {name} and of {other}",
            "move away the one not to be merged, or give its file itself if it is one",
        )
    deepest = max(at, there, key=lambda path: len(path.parts))
    return two_places(source, f"that of {name} in {at}", f"that of {other} in {there}", deepest)


def _unknown(path: Path, known_formats: Sequence[Format], options: OpenOptions) -> NotACheckpoint:
    """The error that no format, or not the one that the user names, knows a path."""
    for other in formats():
        if other not in known_formats and locate(path, options.component, other.recognises) is not None:
            return NotACheckpoint(
                f"{path}: no checkpoint of {options.backend}, but one of {other.name}",
                f"leave out --backend, or give --backend {other.name}",
            )
    if path.is_dir() and (path / "adapter_config.json").exists():
        return NotACheckpoint(
            f"{path}: is a PEFT adapter, not a model",
            f"give its base model, and the adapter as --adapter {path}",
        )
    problem = f"{path}: {_described(path)}"
    step = pointed_step(path) if path.is_dir() else None
    if step is not None:
        problem = f"{path / POINTER}: names {step}, which is {_described(step)}"
    return NotACheckpoint(
        problem,
        "looked here, in the run's step and in actor or critic for: "
        + "; ".join(f"{known.looks_for} ({known.name})" for known in known_formats),
    )


def sidecar_folders(paths: Sequence[Path], options: OpenOptions) -> tuple[Path, ...]:
    """Where config and tokenizer may be: where the user says, in huggingface/, beside the weights."""
    folders = [options.hf_config] if options.hf_config else []
    for path in paths:
        folder = path if path.is_dir() else path.parent
        if (folder / "huggingface").is_symlink():
            raise SourceError(
                f"{folder / 'huggingface'}: is a link", "put the folder itself there, or give --hf-config DIR"
            )
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
