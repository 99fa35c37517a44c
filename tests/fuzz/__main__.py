"""Fuzz the readers, in turn: ``python -m tests.fuzz [--seconds 600] [--target NAME] [--findings FOLDER]``.

With atheris, guided by what code an input reaches; without it, by chance. Each target runs in a process of
its own with bounds on time and memory of each input. A finding is kept as a file, which is the input, and
printed with what came out; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, Fuzzed

SECONDS_EACH = 5
MEGABYTES = 1000
"""Resident at most, with what seeds need (torch) and atheris."""


def fuzz(name: str, seconds: float, findings: Path) -> int:
    """Fuzz one target in this process; 1 if there is a finding."""
    with tempfile.TemporaryDirectory() as scratch:
        seeds = TARGETS[name].seeds(Path(scratch))
    fuzzed = Fuzzed(TARGETS[name])
    if importlib.util.find_spec("atheris") is None:
        return _by_chance(name, fuzzed, seeds, seconds, findings)
    import atheris  # type: ignore[import-not-found, unused-ignore]

    corpus = findings / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed{number}").write_bytes(seed)
    for module in [module for name, module in sys.modules.items() if name.startswith("lazymerge.")]:
        for each in vars(module).values():
            if (
                callable(each)
                and getattr(each, "__module__", None) == module.__name__
                and hasattr(each, "__code__")
            ):
                atheris.instrument_func(each)
    options = [
        f"-max_total_time={int(seconds)}",
        f"-timeout={SECONDS_EACH}",
        f"-rss_limit_mb={MEGABYTES}",
        f"-artifact_prefix={findings}/{name}-",
        "-max_len=65536",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], fuzzed)
    atheris.Fuzz()  # ends the process
    return 0


def _by_chance(name: str, fuzzed: Fuzzed, seeds: list[bytes], seconds: float, findings: Path) -> int:
    generator = random.Random(time.time_ns())
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        data = mutated(seeds, generator)
        count += 1
        began = time.process_time()
        try:
            fuzzed(data)
            assert time.process_time() - began < SECONDS_EACH, "too slow"
        except Exception:
            kept = findings / f"{name}-{generator.randrange(1 << 32):08x}"
            kept.write_bytes(data)
            traceback.print_exc()
            print(f"kept in {kept}")
            return 1
    print(f"{name}: {count} inputs, nothing found")
    return 0


def main() -> int:
    """The exit code of the whole run."""
    parser = argparse.ArgumentParser(description="fuzz the readers of lazymerge")
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all, in turn")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where inputs are kept")
    given = parser.parse_args()
    names = given.target or list(TARGETS)
    given.findings.mkdir(parents=True, exist_ok=True)
    if len(names) == 1:
        return fuzz(names[0], given.seconds, given.findings)
    found = []
    for name in names:
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--findings", str(given.findings)]
        done = subprocess.run([*command, "--seconds", str(given.seconds / len(names))])
        if done.returncode:
            found.append(name)
    print(f"findings in {', '.join(found)}: {given.findings}" if found else "nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
