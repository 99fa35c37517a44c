"""Merges in processes of their own that are killed at a step of theirs, or whose disk fails.

    with Merges() as merges:
        whole = merges(src=..., dst=...)              # whole.steps: each call that changes something on disk
        merges(src=..., dst=..., die=7)               # SIGKILL in the midst of the eighth
        merges(src=..., dst=..., faults=["pwrite|/out/|1|0|errno=28"])   # see faults.c

One process imports lazymerge and forks for every merge, which takes some milliseconds then. Faults are made
by a library that is preloaded, below Python: it retries and raises as with a real disk.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
CHANGING = (
    *("write", "pwrite", "copy_file_range", "sendfile", "ftruncate", "posix_fallocate", "fsync"),
    *("replace", "rename", "link", "unlink", "mkdir", "rmdir"),
)
"""Functions of `os` that change something on disk."""
SECONDS = 60
"""How long a merge may take before it counts as hanging."""


@dataclass(frozen=True)
class Done:
    """How a merge ended: `status` 0, or 2 and (kind, problem, hint) of the error, or the negative signal."""

    status: int
    steps: tuple[str, ...] = ()
    error: tuple[str, str, str] | None = None
    resumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def compiled(folder: Path) -> Path | None:
    """The library of faults.c, compiled in the folder; None if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "faults.so"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        library,
        Path(__file__).with_name("faults.c"),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return library


class Merges:
    """A process that forks for every merge; `library` is what `compiled` gave, for faults."""

    def __init__(self, library: Path | None = None) -> None:
        environment = {**os.environ, **({"LD_PRELOAD": str(library)} if library else {})}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.makers.faults"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def __call__(
        self, *, die: int | None = None, at: Sequence[str] = (), faults: Sequence[str] = (), **options: Any
    ) -> Done:
        """Merge with these options of `lazymerge.merge`, by one worker.

        `die` is the number of the step in whose midst it is killed, counting from 0; `at`: steps that count.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"die": die, "at": at or CHANGING, "faults": ";".join(faults), "options": options}
        print(json.dumps(job, default=str), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return Done(**{key: tuple(x) if isinstance(x, list) else x for key, x in answer.items()})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=SECONDS)
        self._process.stdout.close()


# ---- in the other process ----------------------------------------------------------------------------------


def _serve() -> None:
    import lazymerge.api
    import lazymerge.compute  # noqa: F401 - with torch, that some merges need
    from lazymerge.formats.registry import formats

    formats()  # whatever a fork would have to import

    for line in sys.stdin:
        job = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
            os.close(read)
            text = json.dumps(_merge(job))
            os.environ.pop("FAULTS", None)
            with open(write, "w") as pipe:
                pipe.write(text)
            os._exit(0)
        os.close(write)
        with open(read) as pipe:
            text = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(text or json.dumps({"status": status}), flush=True)


def _merge(job: dict[str, Any]) -> dict[str, Any]:
    import lazymerge

    steps: list[str] = []
    for name in job["at"]:
        setattr(os, name, _counted(name, getattr(os, name), steps, job["die"]))
    if job["faults"]:
        os.environ["FAULTS"] = job["faults"]
    try:
        report = lazymerge.merge(**{"max_workers": 1, **job["options"]})
    except lazymerge.LazymergeError as error:
        told = (type(error).__mro__, error.problem, error.hint)
        kinds = [cls.__name__ for cls in told[0]]
        return {"status": error.exit_code, "steps": steps, "error": (" ".join(kinds), *told[1:])}
    except BaseException as error:
        return {"status": 1, "steps": steps, "error": (type(error).__name__, repr(error), "")}
    notes = [note.text for note in report.warnings]
    return {"status": 0, "steps": steps, "resumed": report.resumed, "notes": notes}


def _counted(name: str, real: Any, steps: list[str], die: int | None) -> Any:
    def step(*arguments: Any, **options: Any) -> Any:
        if die is not None and len(steps) == die:
            _half(name, real, arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        steps.append(name)
        return real(*arguments, **options)

    return step


def _half(name: str, real: Any, arguments: tuple[Any, ...]) -> None:
    """Do half of what moves bytes: a kill may come between two pages."""
    if name == "pwrite":
        fd, data, at = arguments
        real(fd, data[: len(data) // 2], at)
    elif name == "copy_file_range":
        source, target, size, *rest = arguments
        real(source, target, size // 2, *rest)


if __name__ == "__main__":
    _serve()
