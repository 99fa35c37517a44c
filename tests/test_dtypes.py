"""The dtype of the result: kept, or cast as torch casts, where that is asked for and makes sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

import lazymerge
from lazymerge.errors import PlanError
from tests.checks import assert_same_model, assert_same_tensors, refused
from tests.makers.dtensors import dtensors

DRAW = torch.Generator().manual_seed(6)
FLOATS = ["float64", "float32", "float16", "bfloat16"]
NOT_CHECKED = "names are kept as they are, and not checked: config.json names no class (architectures)"
UNCAST = ["int64", "int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "complex64"]


def source(folder: Path, state: dict[str, torch.Tensor], config: dict[str, object] | None = None) -> Path:
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def values(dtype: str) -> torch.Tensor:
    """Values of each kind: ties of rounding, subnormals, zeros of both signs, infinities; no NaNs."""
    special = [
        0.0,
        -0.0,
        1.0,
        1 + 2**-8,
        1 + 2**-9,
        1 + 3 * 2**-9,
        2**-14,
        2**-24,
        2**-133,
        torch.inf,
        -torch.inf,
    ]
    drawn = torch.randn(1000, generator=DRAW, dtype=torch.float64)
    return torch.cat([torch.tensor(special, dtype=torch.float64), drawn]).to(getattr(torch, dtype))


@pytest.mark.parametrize("source_dtype", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("output_format", ["safetensors", "bin"])
def test_a_cast_is_that_of_torch(tmp_path, source_dtype, target, output_format):
    state = {"x": values(source_dtype), "scalar": values(source_dtype)[3].clone()}
    if (source_dtype, target) != ("float32", "bfloat16"):  # whose NaNs differ: tests/test_casting.py
        state["nan"] = torch.full((3,), torch.nan, dtype=getattr(torch, source_dtype))
    src = source(tmp_path / "src", state)
    lazymerge.merge(src, tmp_path / "out", dtype=target, output_format=output_format)
    truth = {name: tensor.to(getattr(torch, target)) for name, tensor in state.items()}
    if output_format == "bin":
        assert_same_tensors(torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True), truth)
    else:
        assert_same_model(tmp_path / "out", truth)


@pytest.mark.parametrize("name", ["fsdp2-shard1", "fsdp2-tp-uneven", "sharded-tensor-uneven", "fsdp2-zoo"])
def test_shards_are_cast(checkpoint, tmp_path, name):
    made = checkpoint(name)
    lazymerge.merge(made.root, tmp_path / "out", dtype="bfloat16")
    truth = {n: t.bfloat16() if t.is_floating_point() else t for n, t in made.truth.items()}
    assert_same_model(tmp_path / "out", truth, tied=[n for names in made.tied for n in names[1:]])


def test_other_types_are_not_cast(tmp_path):
    state = {name: torch.tensor([0, 1, 1, 0, 1]).to(getattr(torch, name)) for name in UNCAST}
    state["x"] = torch.ones(3)
    lazymerge.merge(source(tmp_path / "src", state), tmp_path / "out", dtype="bfloat16")
    assert_same_model(tmp_path / "out", {**state, "x": torch.ones(3).bfloat16()})


@pytest.mark.parametrize("name", ["e_score_correction_bias", "expert_bias"])
def test_a_router_bias_keeps_its_width(tmp_path, name):
    state = {
        f"model.layers.3.mlp.gate.{name}": values("float32"),
        "model.layers.3.mlp.gate.weight": torch.ones(3),
    }
    report = lazymerge.merge(source(tmp_path / "src", state), tmp_path / "out", dtype="bfloat16")
    bias, weight = state
    assert_same_model(tmp_path / "out", {bias: state[bias], weight: state[weight].bfloat16()})
    assert any(bias in note.text for note in report.notes)


def test_a_router_bias_can_be_widened(tmp_path):
    state = {"gate.e_score_correction_bias": torch.ones(3).bfloat16()}
    lazymerge.merge(source(tmp_path / "src", state), tmp_path / "out", dtype="float32")
    assert_same_model(tmp_path / "out", {name: tensor.float() for name, tensor in state.items()})


@pytest.mark.parametrize("value", [65520.0, -1e5, 3e38])
def test_overflow_in_fp16_is_refused(tmp_path, value):
    """In any shard, and by name."""
    entries = {"fine": torch.full((3,), 65504.0), "too.large": (torch.tensor([1.0, 2.0, value]), (Shard(0),))}
    made = dtensors(tmp_path / "run", (("a", 2),), entries)
    with pytest.raises(PlanError) as caught:
        lazymerge.merge(made.root, tmp_path / "out", dtype="float16")
    assert "too.large" in caught.value.problem
    assert f"{value:g}" in caught.value.problem
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("name", ["bf16", "torch.bfloat16", "BFloat16"])
def test_names_of_a_dtype(tmp_path, name):
    state = {"x": values("float32")}
    lazymerge.merge(source(tmp_path / "src", state), tmp_path / "out", dtype=name)
    assert_same_model(tmp_path / "out", {"x": state["x"].bfloat16()})


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "bfloat", "", "auto"])
def test_no_type_to_cast_to(tmp_path, name):
    src = source(tmp_path / "src", {"x": torch.ones(2)})
    with refused(PlanError, repr(name), "bfloat16", dst=tmp_path / "out"):
        lazymerge.merge(src, tmp_path / "out", dtype=name)


# ---- what config.json says ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"dtype": "float16"}], ids=str
)
def test_fp32_where_the_config_says_a_half_type(tmp_path, config):
    """verl keeps fp32 masters: they are kept, and the way to half the size is told."""
    state = {"x": torch.ones(1000, 1000), "ids": torch.arange(3)}
    report = lazymerge.merge(source(tmp_path / "src", state, config), tmp_path / "out")
    assert_same_model(tmp_path / "out", state)
    unchecked, note = report.notes
    assert unchecked.text == NOT_CHECKED
    (named,) = config.values()
    assert note.level == "info"
    assert f"--dtype {named}" in note.text
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({"dtype": "float32"}, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16), ({}, torch.float32)],
    ids=str,
)
def test_no_note_where_nothing_is_amiss(tmp_path, config, dtype):
    state = {"x": torch.ones(100).to(dtype), "norm": torch.ones(3)}
    report = lazymerge.merge(source(tmp_path / "src", state, config), tmp_path / "out")
    assert [note.text for note in report.notes] == [NOT_CHECKED]


def test_the_cast_that_the_note_advises(tmp_path):
    state = {"x": values("float32")}
    src = source(tmp_path / "src", state, {"dtype": "bfloat16", "x": 1})
    report = lazymerge.merge(src, tmp_path / "out", dtype="bfloat16")
    assert_same_model(tmp_path / "out", {"x": state["x"].bfloat16()})
    assert [note.text for note in report.notes] == [NOT_CHECKED]
    assert (tmp_path / "out/config.json").read_bytes() == (src / "config.json").read_bytes()


def test_one_name_or_a_type_of_torch_will_do(tmp_path):
    """Where several are possible, one needs no list; a dtype may be torch's own."""
    src = source(tmp_path / "src", {"a.x": torch.ones(2), "b.x": torch.ones(3), "b.y": torch.ones(4)})
    lazymerge.merge(src, tmp_path / "out", include="b.*", exclude="*.y", dtype=torch.bfloat16)
    assert_same_model(tmp_path / "out", {"b.x": torch.ones(3).bfloat16()})
