"""Computed sources of bytes, and what reading pieces takes: bytes of files, long runs, depth, steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, cast

from lazymerge.boxes import Piece, Shape
from lazymerge.errors import PlanError
from lazymerge.files.local import Source
from lazymerge.files.region import Region


class Computation(Source, Protocol):
    """A source whose bytes are computed from other gathers when they are read."""

    @property
    def whole(self) -> bool:
        """Whether any of it can only be computed together with all of it."""
        ...

    @property
    def reads(self) -> int:
        """Bytes of files that all of it is made of."""
        ...

    @property
    def step(self) -> int:
        """Bytes that are computed together, so that smaller blocks compute them again; 0: any number."""
        ...

    @property
    def long_runs_from(self) -> int:
        """Bytes of a block of it from which on its files are read in long runs; 0: blocks do not matter."""
        ...

    @property
    def depth(self) -> int:
        """Frames of the stack that reading it takes, about."""
        ...

    @property
    def steps(self) -> int:
        """Computations that reading a block of it takes, this one included."""
        ...

    def working_set(self, nbytes: int) -> int:
        """Bytes of memory that computing `nbytes` of it takes, beyond the buffer that it is read into."""
        ...


def computations(pieces: Iterable[Piece]) -> list[Computation]:
    """The different computations that the pieces lie in; none where all bytes come from files."""
    sources = {id(region.source): region.source for _, region in pieces}
    return [cast(Computation, source) for source in sources.values() if hasattr(source, "working_set")]


def bytes_read(pieces: Iterable[Piece]) -> int:
    """Bytes of files that the pieces are made of."""
    pieces = list(pieces)
    computed = computations(pieces)
    from_files = sum(
        math.prod(region.shape) * region.dtype.itemsize
        for _, region in pieces
        if not hasattr(region.source, "working_set")
    )
    return from_files + sum(source.reads for source in computed)


LONG_RUN = 16 << 10
"""Bytes of a read from which on another call for it costs little."""


def long_runs_from(pieces: Iterable[Piece], shape: Shape) -> int:
    """Bytes of a block of a tensor of `shape` from which on its files are read in long runs.

    A block of a transposed tensor holds a short part of every row of the file, the shorter the smaller the
    block. 0 where the size of blocks does not matter.
    """
    return max((_long_runs_from(piece.region, shape) for piece in pieces), default=0)


def _long_runs_from(region: Region, shape: Shape) -> int:
    if hasattr(region.source, "working_set"):
        return cast(Computation, region.source).long_runs_from
    dims = [dim for dim, size in enumerate(region.shape) if size > 1 and region.strides[dim]]
    if not dims:
        return 0
    along = min(dims, key=lambda dim: region.strides[dim])
    if along == dims[-1]:
        return 0
    itemsize = region.dtype.itemsize
    indices = min(region.shape[along], LONG_RUN // itemsize)
    return indices * math.prod(shape[along + 1 :]) * itemsize


DEEPEST = 700
"""Frames of the stack, of the 1,000 that Python has, which reading a tensor may take."""

MOST_STEPS = 1_000
"""Computations that reading a block of a tensor may take: one that is used twice is computed twice."""


def check_effort(depth: int, steps: int) -> None:
    """Raise `PlanError` where reading a tensor would end in a `RecursionError`, or hardly ever."""
    if depth > DEEPEST or steps > MOST_STEPS:
        raise PlanError(
            "a lazy tensor that is made in too many steps, each from the result of the one before",
            "materialize() the result of some of them in between",
        )
