"""Sharded training checkpoints into Hugging Face models, as fast as `cp` and in the memory of `cp`.

lazymerge.merge("run/global_step_100/actor", "model", max_ram="16GB")

checkpoint = lazymerge.open("run")       # names -> lazy tensors; nothing is read
model.load_state_dict(checkpoint)        # read, one tensor at a time
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazymerge.api import merge, open, upload  # noqa: A004 - `lazymerge.open` is what it does
    from lazymerge.checkpoint import Checkpoint, Note, Topology
    from lazymerge.errors import LazymergeError
    from lazymerge.report import MergeReport, Progress
    from lazymerge.verification import VerifyReport, verify

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "LazymergeError",
    "MergeReport",
    "Note",
    "Progress",
    "Topology",
    "VerifyReport",
    "merge",
    "open",
    "upload",
    "verify",
]

_HOMES = {
    "Checkpoint": "lazymerge.checkpoint",
    "LazymergeError": "lazymerge.errors",
    "MergeReport": "lazymerge.report",
    "Note": "lazymerge.checkpoint",
    "Progress": "lazymerge.report",
    "Topology": "lazymerge.checkpoint",
    "merge": "lazymerge.api",
    "open": "lazymerge.api",
    "upload": "lazymerge.api",
    "VerifyReport": "lazymerge.verification",
    "verify": "lazymerge.verification",
}
"""Name -> the module that has it, imported when it is first asked for: `lazymerge --help` needs none."""


def __getattr__(name: str) -> object:
    """The public object of that name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
