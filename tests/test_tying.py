"""Tied embeddings, by flag and by value, which need not agree: what is written, and that it loads.

"Loads" means that transformers finds every weight in the result: none is missing and drawn at random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

import lazymerge
from lazymerge.errors import DamagedFile, PlanError
from tests.checks import assert_same_model, assert_same_tensors, refused, tied_away
from tests.makers.models import MODELS, hub_state

NOT_CHECKED = "names are kept as they are, and not checked: config.json names no class (architectures)"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = {"tie_word_embeddings": True}
NESTED = {"text_config": TIED}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def tensors(*names: str) -> dict[str, torch.Tensor]:
    """Equal tensors of these names, each with a storage of its own, and one more."""
    return {**{name: torch.arange(12.0).reshape(4, 3) for name in names}, "norm": torch.ones(3)}


def model_of(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A tiny model and its config.json."""
    model = MODELS[name]().eval()
    config = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}
    return model, config


def assert_loads(folder: Path, model: torch.nn.Module) -> None:
    """Every weight is found, and the result computes what `model` computes."""
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert {kind: names for kind, names in info.items() if names} == {}
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        before, after = model(tokens).logits, loaded.eval()(tokens).logits
    assert bool((before == after).all())


# ---- the flag and equal values -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp2-llama-tied", "fsdp1-dtensor", "sharded-tensor", "full-bin"])
def test_a_tied_model_is_written_once(checkpoint, tmp_path, name):
    """FSDP2 files hold a tied pair as one storage, those of FSDP1 as two."""
    made = checkpoint(name)
    report = lazymerge.merge(made.root, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth, tied=[HEAD])
    assert list(report.left_out) == tied_away(made) == [HEAD]
    assert EMBEDDING in report.left_out[HEAD]
    assert report.notes == ()


@pytest.mark.parametrize("one_storage", [True, False])
def test_flag_and_both_keys(source, tmp_path, one_storage):
    state = tensors(EMBEDDING, HEAD)
    if one_storage:
        state[HEAD] = state[EMBEDDING]
    report = lazymerge.merge(source(tmp_path / "src", state, TIED), tmp_path / "out")
    assert_same_model(tmp_path / "out", state, tied=[HEAD])
    assert [note.text for note in report.notes] == [NOT_CHECKED]


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("transformer.wte.weight", "lm_head.weight"),
        ("gpt_neox.embed_in.weight", "embed_out.weight"),
        ("transformer.word_embeddings.weight", "lm_head.weight"),
        ("shared.weight", "lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "lm_head.weight"),
        ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"),
    ],
)
def test_other_names_of_the_pair(source, tmp_path, embedding, head):
    state = tensors(embedding, head)
    lazymerge.merge(source(tmp_path / "src", state, TIED), tmp_path / "out")
    assert_same_model(tmp_path / "out", state, tied=[head])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tied_pair_is_cast_once(source, tmp_path, dtype):
    state = tensors(EMBEDDING, HEAD)
    lazymerge.merge(source(tmp_path / "src", state, TIED), tmp_path / "out", dtype=dtype)
    truth = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
    assert_same_model(tmp_path / "out", truth, tied=[HEAD])


def test_a_tied_pair_in_a_bin(source, tmp_path):
    state = tensors(EMBEDDING, HEAD)
    lazymerge.merge(source(tmp_path / "src", state, TIED), tmp_path / "out", output_format="bin")
    del state[HEAD]
    found = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert_same_tensors(found, state)


# ---- no flag, or values that differ ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [{"tie_word_embeddings": False}, {}, None], ids=["false", "silent", "none"]
)
@pytest.mark.parametrize("one_storage", [True, False])
@pytest.mark.parametrize("output_format", ["safetensors", "bin"])
def test_no_flag_and_equal_values(source, tmp_path, config, one_storage, output_format):
    """Both are written, and one storage under two names is no reason to complain."""
    state = tensors(EMBEDDING, HEAD)
    if one_storage:
        state[HEAD] = state[EMBEDDING]
    src = source(tmp_path / "src", state, config)
    report = lazymerge.merge(src, tmp_path / "out", output_format=output_format)
    if output_format == "bin":
        assert_same_tensors(torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True), state)
    else:
        assert_same_model(tmp_path / "out", state)
    assert report.left_out == {}
    assert [note for note in report.notes if "config.json" not in note.text] == []


@pytest.mark.parametrize("change", ["value", "shape", "dtype"])
def test_flag_and_values_that_differ(source, tmp_path, change):
    state = tensors(EMBEDDING, HEAD)
    head = state[HEAD]
    state[HEAD] = {"value": head + (head == 11), "shape": head[:3].clone(), "dtype": head.half()}[change]
    report = lazymerge.merge(source(tmp_path / "src", state, TIED), tmp_path / "out")
    assert_same_model(tmp_path / "out", state)
    (note,) = report.warnings
    assert note.tensor == HEAD
    assert EMBEDDING in note.text


def test_differing_values_are_loaded_as_they_are(source, tmp_path):
    model, config = model_of("llama")
    config["tie_word_embeddings"] = True
    lazymerge.merge(source(tmp_path / "src", dict(model.state_dict()), config), tmp_path / "out")
    assert_loads(tmp_path / "out", model)


# ---- one of the pair ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "gpt2"])
@pytest.mark.parametrize("left", ["head", "embedding", "both"])
def test_whatever_is_left_of_the_pair_loads(source, tmp_path, name, left):
    model, config = model_of(name)
    state = dict(model.state_dict())
    (embedding,) = (key for key in state if key.endswith(("embed_tokens.weight", "wte.weight")))
    whole = dict(state)
    if left != "both":
        del state[embedding if left == "head" else HEAD]
    report = lazymerge.merge(source(tmp_path / "src", state, config), tmp_path / "out")
    assert_same_model(tmp_path / "out", whole, tied=[HEAD])
    assert_loads(tmp_path / "out", model)
    if left == "head":
        assert [note.tensor for note in report.notes] == [HEAD]


def test_a_head_whose_embedding_nobody_knows(source, tmp_path):
    src = source(tmp_path / "src", tensors(HEAD), {**TIED, "architectures": ["XForCausalLM"]})
    with refused(PlanError, HEAD, "XForCausalLM", "tie_word_embeddings", dst=tmp_path / "out"):
        lazymerge.merge(src, tmp_path / "out")


@pytest.mark.parametrize("config", [{"tie_word_embeddings": False}, {}], ids=["false", "silent"])
def test_a_head_alone_without_the_flag(source, tmp_path, config):
    lazymerge.merge(source(tmp_path / "src", tensors(HEAD), config), tmp_path / "out")
    assert_same_model(tmp_path / "out", tensors(HEAD))


def test_a_flag_without_a_head(source, tmp_path):
    state = {"model.embed_tokens.weight": torch.ones(4, 3), "score.weight": torch.ones(2, 3)}
    report = lazymerge.merge(source(tmp_path / "src", state, TIED), tmp_path / "out")
    assert_same_model(tmp_path / "out", state)
    assert [note.text for note in report.notes] == [NOT_CHECKED]


# ---- a flag of a part --------------------------------------------------------------------------------------


def vision_model(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model with a tower, tied by the config of its text part alone."""
    sizes = {"hidden_size": 16, "intermediate_size": 16}
    if kind == "Llava":
        vision = {**sizes, "model_type": "clip_vision_model", "num_hidden_layers": 1, "image_size": 28}
        vision |= {"num_attention_heads": 2, "patch_size": 14}
        text = {**TEXT, "model_type": "llama"}
    else:
        vision = {**sizes, "depth": 1, "num_heads": 2, "out_hidden_size": 16, "deepstack_visual_indexes": []}
        text = {**TEXT, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]}}
    made = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(made).eval()
    config = {**json.loads(made.to_json_string()), "architectures": [type(model).__name__]}
    del config["tie_word_embeddings"]
    return model, config


@pytest.mark.parametrize(("kind", "tied"), [("Llava", ["language_model.lm_head.weight"]), ("Qwen3VL", [])])
@pytest.mark.slow
def test_a_flag_in_the_text_config(source, tmp_path, kind, tied):
    """LLaVA's config hands the flag on to the whole model; Qwen3-VL's does not, and would draw the head.

    LLaVA has other names on the hub.
    """
    model, config = vision_model(kind)
    state = dict(model.state_dict())
    state[HEAD] = state["model.language_model.embed_tokens.weight"].clone()
    model.load_state_dict(state)
    report = lazymerge.merge(source(tmp_path / "src", state, config), tmp_path / "out")
    saved = hub_state(model)
    assert saved is not None
    assert_same_model(tmp_path / "out", saved, tied=tied)
    assert list(report.left_out) == tied
    assert_loads(tmp_path / "out", model)


@pytest.mark.parametrize("config", [NESTED, {**NESTED, "architectures": ["XForCausalLM"]}], ids=str)
def test_a_flag_of_a_part_of_nobody_knows_what(source, tmp_path, config):
    """Both are written: that loads whether the loader ties or not."""
    state = tensors(EMBEDDING, HEAD)
    lazymerge.merge(source(tmp_path / "src", state, config), tmp_path / "out")
    assert_same_model(tmp_path / "out", state)


LLAVA = {"architectures": ["LlavaForConditionalGeneration"], **NESTED}


@pytest.mark.parametrize(
    "config",
    [
        {**LLAVA, "architectures": ["logging"]},  # AttributeError
        {**LLAVA, "quantization_config": 7},  # AttributeError
        {**LLAVA, "vision_config": 5},  # StrictDataclassFieldValidationError
        {**LLAVA, "vision_config": {"model_type": "nobody's"}},  # ValueError
        {**LLAVA, "text_config": {**TIED, "model_type": ["llama"]}},  # TypeError
        {
            **LLAVA,
            "text_config": {**TIED, "model_type": "llama", "num_attention_heads": 0},
        },  # ZeroDivisionError
    ],
    ids=str,
)
def test_a_flag_of_a_part_of_a_config_that_transformers_does_not_take(source, tmp_path, config):
    state = tensors(EMBEDDING, HEAD)
    lazymerge.merge(source(tmp_path / "src", state, config), tmp_path / "out")
    assert_same_model(tmp_path / "out", state)


@pytest.mark.parametrize("flag", ["true", "false", 1, 0, 1.0, [], {}], ids=str)
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_a_flag_that_is_neither_true_nor_false(source, tmp_path, flag, part):
    config = {"model_type": "llama", "tie_word_embeddings": flag}
    with pytest.raises(StrictDataclassError, match="tie_word_embeddings"):  # what transformers says to it
        transformers.LlamaConfig.from_dict(config)
    src = source(tmp_path / "src", tensors(EMBEDDING, HEAD), {"text_config": config} if part else config)
    with refused(DamagedFile, "tie_word_embeddings", json.dumps(flag), "true or false", dst=tmp_path / "out"):
        lazymerge.merge(src, tmp_path / "out")


def test_a_flag_of_null_says_nothing(source, tmp_path):
    state = tensors(EMBEDDING, HEAD)
    lazymerge.merge(source(tmp_path / "src", state, {"tie_word_embeddings": None}), tmp_path / "out")
    assert_same_model(tmp_path / "out", state)


@pytest.mark.parametrize(("outer", "tied"), [(True, [HEAD]), (False, [])])
def test_the_outer_flag_decides(source, tmp_path, outer, tied):
    config = {"tie_word_embeddings": outer, "text_config": {"tie_word_embeddings": not outer}}
    state = tensors(EMBEDDING, HEAD)
    lazymerge.merge(source(tmp_path / "src", state, config), tmp_path / "out")
    assert_same_model(tmp_path / "out", state, tied=tied)


def test_an_embedding_that_is_excluded_is_not_made_up_from_the_head(source, tmp_path):
    model, config = model_of("llama")
    state = dict(model.state_dict())
    src = source(tmp_path / "src", state, {**config, **TIED})
    lazymerge.merge(src, tmp_path / "out", exclude=[EMBEDDING])
    del state[EMBEDDING]
    assert_same_model(tmp_path / "out", state)


def test_a_head_that_equals_the_embedding_of_a_part_is_written(source, tmp_path):
    model, config = model_of("llama")
    state = dict(model.state_dict())
    state["model.mtp.embed_tokens.weight"] = state[HEAD].clone()
    report = lazymerge.merge(source(tmp_path / "src", state, {**config, **TIED}), tmp_path / "out")
    assert_same_model(tmp_path / "out", state)
    assert any("values differ" in note.text and note.tensor == HEAD for note in report.warnings)
