"""The commands that are compared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benches.measure import REPOSITORY, Road

WORKERS = min(4, os.cpu_count() or 1)
"""As many threads as a merge takes where nobody says otherwise."""

HAS_COMMAND = (REPOSITORY / "lazymerge" / "__main__.py").exists()

CP = "cp -r"
CP_SYNC = "cp -r, then sync -f"
MERGE = "lazymerge merge"
MERGE_UNCHECKED = "lazymerge merge --no-check"
UNCHECKED = ("--no-check", "--names", "runtime")
"""Options for tensors that are no model of their config."""

REFERENCE = "load all ranks, torch.cat, save_file"
VERL = "verl.model_merger"
PLAIN = "pread and pwrite"
PLAIN_THREADS = f"pread and pwrite, {WORKERS} threads"
PLAIN_SYNC = f"pread and pwrite, {WORKERS} threads, fsync"


def lazymerge(*arguments: str) -> list[str]:
    """The command line of `lazymerge`, through the module if there is one and through the library if not."""
    if HAS_COMMAND:
        return [sys.executable, "-m", "lazymerge", *arguments]
    assert arguments[0] == "merge", "the library alone has no other command"
    options = dict(zip(arguments[3::2], arguments[4::2], strict=True))
    keywords = {name.removeprefix("--").replace("-", "_"): value for name, value in options.items()}
    if workers := keywords.pop("max_workers", None):
        keywords["max_workers"] = int(workers)  # type: ignore[assignment]
    call = f"lazymerge.merge({arguments[1]!r}, {arguments[2]!r}, **{keywords!r})"
    return [sys.executable, "-c", f"import lazymerge; {call}"]


def ask(source: Path, *options: str) -> None:
    """Plan a merge, so that transformers has been asked for the model's names and the answer is kept."""
    command = lazymerge("merge", str(source), str(source.parent / "asked"), "--dry-run", *options)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def cp(source: Path) -> Road:
    return Road(CP, lambda target: ["cp", "-r", str(source), str(target)])


def cp_sync(source: Path) -> Road:
    """With the flush that a merge ends with."""
    return Road(
        CP_SYNC, lambda target: ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', str(source), str(target)]
    )


def merge(source: Path, *options: str, name: str = MERGE) -> Road:
    return Road(name, lambda target: lazymerge("merge", str(source), str(target), *options))


def reference(source: Path, nbytes: int) -> Road:
    """What verl's merger does, rebuilt."""
    return Road(
        REFERENCE,
        lambda target: [sys.executable, "-m", "benches.reference", str(source), str(target)],
        memory=int(2.4 * nbytes) + 10**9,
    )


def verl(source: Path, nbytes: int, python: str) -> Road:
    """verl's merger itself, in an environment that has it."""

    def command(target: Path) -> Sequence[str]:
        folders = ["--local_dir", str(source), "--target_dir", str(target)]
        return [python, "-m", "verl.model_merger", "merge", "--backend", "fsdp", *folders]

    return Road(VERL, command, memory=int(2.4 * nbytes) + 10**9)


def plain(source: Path, write: int, *, threads: int = 1, sync: bool = False) -> Road:
    """Reading all of the source and writing `write` bytes, through buffers, with no work between."""
    name = PLAIN if threads == 1 else PLAIN_SYNC if sync else PLAIN_THREADS
    options = ["--write", str(write), "--threads", str(threads), *(["--sync"] if sync else [])]
    return Road(
        name,
        lambda target: [sys.executable, "-m", "benches.plain", str(source), str(target), *options],
    )
