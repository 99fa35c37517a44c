"""What the reader of one Megatron layout hands to the format: tensors by canonical name, and facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lazymerge.checkpoint import Copy, Note, Topology
from lazymerge.files.local import LocalFile
from lazymerge.gather import Gather


def _no_copies() -> Iterator[Copy]:
    return iter(())


@dataclass(slots=True)
class Found:
    """The tensors of a checkpoint under canonical names (lazymerge.formats.megatron), unread.

    `settings` are the trainer's arguments as plain values, empty where it recorded none, `iteration` the
    number of the step that it recorded; `left_out` says of what is in the files and no weight of the model
    why it is not among the gathers.
    """

    gathers: dict[str, Gather] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    iteration: object = None
    topology: Topology = field(default_factory=Topology)
    notes: list[Note] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    copies: Callable[[], Iterator[Copy]] = _no_copies
    files: list[LocalFile] = field(default_factory=list)
