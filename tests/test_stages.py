"""--stage merge keeps the trainer's names and layouts; --stage convert goes on, to the same bytes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file

import lazymerge
from lazymerge import cli
from lazymerge.errors import DamagedFile, InconsistentCheckpoint, PlanError
from lazymerge.output import Destination
from tests.checks import assert_same_model, refused

SAMPLES = Path(__file__).parent / "data/megatron"
NAMES = ["verl_te_qwen3moe_ep2_vpp", "torch_oldnames_llama_tp2pp2"]


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.cli, [str(arg) for arg in args], prog_name="lazymerge")


@pytest.fixture(params=NAMES)
def sample(request: pytest.FixtureRequest) -> Path:
    return SAMPLES / request.param


def test_both_stages_give_what_one_pass_gives(sample: Path, tmp_path: Path):
    truth = load_file(sample / "hf/model.safetensors")
    lazymerge.merge(sample / "ckpt", tmp_path / "merged", stage="merge", hf_config=sample / "hf")
    lazymerge.merge(tmp_path / "merged", tmp_path / "model", stage="convert")
    lazymerge.merge(sample / "ckpt", tmp_path / "once", hf_config=sample / "hf")
    assert_same_model(tmp_path / "model", truth)
    for path in (tmp_path / "once").iterdir():
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_first_stage_has_the_trainers_names_and_is_no_model(sample: Path, tmp_path: Path):
    lazymerge.merge(sample / "ckpt", tmp_path / "merged", stage="merge", hf_config=sample / "hf")
    with safe_open(tmp_path / "merged/model.safetensors", framework="pt") as file:
        assert any(name.startswith("decoder.layers.") for name in file.keys())  # noqa: SIM118
    assert not (tmp_path / "merged/config.json").exists()
    assert (tmp_path / "merged/huggingface/config.json").exists()


def test_the_report_says_how_to_go_on_from_the_first_stage(source, tmp_path: Path):
    """No loader takes the folder for a model; the file can be read."""
    src, merged = source(tmp_path / "src", {"w": torch.ones(3)}, {}), tmp_path / "with space"
    done = run("merge", src, merged, "--stage", "merge")
    assert "from_pretrained" not in done.stdout
    command = shlex.split(done.stdout.splitlines()[-1])
    assert command == ["lazymerge", "merge", str(merged), "MODEL", "--stage", "convert"]
    run(*(tmp_path / "model" if word == "MODEL" else word for word in command[1:]))
    assert_same_model(tmp_path / "model", {"w": torch.ones(3)})
    report = json.loads(run("merge", src, tmp_path / "again", "--stage", "merge", "--json").stdout)
    assert report["next_step"].endswith("MODEL --stage convert")
    assert report["how_to_load"] == f"safetensors.torch.load_file('{tmp_path}/again/model.safetensors')"


def test_what_the_first_stage_leaves_is_not_uploaded(source, tmp_path: Path):
    src = source(tmp_path / "src", {"w": torch.ones(3)}, {})
    with refused(PlanError, "--push-to-hub", "--stage convert", dst=tmp_path / "out"):
        lazymerge.merge(src, tmp_path / "out", stage="merge", push_to_hub="lab/model")


def test_an_fsdp_checkpoint(checkpoint, tmp_path: Path):
    made = checkpoint("fsdp2-llama-tied")
    lazymerge.merge(made.root, tmp_path / "merged", stage="merge")
    with safe_open(tmp_path / "merged/model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(made.truth)  # tied ones too: nothing is converted
    lazymerge.merge(tmp_path / "merged", tmp_path / "model", stage="convert")
    lazymerge.merge(made.root, tmp_path / "once")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "once"))
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_flags_of_the_other_stage(sample: Path, tmp_path: Path):
    with refused(PlanError, "--tie-word-embedding: nothing is converted", dst=tmp_path / "out"):
        lazymerge.merge(sample / "ckpt", tmp_path / "out", stage="merge", tie_word_embedding=True)
    with refused(PlanError, "--stage 'read'", dst=tmp_path / "out"):
        lazymerge.merge(sample / "ckpt", tmp_path / "out", stage=["read"])


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 3, "settings": {}}', '{"format": "megatron"}', "[" * 9999]
)
def test_a_damaged_record(sample: Path, tmp_path: Path, text: str):
    lazymerge.merge(sample / "ckpt", tmp_path / "merged", stage="merge", hf_config=sample / "hf")
    (tmp_path / "merged/lazymerge-stage.json").write_text(text)
    with refused(DamagedFile, "lazymerge-stage.json", dst=tmp_path / "out"):
        lazymerge.merge(tmp_path / "merged", tmp_path / "out")


def test_a_record_that_changed_in_between(sample: Path, tmp_path: Path, monkeypatch):
    merged, out = tmp_path / "merged", tmp_path / "out"
    lazymerge.merge(sample / "ckpt", merged, stage="merge", hf_config=sample / "hf")
    with monkeypatch.context() as patch:
        patch.setattr(Destination, "publish", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lazymerge.merge(merged, out)
    os.utime(merged / "lazymerge-stage.json", (1, 1))
    with pytest.raises(InconsistentCheckpoint, match=r"lazymerge-stage\.json: has changed"):
        lazymerge.merge(merged, out)


def test_a_lost_record(sample: Path, tmp_path: Path):
    """The names alone then: no loader's, and the check says so."""
    lazymerge.merge(sample / "ckpt", tmp_path / "merged", stage="merge", hf_config=sample / "hf")
    (tmp_path / "merged/lazymerge-stage.json").unlink()
    with pytest.raises(lazymerge.LazymergeError, match=r"config\.json"):
        lazymerge.merge(tmp_path / "merged", tmp_path / "out")
    assert json.loads((tmp_path / "merged/huggingface/config.json").read_text())
    shutil.rmtree(tmp_path / "merged")
