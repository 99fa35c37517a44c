"""`python -m benches [NAME ...] [--quick]`: measure, print, and write results.json and docs/benchmarks.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benches import experts, folding, megatron, merging, planning, starting, verify
from benches.measure import Place, can_drop_caches, remove
from benches.merging import Row, Settings
from benches.page import load, save, table, write_page

BENCHES: dict[str, Callable[[Settings], list[Row]]] = {
    "merge": merging.merge,
    "memory": merging.memory,
    "tight": merging.tight,
    "cast": merging.cast,
    "rows": merging.rows,
    "megatron": megatron.megatron,
    "experts": experts.experts,
    "fold": folding.folding,
    "verify": verify.verifying,
    "planning": planning.planning,
    "starting": starting.starting,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one run; results are not kept")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="a folder in memory")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a folder on disk")
    parser.add_argument(
        "--only", choices=["shm", "disk", "disk-cold"], action="append", help="one place, or several"
    )
    parser.add_argument(
        "--verl", metavar="PYTHON", help="an interpreter that can import verl, to measure it too"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BENCHES]:
        parser.error(f"no bench {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    disk, shm = (
        Path(tempfile.mkdtemp(prefix="lazymerge-bench-", dir=each)) for each in (options.disk, options.shm)
    )
    places = _places(disk, shm, options.only)
    repeat = 1 if options.quick else options.repeat
    settings = Settings(places, Place("disk", disk), repeat, options.quick, options.verl, _tell)
    results = load()
    try:
        for name in options.names or BENCHES:
            started = time.monotonic()
            rows = BENCHES[name](settings)
            print(f"\n## {name} ({time.monotonic() - started:.0f} s)\n\n{table(rows)}\n", flush=True)
            if not options.quick:
                results[name] = rows
                save(results)
    finally:
        for folder in (disk, shm):
            remove(folder)
    if not options.quick:
        write_page(results)


def _places(disk: Path, shm: Path, only: list[str] | None) -> tuple[Place, ...]:
    places = [Place("shm", shm), Place("disk", disk)]
    if can_drop_caches():
        places.append(Place("disk-cold", disk, cold=True))
    return tuple(place for place in places if not only or place.name in only)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
