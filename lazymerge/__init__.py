"""Sharded training checkpoints into Hugging Face models, as fast as `cp` and in the memory of `cp`.

lazymerge.merge("run/global_step_100/actor", "model", max_ram="16GB")

checkpoint = lazymerge.open("run")       # names -> lazy tensors; nothing is read
model.load_state_dict(checkpoint)        # read, one tensor at a time
"""

from __future__ import annotations

__version__ = "0.1.0"

from lazymerge.api import merge, open  # noqa: A004 - `lazymerge.open` is what it does
from lazymerge.checkpoint import Checkpoint, Note, Topology
from lazymerge.errors import LazymergeError
from lazymerge.report import MergeReport, Progress

__all__ = [
    "Checkpoint",
    "LazymergeError",
    "MergeReport",
    "Note",
    "Progress",
    "Topology",
    "merge",
    "open",
]
