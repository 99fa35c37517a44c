"""Memory: what there is, what a merge takes of it, and what is refused."""

from __future__ import annotations

import pytest
import torch

import lazymerge
from lazymerge import budget
from lazymerge.casting import cast
from lazymerge.errors import BudgetError
from lazymerge.files.dtype import DTYPES
from lazymerge.plan import make_plan


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(str(text) + "\n")
    return folder


def free_under(tmp_path, membership):
    (tmp_path / "cgroup").write_text(membership + "\n")
    return list(budget.cgroup_free(tmp_path / "cgroup", tmp_path / "fs"))


def test_cgroup_v2_and_the_groups_above(tmp_path):
    root = tmp_path / "fs"
    group(root / "a" / "b", memory__max="max", memory__current=900, memory__stat="anon 1")
    group(root / "a", memory__max=1000, memory__current=700, memory__stat="anon 5\ninactive_file 250")
    assert free_under(tmp_path, "0::/a/b") == [1000 - 700 + 250]


def test_cgroup_v1(tmp_path):
    names = {"memory__limit_in_bytes": 5000, "memory__usage_in_bytes": 4000}
    group(tmp_path / "fs" / "memory" / "job", **names, memory__stat="total_inactive_file 100")
    assert free_under(tmp_path, "5:cpu,memory:/job\n4:devices:/x") == [1100]


def test_cgroup_v1_without_a_limit(tmp_path):
    names = {"memory__limit_in_bytes": 9223372036854771712, "memory__usage_in_bytes": 4000}
    group(tmp_path / "fs" / "memory" / "job", **names)
    assert free_under(tmp_path, "5:memory:/job") == []


def test_slurm_limits_count(monkeypatch):
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "700")
    assert budget.available() <= 700 * 2**20
    monkeypatch.delenv("SLURM_MEM_PER_NODE")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "6")
    assert budget.available() <= 600 * 2**20


def test_the_default_is_at_most_two_gigabytes():
    assert budget.default_budget() <= 2 * 10**9


@pytest.fixture
def tensors(tmp_path):
    torch.save({"w": torch.zeros(3000, 1000)}, tmp_path / "model.pt")
    checkpoint = lazymerge.open(tmp_path / "model.pt")
    return checkpoint["w"]


def planned(tensor):
    return list(make_plan({"w": tensor.lazy_gather}).tensors)


def test_blocks_shrink_before_workers_do(tensors):
    plan = planned(tensors.t())  # what goes through a buffer
    base = budget.resident() + budget.SLACK
    rich = budget.spend(base + (200 << 20), 4, plan)
    assert (rich.workers, rich.block) == (4, budget.LARGEST_BLOCK)
    tight = budget.spend(base + (5 << 20), 4, plan)
    assert tight.workers == 4
    assert tight.block < rich.block
    least = budget.spend(base + (1 << 20), 4, plan)
    assert least.workers < 4


@pytest.mark.parametrize("turned", [True, False])
def test_a_million_workers(tensors, turned, monkeypatch):
    """As many as anybody has a use for, found at once: each is a thread."""
    monkeypatch.setattr(budget, "resident", lambda: 100 * 10**6)
    plan = planned(tensors.t() if turned else tensors) + planned(tensors + 1)
    counted = []
    real = budget._per_worker
    monkeypatch.setattr(budget, "_per_worker", lambda *args: counted.append(args) or real(*args))
    spent = budget.spend(10**12, 10**6, plan)
    assert spent.workers == budget.MOST_WORKERS <= 256
    few = budget.spend(140 * 10**6, 10**6, plan)
    assert 1 <= few.workers < budget.MOST_WORKERS
    assert few.peak <= 140 * 10**6
    assert len(counted) < 20
    with pytest.raises(BudgetError):
        budget.spend(10**6, 10**9, plan)


def test_what_is_left_goes_into_long_runs(tensors, tmp_path):
    """Of a transposed tensor; its blocks are counted, and no other tensor's are larger for it."""
    base = budget.resident() + budget.SLACK
    torch.save({"w": torch.zeros(3000, 4000)}, tmp_path / "large.pt")
    plan = planned(lazymerge.open(tmp_path / "large.pt")["w"].t())
    rich = budget.spend(base + (200 << 20), 4, plan)
    assert (rich.block, rich.scattered) == (budget.LARGEST_BLOCK, budget.LARGEST_SCATTERED_BLOCK)
    assert base + 4 * (32 << 20) < rich.peak < base + 4 * (34 << 20)
    tight = budget.spend(base + (40 << 20), 4, plan)
    assert tight.block <= tight.scattered < rich.scattered
    assert tight.peak <= base + (40 << 20)
    straight = budget.spend(base + (200 << 20), 4, planned(tensors[:, :999]))
    assert straight.scattered == straight.block


def test_too_small_says_the_least_that_works(tensors, monkeypatch):
    monkeypatch.setattr(budget, "resident", lambda: 100 * 10**6)
    with pytest.raises(BudgetError) as caught:
        budget.spend(10**6, 4, planned(tensors.t()))
    assert "a budget of 1 MB is too small" in caught.value.problem
    least = int(caught.value.hint.split()[2].removesuffix("MB")) * 10**6
    assert budget.spend(least, 4, planned(tensors.t())).block == budget.SMALLEST_BLOCK
    with pytest.raises(BudgetError):
        budget.spend(least - budget.DIFFERS - 10**6, 4, planned(tensors.t()))


def test_what_the_kernel_copies_takes_no_buffers(tensors, monkeypatch):
    monkeypatch.setattr(budget, "resident", lambda: 100 * 10**6)
    assert budget.spend(10**9, 4, planned(tensors)).peak == 100 * 10**6 + budget.SLACK


def test_what_the_kernel_copies_is_compared_through_scratch(tmp_path):
    """Runs of 64 kB and more are copied without a buffer, and read through one where they are compared."""
    torch.save({name: torch.zeros(8, 1 << 15) for name in "ab"}, tmp_path / "model.pt")
    halves = lazymerge.open(tmp_path / "model.pt")
    (plan,) = planned(torch.cat([halves["a"], halves["b"]], 1))
    assert (plan.buffered, plan.scratch) == (0, 1 << 20)


def test_what_other_kinds_of_tensors_have_left_counts(tensors):
    """A worker has the buffers of a cast while it adds up, and the other way round."""
    casted = cast(tensors.lazy_gather, DTYPES["bfloat16"], "w")
    plans = [list(make_plan({"w": each}).tensors) for each in (casted, (tensors + 1).lazy_gather)]
    alone = [budget.spend(1 << 30, 1, each).peak for each in plans]
    both = budget.spend(1 << 30, 1, [*plans[0], *plans[1]]).peak
    extra = [budget._extra(each[0], 2 << 20) for each in plans]
    assert both == pytest.approx(max(alone) + min(extra), abs=1 << 20)


def test_a_sum_over_columns_takes_rows_of_its_operand(tensors):
    (plan,) = planned(tensors.sum(1))
    (computed,) = plan.computed
    assert computed.working_set(plan.nbytes) < 16 << 20  # the tensor has 12 MB, its sum 12 kB


def test_what_has_to_be_computed_whole_is_counted(tensors):
    plan = planned((tensors + 1).sum(0))
    with pytest.raises(BudgetError, match="w alone takes"):
        budget.spend(budget.resident() + budget.SLACK + (8 << 20), 1, plan)
    assert budget.spend(budget.resident() + budget.SLACK + (60 << 20), 1, plan).peak > 12 * 10**6


@pytest.mark.parametrize(
    "computed",
    [
        lambda half: half.sum(0, dtype=torch.float32),
        lambda half: torch.linalg.vector_norm(half, dim=0, dtype=torch.float32),
    ],
)
def test_what_torch_widens_before_it_computes_is_counted(tmp_path, computed):
    """6 MB in bf16, of which torch makes 12 MB in fp32."""
    torch.save({"w": torch.zeros(3000, 1000).bfloat16()}, tmp_path / "half.pt")
    (plan,) = planned(computed(lazymerge.open(tmp_path / "half.pt")["w"]))
    assert 18 * 10**6 < plan.computed[0].working_set(plan.nbytes) < 20 * 10**6


def test_too_small_is_refused_before_work(tmp_path, tensors):
    with pytest.raises(BudgetError):
        lazymerge.merge(tmp_path / "model.pt", tmp_path / "out", max_ram="20MB")
    assert not (tmp_path / "out").exists()
