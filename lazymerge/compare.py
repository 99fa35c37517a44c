"""Two checkpoints compared: names, shapes, element types, values. Nothing of either is written anywhere.

Both are read once, side by side, in blocks that do not grow with the tensors. Tensors are visited in the
order in which they stand in the files of the first checkpoint. Values are compared where names and shapes
agree; equal bytes are found equal without being looked at as numbers.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import xxhash

from lazymerge.boxes import Box
from lazymerge.budget import MOST_WORKERS, SLACK, default_budget, resident, too_small
from lazymerge.checkpoint import Checkpoint
from lazymerge.comparison import (
    ATOL,
    DTYPE,
    EXTRA,
    KINDS,
    MISSING,
    SHAPE,
    VALUES,
    CompareOptions,
    Comparison,
    Difference,
    Nonfinite,
)
from lazymerge.errors import BudgetError, PlanError
from lazymerge.files.local import LocalFile
from lazymerge.fill import SCRATCH, fill, windows
from lazymerge.gather import Gather
from lazymerge.plan import PlannedTensor, planned
from lazymerge.threads import share
from lazymerge.values import CHUNK, Found, Tolerance, compare_blocks, has_values, is_complex, rounding

BLOCK = 1 << 20
"""Bytes of a side that a worker reads at a time: two of them fit a processor's cache."""

SCATTERED_BLOCK = 32 << 20
"""Where larger blocks are read in longer runs, as of a tensor that is transposed."""

SMALLEST_BLOCK = 256 << 10
_UNIT = 64 << 20  # bytes that a worker takes at once, so that several share a large tensor
_TEMPORARY = 64 * CHUNK  # bytes that a worker takes to look at elements as numbers
_GROWTH = 12 << 20  # bytes that a merge leaves behind in the process; 8 MB were measured
_GROWTH_PER_TENSOR = 2500  # bytes that headers, pairs, digests and the manifest take; 2,200 were measured


def compare(
    one: Checkpoint,
    other: Checkpoint,
    options: CompareOptions | None = None,
    *,
    max_ram: int | None = None,
    workers: int = 1,
    hashed: bool = False,
    refuses: bool = True,
    known: Iterable[Difference] = (),
    on_bytes: Callable[[int, int, str], None] | None = None,
) -> Comparison:
    """Compare `one` with `other`, which is what it should be. Differences that are `known` are added.

    `max_ram` bounds the resident memory of the process in bytes (default: as a merge's); where it is too
    small and `refuses` is false, the least that works is taken. `on_bytes` is
    called from any thread with (bytes just compared, bytes of all, name of the tensor), bytes being those
    of the other side. Raises `PlanError` for options that contradict each other, `BudgetError`, and what
    reading raises.
    """
    options = options or CompareOptions()
    _check(options)
    results = _Results(options, hashed)
    pairs = []
    for name in _in_file_order(one.gathers):
        pair = results.pair(name, one.gathers[name], other.gathers.get(name))
        if pair is not None:
            pairs.append(pair)
    for name, gather in other.gathers.items():
        if name not in one.gathers:
            results.differ(Difference(MISSING, name, None, _shown(gather)))
    for difference in known:
        results.differ(difference)
    if pairs:
        total = sum(pair.other.nbytes for pair in pairs)
        try:
            spending = _spend(max_ram, workers, pairs)
        except BudgetError:
            if refuses:
                raise
            spending = _Spending(1, SMALLEST_BLOCK, SMALLEST_BLOCK)

        def work(units: Iterator[_Unit]) -> None:
            buffers = _Buffers(), _Buffers()
            for unit in units:
                results.found(unit, _compare(unit, buffers, results, total, on_bytes))

        share(_units(pairs, spending, together=hashed), work, spending.workers)
    return results.comparison()


def _check(options: CompareOptions) -> None:
    given = [("--atol", options.atol), ("--rtol", options.rtol)]
    for name, value in given:
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise PlanError(f"{name} {value}: no tolerance", "give a number that is not negative")
        if value is not None and options.exact:
            raise PlanError(f"--exact and {name}", "give one of them: --exact compares bytes")
    if options.exact and options.accept_rounding:
        raise PlanError("--exact and --accept-rounding", "give one of them: --exact compares bytes")
    if options.max_mismatches < 0:
        raise PlanError(f"--max-mismatches {options.max_mismatches}", "give 0 or more")


def _in_file_order(gathers: Mapping[str, Gather]) -> list[str]:
    """The names by where their first bytes are; what is computed stays where it was, in front."""

    def place(name: str) -> tuple[str, int]:
        piece = next(iter(gathers[name].pieces()), None)
        if piece is None or not isinstance(piece.region.source, LocalFile):
            return "", 0
        return piece.region.source.name, piece.region.offset

    return sorted(gathers, key=place)


def _shown(gather: Gather) -> str:
    return f"{gather.dtype} {list(gather.shape)}"


# ------------------------------------------------------------------------------------- reading


class _Pair(NamedTuple):
    """A tensor of both sides, proved complete."""

    name: str
    one: Gather
    other: Gather
    plans: tuple[PlannedTensor, PlannedTensor]
    tolerance: Tolerance | None

    def block(self, limit: int, scattered: int) -> int:
        """Bytes of a block of each side where `limit` are wanted; as `PlannedTensor.block`."""
        return max(plan.block(limit, scattered) for plan in self.plans)

    def takes(self, limit: int, scattered: int) -> int:
        """Bytes of memory that comparing it in such blocks takes."""
        return sum(_taken(plan, self.block(limit, scattered)) for plan in self.plans)


def _taken(plan: PlannedTensor, block: int) -> int:
    size = min(block, plan.nbytes)
    computing = [source.working_set(min(size, source.size)) for source in plan.computed]
    return size + plan.scratch + max(computing, default=0)


class _Spending(NamedTuple):
    workers: int
    block: int
    scattered: int


def _spend(max_ram: int | None, workers: int, pairs: Sequence[_Pair]) -> _Spending:
    """The most workers with the largest blocks that fit the budget; `BudgetError` if none does."""
    budget = default_budget() if max_ram is None else max_ram
    base = resident() + SLACK
    costs = {
        sizes: _TEMPORARY + max(pair.takes(*sizes) for pair in pairs)
        for sizes in ((BLOCK, SCATTERED_BLOCK), (BLOCK, BLOCK), (SMALLEST_BLOCK, SMALLEST_BLOCK))
    }
    for count in range(min(workers, MOST_WORKERS), 0, -1):
        for sizes, each in costs.items():
            if base + count * each <= budget:
                return _Spending(count, *sizes)
    costliest = max(pairs, key=lambda pair: pair.takes(SMALLEST_BLOCK, SMALLEST_BLOCK))
    raise _too_small(budget, base, each, costliest.name)


def check_budget(gathers: Mapping[str, Gather], max_ram: int) -> None:
    """Raise `BudgetError` if these tensors could not be compared with what a merge has written of them."""
    costs = {}
    for name, gather in gathers.items():
        plan = planned(name, gather, 0)
        block = plan.block(SMALLEST_BLOCK, SMALLEST_BLOCK)
        costs[name] = _taken(plan, block) + min(block, plan.nbytes)
    base = resident() + SLACK + _GROWTH + _GROWTH_PER_TENSOR * len(gathers)
    costliest = max(costs, key=lambda name: costs[name], default=None)
    if costliest is not None and base + _TEMPORARY + costs[costliest] > max_ram:
        raise _too_small(max_ram, base, _TEMPORARY + costs[costliest], costliest)


def _too_small(budget: int, base: int, more: int, name: str) -> BudgetError:
    told = f"{base // 10**6} MB of them are the interpreter and the headers"
    return too_small(budget, f"comparing {name}", base + more, told)


class _Unit(NamedTuple):
    """A part of a tensor for one worker: windows, and the index of their first element."""

    pair: _Pair
    boxes: Iterable[Box]
    at: int
    last: bool


def _units(pairs: Iterable[_Pair], spending: _Spending, *, together: bool) -> Iterator[_Unit]:
    """What there is to compare; each tensor in one unit if they have to stay `together`."""
    for pair in pairs:
        size = pair.block(spending.block, spending.scattered)
        itemsize = max(pair.one.dtype.itemsize, pair.other.dtype.itemsize)
        boxes = windows(pair.one.shape, itemsize, size)
        if together:
            yield _Unit(pair, boxes, 0, last=True)
            continue
        at = 0
        while some := list(islice(boxes, max(1, _UNIT // max(size, 1)))):
            count = sum(box.numel for box in some)
            yield _Unit(pair, some, at, last=at + count == pair.one.numel)
            at += count


class _Buffers:
    """A buffer that grows to what is asked for, and is used again."""

    def __init__(self) -> None:
        self._raw = np.empty(0, np.uint8)

    def of(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """`nbytes` of it."""
        if self._raw.size < nbytes:
            self._raw = np.empty(0, np.uint8)  # the smaller one goes first, so that there is one at a time
            self._raw = np.empty(nbytes, np.uint8)
        return self._raw[:nbytes]


class _UnitFound(NamedTuple):
    found: Found
    digest: str | None


def _compare(
    unit: _Unit,
    buffers: tuple[_Buffers, _Buffers],
    results: _Results,
    total: int,
    on_bytes: Callable[[int, int, str], None] | None,
) -> _UnitFound:
    pair, sides = unit.pair, (unit.pair.one, unit.pair.other)
    types = pair.one.dtype, pair.other.dtype
    digest = xxhash.xxh3_128() if results.hashed else None
    found, at = Found(), 0
    for box in unit.boxes:
        blocks = []
        for gather, buffer in zip(sides, buffers, strict=True):
            raw = buffer.of(box.numel * gather.dtype.itemsize)
            fill(gather, box, raw.data, SCRATCH)
            blocks.append(raw)
        if digest is not None:
            digest.update(blocks[1].data)
        found.add(compare_blocks(blocks[0], blocks[1], types, pair.tolerance), at)
        at += box.numel
        if on_bytes is not None:
            on_bytes(blocks[1].size, total, pair.name)
    if unit.last:
        _forget(pair)
    return _UnitFound(found, None if digest is None else digest.hexdigest())


def _forget(pair: _Pair) -> None:
    """Let the kernel drop what was read: other programs have a use for the memory."""
    for plan in pair.plans:
        if plan.nbytes < BLOCK:
            continue
        for _, region in plan.gather.pieces():
            if isinstance(region.source, LocalFile):
                region.source.forget(region.offset, region.extent)


# ------------------------------------------------------------------------------------- results


class _Results:
    """What has been found so far, of all threads."""

    def __init__(self, options: CompareOptions, hashed: bool) -> None:
        self.options = options
        self.hashed = hashed
        self._lock = threading.Lock()
        self._differences: list[Difference] = []
        self._values: dict[str, tuple[_Pair, Found]] = {}
        self._digests: dict[str, str] = {}
        self._hint = ""

    def differ(self, difference: Difference) -> None:
        """Keep a difference that shows without reading."""
        self._differences.append(difference)

    def pair(self, name: str, one: Gather, other: Gather | None) -> _Pair | None:
        """The tensor of both sides, if its values can be compared; what they differ in else is kept."""
        if other is None:
            self.differ(Difference(EXTRA, name, _shown(one), None))
            return None
        if one.shape != other.shape:
            self.differ(Difference(SHAPE, name, _shown(one), _shown(other), max(one.numel, other.numel)))
            return None
        tolerance = self._tolerance(one, other)
        if one.dtype != other.dtype and tolerance is None:
            self.differ(Difference(DTYPE, name, _shown(one), _shown(other), one.numel))
            return None
        return _Pair(name, one, other, (planned(name, one, 0), planned(name, other, 0)), tolerance)

    def _tolerance(self, one: Gather, other: Gather) -> Tolerance | None:
        """None: bytewise, or not at all where the types differ."""
        options, types = self.options, (one.dtype, other.dtype)
        given = options.atol is not None or options.rtol is not None
        if options.exact or (types[0] == types[1] and not has_values(types[0])):
            return None
        if types[0] == types[1] or given:
            if not all(has_values(dtype) for dtype in types) or is_complex(types[0]) != is_complex(types[1]):
                return None
            atol = ATOL if options.atol is None else options.atol
            return Tolerance(atol, options.rtol or 0.0)
        explained = rounding(types) if is_complex(types[0]) == is_complex(types[1]) else None
        if explained is not None and not options.accept_rounding:
            self._hint = (
                f"to compare {types[0]} with {types[1]}, give --accept-rounding (which is"
                f" --rtol {explained.rtol:g} --atol {explained.atol:g}) or --rtol and --atol of your own"
            )
        return explained if options.accept_rounding else None

    def found(self, unit: _Unit, result: _UnitFound) -> None:
        """Take in what comparing a part of a tensor has found."""
        name = unit.pair.name
        with self._lock:
            _, found = self._values.setdefault(name, (unit.pair, Found()))
            found.add(result.found, unit.at)
            if result.digest is not None:
                self._digests[name] = result.digest

    def comparison(self) -> Comparison:
        """All of it, in an order that does not depend on the threads."""
        everything = [found for _, found in self._values.values()]
        differences = self._differences + [
            _of_values(pair, found) for pair, found in self._values.values() if found.mismatches
        ]
        nonfinite = [
            Nonfinite(name, found.nan, found.inf)
            for name, (_, found) in self._values.items()
            if any(found.nan) or any(found.inf)
        ]
        nonfinite.sort(key=lambda each: (-sum(each.nan) - sum(each.inf), each.name))
        counts = Counter(difference.kind for difference in differences)
        listed: list[Difference] = []
        for kind in KINDS:
            of_kind = [difference for difference in differences if difference.kind == kind]
            of_kind.sort(key=lambda each: (-each.largest, -each.mismatches, each.name))
            listed += of_kind[: self.options.max_mismatches]
        return Comparison(
            tensors=len(everything),
            identical=sum(found.identical for found in everything),
            nbytes=sum(pair.other.nbytes for pair, _ in self._values.values()),
            counts={kind: counts[kind] for kind in KINDS},
            differences=tuple(listed),
            largest=max((found.largest for found in everything), default=0.0),
            nan=(sum(found.nan[0] for found in everything), sum(found.nan[1] for found in everything)),
            inf=(sum(found.inf[0] for found in everything), sum(found.inf[1] for found in everything)),
            nonfinite=tuple(nonfinite[: self.options.max_mismatches]),
            hint=self._hint,
            digests=self._digests,
        )


def _of_values(pair: _Pair, found: Found) -> Difference:
    first = None if found.first is None else np.unravel_index(found.first, pair.one.shape)
    return Difference(
        VALUES,
        pair.name,
        _shown(pair.one),
        _shown(pair.other),
        elements=pair.one.numel,
        mismatches=found.mismatches,
        largest=found.largest,
        first=None if first is None else tuple(int(at) for at in first),
        values=found.values,
        bits=found.bits,
    )
