"""From the folder that a user names to the folder that holds the files: run, step, component, leaf.

RUN/latest_checkpointed_iteration.txt   the step that was finished last
RUN/global_step_N/actor/                what a format recognises (critic with --component critic)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lazymerge.checkpoint import Note
from lazymerge.errors import AmbiguousCheckpoint, IncompleteCheckpoint, NotACheckpoint, SourceError

POINTER = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"global_step_(\d+)")
_COMPONENTS = ("actor", "critic")


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
    for name in (component, *([] if component in _COMPONENTS else _COMPONENTS)):
        if recognised(source / name):
            return Located(source / name)
    step, notes = _step(source)
    if step is None:
        _refuse_other_component(source, component, recognised)
        return None
    found = locate(step, component, recognised)
    if found is None:
        return None
    return Located(found.path, (*notes, *found.notes))


def _refuse_other_component(source: Path, component: str, recognised: Callable[[Path], bool]) -> None:
    others = [name for name in _COMPONENTS if name != component and recognised(source / name)]
    if others:
        raise NotACheckpoint(
            f"{source}: holds {' and '.join(others)}, and no {component}",
            f"give --component {others[0]} to merge that",
        )


def _step(run: Path) -> tuple[Path | None, tuple[Note, ...]]:
    """The step folder of a run that is to be taken, and a note if it is not the newest."""
    steps = {
        int(m.group(1)): path for path in run.iterdir() if (m := _STEP.fullmatch(path.name)) and path.is_dir()
    }
    if not steps:
        return None, ()
    newest = max(steps)
    pointer = run / POINTER
    if pointer.is_file():
        text = pointer.read_text(errors="replace")[:100].strip()
        if not text.isdigit():
            raise SourceError(f"{pointer}: {text!r} is no step number", "give the step folder itself")
        step = int(text)
        if step not in steps:
            raise IncompleteCheckpoint(
                f"{pointer}: names step {step}, but {run} holds {', '.join(map(str, sorted(steps)))}",
                "give the step folder itself",
            )
        if step == newest:
            return steps[step], ()
        newer = ", ".join(str(n) for n in sorted(steps) if n > step)
        return steps[step], (
            Note(
                "warning", f"taking step {step}, which {POINTER} names; newer and perhaps unfinished: {newer}"
            ),
        )
    if len(steps) > 1:
        raise AmbiguousCheckpoint(
            f"{run}: holds steps {', '.join(map(str, sorted(steps)))} and no {POINTER}",
            f"give the step folder itself, for example {steps[newest]}",
        )
    return steps[newest], ()
