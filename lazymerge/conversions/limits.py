"""Limits that a process sets itself after its imports, before it looks at anything of a stranger's."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def bound(seconds: int, memory: int) -> None:
    """Bound the processor time and the memory (bytes) that this process may use from here on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds)
    if sys.platform == "linux":  # elsewhere this limit counts other things, or nothing
        held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if held:
            _lower(resource.RLIMIT_DATA, int(held[1]) * 1024 + memory)


def _lower(kind: int, limit: int) -> None:
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(kind, (limit, hard))
