"""The benches run: small, once, with nothing kept of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benches.__main__ import BENCHES

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_runs(name: str, tmp_path: Path) -> None:
    results = (ROOT / "benches/results.json").read_bytes()
    command = [sys.executable, "-m", "benches", name, "--quick", "--only", "shm", "--only", "disk"]
    done = subprocess.run(
        [*command, "--shm", tmp_path, "--disk", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| checkpoint | where | road |" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert (ROOT / "benches/results.json").read_bytes() == results
