"""`verify` of checkpoints on disk: sharded ones against saved models, results, the command, the memory."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from lazymerge import api
from lazymerge.cli.verify import verify as command
from lazymerge.errors import (
    LazymergeError,
    PlanError,
    SourceError,
    UnsupportedCheckpoint,
    VerificationError,
)
from lazymerge.manifest import MANIFEST, check_manifest
from lazymerge.reread import verify_result
from lazymerge.verification import verify
from tests.makers.models import build_model

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The model of the checkpoint "fsdp2-llama" as transformers saves it."""
    folder = tmp_path_factory.mktemp("reference") / "model"
    build_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def model(reference, tmp_path):
    """A copy of it to change."""
    return Path(shutil.copytree(reference, tmp_path / "model"))


def changed(folder, change):
    """The folder after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_sharded_checkpoint_is_its_saved_model(checkpoint, reference):
    made = checkpoint("fsdp2-llama")
    for options in ({}, {"exact": True}):
        report = verify(made.root, reference, **options)
        assert report.same
        assert report.comparison.tensors == report.comparison.identical == len(made.truth)
        assert report.comparison.nbytes == sum(tensor.nbytes for tensor in made.truth.values())
        assert verify(reference, made.root, **options).same


def test_a_tied_checkpoint_is_its_saved_model(checkpoint, tmp_path):
    build_model("llama-tied").save_pretrained(tmp_path / "model")
    assert verify(checkpoint("fsdp2-llama-tied").root, tmp_path / "model", exact=True).same


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_one_changed_value_is_named(checkpoint, model, workers):
    name = "model.layers.1.mlp.up_proj.weight"
    place = (7, 3)

    def change(tensors):
        tensors[name][place] += 0.25

    before = load_file(model / "model.safetensors")[name][place].item()
    report = verify(checkpoint("fsdp2-llama").root, changed(model, change), max_workers=workers)
    assert not report.same
    (difference,) = report.comparison.differences
    assert (difference.name, difference.first, difference.mismatches) == (name, place, 1)
    assert difference.values[0] == before
    assert difference.largest == pytest.approx(0.25, abs=1e-6)
    assert report.comparison.identical == report.comparison.tensors - 1


def test_a_dtype_that_was_changed_needs_a_word(checkpoint, model):
    def change(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.bfloat16()

    root = checkpoint("fsdp2-llama").root
    changed(model, change)
    plain = verify(root, model)
    assert plain.comparison.counts["dtype"] == len(load_file(model / "model.safetensors"))
    assert "--accept-rounding" in plain.comparison.hint
    accepted = verify(root, model, accept_rounding=True)
    assert accepted.same and accepted.comparison.largest > 0
    assert not verify(root, model, atol=1e-9).same


def test_the_config_of_one_side_serves_both(checkpoint, model, tmp_path):
    made = checkpoint("fsdp2-llama-tied")
    bare = tmp_path / "bare"
    bare.mkdir()
    for rank in range(made.world_size):
        shutil.copy(made.rank_file(rank), bare)
    build_model("llama-tied").save_pretrained(tmp_path / "tied")
    assert verify(bare, tmp_path / "tied").same


def test_what_cannot_be_compared_is_refused(reference, tmp_path):
    with pytest.raises(PlanError, match="nothing to compare with"):
        verify(reference, exact=True)
    with pytest.raises(SourceError, match="no such folder"):
        verify(tmp_path / "nowhere")
    with pytest.raises(PlanError, match="max-workers"):
        verify(reference, reference, max_workers=0)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_view_whose_bytes_are_not_its_values_is_refused(reference, tmp_path, indexed):
    name = "pytorch_model-00001-of-00001.bin" if indexed else "pytorch_model.bin"
    torch.save({"x": torch.ones(3, dtype=torch.complex64).conj(), "y": torch.ones(2)}, tmp_path / name)
    if indexed:
        index = {"metadata": {}, "weight_map": {"x": name, "y": name}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedCheckpoint, match="conjugated or negated") as error:
        verify(tmp_path, reference)
    assert "resolve_conj()" in error.value.hint


def test_no_torch_and_little_memory_for_what_only_moves(tmp_path):
    """256 MB in one tensor, under a limit far below it."""
    torch.manual_seed(0)
    big = torch.randn(1 << 13, 1 << 13)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file({"big": big}, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    with open(tmp_path / "b" / "model.safetensors", "r+b") as file:
        file.seek(-3, 2)
        file.write(b"\xff")
    code = """
import json, resource, sys
import lazymerge.verification
data = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + (64 << 20), data + (64 << 20)))
report = lazymerge.verification.verify(sys.argv[1], sys.argv[2], exact=True, max_workers=2)
print(json.dumps({**report.to_json(), "torch": "torch" in sys.modules}))
"""
    run = [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert not found["torch"]
    assert found["comparison"]["counts"]["values"] == 1
    assert found["comparison"]["differences"][0]["first"] == [(1 << 13) - 1, (1 << 13) - 1]
    assert found["peak"] < 150 << 20


# ------------------------------------------------------------------------------------- a result


@pytest.fixture
def merged(checkpoint, tmp_path):
    """A merge of several files, and the checkpoint that it was made of."""
    made = checkpoint("fsdp2-llama")
    api.merge(made.root, tmp_path / "merged", max_shard_size=6000)
    return api.open(made.root), tmp_path / "merged"


def names_of(folder):
    """All files of a result, which nobody has put others beside yet."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def test_a_result_is_reread_and_gets_a_manifest(merged):
    source, folder = merged
    verify_result(source, folder, names_of(folder), workers=2)
    assert (folder / MANIFEST).is_file()
    assert check_manifest(folder).same
    assert verify(folder).manifest.tensors == len(source)


def test_files_beside_a_result_are_reread_too(merged):
    """The tensors of an adapter, which are no part of the model."""
    source, folder = merged
    (folder / "lora_adapter").mkdir()
    name, place = "model.norm.weight", "lora_adapter/adapter_model.safetensors"
    beside = {place: {"x": source.gathers[name]}}
    save_file({"x": source[name].materialize()}, folder / place)
    verify_result(source, folder, names_of(folder), beside)
    assert check_manifest(folder).same
    (folder / MANIFEST).unlink()
    save_file({"x": source[name].materialize() + 1}, folder / place)
    with pytest.raises(VerificationError, match=r"adapter_model\.safetensors.*values differ"):
        verify_result(source, folder, names_of(folder), beside)
    assert not (folder / MANIFEST).exists()


def test_a_result_that_differs_gets_no_manifest(merged):
    source, folder = merged
    victim = sorted(folder.glob("*.safetensors"))[1]
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    with pytest.raises(VerificationError, match="values differ") as error:
        verify_result(source, folder, names_of(folder))
    assert error.value.exit_code == 3
    assert not (folder / MANIFEST).exists()


def test_a_result_whose_index_lies_is_refused(merged):
    source, folder = merged
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first, *_, last = sorted(set(content["weight_map"].values()))
    name = next(name for name, file in content["weight_map"].items() if file == first)
    content["weight_map"][name] = last
    index.write_text(json.dumps(content))
    with pytest.raises(LazymergeError, match=re.escape(name)):
        verify_result(source, folder, names_of(folder))
    assert not (folder / MANIFEST).exists()


def test_what_lies_beside_a_result_is_not_in_its_manifest(merged):
    """Nor is it a reason to call the result wrong: a destination may hold files of the user's."""
    source, folder = merged
    names = names_of(folder)
    (folder / "credentials.json").write_text("{}")
    shutil.copy(sorted(folder.glob("*.safetensors"))[0], folder / "mine.safetensors")
    verify_result(source, folder, names)
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    assert set(listed) == set(names)


# ------------------------------------------------------------------------------------ the command


def run(*arguments):
    return CliRunner().invoke(
        command, [str(argument) for argument in arguments], prog_name="lazymerge verify"
    )


def test_the_command_says_equal(checkpoint, reference):
    done = run(checkpoint("fsdp2-llama").root, "--against", reference)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].startswith("equal: 21 tensors, 21 of them byte for byte")
    assert run(checkpoint("fsdp2-llama").root, "--against", reference, "-q").stdout == ""


def test_the_command_has_a_table_of_the_worst(checkpoint, model):
    def change(tensors):
        tensors["model.norm.weight"][3] = -8192.0
        tensors["model.layers.0.mlp.up_proj.weight"] += 1.0
        tensors["model.embed_tokens.weight"][1, 2] = torch.nan
        tensors["new"] = torch.ones(2, 2)
        del tensors["lm_head.weight"]

    root = checkpoint("fsdp2-llama").root
    changed(model, change)
    done = run(root, "--against", model)
    assert done.exit_code == 3
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("5 of 22 tensors differ")
    shown = "\n".join(lines)
    assert "Missing in A: 1 tensor\n  new  float32 [2, 2]" in shown
    assert "Only in A: 1 tensor\n  lm_head.weight" in shown
    table = lines[lines.index("Of other values: 3 tensors") + 2 :][:3]
    assert [row.split()[0] for row in table] == [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.mlp.up_proj.weight",
    ]
    assert table[0].split()[1:5] == ["inf", "1", "of", "512"]
    assert "-8192.0" in table[1]
    assert "NaN: 0 elements in A, 1 in B" in shown
    assert "and 2 more" in run(root, "--against", model, "--max-mismatches", 1).stdout


def test_json_is_one_object_without_odd_numbers(checkpoint, model):
    def change(tensors):
        tensors["model.norm.weight"][3] = torch.nan

    done = run(checkpoint("fsdp2-llama").root, "--against", changed(model, change), "--json")
    assert done.exit_code == 3

    def refuse(constant):
        raise AssertionError(constant)

    found = json.loads(done.stdout, parse_constant=refuse)
    assert found["same"] is False
    assert found["comparison"]["differences"][0]["values"][1] == "nan"
    assert found["comparison"]["largest"] == "inf"


def test_the_command_alone_checks_a_folder(merged):
    source, folder = merged
    done = run(folder)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"warning: there is no {MANIFEST} to check")
    verify_result(source, folder, names_of(folder))
    done = run(folder)
    assert done.exit_code == 0 and done.stdout.startswith("unchanged: ")
    (folder / "model-extra.safetensors").write_bytes(b"")
    done = run(folder)
    assert done.exit_code == 3
    assert "model-extra.safetensors" in done.stdout and "problem" in done.stdout.splitlines()[-1]


def test_mistakes_end_with_code_2(reference, tmp_path):
    assert run(reference, "--exact").exit_code == 2
    assert run(tmp_path, "--against", reference).exit_code == 2
    done = run(reference, "--against", reference, "--exact", "--atol", 1)
    assert done.exit_code == 2 and "--exact" in done.stderr


# ------------------------------------------------------------------------------------- the logits


@pytest.mark.slow
def test_logits_are_compared(checkpoint, reference, model):
    report = verify(reference, model, forward=True)
    assert report.same
    assert report.forward.largest == 0.0
    assert report.forward.agreeing == report.forward.positions == 16
    assert report.forward.shapes[0] == (1, 16, 32)
    assert report.forward.class_names == ("LlamaForCausalLM", "LlamaForCausalLM")

    def change(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()

    done = run(reference, "--against", changed(model, change), "--forward", "--json")
    assert done.exit_code == 3
    found = json.loads(done.stdout)["forward"]
    assert found["same"] is False and found["largest"] > 0 and found["agreeing"] < 16
    with pytest.raises(PlanError, match="--forward"):
        verify(checkpoint("fsdp2-llama").root, reference, forward=True)


@pytest.mark.slow
def test_a_weight_that_transformers_does_not_find_is_told(reference, model):
    def change(tensors):
        del tensors["model.norm.weight"]

    report = verify(model, changed(model, change), forward=True)
    assert report.forward.missing == (("model.norm.weight",), ("model.norm.weight",))
    assert not report.same
