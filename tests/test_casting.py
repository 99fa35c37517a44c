"""The casts that need no torch: the same bits as torch's, from plain and sharded tensors, and without it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import lazymerge
from lazymerge.casting import Cast, casts
from lazymerge.errors import PlanError
from lazymerge.files.dtype import DTYPES
from lazymerge.plan import make_plan
from lazymerge.plan_json import plan_from_json, plan_to_json
from tests.checks import assert_same_model

BF16 = DTYPES["bfloat16"]
DRAW = torch.Generator().manual_seed(9)


def saved(tmp_path, state):
    tmp_path.mkdir(exist_ok=True)
    torch.save(state, tmp_path / "pytorch_model.bin")
    return tmp_path


def floats(lower_halves: list[int]) -> torch.Tensor:
    """Floats of every upper half, which is a bfloat16, with each of these lower halves."""
    bits = torch.arange(1 << 16).unsqueeze(1) * (1 << 16) + torch.tensor(lower_halves)
    return bits.flatten().to(torch.uint32).view(torch.float32)


def assert_rounded_as_torch_does(tmp_path, values: torch.Tensor) -> None:
    """Equal bits but for NaNs, which stay NaNs of their sign; overflow is dealt with elsewhere."""
    opened = lazymerge.open(saved(tmp_path / "src", {"x": values}))
    source = Cast(opened.gathers["x"], BF16, "x")
    out = bytearray(source.size)
    source.read_into(0, memoryview(out))
    got = torch.frombuffer(out, dtype=torch.int16)
    truth, nan = values.bfloat16().view(torch.int16), values.isnan()
    assert torch.equal(got[~nan], truth[~nan])
    assert torch.equal(got[nan], torch.where(values[nan].signbit(), 0xFFC0 - 65536, 0x7FC0).short())


@pytest.mark.parametrize(
    "lower_halves",
    [[0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFF], torch.randint(1 << 16, (32,), generator=DRAW).tolist()],
    ids=["around ties", "drawn"],
)
def test_floats_are_rounded_as_torch_rounds_them(tmp_path, lower_halves):
    values = floats(lower_halves)
    overflows = values.isfinite() & values.bfloat16().isinf()
    assert_rounded_as_torch_does(tmp_path, values[~overflows])


def test_bfloat16_becomes_float32_exactly(tmp_path):
    values = torch.arange(1 << 16, dtype=torch.int32).short().view(torch.bfloat16)
    values = values[~values.isnan()]
    lazymerge.merge(saved(tmp_path / "src", {"x": values}), tmp_path / "out", dtype="float32")
    assert_same_model(tmp_path / "out", {"x": values.float()})


@pytest.mark.parametrize("value", [3.4e38, -3.4e38])
def test_overflow_is_refused_by_name(tmp_path, value):
    state = {"x": torch.tensor([1.0, value])}
    with pytest.raises(PlanError, match=r"x: 1 of its values, such as -?3.4e\+38, do not fit bfloat16"):
        lazymerge.merge(saved(tmp_path / "src", state), tmp_path / "out", dtype="bfloat16")


def test_a_plan_with_casts_survives_json(tmp_path):
    src = saved(tmp_path / "src", {"x": torch.randn(5, 7).t()})
    gather = lazymerge.conversions.dtypes.cast_to(lazymerge.open(src), BF16).gathers["x"]
    plan = make_plan({"x": gather})
    again = plan_from_json(plan_to_json(plan))
    assert plan_to_json(again) == plan_to_json(plan)
    assert isinstance(again.files[0].tensors[0].computed[0], Cast)


def test_a_plan_with_a_cast_that_is_none_is_refused(tmp_path):
    src = saved(tmp_path / "src", {"x": torch.randn(5)})
    plan = plan_to_json(make_plan(lazymerge.conversions.dtypes.cast_to(lazymerge.open(src), BF16).gathers))
    for source in plan["sources"]:
        if "cast" in source:
            source["cast"] = "int32"
    with pytest.raises(PlanError, match="a cast of float32 to int32"):
        plan_from_json(plan)


def test_other_types_are_left_to_torch(tmp_path):
    state = {"half": torch.ones(2).half(), "double": torch.ones(2).double(), "single": torch.ones(2)}
    opened = lazymerge.open(saved(tmp_path / "src", state)).gathers
    assert [casts(opened[name], BF16) for name in state] == [False, False, True]
    assert not casts(opened["single"], DTYPES["float16"])


def test_torch_is_not_imported(tmp_path):
    src = saved(tmp_path / "src", {"x": torch.randn(300, 500)})
    script = (
        "import sys, lazymerge\n"
        "lazymerge.merge(sys.argv[1], sys.argv[2], dtype='bfloat16')\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(src), str(tmp_path / "out")], check=True)
