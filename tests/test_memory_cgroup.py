"""Merges in a cgroup that may hold so much and no more: buffers, page cache and all."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import lazymerge
from benches import cgroups
from tests.makers.plans import KINDS
from tests.test_memory import assert_holds, large, merge_limited
from tests.test_memory_kinds import LARGE, assert_same

pytestmark = pytest.mark.slow

HALF = 512 * 10**6


def merge_within(limit: int, src: Path, dst: Path, **options: object) -> None:
    """Merge by the command line in a cgroup of `limit` bytes; skips where none can be made."""
    flags = [
        text
        for name, value in options.items()
        for text in (
            ["--no-check"]
            if (name, value) == ("check", False)
            else [f"--{name.replace('_', '-')}", str(value)]
        )
        if value is not None
    ]
    command = [sys.executable, "-m", "lazymerge", "merge", str(src), str(dst), *flags]
    with cgroups.limited(limit) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        done = cgroups.run(group, command)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def room(tmp_path) -> Iterator[Path]:
    """A folder for what is large."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_the_limit_is_one(room):
    """Who holds more than the limit is killed: else the tests below could not fail."""
    with cgroups.limited(HALF) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        done = cgroups.run(group, [sys.executable, "-c", "x = bytearray(600 << 20)"])
    assert done.returncode in {-9, 137}


def test_six_gigabytes_in_half_a_gigabyte(room):
    made = large(room / "src", 8, {f"layers.{i:02}.weight": ((16384, 4096), 0) for i in range(23)})
    assert made.nbytes > 6 * 10**9
    merge_within(HALF, made.folder, room / "out")
    assert_holds(room / "out", made)


@pytest.mark.parametrize(("dim", "dtype"), [(0, None), (1, None), (0, "bfloat16")])
def test_a_tensor_of_two_gigabytes_in_half_a_gigabyte(room, dim, dtype):
    made = large(room / "src", 4, {"model.embed_tokens.weight": ((1 << 17, 4096), dim)})
    assert made.nbytes > 2 * 10**9
    merge_within(HALF, made.folder, room / "out", dtype=dtype)
    assert_holds(room / "out", made, torch.bfloat16 if dtype else torch.float32)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_in_little_more_than_its_floor(room, name):
    kind = KINDS[name](room / "src", LARGE)
    lazymerge.merge(kind.src, room / "out", **kind.options)
    least = merge_limited(
        room=1 << 30, src=kind.src, dst=room / "none", torch=kind.torch, max_ram="1MB", **kind.options
    )["least"]
    merge_within(least + (32 << 20), kind.src, room / "tight", max_ram=least + (4 << 20), **kind.options)
    assert_same(room / "out", room / "tight")


def test_more_than_the_cgroup_has_is_not_spent(room):
    """Of a budget that is larger than the limit, which would kill the merge."""
    torch.save({"w": torch.randn(8192, 4096).t()}, room / "model.pt")
    merge_within(80 * 10**6, room / "model.pt", room / "out", max_ram="1GB", names="runtime", check=False)
    with safe_open(room / "out/model.safetensors", "pt") as file:
        result = file.get_tensor("w")
    assert torch.equal(result, torch.load(room / "model.pt")["w"])
