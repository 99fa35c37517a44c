"""Runs the command line on hostile input, and notes what it may never do.

A zygote (tests/attacks/zygote.py) has imported lazymerge and forks a child for each attack. The child lowers
its limits, watches itself with an audit hook and runs the command as `lazymerge` does; what is reported is
its exit code, its talk, its processor time, its peak of memory, and every `violation`:

    a process that was started, a connection, a name that was resolved
    a module imported that neither lazymerge nor its dependencies are, or from a file of the attack
    Python's own unpickler asked for a global
    a file written, made, renamed or removed outside of where the result goes
    a file read that is none of the attack's: /etc/passwd, a device, a folder `outside`
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 5
"""Of processor time, imports apart."""
MEMORY = 300 << 20
"""Bytes of resident memory at most, interpreter and imports included."""
_PATIENCE = 60
PLAIN = ("--no-check", "--names", "runtime", "--max-ram", "250MiB")
"""Options of a merge that asks transformers nothing."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `killed` is the signal that ended it, such as SIGXCPU (24).

    `seconds` and `peak` are with the processes that it started, `own_peak` without them.
    """

    code: int | None
    killed: int
    seconds: float
    peak: int  # bytes
    own_peak: int
    violations: tuple[str, ...]
    processes: tuple[
        tuple[list[str], dict[str, str]], ...
    ]  # commands that were started, and their environment
    stdout: str
    stderr: str


class Zygote:
    """The process that forks one child for each command."""

    def __init__(self) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.zygote"],
            cwd=ROOT,
            env={**environment, "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        arguments: Sequence[str | Path],
        dst: Path,
        *,
        memory: int = MEMORY,
        seconds: int = SECONDS,
        environment: dict[str, str] | None = None,
        control: str | None = None,
    ) -> Outcome:
        """The outcome of `lazymerge ARGUMENTS`, which may write below the parent of `dst` alone.

        `memory` and `seconds` are where the child is ended. `control` is Python code to run in its place,
        for a test of the harness itself.
        """
        request = {
            "arguments": [os.fspath(each) for each in arguments],
            "writable": str(dst.parent),
            "memory": memory,
            "seconds": seconds,
            "environment": environment or {},
            "control": control,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE)
        if not ready:
            self._process.kill()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        answer["violations"] = tuple(answer["violations"])
        answer["processes"] = tuple((command, env) for command, env in answer["processes"])
        return Outcome(**answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()


class Attacker:
    """Attacks in one test's folder: `out` is where the result would go, `outside` what nobody may touch."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.zygote = zygote
        self.folder = folder
        self.src = folder / "src"
        self.out = folder / "results" / "model"
        self.outside = folder / "outside"
        self.src.mkdir()
        self.outside.mkdir()
        (self.outside / "secret").write_text("nobody may read this")

    def merge(self, *options: str | Path, src: Path | None = None, **limits: Any) -> Outcome:
        """The outcome of merging `src`."""
        return self.zygote.run(
            ["merge", src or self.src, self.out, "--quiet", *(options or PLAIN)], self.out, **limits
        )

    def refused(self, *words: str, options: Sequence[str | Path] = PLAIN, src: Path | None = None) -> Outcome:
        """The merge is refused in two lines, within the bounds, and nothing has happened at all."""
        before = _tree(self.folder)
        outcome = self.merge(*options, src=src)
        assert_refusal(outcome, *words)
        assert _tree(self.folder) == before, "something was left behind"
        return outcome

    def refused_or_merged(self, *options: str | Path) -> Outcome:
        """Either is right, as long as nothing else has happened; a result is removed again."""
        before = _tree(self.src), _tree(self.outside)
        outcome = self.merge(*(options or PLAIN))
        assert_harmless(outcome)
        assert (_tree(self.src), _tree(self.outside)) == before
        if outcome.code != 0:
            assert_refusal(outcome)
            assert not self.out.parent.exists(), "something was left behind"
        shutil.rmtree(self.out.parent, ignore_errors=True)
        return outcome


def _tree(folder: Path) -> dict[str, Any]:
    """What is in a folder and when it was changed; contents are not read, since they may be sparse."""
    found = {}
    for path in sorted(folder.rglob("*")):
        place = path.lstat()
        found[str(path.relative_to(folder))] = (place.st_mode, place.st_ino, place.st_size, place.st_mtime_ns)
    return found


def assert_harmless(outcome: Outcome) -> None:
    """No violation, no bug, and within the bounds."""
    assert not outcome.violations, outcome.violations
    assert not outcome.processes, outcome.processes
    assert not outcome.killed, f"ended by signal {outcome.killed} after {outcome.seconds:.1f} s"
    assert outcome.code in {0, 2}, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert outcome.seconds < SECONDS
    assert outcome.peak < MEMORY, f"{outcome.peak >> 20} MB"


def assert_refusal(outcome: Outcome, *words: str) -> None:
    """One line that says what is wrong with all `words` in it, and one that says what to do."""
    assert_harmless(outcome)
    assert outcome.code == 2, f"exit code {outcome.code}: {outcome.stderr}"
    said = ("warning: ", "asking transformers ")  # before
    lines = [line for line in outcome.stderr.splitlines() if not line.startswith(said)]
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"], outcome.stderr
    assert len(outcome.stderr) < 20_000, "a message that fills the terminal"
    for word in words:
        assert word in lines[0], f"{word!r} not in {lines[0][:2000]}"
