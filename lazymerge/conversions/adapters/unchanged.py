"""Whether folding leaves everything as it was, told from the adapter's tensors, which are small."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lazymerge.fill import SCRATCH, equal, fill, windows
from lazymerge.gather import Gather
from lazymerge.lowrank import Term


def changes_nothing(
    terms: Sequence[Term], scaled: bool, replaced: Sequence[tuple[Gather | None, Gather | None]]
) -> bool:
    """Whether every product is zero, no row is scaled (DoRA), and what takes a tensor's place equals it.

    `replaced` are pairs of (base's, result's); None for a tensor that one of them has not. Reading ends with
    the first that differs. A product that is too small to change a rounded weight counts as a change.
    """
    return not (
        scaled
        or any(_adds(term) for term in terms)
        or any(
            was is None or now is None or was.shape != now.shape or not equal(was, now)
            for was, now in replaced
        )
    )


def _adds(term: Term) -> bool:
    return term.scale != 0 and all(not _is_zero(operand) for operand in term.operands)


def _is_zero(gather: Gather) -> bool:
    for window in windows(gather.shape, gather.dtype.itemsize, SCRATCH):
        raw = np.empty(window.numel * gather.dtype.itemsize, np.uint8)
        fill(gather, window, raw.data, SCRATCH)
        magnitudes = raw.view(f"u{gather.dtype.itemsize}") << 1  # without the sign: -0.0 is zero
        if magnitudes.any():
            return False
    return True
