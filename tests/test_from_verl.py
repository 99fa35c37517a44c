"""verl's command line, word for word: `python -m verl.model_merger` becomes `python -m lazymerge`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import lazymerge
from lazymerge import cli
from tests.checks import assert_same_model, tied_away, tree
from tests.makers.layout import Made, copy_of
from tests.test_megatron_samples import as_megatron_has_it

SAMPLES = Path(__file__).parent / "data/megatron"


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.cli, [str(arg) for arg in args], prog_name="lazymerge")


def assert_merged(done: Result, folder: Path, made: Made) -> None:
    assert done.exit_code == 0, done.stderr
    assert_same_model(folder, made.hub_truth, tied_away(made))


def test_the_command_of_the_documentation(checkpoint, tmp_path: Path):
    made = checkpoint("fsdp2-qwen2")
    done = run("merge", "--backend", "fsdp", "--local_dir", made.leaf, "--target_dir", tmp_path / "out")
    assert_merged(done, tmp_path / "out", made)


def test_every_flag_of_it(checkpoint, tmp_path: Path):
    made = checkpoint("fsdp2-qwen2")
    done = run(
        *("merge", "--backend", "fsdp", "--local_dir", made.leaf, "--target_dir", tmp_path / "out"),
        *("--hf_model_path", made.sidecars, "--use_cpu_initialization", "--low_cpu_mem_usage"),
        *("--trust-remote-code", "--private", "--log-level", "info"),
    )
    assert_merged(done, tmp_path / "out", made)
    assert "--use_cpu_initialization: no model is ever built here" in done.stderr
    assert "--low_cpu_mem_usage: memory is always bounded here" in done.stderr


def test_where_it_writes_if_it_is_not_told(checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    made = checkpoint("fsdp2-qwen2")
    assert_merged(run("merge", "--backend", "fsdp", "--local_dir", made.leaf), tmp_path / "tmp", made)


def test_a_second_time_replaces_the_first_as_there(checkpoint, tmp_path: Path):
    for name in ("fsdp2-llama", "fsdp2-qwen2"):
        made = checkpoint(name)
        done = run("merge", "--backend", "fsdp", "--local_dir", made.leaf, "--target_dir", tmp_path / "out")
        assert_merged(done, tmp_path / "out", made)
    before = tree(tmp_path / "out")
    done = run("merge", "--local_dir", made.leaf, "--target_dir", tmp_path / "out", "--no-overwrite")
    assert (done.exit_code, tree(tmp_path / "out")) == (2, before)
    assert "is not empty" in done.stderr


def test_flags_that_do_nothing_there_either(checkpoint, tmp_path: Path):
    """verl's merger takes them for every backend."""
    made = checkpoint("fsdp2-qwen2")
    flags = ["--tie-word-embedding", "--is-value-model"]
    done = run("merge", "--backend", "fsdp", "--local_dir", made.leaf, "--target_dir", tmp_path / "o", *flags)
    assert_merged(done, tmp_path / "o", made)
    assert "--tie-word-embedding, --is-value-model: only for Megatron checkpoints" in done.stdout
    done = run("merge", made.leaf, tmp_path / "p", "--force-shape-match", *flags)
    assert done.exit_code == 2
    assert "--force-shape-match: only for Megatron" in done.stderr


def test_a_model_of_the_hub_by_its_name(checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """--hf_model_path: what is in the local cache is taken, and nothing is downloaded."""
    made = checkpoint("fsdp2-qwen2")
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    snapshot = cache / "models--Lab--Some-7B" / "snapshots" / "0123abcd"
    shutil.copytree(made.sidecars, snapshot)
    (snapshot / "generation_config.json").write_text('{"top_k": 7}')
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123abcd")
    flags = ["merge", "--local_dir", made.leaf, "--target_dir", tmp_path / "out", "--hf_model_path"]
    assert_merged(run(*flags, "Lab/Some-7B"), tmp_path / "out", made)
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"top_k": 7}'
    for name, words in (("Lab/Other-7B", "nothing is downloaded"), ("/no/such/folder", "no such folder")):
        done = run(*flags, name)
        assert done.exit_code == 2
        assert words in done.stderr


def test_megatron(tmp_path: Path):
    sample = SAMPLES / "verl_te_qwen3moe_ep2_vpp"
    done = run(
        *("merge", "--backend", "megatron", "--local_dir", sample / "ckpt", "--target_dir", tmp_path / "out"),
        *("--hf_model_path", sample / "hf"),
    )
    assert done.exit_code == 0, done.stderr
    assert_same_model(tmp_path / "out", load_file(sample / "hf/model.safetensors"))


NOTHING = ["--use_cpu_initialization", "--low_cpu_mem_usage", "--trust-remote-code", "--private"]
"""Flags of verl's that change no byte, here and there."""


@pytest.mark.slow
def test_every_layout_of_fsdp(fsdp_checkpoint: Made, tmp_path: Path):
    """Merged, compared by `test`, and merged by stages, with all of verl's flags."""
    made, out = fsdp_checkpoint, tmp_path / "out"
    local = ["--backend", "fsdp", "--local_dir", made.leaf]
    given = [*NOTHING, "--hf_model_path", made.sidecars, "--log-level", "warning"]
    if any(".lora_" in name for name in made.truth):  # verl's own says what alpha was in a file of its own
        given += ["--lora-alpha", "16"]
    assert_merged(run("merge", *local, "--target_dir", out, *given), out, made)
    done = run("test", *local, "--test_hf_dir", out, "--hf_model_path", made.sidecars)
    assert (done.exit_code, "equal: " in done.stdout) == (0, True), done.output
    stage = ["--stage", "merge", "--stage", "convert"]
    assert_merged(run("merge", *local, "--target_dir", out, *given, *stage), out, made)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.iterdir()))
def test_every_layout_of_megatron(name: str, tmp_path: Path):
    """With verl's flags; what the weights are tied and valued as is said where the sample is that."""
    sample, out = SAMPLES / name, tmp_path / "out"
    truth = as_megatron_has_it(load_file(sample / "hf/model.safetensors"))
    config = json.loads((sample / "hf/config.json").read_text())
    flags = ["--force-shape-match", "--param-mapping", "decoder.final_layernorm.weight:model.norm.weight"]
    if config.get("tie_word_embeddings"):
        flags += ["--tie-word-embedding"]
    if (sample / "hf/value.safetensors").exists():
        head = load_file(sample / "hf/value.safetensors")
        del truth["lm_head.weight"]
        truth |= {f"score.{part}": head[part] for part in ("weight", "bias")}
        flags += ["--is-value-model"]
    local = ["--backend", "megatron", "--local_dir", sample / "ckpt", "--hf_model_path", sample / "hf"]
    done = run("merge", *local, "--target_dir", out, *NOTHING, *flags)
    assert done.exit_code == 0, done.stderr
    assert_same_model(out, truth)
    flags = [flag for flag in flags if flag in {"--tie-word-embedding", "--is-value-model"}]
    done = run("test", *local, "--test_hf_dir", out, *flags)
    assert (done.exit_code, "equal: " in done.stdout) == (0, True), done.output


def test_into_the_folder_of_config_and_tokenizer_as_verl_documents_it(checkpoint, tmp_path: Path):
    """`--target_dir CKPT/actor/huggingface`: weights beside what is there, which stays as it is."""
    made = copy_of(checkpoint("fsdp2-qwen2"), tmp_path / "run")
    target = f"{made.leaf}/huggingface"
    merge = ["merge", "--backend", "fsdp", "--local_dir", made.leaf, "--target_dir", target]
    before = tree(made.root)
    assert_merged(run(*merge), Path(target), made)
    assert_merged(run(*merge, "--max-shard-size", "20kB"), Path(target), made)
    after = tree(made.root)
    assert after.items() >= before.items()
    assert all(Path(name).match("huggingface/model*.safetensors*") for name in after.keys() - before.keys())
    done = run("test", "--backend", "fsdp", "--local_dir", made.leaf, "--test_hf_dir", target)
    assert (done.exit_code, "equal: " in done.stdout) == (0, True), done.output
    for level in (made.root, made.leaf):  # the rank files are meant as before, at any level
        assert lazymerge.open(level).format == "fsdp"


@pytest.mark.slow
def test_into_it_for_megatron(tmp_path: Path):
    sample = SAMPLES / "verl_te_qwen3moe_ep2_vpp"
    shutil.copytree(sample / "ckpt", tmp_path / "run")
    actor = tmp_path / "run/global_step_100/actor"
    (actor / "huggingface").mkdir(exist_ok=True)
    shutil.copy(sample / "hf/config.json", actor / "huggingface")
    before = tree(actor)
    flags = ["--backend", "megatron", "--local_dir", actor]
    for _ in range(2):
        done = run("merge", *flags, "--target_dir", actor / "huggingface")
        assert done.exit_code == 0, done.stderr
        assert_same_model(actor / "huggingface", load_file(sample / "hf/model.safetensors"))
        assert tree(actor).items() >= before.items()
    done = run("test", *flags, "--test_hf_dir", actor / "huggingface")
    assert (done.exit_code, "equal: " in done.stdout) == (0, True), done.output


@pytest.mark.parametrize(
    ("backend", "words"), [("megatron", "no checkpoint"), ("deepspeedy", "no such format")]
)
def test_another_backend(checkpoint, tmp_path: Path, backend: str, words: str):
    made = checkpoint("fsdp2-qwen2")
    done = run("merge", "--backend", backend, "--local_dir", made.leaf, "--target_dir", tmp_path / "out")
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["a", "b", "--local_dir", "c"], "--local-dir is SRC"),
        (["--target_dir", "c"], "Missing argument 'SRC...'"),
        (["a", "--target_dir", "c", "--hf-config", "x", "--hf_model_path", "y"], "is --hf-config"),
    ],
)
def test_both_ways_at_once(args: list[str], words: str):
    done = run("merge", *args)
    assert done.exit_code == 2
    assert words in done.stderr


def test_verls_test(checkpoint, tmp_path: Path):
    made = checkpoint("fsdp2-qwen2")
    lazymerge.merge(made.root, tmp_path / "model")
    flags = ["test", "--backend", "fsdp", "--local_dir", made.leaf, "--test_hf_dir"]
    done = run(*flags, tmp_path / "model")
    assert (done.exit_code, "equal: " in done.stdout) == (0, True), done.output
    path = tmp_path / "model/model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][1, 2] += 1
    save_file(tensors, path, {"format": "pt"})
    done = run(*flags, tmp_path / "model")
    assert done.exit_code == 3
    assert name in done.stdout


def test_verls_test_of_megatron():
    sample = SAMPLES / "verl_te_qwen3moe_ep2_vpp"
    flags = ["test", "--backend", "megatron", "--local_dir", sample / "ckpt", "--test_hf_dir", sample / "hf"]
    done = run(*flags, "--hf_model_path", sample / "hf", "--use_cpu_initialization")
    assert done.exit_code == 0, done.output
    assert run(*flags, "--backend", "fsdp").exit_code == 2


def test_verls_test_without_its_directory():
    done = run("test", "--backend", "fsdp", "--test_hf_dir", "x")
    assert done.exit_code == 2
    assert "Missing argument 'A'" in done.stderr


def test_under_torchrun_one_rank_merges(checkpoint, tmp_path: Path):
    """verl merges Megatron under torchrun: the others end at once, and well."""
    made = checkpoint("fsdp2-qwen2")
    command = [sys.executable, "-m", "lazymerge", "merge", "--local_dir", made.leaf, "--target_dir"]
    for rank in ("1", "0"):
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": "2"}
        done = subprocess.run(
            [*command, tmp_path / "out"], env=environment, capture_output=True, text=True, cwd=Path.cwd()
        )
        assert done.returncode == 0, done.stderr
        assert ("note: rank 1 has nothing to do: rank 0 does all of it" in done.stderr) == (rank == "1")
        assert (tmp_path / "out").exists() == (rank == "0")
    assert_same_model(tmp_path / "out", made.truth, tied_away(made))
