"""Folding into bases whose names on the hub are others: experts, heads, what is tied and what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import lazymerge
from lazymerge.conversions.adapters.vocabulary import tied_head
from lazymerge.errors import UnsupportedCheckpoint
from tests import folding
from tests.makers import peft_models as makers
from tests.makers import tiny_models

WEIGHTS = "model.safetensors"
LORA = {"r": 2, "lora_alpha": 3}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def merged(
    tmp_path: Path, model: torch.nn.Module, lora: dict[str, Any], *, lacking: str = "", **adapter: Any
) -> None:
    """Fold an adapter of PEFT's into a whole model; the result is what PEFT merges and transformers saves.

    `lacking` is a field that config.json has not.
    """
    make = type(model).from_pretrained
    base = makers.save_base(model, tmp_path / "base")
    if lacking:
        config = folding.config_of(base)
        del config[lacking]
        (base / "config.json").write_text(json.dumps(config))
    folder = makers.adapted(base, tmp_path / "adapter", {**LORA, **lora}, make=make, **adapter)
    lazymerge.merge(base, tmp_path / "out", adapter=str(folder))
    with makers.quiet():
        adapted = makers.load(base, make)
        if "resize" in adapter:
            adapted.resize_token_embeddings(adapter["resize"])
        import peft

        peft.PeftModel.from_pretrained(adapted, folder).merge_and_unload().save_pretrained(tmp_path / "truth")
    was, truth, out = (load_file(tmp_path / name / WEIGHTS) for name in ("base", "truth", "out"))
    assert out.keys() == truth.keys()
    assert any(
        was[name].shape != truth[name].shape or not torch.equal(was[name], truth[name]) for name in was
    )
    for name, tensor in truth.items():
        torch.testing.assert_close(out[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def tiny(key: str) -> torch.nn.Module:
    model: torch.nn.Module = tiny_models.filled(tiny_models.class_of(key), 0)
    return model


@pytest.mark.parametrize(
    ("key", "parameters"),
    [
        ("deepseek_v4", EXPERTS),
        pytest.param("nemotron_h", EXPERTS[1:], marks=pytest.mark.slow),
        pytest.param("kimi_k25", EXPERTS, marks=pytest.mark.slow),
        pytest.param("qwen3_omni_moe", EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_parameters_that_the_hub_has_elsewhere(tmp_path: Path, key: str, parameters: list[str]) -> None:
    merged(tmp_path, tiny(key), {"target_modules": [], "target_parameters": parameters})


@pytest.mark.slow
def test_of_a_class_that_the_tensors_show(tmp_path: Path) -> None:
    """config.json names none, and an adapter has the names that its tensors have when it runs."""
    merged(
        tmp_path,
        tiny("deepseek_v4"),
        {"target_modules": ["q_a_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        lacking="architectures",
    )


@pytest.mark.slow
def test_parameters_that_mirror_each_other(tmp_path: Path) -> None:
    """Versions of PEFT differ in which side is in, so that either may be the one."""
    lora = {"target_modules": [], "target_parameters": ["experts.up_proj", "experts.down_proj"]}
    with pytest.raises(UnsupportedCheckpoint, match="go with several of its parameters"):
        merged(tmp_path, tiny("nemotron_h"), lora)


ADAPTED = {"target_modules": ["embed_tokens"]}


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (ADAPTED, True),
        ({"target_modules": ["q_a_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, True),
        pytest.param(ADAPTED, False, marks=pytest.mark.slow),
    ],
    ids=["an adapted embedding", "both saved whole", "by the class alone"],
)
def test_a_head_of_another_name_is_not_tied(tmp_path: Path, lora: dict[str, Any], says: bool) -> None:
    """DeepSeek-V4's is head.weight on the hub, and not the embedding; `says` that config.json says so."""
    merged(tmp_path, tiny("deepseek_v4"), lora, lacking="" if says else "tie_word_embeddings")


@pytest.mark.slow
def test_a_longer_vocabulary_with_a_head_of_another_name(tmp_path: Path) -> None:
    model_class = tiny_models.class_of("deepseek_v4")
    plain = tiny_models.filled(model_class, 0).config.to_dict()
    plain["mlp_layer_types"] = ["moe"] * len(plain["mlp_layer_types"])  # no tables of all tokens
    torch.manual_seed(0)
    model = model_class(model_class.config_class.from_dict(plain))
    rows = model.config.vocab_size + 8
    lora = {"target_modules": ["q_a_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    merged(tmp_path, model, lora, resize=rows)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == rows


def test_of_an_unknown_class_the_flag_says_what_is_tied(tmp_path: Path) -> None:
    base = makers.save_base(makers.llama(), tmp_path / "base")
    lora = {"r": 2, "target_modules": ["embed_tokens"]}
    adapter = makers.adapted(base, tmp_path / "adapter", lora)
    tensors = load_file(base / WEIGHTS)
    tensors["output.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, base / WEIGHTS, {"format": "pt"})
    config = {**folding.config_of(base), "model_type": "mine", "architectures": ["MineForCausalLM"]}
    (base / "config.json").write_text(json.dumps(config))
    assert folding.folded(base, adapter).checkpoint.gathers.keys() == tensors.keys()
    gathers = folding.base_checkpoint(base).gathers
    assert tied_head(gathers, config) is None
    del config["tie_word_embeddings"]
    assert tied_head(gathers, config) == "lm_head.weight"


# ---------------------------------------------------------- layers of one expert, in a tensor with all


def llama4(intermediate_size: int) -> torch.nn.Module:
    """Its experts lie [experts, in, out] on the hub."""
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **{**makers.SIZES, "num_hidden_layers": 1, "intermediate_size": intermediate_size},
        intermediate_size_mlp=24,
        num_local_experts=2,
        num_experts_per_tok=1,
        head_dim=4,
        interleave_moe_layer_step=1,
    )
    return transformers.Llama4ForCausalLM(config)


@pytest.mark.parametrize("leaf", ["gate_proj", "down_proj"])
@pytest.mark.parametrize("size", [8, 12, 16], ids=["gate and up square", "no square", "down square"])
def test_a_layer_of_one_expert_that_lies_turned(tmp_path: Path, size: int, leaf: str) -> None:
    base = makers.save_base(llama4(size), tmp_path / "base")
    adapter = per_expert(base, tmp_path / "adapter", leaf, size)
    with pytest.raises(UnsupportedCheckpoint, match=r"lies \[experts, in, out\]"):
        folding.folded(base, adapter)


def test_a_layer_of_one_expert_that_may_lie_turned(tmp_path: Path) -> None:
    """Where nothing but a square tensor is there."""
    base = makers.save_base(llama4(16), tmp_path / "base")
    tensors = load_file(base / WEIGHTS)
    save_file({name: each for name, each in tensors.items() if "gate_up" not in name}, base / WEIGHTS)
    adapter = per_expert(base, tmp_path / "adapter", "down_proj", 16)
    with pytest.raises(UnsupportedCheckpoint, match=r"may lie \[experts, in, out\]"):
        folding.folded(base, adapter)


def per_expert(base: Path, folder: Path, leaf: str, size: int) -> Path:
    """LoRA of a layer of expert 1."""
    hidden = makers.SIZES["hidden_size"]
    ins, outs = (size, hidden) if leaf == "down_proj" else (hidden, size)
    module = f"base_model.model.model.layers.0.feed_forward.experts.1.{leaf}"
    tensors = {
        f"{module}.lora_A.weight": torch.randn(2, ins),
        f"{module}.lora_B.weight": torch.randn(outs, 2),
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", **LORA, "target_modules": [leaf]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
