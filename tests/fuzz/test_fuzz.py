"""Half a minute of it: every reader on changed files, where only `LazymergeError` may come out.

`make fuzz` runs the same targets for longer, guided by the code that inputs reach.
"""

from __future__ import annotations

import collections
import random
import time
import zlib
from pathlib import Path

import pytest

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, Fuzzed

SECONDS = 2.4
SECONDS_EACH = 5


@pytest.mark.parametrize("name", list(TARGETS))
def test_only_our_errors_come_out(name: str, tmp_path: Path) -> None:
    seeds = TARGETS[name].seeds(tmp_path)
    fuzzed = Fuzzed(TARGETS[name])
    for seed in seeds:
        fuzzed(seed)
        fuzzed.target.read(fuzzed.folder)  # the honest one is read without an error
    generator = random.Random(zlib.crc32(name.encode()))
    end = time.monotonic() + SECONDS
    count = 0
    try:
        while time.monotonic() < end:
            data = mutated(seeds, generator)
            began = time.process_time()
            try:
                fuzzed(data)
            except Exception as error:
                raise AssertionError(f"{name} on {data[:2000]!r}") from error
            assert time.process_time() - began < SECONDS_EACH, f"{name} on {data[:2000]!r}"
            count += 1
    finally:
        fuzzed.close()
    assert count > 50


def test_a_finding_is_found(tmp_path: Path) -> None:
    """A reader with a bug, which one mutation in some hundred meets."""
    from tests.fuzz.targets import Target

    def read(folder: Path) -> None:
        assert b"[[" not in (folder / "x").read_bytes()

    fuzzed = Fuzzed(Target("x", read, lambda folder: [b"honest"]))
    generator = random.Random(0)
    inputs = (mutated([b"honest"], generator) for _ in range(10_000))
    with pytest.raises(AssertionError):
        collections.deque(map(fuzzed, inputs), maxlen=0)
    fuzzed.close()
