"""What several ranks hold of the same tensors, compared: drift is told, and files of two runs are refused."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.errors import InconsistentCheckpoint
from lazymerge.fill import SCRATCH, equal
from lazymerge.gather import of_region
from lazymerge.prepare import Prepared
from lazymerge.report import Meter

OF_TWO_RUNS = 3
"""Copies from which on two ranks that agree in none of them are no drift of one run."""

log = logging.getLogger("lazymerge")


def compare_copies(prepared: Prepared, strict: bool, meter: Meter) -> Prepared:
    """Compare what several ranks hold of what is written; see `check_copies`."""
    beside = (name for each in prepared.adapters.values() for name in each)
    names = {*prepared.checkpoint.gathers, *beside, *prepared.folded}
    return replace(prepared, checkpoint=check_copies(prepared.checkpoint, names, strict, meter))


def check_copies(checkpoint: Checkpoint, names: Collection[str], strict: bool, meter: Meter) -> Checkpoint:
    """Compare what several ranks hold of these tensors; those that differ become warnings, or an error."""
    notes: dict[str, Note] = {}
    compared: Counter[tuple[str, str]] = Counter()
    differing: Counter[tuple[str, str]] = Counter()
    for copy in checkpoint.copies():
        if copy.name not in names:
            continue
        meter.tell("check", 0, 0, copy.name)
        files = copy.used.source.name, copy.other.source.name
        compared[files] += 1
        if equal(of_region(copy.used), of_region(copy.other), SCRATCH):
            continue
        differing[files] += 1
        text = f"{copy.source or copy.name} differs between {files[0]} and {files[1]}"
        if strict:
            raise InconsistentCheckpoint(text, "merge without --strict to take the first one's values")
        text += "; the first one's values are taken"
        notes.setdefault(copy.name, Note("warning", text, copy.name, lossy=True))
    for (one, other), count in differing.items():
        if count == compared[one, other] >= OF_TWO_RUNS:
            raise InconsistentCheckpoint(
                f"{other}: differs from {one} in all {count} tensors that both hold: it is of another save",
                "bring together the files of one save; --no-check-copies merges them as they are",
            )
    log.debug("checked %d copies that ranks share, %d tensors differ", compared.total(), len(notes))
    return checkpoint.with_notes(*notes.values())
