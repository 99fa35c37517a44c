"""LoRA in sharded checkpoints: real PEFT models, sharded by FSDP, and what PEFT makes of the result."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lazymerge
from lazymerge.compute import read
from lazymerge.conversions.adapters.adapter import Adapter
from lazymerge.conversions.adapters.trained import LoraOptions, Split, split
from lazymerge.execute import write_file
from lazymerge.plan import safetensors_file
from tests.checks import assert_same_tensors
from tests.makers.peft_fsdp import PROMPT, MadeLora, peft_fsdp

META = {"r": 8, "lora_alpha": 32, "task_type": "CAUSAL_LM"}
PLAIN = {
    "r": 8,
    "lora_alpha": 32,
    "task_type": "CAUSAL_LM",
    "target_modules": ["q_proj", "v_proj", "down_proj"],
}
HYBRID = (("ddp", 2), ("fsdp", 2))

# name -> (model, adapters, further arguments of the maker, whether PEFT's own configs are given)
RECIPES: dict[str, tuple[str, dict[str, dict[str, Any]], dict[str, Any], bool]] = {
    "plain": ("llama", {"default": PLAIN}, {"meta": META}, False),
    "fsdp1": ("llama", {"default": PLAIN}, {"meta": META, "version": 1}, False),
    "bfloat16": ("llama", {"default": PLAIN}, {"meta": META, "dtype": torch.bfloat16}, False),
    "hybrid": ("llama", {"default": PLAIN}, {"meta": META, "mesh": HYBRID}, False),
    "one layer": ("llama", {"default": {**PLAIN, "layers_to_transform": [1]}}, {"meta": META}, False),
    "all layers": ("llama", {"default": {**PLAIN, "target_modules": "all-linear"}}, {"meta": META}, False),
    "ranks": (
        "llama",
        {"default": {**PLAIN, "rank_pattern": {"layers.0.self_attn.q_proj": 4, "down_proj": 2}}},
        {"meta": META},
        False,
    ),
    "head of a classifier": (
        "classifier",
        {
            "default": {
                **{"r": 4, "lora_alpha": 6, "task_type": "SEQ_CLS", "use_dora": True},
                "target_modules": ["q_proj", "up_proj", "embed_tokens"],
            }
        },
        {"meta": {"r": 4, "lora_alpha": 6, "task_type": "SEQ_CLS"}},
        False,
    ),
    "Conv1D": (
        "gpt2",
        {
            "default": {
                "r": 8,
                "lora_alpha": 32,
                "target_modules": ["attn.c_proj", "c_attn"],
                "fan_in_fan_out": True,
            }
        },
        {"meta": META},
        False,
    ),
    "square Conv1D": (
        "gpt2",
        {"default": {"r": 8, "lora_alpha": 32, "target_modules": ["attn.c_proj"], "fan_in_fan_out": True}},
        {"meta": META},
        False,
    ),
    "experts": (
        "qwen3-moe",
        {
            "default": {
                **{"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj"]},
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            }
        },
        {"meta": META},
        False,
    ),
    "one parameter of experts": (
        "qwen3-moe",
        {"default": {**PLAIN, "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}},
        {"meta": META},
        False,
    ),
    "experts and their router": (
        "qwen3-moe",
        {
            "default": {
                **{"r": 8, "lora_alpha": 32, "target_modules": ["q_proj"]},
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.gate.weight"],
            }
        },
        {"meta": META},
        True,
    ),
    "bias of B": (
        "classifier",
        {"default": {**PLAIN, "task_type": None, "lora_bias": True, "target_modules": ["q_proj", "k_proj"]}},
        {"meta": {**META, "task_type": None}},
        False,
    ),
    "whole modules": (
        "llama",
        {"default": {**PLAIN, "modules_to_save": ["norm", "lm_head", "1.mlp.gate_proj"]}},
        {"meta": META},
        False,
    ),
    "embedding and head": (
        "llama",
        {"default": {**PLAIN, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}},
        {"meta": META},
        False,
    ),
    "two adapters": (
        "llama",
        {
            "default": PLAIN,
            "other": {**PLAIN, "r": 4, "lora_alpha": 6, "target_modules": ["k_proj", "q_proj"]},
        },
        {},
        True,
    ),
    "trained biases": (
        "classifier",
        {"default": {**PLAIN, "task_type": None, "bias": "lora_only", "target_modules": ["q_proj"]}},
        {},
        True,
    ),
    "rows of an embedding": ("llama", {"default": {**PLAIN, "trainable_token_indices": [3, 5]}}, {}, True),
    "rows of a tied embedding": (
        "qwen2",
        {"default": {**PLAIN, "trainable_token_indices": [3, 5]}},
        {},
        True,
    ),
    "patterns": (
        "llama",
        {
            "default": {
                **{**PLAIN, "use_rslora": True, "lora_alpha": 16},
                **{"alpha_pattern": {"down_proj": 5}, "rank_pattern": {"v_proj": 3}},
            }
        },
        {},
        True,
    ),
}


def of_recipe(make: Any, name: str) -> MadeLora:
    return make(_by_name, name)  # `make` wants arguments that it can remember


def _by_name(root: Path, name: str) -> MadeLora:
    model, adapters, options, _ = RECIPES[name]
    return peft_fsdp(root, model, adapters, **options)


def options_of(name: str, made: MadeLora) -> LoraOptions:
    return LoraOptions(config=str(made.reference()) if RECIPES[name][3] else None)


def config_of(made: MadeLora) -> dict[str, Any]:
    return json.loads((made.sidecars / "config.json").read_text())


def split_of(made: MadeLora, options: LoraOptions | None = None) -> Split:
    return split(lazymerge.open(made.leaf), options, config_of(made))


def tensors(gathers: Any) -> dict[str, torch.Tensor]:
    return {name: read(gather) for name, gather in gathers.items()}


def write_adapter(adapter: Adapter, folder: Path) -> Path:
    """The adapter's two files, in a folder of its name as PEFT has it."""
    folder = folder / adapter.folder
    folder.mkdir(parents=True, exist_ok=True)
    file = safetensors_file("adapter_model.safetensors", adapter.gathers)
    target = os.open(folder / file.name, os.O_RDWR | os.O_CREAT)
    write_file(file, target, block=1 << 20, workers=1, on_bytes=lambda _: None)
    os.close(target)
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config))
    return folder


def loaded(made: MadeLora, done: Split, folder: Path) -> Any:
    """The base with all adapters, as PEFT loads them; nothing may be missing."""
    import transformers
    from peft import PeftModel

    config = transformers.AutoConfig.from_pretrained(made.sidecars)
    base = getattr(transformers, config.architectures[0])(config)
    base.to(next(iter(made.base.values())).dtype).load_state_dict(tensors(done.base.gathers), strict=True)
    model = None
    for adapter in done.adapters:
        path = write_adapter(adapter, folder)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "The following rank_pattern keys"
            )  # of parameters: PEFT's mistake
            warnings.filterwarnings("ignore", ".*tie_word_embeddings=True")
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            if model is None:
                model = PeftModel.from_pretrained(base, path, adapter.name, autocast_adapter_dtype=False)
            else:
                model.load_adapter(path, adapter.name, autocast_adapter_dtype=False)
    return model.eval()


SLOW = {"bfloat16", "all layers", "square Conv1D", "one parameter of experts", "rows of an embedding"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RECIPES]
)
def test_base_and_adapters(make, tmp_path, name):
    made = of_recipe(make, name)
    done = split_of(made, options_of(name, made))
    assert_same_tensors(tensors(done.base.gathers), made.base)
    model = loaded(made, done, tmp_path)
    assert_same_tensors(model.state_dict(), made.trained)
    for adapter in done.adapters:
        ours = tmp_path / adapter.folder / "adapter_model.safetensors"
        assert ours.read_bytes() == (made.reference(adapter.name) / ours.name).read_bytes()
        model.set_adapter(adapter.name)
        with torch.no_grad():
            torch.testing.assert_close(
                model(input_ids=torch.tensor(PROMPT)).logits, made.logits[adapter.name]
            )
    assert [adapter.name for adapter in done.adapters] == list(RECIPES[name][1])
