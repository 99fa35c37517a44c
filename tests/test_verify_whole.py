"""`verify` never says equal of what it has not compared: rows that were cut, copies that ranks share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate

import lazymerge
from lazymerge.cli import cli
from lazymerge.conversions import saved_names
from lazymerge.errors import InconsistentCheckpoint, PlanError
from lazymerge.forward import ForwardReport
from lazymerge.verification import verify
from tests.makers.dtensors import dtensors
from tests.makers.layout import copy_of, edit_rank

SAMPLE = Path(__file__).parent / "data" / "megatron" / "verl_te_qwen3moe_ep2_vpp"
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


def run(*arguments: object):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="lazymerge")


# ------------------------------------------------------------------------------------- rows that are cut


def with_vocabulary(rows: int, folder: Path) -> Path:
    """The sample's model with its first words alone."""
    shutil.copytree(SAMPLE / "hf", folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:rows].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    return folder


def test_a_vocabulary_that_was_cut_is_not_equal(tmp_path, monkeypatch):
    """120 rows were trained: a config.json with 64 makes the rest look like padding."""
    for name, answer in (("architecture_and_conversion", None), ("classes", [])):  # which takes 8 s
        monkeypatch.setattr(saved_names, name, lambda *_, answer=answer: answer)
    model = with_vocabulary(64, tmp_path / "model")
    flags = ("test", "--backend", "megatron", "--local_dir", SAMPLE / "ckpt", "--test_hf_dir", model)
    flags += ("--hf_model_path", model)
    done = run(*flags, "--json")
    assert done.exit_code == 3
    found = json.loads(done.stdout)
    assert found["comparison"]["same"] and not found["same"]
    assert [note["lossy"] for note in found["notes"]["one"]] == [True, True]
    assert found["notes"]["other"] == []
    done = run(*flags)
    assert done.exit_code == 3
    *_, first, second, answer = done.stdout.splitlines()
    assert first.startswith("warning: A: embedding.word_embeddings.weight: 64 of 128 rows are cut")
    assert second.startswith("warning: A: output_layer.weight: 64 of 128 rows are cut")
    assert answer.startswith("not equal: A: embedding.word_embeddings.weight: 64 of 128 rows are cut")


def test_padding_that_is_cut_is_equal():
    report = verify(SAMPLE / "ckpt", SAMPLE / "hf")
    assert report.same
    assert ["8 of 128 rows are cut" in note.text for note in report.notes[0]] == [True, True]


# ------------------------------------------------------------------------------------- copies


@pytest.fixture
def replicated(checkpoint, tmp_path):
    """A copy of a checkpoint that two replicas hold, and the model that it was."""
    made = copy_of(checkpoint("fsdp2-hsdp"), tmp_path / "run")
    model = tmp_path / "model"
    shutil.copytree(made.sidecars, model)
    save_file({name: each.contiguous() for name, each in made.hub_truth.items()}, model / "model.safetensors")
    return made, model


@pytest.mark.parametrize("swapped", [False, True])
def test_a_copy_that_differs_is_not_equal(replicated, swapped):
    made, model = replicated
    sides = (model, made.root) if swapped else (made.root, model)
    assert verify(*sides).same
    name = "model.norm.weight"
    edit_rank(made, 2, lambda state: state[name]._local_tensor.add_(1))
    report = verify(*sides)
    assert report.comparison.same and not report.same
    (note,) = report.notes[swapped]
    assert note.lossy and note.text.startswith(f"{name} differs between")
    assert report.notes[not swapped] == ()
    done = run("verify", sides[0], "--against", sides[1])
    assert done.exit_code == 3
    side = "AB"[swapped]
    assert done.stdout.splitlines()[-1].startswith(f"not equal: {side}: {name} differs between")


def test_a_rank_of_another_save_is_refused(replicated):
    made, model = replicated

    def other(state: dict) -> None:
        for tensor in state.values():
            getattr(tensor, "_local_tensor", tensor).add_(1)

    edit_rank(made, 2, other)
    with pytest.raises(InconsistentCheckpoint, match="it is of another save"):
        verify(model, made.root)


def test_copies_of_adapters_are_compared_too(tmp_path):
    torch.manual_seed(0)
    lora = f"{MODULE}.lora_A.default.weight"
    tensors = {
        f"{MODULE}.base_layer.weight": torch.randn(6, 5),
        lora: torch.randn(2, 5),
        f"{MODULE}.lora_B.default.weight": torch.randn(6, 2),
    }
    entries = {name: (tensor, (Replicate(),)) for name, tensor in tensors.items()}
    made = dtensors(tmp_path / "run", (("ddp", 2),), entries)
    assert verify(made.root, made.root).same
    edit_rank(made, 1, lambda state: state[lora]._local_tensor.add_(1))
    report = verify(made.root, made.root)
    assert [[note.lossy for note in notes] for notes in report.notes] == [[True], [True]]
    assert not report.same
    assert verify(made.root, made.root, base_only=True).same


# ------------------------------------------------------------------------------------- a folder alone


@pytest.fixture
def folder(tmp_path):
    """A model with nothing but weights."""
    (tmp_path / "alone").mkdir()
    save_file({"x": torch.ones(3)}, tmp_path / "alone" / "model.safetensors", {"format": "pt"})
    return tmp_path / "alone"


@pytest.mark.parametrize(
    "flags",
    [
        *(["--atol", "1"], ["--rtol", "1"], ["--exact"], ["--accept-rounding"], ["--max-mismatches", "5"]),
        *(["--base-only"], ["--forward"], ["--component", "critic"], ["--fsdp-version", "2"]),
        *(["--world-size", "5"], ["--hf-config", "/nowhere"], ["--backend", "nonsense"], ["--family", "x"]),
        *(["--param-mapping", "a:b"], ["--tie-word-embedding"], ["--is-value-model"]),
        ["--trust-remote-code"],
    ],
    ids=lambda flags: flags[0],
)
def test_options_that_mean_nothing_alone_are_refused(folder, flags):
    done = run("verify", folder, *flags)
    assert done.exit_code == 2
    assert f"{flags[0]}: nothing to compare with" in done.stderr and "--against" in done.stderr


@pytest.mark.parametrize("empty", ["src", "against", "hf_config"])
def test_an_empty_path_is_not_the_current_folder(folder, monkeypatch, empty):
    monkeypatch.chdir(folder)
    with pytest.raises(PlanError, match="the path is empty"):
        verify(**{"src": folder, "against": folder, empty: ""})
    if empty == "src":
        assert run("verify", "").exit_code == 2


def test_a_budget_is_kept_alone(folder):
    lazymerge.merge(folder, folder.parent / "sealed", verify=True)
    assert run("verify", folder.parent / "sealed", "--max-ram", "4GB", "--max-workers", "2").exit_code == 0
    done = run("verify", folder.parent / "sealed", "--max-ram", "1KB")
    assert done.exit_code == 2 and "--max-ram" in done.stderr


def test_weights_that_no_loader_takes_are_told(folder):
    assert verify(folder).notes == ((), ())
    torch.save({"x": torch.zeros(3)}, folder / "pytorch_model.bin")
    done = run("verify", folder)
    assert done.exit_code == 0
    assert "warning: pytorch_model.bin beside the model was not checked" in done.stdout


@pytest.mark.parametrize("output_format", ["safetensors", "bin"])
def test_a_sealed_result_that_lost_its_weights_is_changed(folder, output_format):
    """The manifest knows better than any error about a folder that is no model."""
    out = folder.parent / "out"
    lazymerge.merge(folder, out, verify=True, output_format=output_format)
    name = "model.safetensors" if output_format == "safetensors" else "pytorch_model.bin"
    whole = (out / name).read_bytes()
    damages = [None, whole[:-10], whole[: len(whole) // 2], b"", whole[:80] + b"\xff" + whole[81:]]
    for content in damages:
        (out / name).unlink(missing_ok=True)
        if content is not None:
            (out / name).write_bytes(content)
        done = run("verify", out)
        assert done.exit_code == 3, done.output
        assert done.stdout.startswith(f"{name}: ")


def test_a_sealed_result_of_shards_that_lost_them_all_is_changed(folder):
    out = folder.parent / "out"
    save_file({"x": torch.ones(3), "y": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    lazymerge.merge(folder, out, verify=True, max_shard_size=12)
    names = sorted(path.name for path in out.glob("model-*"))
    assert len(names) == 2
    for name in (*names, "model.safetensors.index.json"):
        (out / name).unlink()
    report = verify(out)
    assert {problem.file for problem in report.manifest.problems} == {*names, "model.safetensors.index.json"}


def test_a_sealed_adapter_is_unchanged(tmp_path):
    state = {
        f"{MODULE}.lora_A.default.weight": torch.ones(2, 5),
        f"{MODULE}.lora_B.default.weight": torch.ones(6, 2),
    }
    (tmp_path / "src").mkdir()
    torch.save(state, tmp_path / "src" / "model_world_size_1_rank_0.pt")
    (tmp_path / "src" / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 16}')
    lazymerge.merge(tmp_path / "src", tmp_path / "out", lora="only", verify=True)
    assert verify(tmp_path / "out").same
    (tmp_path / "out" / "adapter_model.safetensors").unlink()
    assert not verify(tmp_path / "out").same


def test_verls_test_says_which_flag_is_missing(folder):
    done = run("test", "--local_dir", folder)
    assert done.exit_code == 2
    assert "Missing option '--test-hf-dir'" in done.stderr


# ------------------------------------------------------------------------------------- the logits


@pytest.mark.parametrize(
    ("largest", "magnitude", "same"),
    [(9e-4, 0.2, False), (1e-4, 0.2, True), (0.0, 0.0, True), (0.1, 200.0, True)],
)
def test_logits_are_close_by_the_largest_of_them(largest, magnitude, same):
    shape = (1, 16, 32)
    report = ForwardReport(("A", "A"), (shape, shape), 16, 16, largest, magnitude, ((), ()), ((), ()))
    assert report.same is same
