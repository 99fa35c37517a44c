"""What memory there is, and how a merge spends it.

`max_ram` bounds what the operating system counts against the process: the interpreter, imports
and buffers. What is left of it when the plan is made goes into the workers' blocks:

    resident now | slack | workers x (block + scratch + what the costliest tensor computes)

The result never depends on it; only the block size does.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from lazymerge.errors import BudgetError
from lazymerge.plan import PlannedTensor

DEFAULT = 2 * 10**9
"""Bytes that a merge may take where nobody says otherwise and half the free memory is more."""

LARGEST_BLOCK = 4 << 20
LARGEST_COMPUTED_BLOCK = 2 << 20
"""Where something is computed: smaller ones spend their time on taking turns in Python."""

LARGEST_SCATTERED_BLOCK = 32 << 20
"""Where larger blocks are read in longer runs, as of a tensor that is transposed."""

SMALLEST_BLOCK = 256 << 10
MOST_WORKERS = 64
"""Threads beyond which none has a use: they take turns in Python, and their stacks are not counted."""

SLACK = 6 << 20
"""Bytes for what the interpreter allocates while it works: descriptors, pieces, threads."""


_ARENA = 1 << 20
"""Bytes that a worker which computes has beside its buffers: its heap, what libraries keep for a thread."""

DIFFERS = 2 << 20
"""Bytes by which what an interpreter has in memory differs from run to run, at most."""


@dataclass(frozen=True, slots=True)
class Spending:
    """How much a merge may use: workers, and the bytes of the block that each of them moves at a time.

    `scattered` is the block of tensors that are read in longer runs then; `peak` is the predicted resident
    memory of the process in bytes.
    """

    workers: int
    block: int
    scattered: int
    peak: int


def spend(max_ram: int | None, workers: int, tensors: Iterable[PlannedTensor]) -> Spending:
    """The largest blocks (and most workers) that fit `max_ram` bytes, or the default budget.

    `workers` are as many as the user lets it take; more than `MOST_WORKERS` are not.
    Raises `BudgetError` with the least that works if even one worker with the smallest block does not fit.
    """
    budget = default_budget() if max_ram is None else max_ram
    tensors = list(tensors)
    computed = [tensor for tensor in tensors if tensor.computed]
    filled = max((tensor.buffered for tensor in tensors), default=0)
    base = resident() + SLACK
    through = max((tensor.scratch for tensor in tensors if tensor.buffered), default=0)
    costs = {block: _per_worker(min(block, filled), through, computed) for block in _blocks(bool(computed))}
    for count in range(min(workers, MOST_WORKERS), 0, -1):
        for block, cost in costs.items():
            peak = base + count * cost
            if peak <= budget:
                return _with_long_runs(Spending(count, block, block, peak), budget, base, tensors)
    least = base + costs[SMALLEST_BLOCK]
    told = f"{base // 10**6} MB of them are the interpreter and the plan"
    if computed:
        costliest = max(computed, key=lambda tensor: _extra(tensor, SMALLEST_BLOCK))
        told += f"; {costliest.name} alone takes {_megabytes(_extra(costliest, SMALLEST_BLOCK))}"
    raise too_small(budget, "this merge", least, told)


def too_small(budget: int, what: str, least: int, told: str) -> BudgetError:
    """The error that `what` takes `least` bytes; `told` says of them what they are for."""
    return BudgetError(
        f"a budget of {budget // 10**6} MB is too small: {what} takes at least {_megabytes(least)} ({told})",
        f"give --max-ram {_megabytes(least + DIFFERS).replace(' ', '')} or more",
        least,
    )


def _blocks(computing: bool) -> Iterator[int]:
    """Sizes of blocks in bytes, the largest first."""
    block = LARGEST_COMPUTED_BLOCK if computing else LARGEST_BLOCK
    while block >= SMALLEST_BLOCK:
        yield block
        block //= 2


def _with_long_runs(spent: Spending, budget: int, base: int, tensors: list[PlannedTensor]) -> Spending:
    """With the largest blocks for scattered tensors that what is left of the budget allows."""
    scattered = LARGEST_SCATTERED_BLOCK
    kept = _by_kind((tensor for tensor in tensors if tensor.computed), spent.block)
    tensors = [tensor for tensor in tensors if tensor.long_runs_from > spent.block]
    while tensors and scattered > spent.block:
        most = max(_of_scattered(tensor, spent.block, scattered, kept) for tensor in tensors)
        peak = max(spent.peak, base + spent.workers * most)
        if peak <= budget:
            return Spending(spent.workers, spent.block, scattered, peak)
        scattered //= 2
    return spent


def _of_scattered(tensor: PlannedTensor, block: int, scattered: int, kept: Mapping[type, int]) -> int:
    """Bytes that a worker takes for a block of a scattered tensor, with what it has `kept` of other kinds."""
    size = min(tensor.block(block, scattered), tensor.nbytes)
    computing = [source.working_set(min(size, source.size)) for source in tensor.computed]
    own = {type(source) for source in tensor.computed}
    others = sum(nbytes for kind, nbytes in kept.items() if kind not in own)
    return size + tensor.scratch + max(computing, default=0) + others + (_ARENA if kept else 0)


def _megabytes(nbytes: int) -> str:
    """Rounded up: what is said to be enough has to be."""
    return f"{-(-nbytes // 10**6)} MB"


def _per_worker(block: int, through: int, computed: Iterable[PlannedTensor]) -> int:
    """Bytes for a block, for what it is read through, and for computing."""
    kinds = _by_kind(computed, block)
    return block + min(block, through) + sum(kinds.values()) + (_ARENA if kinds else 0)


def _by_kind(computed: Iterable[PlannedTensor], block: int) -> dict[type, int]:
    """Bytes that computing the costliest tensor of each kind takes.

    A worker that goes on to a tensor of another kind still has the buffers of the one before.
    """
    most: dict[type, int] = {}
    for tensor in computed:
        for kind in {type(source) for source in tensor.computed}:
            most[kind] = max(most.get(kind, 0), _extra(tensor, block))
    return most


def _extra(tensor: PlannedTensor, block: int) -> int:
    """Bytes beyond its block that computing a tensor takes."""
    size = min(tensor.block(block, 0), tensor.nbytes)
    needed = max(source.working_set(min(size, source.size)) for source in tensor.computed)
    return needed + max(0, size - block)


def default_budget() -> int:
    """The smaller of 2 GB and half of what the machine, its cgroup or its Slurm job has free, in bytes."""
    return min(DEFAULT, available() // 2 + resident())


def available() -> int:
    """Bytes that this process could still take: the least that the machine and every limit on it leave."""
    return max(0, min([psutil.virtual_memory().available, *_limits()]))


def resident() -> int:
    """Bytes of this process that are in memory now, mapped pages included."""
    return int(psutil.Process().memory_info().rss)


def high_water() -> int:
    """The most bytes of this process that were ever in memory (0 where the system does not say)."""
    return _status("VmHWM")


def _status(field: str) -> int:
    """Bytes that the kernel tells of this process in a field of its status; 0 where it does not."""
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _limits() -> Iterator[int]:
    mine = resident()
    yield from cgroup_free(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    per_node = os.environ.get("SLURM_MEM_PER_NODE", "")
    if per_node.isdigit() and int(per_node):
        yield int(per_node) * 2**20 - mine
    per_cpu, cpus = os.environ.get("SLURM_MEM_PER_CPU", ""), os.environ.get("SLURM_CPUS_ON_NODE", "")
    if per_cpu.isdigit() and cpus.isdigit() and int(per_cpu) and int(cpus):
        yield int(per_cpu) * int(cpus) * 2**20 - mine
    for kind, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield soft - (_status(field) or mine)


def cgroup_free(membership: Path, root: Path) -> Iterator[int]:
    """Bytes free under the limit of every memory cgroup above this process, versions 1 and 2.

    `membership` lists the process's groups as /proc/self/cgroup does; `root` is where they are mounted.
    """
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            folder = root / "memory"
        else:
            continue
        group = folder / path.strip("/")
        while True:
            yield from _group_free(group, *names)
            if group == folder or folder not in group.parents:
                break
            group = group.parent


def _group_free(group: Path, limit_name: str, used_name: str, cache_name: str) -> Iterator[int]:
    limit, used = _read(group / limit_name).strip(), _read(group / used_name).strip()
    if not limit.isdigit() or not used.isdigit() or int(limit) >= 1 << 60:  # "max", or version 1's no limit
        return
    statistics = dict(line.split() for line in _read(group / "memory.stat").splitlines() if " " in line)
    yield int(limit) - int(used) + int(statistics.get(cache_name, "0"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
