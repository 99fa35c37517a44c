"""The plan: what it promises, and that it is data."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import lazymerge
from lazymerge.conversions.dtypes import cast_to
from lazymerge.errors import InconsistentCheckpoint, PlanError
from lazymerge.execute import write_file
from lazymerge.files.dtype import DTYPES
from lazymerge.files.size import parse_size
from lazymerge.plan import Plan, make_plan
from lazymerge.plan_json import plan_from_json, plan_to_json
from lazymerge.tensor import LazyTensor


def execute(plan: Plan, folder, block: int = 1 << 16, workers: int = 2) -> None:
    for file in plan.files:
        with open(folder / file.name, "wb+") as target:
            target.truncate(file.size)
            write_file(file, target.fileno(), block=block, workers=workers, on_bytes=lambda count: None)


@pytest.fixture
def saved(tmp_path):
    """A state dict in a file, and the checkpoint that lazymerge opens it as."""
    torch.manual_seed(0)
    state = {
        "a.weight": torch.randn(40, 30),
        "b.weight": torch.randn(7, 3, dtype=torch.float64),
        "b.count": torch.tensor(5),
        "c": torch.randn(64, 64).to(torch.bfloat16),
        "mask": torch.rand(9) > 0.5,
        "none": torch.zeros(0, 4),
    }
    torch.save(state, tmp_path / "model.pt")
    return state, lazymerge.open(tmp_path / "model.pt")


def through_json(plan: Plan) -> Plan:
    return plan_from_json(json.loads(json.dumps(plan_to_json(plan))))


@pytest.mark.parametrize("again", [lambda plan: plan, through_json], ids=["made", "from json"])
def test_a_plan_writes_what_save_file_writes(saved, tmp_path, again):
    state, checkpoint = saved
    execute(again(make_plan(checkpoint.gathers)), tmp_path)
    save_file(state, tmp_path / "golden.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "golden.safetensors").read_bytes()


def test_computations_and_constants_survive_json(saved, tmp_path):
    state, checkpoint = saved
    lazy = dict(checkpoint)
    made = {
        "cast": lazy["a.weight"].to(torch.bfloat16),
        "product": lazy["a.weight"] @ torch.ones(30, 2),
        "sum": (lazy["a.weight"] + lazy["a.weight"] * 2).sum(0),
        "norm": torch.linalg.norm(lazy["a.weight"], dim=1),
        "slice": lazy["c"].t()[3:5].reshape(-1),
    }
    plan = make_plan({name: tensor.lazy_gather for name, tensor in made.items()})
    execute(through_json(plan), tmp_path)
    result = load_file(tmp_path / "model.safetensors")
    a = state["a.weight"]
    assert torch.equal(result["cast"], a.to(torch.bfloat16))
    assert torch.equal(result["product"], a @ torch.ones(30, 2))
    assert torch.equal(result["sum"], (a + a * 2).sum(0))
    assert torch.equal(result["norm"], torch.linalg.norm(a, dim=1))
    assert torch.equal(result["slice"], state["c"].t()[3:5].reshape(-1))


def test_the_json_of_a_bin_plan(saved, tmp_path):
    state, checkpoint = saved
    execute(through_json(make_plan(checkpoint.gathers, output_format="bin")), tmp_path)
    result = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert list(result) == list(state)
    assert all(torch.equal(result[name], state[name]) for name in state)


def test_a_large_constant_is_not_put_into_json(saved):
    gather = (LazyTensor(saved[1].gathers["a.weight"]) @ torch.ones(30, 20000)).lazy_gather
    with pytest.raises(PlanError, match="only in memory"):
        plan_to_json(make_plan({"w": gather}))


def test_a_source_that_changed_since_is_refused(saved, tmp_path):
    data = plan_to_json(make_plan(saved[1].gathers))
    os.utime(tmp_path / "model.pt", (1, 1))
    with pytest.raises(InconsistentCheckpoint, match=r"model\.pt: has changed since the plan was made"):
        plan_from_json(data)


PIECES = [
    (0, [-1, 0]),
    (0, [0.0, 0]),
    (1, [40, True]),
    (2, [-30, 1]),
    (2, [1 << 30, 1]),
    (4, -4),
    (4, 1e3),
    (4, 1 << 40),
]
"""Of a piece: where its start, shape, strides, and offset are, and what none of them can be."""


def piece_of(data):
    """The first piece of the first tensor: start, shape, strides, source, offset."""
    return data["files"][0]["tensors"][0]["gather"]["pieces"][0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("files"),
        lambda data: data.update(version=2),
        lambda data: data["files"][0]["tensors"][0]["gather"].update(dtype="float3"),
        lambda data: data["files"][0]["tensors"][0]["gather"].update(shape=[1]),
        lambda data: data["files"][0]["tensors"][0].update(shape=[3]),
        lambda data: data.update(sources=[]),
        lambda data: data["files"][0].update(name="../model.safetensors"),
        lambda data: data["files"][0].update(name=3),
        *(lambda data, at=at, value=value: piece_of(data).__setitem__(at, value) for at, value in PIECES),
    ],
)
def test_a_damaged_plan_is_refused(saved, damage):
    data = plan_to_json(make_plan({"a.weight": saved[1].gathers["a.weight"]}))
    plan_from_json(data)
    damage(data)
    with pytest.raises(lazymerge.LazymergeError):
        plan_from_json(data)


@pytest.mark.parametrize("offset", [1, 2, 80 * 30])
def test_a_computation_is_read_from_whole_elements_and_to_its_end(saved, offset):
    cast = cast_to(saved[1], DTYPES["bfloat16"])
    data = plan_to_json(make_plan({"a.weight": cast.gathers["a.weight"]}))
    plan_from_json(data)
    piece_of(data)[4] += offset
    with pytest.raises(PlanError, match="a plan with bytes"):
        plan_from_json(data)


def test_sizes_and_reads_are_predicted(saved, tmp_path):
    state, checkpoint = saved
    plan = make_plan(checkpoint.gathers)
    execute(plan, tmp_path)
    assert plan.size == (tmp_path / "model.safetensors").stat().st_size
    assert plan.reads == plan.nbytes == sum(tensor.nbytes for tensor in state.values())
    half = make_plan(cast_to(checkpoint, DTYPES["bfloat16"]).gathers)
    assert half.reads == plan.reads
    assert half.per_dtype()["bfloat16"] == (3 + 1, 2 * (1200 + 21 + 4096 + 0))


def test_nothing_to_write_is_refused():
    with pytest.raises(PlanError, match="no tensor is left"):
        make_plan({})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5 GB", 1_500_000_000),
        ("7", 7),
        (123, 123),
        ("2kb", 2000),
        ("1T", 10**12),
        ("3g", 3 * 10**9),
    ],
)
def test_sizes_are_read_as_the_hub_reads_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-3GB", "1e9", "0", 0, "5 giga", "1.2.3GB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(PlanError):
        parse_size(text)
