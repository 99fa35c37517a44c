"""results.json, and the page that is made of it: the targets with what was measured, then every row."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benches import experts, folding, roads, starting, verify
from benches.measure import REPOSITORY, Run, peak, seconds
from benches.merging import GB4, MERGE_TIGHT, ROWS, Row

RESULTS = Path(__file__).parent / "results.json"
PAGE = REPOSITORY / "docs" / "benchmarks.md"
BEGIN = "<!-- made by `python -m benches`; edits between these lines are lost -->"
END = "<!-- end of what is made -->"

Results = dict[str, list[Row]]


def load() -> Results:
    """What was measured before, by bench."""
    if not RESULTS.exists():
        return {}
    stored = json.loads(RESULTS.read_text())["benches"]
    return {
        name: [Row(**{**row, "runs": [Run(**run) for run in row["runs"]]}) for row in rows]
        for name, rows in stored.items()
    }


def save(results: Results) -> None:
    benches = {name: [asdict(row) for row in rows] for name, rows in results.items()}
    RESULTS.write_text(json.dumps({"machine": machine(), "benches": benches}, indent=1) + "\n")


def machine() -> str:
    """What it was measured on, in a line."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in cpus if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB of memory,"
        f" Linux {platform.release()}, Python {platform.python_version()}"
    )


def table(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table; times are medians with the fastest and slowest, peaks are the highest."""
    lines = [
        "| checkpoint | where | road | seconds (median, all) | GB/s | processor s | peak MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = sorted(run.seconds for run in row.runs)
        rate = f"{row.nbytes / times[len(times) // 2] / 1e9:.2f}" if row.nbytes > 1e8 else ""
        lines.append(
            f"| {row.what} | {row.place} | {row.road}"
            f" | {median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f}) | {rate}"
            f" | {median(run.processor for run in row.runs):.2f} | {peak(row.runs) / 1e6:.0f} |"
        )
    return "\n".join(lines)


def write_page(results: Results) -> None:
    """Replace the part between the markers."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    counts = sorted({len(row.runs) for rows in results.values() for row in rows})
    runs = " or ".join(map(str, counts))
    parts = [BEGIN, "", f"Measured on {machine()}; {runs} runs of each.", "", targets(results)]
    for name, rows in results.items():
        parts += ["", f"## {name}", "", table(rows)]
    PAGE.write_text(before + "\n".join(parts) + "\n\n" + END + after)


# ---- the targets ----------------------------------------------------------------------------------------


def targets(results: Results) -> str:
    """The targets of the first version, each with what was measured and whether it is met."""
    lines = ["| what | target | measured | |", "|---|---|---|---|"]
    for what, target, found in _found(results):
        values = [f"{shown} ({place})" if place else shown for place, shown, _ in found]
        met = [met for *_, met in found]
        mark = "" if not met else "met" if all(met) else "missed" if not any(met) else "met in part"
        lines.append(f"| {what} | {target} | {', '.join(values) or 'not measured'} | {mark} |")
    return "\n".join(lines)


Found = list[tuple[str, str, bool]]  # place, what to show, whether it meets the target


def _found(results: Results) -> Iterable[tuple[str, str, Found]]:
    merges, casts, cut = results.get("merge", []), results.get("cast", []), results.get("rows", [])
    copied = [row for row in merges if row.what == GB4.name]
    loaded = [row for row in merges if row.what != GB4.name]
    yield (
        "4.4 GB of bf16 on 4 ranks, no cast: time against `cp -r`",
        "at most 1.1 x",
        _ratios(copied, roads.MERGE, roads.CP, 1.1),
    )
    yield (
        "the same against `cp -r` and the flush that a merge ends with",
        "",
        _ratios(copied, roads.MERGE, roads.CP_SYNC, 1.1),
    )
    for road in (roads.REFERENCE, roads.VERL):
        faster = _ratios(loaded, road, roads.MERGE, 3, above=True)
        yield f"the same against: {road}", "at least 3 x faster", faster
        smaller = _ratios(loaded, road, roads.MERGE, 15, above=True, memory=True)
        yield "peak memory of that against a merge's", "at least 15 x", smaller
    yield "peak memory, 1 to 8 GB and one tensor of 2 GB", "at most 300 MB, within 10 %", _memory(results)
    yield (
        "fp32 cast to bf16 against `pread` and `pwrite`, one thread",
        "at most 1.3 x",
        _ratios(casts, roads.MERGE, roads.PLAIN, 1.3),
    )
    yield (
        "the same with as many threads as a merge",
        "at most 1.3 x",
        _ratios(casts, roads.MERGE, roads.PLAIN_THREADS, 1.3),
    )
    yield (
        "the same with the flush that a merge ends with",
        "",
        _ratios(casts, roads.MERGE, roads.PLAIN_SYNC, 1.3),
    )
    yield "row-parallel shards against contiguous ones: rate", "at least half", _rates(cut)
    converted = results.get("megatron", [])
    for road, how in ((roads.MERGE, ""), (roads.MERGE_UNCHECKED, ", without the check of names and shapes")):
        yield (
            f"4.4 GB from Megatron (TP=4, PP=2): time against `cp -r`{how}",
            "at most 1.5 x",
            _ratios(converted, road, roads.CP, 1.5),
        )
        yield (
            f"the same against `cp -r` and the flush that a merge ends with{how}",
            "",
            _ratios(converted, road, roads.CP_SYNC, 1.5),
        )
        peaks = [(row.place, peak(row.runs) / 1e6) for row in converted if row.road == road]
        yield (
            f"peak memory of that{how}",
            "at most 350 MB",
            [(place, f"{most:.0f} MB", most <= 350) for place, most in peaks],
        )
    yield (
        "6 GB on disk in a cgroup of 512 MB, page cache included: time against all memory",
        "at most 1.5 x",
        _ratios(results.get("tight", []), MERGE_TIGHT, roads.MERGE, 1.5),
    )
    yield (
        "`verify` of 4.4 GB against its copy: time against `cmp`",
        "at most 1.3 x",
        _ratios(results.get("verify", []), verify.VERIFY, verify.CMP, 1.3),
    )
    folds = results.get("fold", [])
    yield (
        "an adapter of rank 16 folded into 2 GB: time against a plain merge",
        "at most 2 x",
        _ratios(folds, folding.FOLD, roads.MERGE, 2),
    )
    yield (
        "the same against: " + folding.PEFT,
        "",
        _ratios(folds, folding.PEFT, folding.FOLD, 1, above=True),
    )
    yield (
        "128 fused experts under the hub's names: time against a merge that leaves them fused",
        "at most 1.2 x",
        _ratios(results.get("experts", []), experts.HUB, experts.PLAIN, 1.2),
    )
    for what, rows, road, limit in (
        ("verifying", results.get("verify", []), verify.VERIFY, 350),
        ("folding", folds, folding.FOLD, 400),
    ):
        peaks = [(row.place, peak(row.runs) / 1e6) for row in rows if row.road == road]
        yield (
            f"peak memory of {what}",
            f"at most {limit} MB",
            [(place, f"{most:.0f} MB", most <= limit) for place, most in peaks],
        )
    yield (
        "planning 723 tensors on 512 ranks",
        "at most 15 s and 400 MB, linear in ranks",
        _planning(results.get("planning", [])),
    )
    helps = [row for row in results.get("starting", []) if row.road == starting.HELP]
    times = [("", f"{seconds(row.runs):.2f} s", seconds(row.runs) <= 0.25) for row in helps]
    yield "`lazymerge --help`", "at most 0.25 s", times


def _by_place(rows: Sequence[Row], road: str) -> Mapping[str, Row]:
    return {row.place: row for row in rows if row.road == road}


def _ratios(
    rows: Sequence[Row], road: str, other: str, limit: float, *, above: bool = False, memory: bool = False
) -> Found:
    """The one road's time (or peak) as a multiple of the other's, where both were measured."""
    others = _by_place(rows, other)
    found = []
    for place, row in _by_place(rows, road).items():
        if place in others:
            mine, its = row.runs, others[place].runs
            ratio = peak(mine) / peak(its) if memory else seconds(mine) / seconds(its)
            found.append((place, f"{ratio:.2f} x", ratio >= limit if above else ratio <= limit))
    return found


def _memory(results: Results) -> Found:
    peaks = [peak(row.runs) / 1e6 for row in results.get("memory", [])]
    if not peaks:
        return []
    met = max(peaks) <= 300 and max(peaks) <= 1.1 * min(peaks)
    return [("", " / ".join(f"{each:.0f}" for each in peaks) + " MB", met)]


def _rates(rows: Sequence[Row]) -> Found:
    cut = _by_place([row for row in rows if row.what == ROWS.name], roads.MERGE)
    whole = _by_place([row for row in rows if row.what == GB4.name], roads.MERGE)
    found = []
    for place, row in cut.items():
        if place in whole:
            rate = seconds(whole[place].runs) / seconds(row.runs)
            found.append((place, f"{rate:.2f}", rate >= 0.5))
    return found


def _planning(rows: Sequence[Row]) -> Found:
    if not rows:
        return []
    times = [seconds(row.runs) for row in rows]
    most = peak(rows[-1].runs) / 1e6
    met = times[-1] <= 15 and most <= 400 and times[-1] <= 2.2 * times[-2]
    shown = " / ".join(f"{each:.1f}" for each in times)
    return [("", f"{shown} s for 128 / 256 / 512, {most:.0f} MB", met)]
