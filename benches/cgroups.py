"""Commands under a memory limit of the kernel's that counts everything: the page cache too, and children.

A cgroup of version 2 (`memory.max`) where there is one that can be written to, else of version 1
(`memory.limit_in_bytes`), whose charging of pages is the same.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def limited(nbytes: int) -> Iterator[Path | None]:
    """A cgroup that may hold `nbytes` of memory, gone at the end; None where none can be made."""
    made = _made(nbytes)
    try:
        yield made
    finally:
        if made is not None:
            _remove(made)


def run(group: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a cgroup; what it said."""
    return subprocess.run(inside(group, command), capture_output=True, text=True, check=False)


def inside(group: Path, command: Sequence[str]) -> list[str]:
    """The command that runs another in a cgroup from its first page on."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]


def _made(nbytes: int) -> Path | None:
    for parent, limit in _places():
        group = parent / f"lazymerge-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(nbytes))
            if int((group / limit).read_text()) <= nbytes:
                return group
        except OSError:
            pass
        group.rmdir()
    return None


def _places() -> Iterator[tuple[Path, str]]:
    """Groups that could hold one with a limit on memory, and the file that the limit goes into."""
    for root in (_ROOT, _ROOT / "unified"):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                for parent in (root / line[3:].lstrip("/"), root):
                    handed_down = parent / "cgroup.subtree_control"
                    if handed_down.exists() and "memory" in handed_down.read_text().split():
                        yield parent, "memory.max"
    if (_ROOT / "memory" / "memory.limit_in_bytes").exists():
        yield _ROOT / "memory", "memory.limit_in_bytes"


def _remove(group: Path) -> None:
    for _ in range(100):  # a process that has ended is in it for a moment
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.05)
    group.rmdir()
