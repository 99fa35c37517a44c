"""Each kind of plan: its predictions, its floor, and the same bytes whatever the budget and the workers."""

from __future__ import annotations

import filecmp
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lazymerge
from lazymerge.errors import BudgetError
from tests.makers.plans import KINDS, Kind
from tests.test_memory import merge_limited, on_disk

LARGE = 2048  # matrices of 8192 x 2048: 32 or 64 MB
SMALL = 512  # of 2048 x 512, which the smallest blocks cut in eight


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Kind]]:
    """`made(name, width)`: a checkpoint of that kind, whose class has been asked for."""
    folder = tmp_path_factory.mktemp("kinds")

    @functools.cache
    def make(name: str, width: int) -> Kind:
        kind = KINDS[name](folder / f"{name} {width}", width)
        lazymerge.merge(kind.src, folder / "nowhere", dry_run=True, **kind.options)
        return kind

    yield make
    shutil.rmtree(folder)


def assert_same(one: Path, other: Path) -> None:
    """Every file of the two results is the same."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert filecmp.cmp(one / name, other / name, shallow=False), name


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_predictions_and_the_floor(made, tmp_path, name):
    """Peak and disk are as foretold; the least budget that is named is enough and changes nothing."""
    kind = made(name, LARGE)
    common: dict[str, Any] = {"src": kind.src, "torch": kind.torch, **kind.options}
    measured = merge_limited(room=1 << 30, dst=tmp_path / "out", **common)
    disk = on_disk(tmp_path / "out")
    assert abs(measured["predicted"] - measured["peak"]) <= 0.2 * measured["peak"]
    assert abs(measured["disk"] - disk) <= 0.2 * disk
    least = merge_limited(room=1 << 30, dst=tmp_path / "none", max_ram="1MB", **common)["least"]
    tight = merge_limited(room=least, dst=tmp_path / "tight", max_ram=least, **common)
    assert tight["peak"] <= least
    assert_same(tmp_path / "out", tmp_path / "tight")


def floor(kind: Kind, workers: int) -> int:
    """The least budget in bytes that a merge of this kind accepts here and now."""
    with pytest.raises(BudgetError) as caught:
        lazymerge.merge(kind.src, "nowhere", max_ram=1, max_workers=workers, dry_run=True, **kind.options)
    return int(caught.value.hint.partition("--max-ram ")[2].partition("MB")[0]) * 10**6


@pytest.mark.parametrize("name", KINDS)
def test_any_budget_and_any_workers_give_the_same_bytes(made, tmp_path, name):
    kind = made(name, SMALL)
    first = tmp_path / "first"
    lazymerge.merge(kind.src, first, max_workers=1, **kind.options)

    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 64 << 20), st.sampled_from([1, 2, 4]))
    def check(more: int, workers: int) -> None:
        out = tmp_path / "out"
        least = floor(kind, workers) + (1 << 20)  # what the test itself takes meanwhile
        lazymerge.merge(kind.src, out, max_ram=least + more, max_workers=workers, **kind.options)
        assert_same(first, out)
        shutil.rmtree(out)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "cast", "partial", "fold"])
def test_one_budget_is_named_for_a_merge_and_its_verification(made, tmp_path, name):
    """Whichever of both needs more."""
    kind = made(name, SMALL)
    common: dict[str, Any] = {"src": kind.src, "torch": kind.torch, "verify": True, **kind.options}
    least = merge_limited(room=1 << 30, dst=tmp_path / "none", max_ram="1MB", **common)["least"]
    assert merge_limited(room=least, dst=tmp_path / "out", max_ram=least, **common)["peak"] <= least
