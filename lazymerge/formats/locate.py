"""From the folder that a user names to the folder that holds the files: run, step, component, leaf.

RUN/latest_checkpointed_iteration.txt   the step that was finished last (a number, or "release")
RUN/global_step_N/actor/                verl: what a format recognises (critic with --component critic),
                                        or has a folder dist_ckpt/ or model/dist_ckpt/
RUN/iter_000000N/, RUN/release/         Megatron-LM, Megatron-Bridge
NAME/weights/ with NAME/context/        NeMo 2
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lazymerge.checkpoint import Note
from lazymerge.errors import AmbiguousCheckpoint, IncompleteCheckpoint, NotACheckpoint, SourceError
from lazymerge.files.local import LocalFile, refuse_no_file

POINTER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_STEP = re.compile(r"(?:global_step|iter)_(\d+)")
_LIKE_A_NUMBER = re.compile(r"[-+.\d]{0,20}", re.ASCII)
_COMPONENTS = ("actor", "critic")
_LEAVES = ("model/dist_ckpt", "dist_ckpt")
_NEMO = ("weights", "context")


@dataclass(frozen=True, slots=True)
class Located:
    """The folder (or file) to open, and what was decided on the way to it."""

    path: Path
    notes: tuple[Note, ...] = ()


def locate(source: Path, component: str, recognised: Callable[[Path], bool]) -> Located | None:
    """The place at or below `source` that `recognised` accepts; None if there is none.

    Raises `AmbiguousCheckpoint` where several are there and nothing says which one.
    """
    if not source.is_dir():
        return Located(source) if recognised(source) else None
    leaf = _leaf(source, component, recognised)
    if leaf is not None:
        below = next(
            (place for step in _steps(source).values() if (place := _leaf(step, component, recognised))), None
        )
        if below is not None:
            raise two_places(source, str(leaf), str(below), below)
        return Located(leaf)
    step, notes = _step(source, lambda step: _leaf(step, component, recognised) is not None)
    if step is None:
        _refuse_other_component(source, component, recognised)
        return None
    found = locate(step, component, recognised)
    if found is None:
        return None
    return Located(found.path, (*notes, *found.notes))


def two_places(source: Path, one: str, other: str, example: Path) -> AmbiguousCheckpoint:
    """The error that two checkpoints are at or below `source`, and nothing says which one is meant."""
    return AmbiguousCheckpoint(
        f"{source}: holds two checkpoints, {one} and {other}",
        f"give the folder or file itself, for example {example}, or move away the one not to be merged",
    )


def _leaf(folder: Path, component: str, recognised: Callable[[Path], bool]) -> Path | None:
    """The place at or below a folder where the weights are, in the component or outside of all.

    A component that is not there may be one that the user did not mean to name.
    """
    names = ["", component]
    found = [place for name in names for place in _places(folder / name) if recognised(place)]
    if not found and component not in _COMPONENTS:
        found = [place for name in _COMPONENTS for place in _places(folder / name) if recognised(place)]
    if len(found) > 1:
        raise two_places(folder, str(found[0]), str(found[1]), found[1])
    return found[0] if found else None


def _places(folder: Path) -> list[Path]:
    """The folder itself, and those below it which trainers save the weights in."""
    weights, context = _NEMO
    below = [folder / name for name in _LEAVES]
    if (folder / context).is_dir():
        below.append(folder / weights)
    return [folder, *below]


def _refuse_other_component(source: Path, component: str, recognised: Callable[[Path], bool]) -> None:
    others = [
        name
        for name in _COMPONENTS
        if name != component and any(recognised(place) for place in _places(source / name))
    ]
    if others:
        raise NotACheckpoint(
            f"{source}: holds {' and '.join(others)}, and no {component}",
            f"give --component {others[0]} to merge that",
        )


def pointed_step(run: Path) -> Path | None:
    """The step folder that the pointer of a run names; None if there is no pointer, or no such folder."""
    text = _pointer(run)
    return _steps(run).get(_number(text)) if text is not None and _is_step(text) else None


def _pointer(run: Path) -> str | None:
    """What the pointer says; None if there is none."""
    if not os.path.lexists(run / POINTER):
        return None
    refuse_no_file(run / POINTER)
    file = LocalFile(run / POINTER)
    return file.read(0, min(file.size, 100)).decode(errors="replace").strip()


def _is_step(text: str) -> bool:
    return text.isdecimal() or text == _RELEASE


def _number(text: str) -> int:
    return _RELEASE_STEP if text == _RELEASE else int(text)


def _step(run: Path, holds: Callable[[Path], bool]) -> tuple[Path | None, tuple[Note, ...]]:
    """The step folder of a run that is to be taken, and a note if it is not the newest.

    Where nothing says which one, that is an error only if one of them `holds` a checkpoint.
    """
    steps = _steps(run)
    if not steps:
        return None, ()
    text, pointer = _pointer(run), run / POINTER
    newest = max(steps)
    if text is not None and _is_step(text) and _number(text) in steps:
        step = _number(text)
        if step in (newest, _RELEASE_STEP):
            return steps[step], ()
        newer = ", ".join(str(n) for n in sorted(steps) if n > step)
        return steps[step], (
            Note(
                "warning", f"taking step {step}, which {POINTER} names; newer and perhaps unfinished: {newer}"
            ),
        )
    if text is None and len(steps) == 1:
        return steps[newest], ()
    if not any(holds(step) for step in steps.values()):
        return None, ()
    if text is None:
        raise AmbiguousCheckpoint(
            f"{run}: holds steps {_listed(steps)} and no {POINTER}",
            f"give the step folder itself, for example {steps[newest]}",
        )
    if not _is_step(text):
        shown = f"{text!r} is" if _LIKE_A_NUMBER.fullmatch(text) else "what it holds is"  # of any other file
        raise SourceError(f"{pointer}: {shown} no step number", "give the step folder itself")
    raise IncompleteCheckpoint(
        f"{pointer}: names step {text}, but {run} holds {_listed(steps)}", "give the step folder itself"
    )


_RELEASE_STEP = -1
"""Stands for the folder `release`, which holds converted weights: older than any step."""


def _steps(run: Path) -> dict[int, Path]:
    """The step folders of a run by number."""
    steps: dict[int, Path] = {}
    for path in sorted(run.iterdir()):
        match = _STEP.fullmatch(path.name)
        if (match is None and path.name != _RELEASE) or not path.is_dir():
            continue
        step = int(match[1]) if match else _RELEASE_STEP
        if step in steps:
            raise AmbiguousCheckpoint(
                f"{run}: {steps[step].name} and {path.name} are both step {step}",
                f"give the step folder itself, for example {path}",
            )
        steps[step] = path
    return steps


def _listed(steps: dict[int, Path]) -> str:
    return ", ".join(_RELEASE if step == _RELEASE_STEP else str(step) for step in sorted(steps))
