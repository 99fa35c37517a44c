"""From the folder that a user names to the folder that holds the files: run, step, component, leaf.

RUN/latest_checkpointed_iteration.txt   the step that was finished last (a number, or "release")
RUN/global_step_N/actor/                verl: what a format recognises (critic with --component critic),
                                        or has a folder dist_ckpt/ or model/dist_ckpt/
RUN/iter_000000N/, RUN/release/         Megatron-LM, Megatron-Bridge
NAME/weights/ with NAME/context/        NeMo 2
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lazymerge.checkpoint import Note
from lazymerge.errors import AmbiguousCheckpoint, IncompleteCheckpoint, NotACheckpoint, SourceError

POINTER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_STEP = re.compile(r"(?:global_step|iter)_(\d+)")
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

    Raises `AmbiguousCheckpoint` where several steps are there and nothing says which one.
    """
    if recognised(source):
        return Located(source)
    if not source.is_dir():
        return None
    for name in ("", component, *([] if component in _COMPONENTS else _COMPONENTS)):
        leaf = _leaf(source / name, recognised)
        if leaf is not None:
            return Located(leaf)
    step, notes = _step(source)
    if step is None:
        _refuse_other_component(source, component, recognised)
        return None
    found = locate(step, component, recognised)
    if found is None:
        return None
    return Located(found.path, (*notes, *found.notes))


def _leaf(folder: Path, recognised: Callable[[Path], bool]) -> Path | None:
    """The folder itself, or that below it which its trainer saves the weights in."""
    weights, context = _NEMO
    below = [folder / name for name in _LEAVES]
    if (folder / context).is_dir():
        below.append(folder / weights)
    return next((place for place in (folder, *below) if recognised(place)), None)


def _refuse_other_component(source: Path, component: str, recognised: Callable[[Path], bool]) -> None:
    others = [name for name in _COMPONENTS if name != component and _leaf(source / name, recognised)]
    if others:
        raise NotACheckpoint(
            f"{source}: holds {' and '.join(others)}, and no {component}",
            f"give --component {others[0]} to merge that",
        )


def _step(run: Path) -> tuple[Path | None, tuple[Note, ...]]:
    """The step folder of a run that is to be taken, and a note if it is not the newest."""
    steps = _steps(run)
    if not steps:
        return None, ()
    newest = max(steps)
    pointer = run / POINTER
    if pointer.is_file():
        text = pointer.read_text(errors="replace")[:100].strip()
        if not text.isdecimal() and text != _RELEASE:
            raise SourceError(f"{pointer}: {text!r} is no step number", "give the step folder itself")
        step = _RELEASE_STEP if text == _RELEASE else int(text)
        if step not in steps:
            raise IncompleteCheckpoint(
                f"{pointer}: names step {text}, but {run} holds {_listed(steps)}",
                "give the step folder itself",
            )
        if step in (newest, _RELEASE_STEP):
            return steps[step], ()
        newer = ", ".join(str(n) for n in sorted(steps) if n > step)
        return steps[step], (
            Note(
                "warning", f"taking step {step}, which {POINTER} names; newer and perhaps unfinished: {newer}"
            ),
        )
    if len(steps) > 1:
        raise AmbiguousCheckpoint(
            f"{run}: holds steps {_listed(steps)} and no {POINTER}",
            f"give the step folder itself, for example {steps[newest]}",
        )
    return steps[newest], ()


_RELEASE_STEP = -1
"""Stands for the folder `release`, which holds converted weights: older than any step."""


def _steps(run: Path) -> dict[int, Path]:
    """The step folders of a run by number."""
    steps: dict[int, Path] = {}
    for path in sorted(run.iterdir()):
        match = _STEP.fullmatch(path.name)
        if not path.is_dir() or (match is None and path.name != _RELEASE):
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
