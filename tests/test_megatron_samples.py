"""Nine checkpoints that Megatron-LM wrote itself (tests/data/megatron: `ckpt`, the weights that went in as
`hf`, and how it was made as `case.json`), merged under each path that a user would give.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lazymerge
from tests.checks import assert_same_model, raw
from tests.makers.megatron_models import ask_here

SAMPLES = Path(__file__).parent / "data" / "megatron"
STEP = "iter_0000100"
VERL = "global_step_100/actor"
SOURCES = {
    "td_te_dsv3_tp2ep2pp2": ("", STEP),
    "td_te_qwen2_tp2pp2": ("", STEP),
    "td_te_qwen3_tp2_optim": ("", STEP),
    "td_te_qwen3moe_ep2grouped": ("", STEP),
    "torch_local_llama_vpp": ("", STEP),
    "torch_oldnames_llama_tp2pp2": ("", STEP),
    "torch_te_qwen3moe_tp2ep2pp2": ("", STEP),
    "verl_te_qwen3moe_ep2_vpp": ("", "global_step_100", VERL, f"{VERL}/dist_ckpt"),
}
VALUE = "verl2_te_qwen2_value"
VALUE_SOURCES = ("", "global_step_100", VERL, f"{VERL}/model", f"{VERL}/model/dist_ckpt")


@pytest.fixture(autouse=True)
def _ask_here(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_here(monkeypatch)


def test_no_sample_is_forgotten() -> None:
    assert {*SOURCES, VALUE} == {path.name for path in SAMPLES.iterdir()}


@pytest.mark.parametrize(("name", "below"), [(name, path) for name in SOURCES for path in SOURCES[name]])
def test_a_sample_gives_back_the_weights_that_went_in(name: str, below: str, tmp_path: Path) -> None:
    folder = SAMPLES / name
    lazymerge.merge(folder / "ckpt" / below, tmp_path / "merged", hf_config=base_model(folder, tmp_path))
    assert_same_model(tmp_path / "merged", as_megatron_has_it(load_file(folder / "hf" / "model.safetensors")))


@pytest.mark.parametrize("below", VALUE_SOURCES)
def test_a_value_head_is_merged_as_one(below: str, tmp_path: Path) -> None:
    """verl trains a critic with the config of a causal model, and `hf` has that model and the head apart."""
    folder = SAMPLES / VALUE
    config = base_model(folder, tmp_path)
    src = folder / "ckpt" / below
    lazymerge.merge(src, tmp_path / "merged", hf_config=config, is_value_model=True)
    truth = load_file(folder / "hf" / "model.safetensors")
    del truth["lm_head.weight"]
    head = load_file(folder / "hf" / "value.safetensors")
    assert_same_model(
        tmp_path / "merged", truth | {f"score.{part}": head[part] for part in ("weight", "bias")}
    )


def test_verl_needs_no_config_beside_its_own(tmp_path: Path) -> None:
    folder = SAMPLES / "verl_te_qwen3moe_ep2_vpp"
    lazymerge.merge(folder / "ckpt", tmp_path / "merged")
    assert_same_model(tmp_path / "merged", load_file(folder / "hf" / "model.safetensors"))


def as_megatron_has_it(truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Megatron holds router biases in float32; these were made of the bfloat16 values, so nothing is lost."""
    biases = [name for name in truth if name.endswith("e_score_correction_bias")]
    wide = {name: truth[name].float() for name in biases}
    assert all(raw(tensor.bfloat16()) == raw(truth[name]) for name, tensor in wide.items())
    return truth | wide


def base_model(folder: Path, tmp_path: Path) -> Path:
    """A folder with the config alone."""
    config = tmp_path / "base"
    config.mkdir()
    (config / "config.json").write_bytes((folder / "hf" / "config.json").read_bytes())
    return config


def test_a_merge_needs_no_torch(tmp_path: Path) -> None:
    """Nor does the process that checks names and shapes leave it behind."""
    case = SAMPLES / "torch_te_qwen3moe_tp2ep2pp2"
    script = (
        "import sys, lazymerge\n"
        "lazymerge.merge(sys.argv[1], sys.argv[2], hf_config=sys.argv[3])\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, case / "ckpt", tmp_path / "out", case / "hf"], check=True)
