"""Checkpoints that megatron-core wrote (tests/data/megatron_core), merged and compared with what went in."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import lazymerge

DATA = Path(__file__).parent / "data" / "megatron_core"
CASES = sorted(path.parent.name for path in DATA.glob("*/hf"))


def merged(case: Path, out: Path) -> bytes:
    """The file that a merge of the case's checkpoint writes."""
    lazymerge.merge(case / "ckpt", out, hf_config=case / "hf")
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    return (out / "model.safetensors").read_bytes()


def test_the_data_is_that_of_the_maker():
    from tests.makers import megatron_core

    assert sorted(megatron_core.CASES) == CASES


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_megatron_core_is_what_went_in(tmp_path, name):
    case = DATA / name
    assert merged(case, tmp_path / "out") == (case / "hf" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["td_local_llama_pp2vpp2", "torch_local_deepseek_tp2ep2"])
def test_a_case_made_afresh_is_what_went_in(tmp_path, name):
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: tests/data/megatron_core/README.md says how")
    from tests.makers.megatron_core import make

    case = make(name, tmp_path / "made")
    truth = (DATA / name / "hf" / "model.safetensors").read_bytes()
    assert (case / "hf" / "model.safetensors").read_bytes() == truth
    assert merged(case, tmp_path / "out") == truth
