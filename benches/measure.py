"""A command in a fresh process: its wall time, its processor time, and the most memory that it held.

Memory is what the operating system counts against the process, anonymous and mapped pages together;
the page cache is nobody's. It is the larger of the kernel's own high-water mark (VmHWM) and the highest
sum of RssAnon, RssFile and RssShmem, of the process and its children, among the samples, which are taken
every few milliseconds. This
process imports no torch: a child's `ru_maxrss` starts at the size of its parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).parents[1]
_INTERVAL = 0.005


@dataclass(frozen=True, slots=True)
class Run:
    """One run: wall and processor time in seconds, memory in bytes."""

    seconds: float
    processor: float
    peak: int


@dataclass(frozen=True, slots=True)
class Road:
    """A way to do the job: `command` makes the arguments for an output path that does not exist.

    `memory` is about what it holds in bytes, so that a machine that has less is not driven into a wall.
    """

    name: str
    command: Callable[[Path], Sequence[str]]
    memory: int = 500_000_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where source and result are: `cold` drops the page cache before each run, else the source is in it."""

    name: str
    folder: Path
    cold: bool = False


def run(command: Sequence[str]) -> Run:
    """Run a command to its end; `RuntimeError` with what it said if it fails.

    Python may keep its bytecode, as an installed package has it: compiling is no part of a merge.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as said:
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**environment, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
        sampler = _Sampler(process.pid)
        sampler.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        sampler.stop()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            text = said.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"{' '.join(command)}\nended with {process.returncode}:\n{text}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, sampler.peak)


class _Sampler(threading.Thread):
    """Reads what the system says of a process and its children until told to stop."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._pid = pid
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.is_set():
            high, now = _resident(self._pid)
            children = sum(_resident(child)[1] for child in _children(self._pid))
            self.peak = max(self.peak, high, now + children)
            self._done.wait(_INTERVAL)

    def stop(self) -> None:
        self._done.set()
        self.join()


def _resident(pid: int) -> tuple[int, int]:
    """Bytes of a process in memory: its high-water mark, and now. 0 if it has just ended."""
    fields = {}
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in {"VmHWM", "RssAnon", "RssFile", "RssShmem"}:
                    fields[name] = int(value.split()[0]) * 1024
    except OSError:
        return 0, 0
    return fields.pop("VmHWM", 0), sum(fields.values())


def _children(pid: int) -> list[int]:
    """The processes that any of its threads has started."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except OSError:  # a thread, or all of it, has just ended
        pass
    return found


def alternate(
    roads: Sequence[Road],
    place: Place,
    source: Path,
    repeat: int,
    tell: Callable[[str], None],
    *,
    prepare: bool = True,
) -> dict[str, list[Run]]:
    """Road -> its runs. Every round takes every road once, each round beginning with another one.

    Each result is deleted before the next run begins. Without `prepare` caches stay as they are.
    """
    runs: dict[str, list[Run]] = {road.name: [] for road in roads}
    for number in range(repeat):
        turn = number % len(roads)
        for road in (*roads[turn:], *roads[:turn]):
            if (free := available()) < road.memory:
                tell(f"  {road.name}: left out, {free / 1e9:.1f} GB are free of {road.memory / 1e9:.1f}")
                continue
            target = place.folder / "result"
            remove(target)
            if prepare:
                settle(source, place)
            done = run(road.command(target))
            remove(target)
            runs[road.name].append(done)
            tell(
                f"  {place.name:<9} {road.name:<42} {done.seconds:7.2f} s"
                f" {done.processor:7.2f} s cpu {done.peak / 1e6:7.0f} MB"
            )
    return {name: done for name, done in runs.items() if done}


def settle(source: Path, place: Place) -> None:
    """Everything is written out, and the source is in the page cache, or nothing is."""
    os.sync()
    if place.cold:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return
    buffer = memoryview(bytearray(4 << 20))
    for path in source.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def can_drop_caches() -> bool:
    """Whether this user may empty the page cache."""
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


def remove(path: Path) -> None:
    subprocess.run(["rm", "-rf", str(path)], check=True)


def available() -> int:
    """Bytes of memory that a new process could have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


def seconds(runs: Sequence[Run]) -> float:
    """The median wall time."""
    return median(each.seconds for each in runs)


def peak(runs: Sequence[Run]) -> int:
    """The highest peak: a bound is kept by every run or not at all."""
    return max(each.peak for each in runs)
