"""Parts that training left out come from the base model if the user says so; else they are named."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import lazymerge
from lazymerge.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    PlanError,
    UnsupportedCheckpoint,
)
from tests.checks import assert_same_model, refused
from tests.makers.megatron_files import megatron_run, write_torch
from tests.makers.megatron_inverse import to_megatron
from tests.makers.megatron_models import ask_here, load, logits, original

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


@pytest.fixture(autouse=True)
def asked_here(monkeypatch):
    ask_here(monkeypatch)


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """A vision-language model, and a checkpoint of its text decoder alone, trained on."""
    return trained(tmp_path_factory.mktemp("vision"), "qwen2.5-vl", ("vision_model.", "visual."))


@pytest.fixture(scope="module")
def predicting(tmp_path_factory):
    """A model with two MTP layers, and a checkpoint without them, trained on."""
    return trained(tmp_path_factory.mktemp("mtp"), "deepseek-v3-mtp", ("mtp.",))


def trained(folder, name, left_out):
    base = original(name, folder / "base")
    truth = {name: tensor.clone() for name, tensor in base.truth.items()}
    moved = next(n for n in truth if n.startswith("model.") and n.endswith("self_attn.o_proj.weight"))
    truth[moved] += 1
    model = to_megatron(replace(base, truth=truth))
    for key in [key for key in model.tensors if key.startswith(left_out)]:
        del model.tensors[key]
    step = megatron_run(folder / "run", lambda step: write_torch(step, model))
    return base, step, truth


def is_left_out(name):
    return name.startswith("visual.") or name.startswith(("model.layers.2.", "model.layers.3."))


@pytest.fixture(scope="module", params=["qwen3-next", "glm4-moe"])
def other(request, tmp_path_factory):
    """The same with one MTP layer."""
    return trained(tmp_path_factory.mktemp("other"), request.param, ("mtp.",))


def test_mtp_layers_of_other_families(other, tmp_path):
    base, step, truth = other
    lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=base.folder)
    assert_same_model(tmp_path / "out", truth)


@pytest.mark.parametrize("which", ["vision", "predicting"])
def test_what_is_not_trained_is_that_of_the_base(which, request, tmp_path):
    base, step, truth = request.getfixturevalue(which)
    report = lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=base.folder)
    assert_same_model(tmp_path / "out", truth)
    (note,) = [note for note in report.notes if str(base.folder) in note.text]
    assert f"{sum(map(is_left_out, truth))} tensors are those of" in note.text


def test_the_model_is_whole_again(vision, tmp_path):
    base, step, truth = vision
    lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=base.folder)
    shutil.copytree(base.folder, tmp_path / "expected")
    save_file(truth, tmp_path / "expected" / "model.safetensors", {"format": "pt"})
    got, expected = (logits(load("qwen2.5-vl", tmp_path / name)) for name in ("out", "expected"))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("which", ["vision", "predicting"])
def test_without_it_what_is_absent_is_named(which, request, tmp_path):
    base, step, truth = request.getfixturevalue(which)
    report = lazymerge.merge(step, tmp_path / "out", hf_config=base.folder)
    assert_same_model(tmp_path / "out", {n: t for n, t in truth.items() if not is_left_out(n)})
    words = "visual of Qwen2_5_VL" if which == "vision" else "2 MTP layers"
    assert any(words in note.text for note in report.notes)


def test_the_index_of_the_base_is_read_for_names(vision, tmp_path):
    """A sharded base: its index lists the vision tower, and the result has an index without it."""
    base, step, truth = vision
    shutil.copytree(base.folder, tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    reshard(base.truth, tmp_path / "base")
    report = lazymerge.merge(step, tmp_path / "out", hf_config=tmp_path / "base", max_shard_size=20_000)
    absent = sorted(filter(is_left_out, truth))
    assert any(
        f"{len(absent)} tensors that" in note.text and "--backfill" in note.text for note in report.notes
    )
    assert_same_model(tmp_path / "out", {n: t for n, t in truth.items() if not is_left_out(n)})
    lazymerge.merge(step, tmp_path / "full", hf_config=tmp_path / "base", backfill=tmp_path / "base")
    assert_same_model(tmp_path / "full", truth)


def reshard(tensors, folder):
    import json

    files = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        files.setdefault(f"model-{number % 3 + 1:05d}-of-00003.safetensors", {})[name] = tensor
    for file, held in files.items():
        save_file(held, folder / file, {"format": "pt"})
    places = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_trained_tensor_that_is_lost_is_never_filled(vision, tmp_path):
    base, step, _ = vision
    shutil.copytree(step, tmp_path / "run")
    path = tmp_path / "run" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    name = next(
        name for name in state["model"] if name.endswith("layers.1.self_attention.linear_proj.weight")
    )
    del state["model"][name]
    torch.save(state, path)
    with refused(IncompleteCheckpoint, "layers.1.self_attn.o_proj.weight", dst=tmp_path / "out"):
        lazymerge.merge(tmp_path / "run", tmp_path / "out", hf_config=base.folder, backfill=base.folder)


def test_a_layer_that_was_trained_in_part_is_not_mixed(predicting, tmp_path):
    """The base's MTP layer has a copy of the embedding, which is not that of the trained one."""
    base, _, _ = predicting
    copies = {
        "model.layers.2.embed_tokens.weight": base.truth["model.embed_tokens.weight"].clone(),
        "model.layers.2.shared_head.head.weight": base.truth["lm_head.weight"].clone(),
    }
    shutil.copytree(base.folder, tmp_path / "base")
    save_file({**base.truth, **copies}, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    model = to_megatron(base)
    step = megatron_run(tmp_path / "run", lambda step: write_torch(step, model))
    with refused(PlanError, "--backfill", "has all", dst=tmp_path / "out"):
        lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=tmp_path / "base")


def test_another_models_part_is_refused(vision, tmp_path):
    base, step, _ = vision
    shutil.copytree(base.folder, tmp_path / "base")
    tensors = load_file(base.folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("patch_embed.proj.weight"))
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with refused(InconsistentCheckpoint, name, "by config.json", dst=tmp_path / "out"):
        lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=tmp_path / "base")


def test_it_needs_the_check(vision, tmp_path):
    base, step, _ = vision
    with refused(PlanError, "--backfill", "--no-check", dst=tmp_path / "out"):
        lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=base.folder, check=False)


# ---- a base that is not whole, or quantised ----------------------------------------------------------------


def changed_base(base, folder, change):
    """The base's folder with other tensors: `change(name, tensor)` gives what is there of them."""
    shutil.copytree(base.folder, folder)
    tensors = {}
    for name, tensor in load_file(base.folder / "model.safetensors").items():
        tensors |= change(name, tensor)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("which", "lost", "named"),
    [
        ("vision", "visual.blocks.1.", "visual.blocks.1.attn.proj.bias"),
        ("predicting", "model.layers.2.eh_proj", "model.layers.2.eh_proj.weight"),
        ("predicting", "model.layers.3.hnorm", "model.layers.3.hnorm.weight"),
        ("predicting", "model.layers.3.mlp.experts.2.up_proj", "model.layers.3.mlp.experts.2.up_proj.weight"),
        ("predicting", "model.layers.3.self_attn", "model.layers.3.self_attn.kv_a_layernorm.weight"),
        ("predicting", "model.layers.3.", "model.layers.3."),
        ("delta", "mtp.norm.", "mtp.norm.weight"),
        ("delta", "mtp.layers.0.self_attn.o_proj", "mtp.layers.0.self_attn.o_proj.weight"),
        ("delta", "mtp.layers.0.", "mtp.layers.0."),
    ],
)
def test_a_part_that_the_base_has_only_some_of(which, lost, named, request, tmp_path):
    base, step, _ = request.getfixturevalue(which)
    folder = changed_base(base, tmp_path / "base", lambda n, t: {} if n.startswith(lost) else {n: t})
    with refused(IncompleteCheckpoint, str(folder), named, dst=tmp_path / "out"):
        lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=folder)


@pytest.fixture(scope="module")
def delta(tmp_path_factory):
    """The same for a model whose MTP layers are named apart from the decoder's."""
    return trained(tmp_path_factory.mktemp("delta"), "qwen3-next", ("mtp.",))


@pytest.mark.parametrize(
    "name", ["model.layers.3.hnorm.weight", "model.layers.2.mlp.shared_experts.up_proj.weight"]
)
def test_an_mtp_layer_of_another_size_is_refused(name, predicting, tmp_path):
    base, step, _ = predicting
    folder = changed_base(base, tmp_path / "base", lambda n, t: {n: t[:8].clone() if n == name else t})
    with refused(InconsistentCheckpoint, name, "(8,", "by config.json", dst=tmp_path / "out"):
        lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=folder)


def test_the_copies_that_mtp_layers_come_with(predicting, tmp_path):
    """As DeepSeek-V3 is published; those of another vocabulary are another model's."""
    base, step, truth = predicting
    name = "model.layers.2.embed_tokens.weight"
    copy = {name: base.truth["model.embed_tokens.weight"]}
    folder = changed_base(base, tmp_path / "base", lambda n, t: {n: t, **copy})
    lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=folder)
    assert_same_model(tmp_path / "out", truth | copy)
    short = {name: copy[name][:100].clone()}
    folder = changed_base(base, tmp_path / "short", lambda n, t: {n: t, **short})
    with refused(InconsistentCheckpoint, name, "(100, 32)", "(120, 32)", dst=tmp_path / "refused"):
        lazymerge.merge(step, tmp_path / "refused", hf_config=base.folder, backfill=folder)


def test_layers_that_the_config_does_not_count_stay_behind(predicting, tmp_path):
    """The class ignores layer 61, wherever the model ends; and buffers, which are no part to fill."""
    base, step, truth = predicting
    stray = {"model.layers.61.eh_proj.weight": torch.ones(2, 2), "model.rotary_emb.inv_freq": torch.ones(2)}
    folder = changed_base(base, tmp_path / "base", lambda n, t: {n: t, **stray})
    lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=folder)
    assert_same_model(tmp_path / "out", truth)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("which", ["vision", "predicting"])
def test_a_quantised_base_is_refused(which, dtype, request, tmp_path):
    base, step, _ = request.getfixturevalue(which)
    folder = changed_base(base, tmp_path / "base", lambda n, t: {n: t.to(dtype) if "proj" in n else t})
    words = ("quantised", str(dtype).removeprefix("torch."), "dequantise the base")
    with refused(UnsupportedCheckpoint, *words, dst=tmp_path / "out"):
        lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=folder)


def test_a_base_with_scales_is_refused(predicting, tmp_path):
    base, step, _ = predicting
    scaled = "model.layers.2.eh_proj.weight"
    scale = {f"{scaled}_scale_inv": torch.ones(1, 1)}
    folder = changed_base(base, tmp_path / "base", lambda n, t: {n: t, **scale})
    with refused(UnsupportedCheckpoint, f"{scaled}_scale_inv", "quantised", dst=tmp_path / "out"):
        lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=folder)


def test_a_quantised_tensor_that_is_not_needed_is_no_reason(vision, tmp_path):
    base, step, truth = vision
    folder = changed_base(
        base, tmp_path / "base", lambda n, t: {n: t if n.startswith("visual.") else t.to(torch.float8_e4m3fn)}
    )
    report = lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=folder)
    assert_same_model(tmp_path / "out", truth)
    assert report.warnings == ()


def test_a_base_of_another_dtype_is_named(vision, tmp_path):
    base, step, truth = vision
    folder = changed_base(base, tmp_path / "base", lambda n, t: {n: t.float()})
    report = lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=folder)
    (warning,) = report.warnings
    assert "float32" in warning.text and "bfloat16" in warning.text and "--dtype" in warning.text
    expected = {n: t.float() if n.startswith("visual.") else t for n, t in truth.items()}
    assert_same_model(tmp_path / "out", expected)
    lazymerge.merge(step, tmp_path / "one", hf_config=base.folder, backfill=folder, dtype="bfloat16")
    assert_same_model(tmp_path / "one", truth)


def test_what_was_filled_is_not_called_absent(vision, tmp_path):
    base, step, _ = vision
    report = lazymerge.merge(step, tmp_path / "out", hf_config=base.folder, backfill=base.folder)
    assert report.warnings == ()
