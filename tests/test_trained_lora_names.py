"""The config of an extracted adapter against PEFT itself: it has to hit exactly the layers that have LoRA."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lazymerge.checkpoint import Checkpoint
from lazymerge.conversions.adapters.trained import LoraOptions, Split, split
from lazymerge.elements import in_memory
from lazymerge.errors import PlanError


class Block(nn.Module):
    """Names that end alike, at different depths."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 4)
        self.my_proj = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.post_norm = nn.LayerNorm(6)
        self.conv = nn.Conv1d(4, 6, 3, groups=2)


class Toy(nn.Module):
    """Two stacks of blocks, one inside a module that has the other's name too, and layers of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(11)])
        self.tower = nn.ModuleDict(
            {"layers": nn.ModuleList([Block() for _ in range(2)]), "proj": nn.Linear(4, 4)}
        )
        self.proj = nn.Linear(4, 5)
        self.embed_tokens = nn.Embedding(7, 4)
        self.image = nn.Conv2d(4, 4, 3)


LEAVES = [
    name for name, module in Toy().named_modules() if not list(module.children()) and "norm" not in name
]
NORMS = [name for name, _ in Toy().named_modules() if name.endswith("norm")]


def trained(fields: dict[str, Any], model: nn.Module | None = None) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model or Toy(), LoraConfig(**fields))


def split_of(model: nn.Module, options: LoraOptions | None = None) -> Split:
    gathers = {name: in_memory(tensor) for name, tensor in model.state_dict().items()}
    return split(Checkpoint(gathers, "test"), options or LoraOptions(alpha=4))


def as_peft_reads(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in {"peft_type", "inference_mode"}}


@pytest.mark.parametrize("seed", range(20))
def test_peft_puts_the_same_layers_there(seed):
    choose = random.Random(seed)
    layers = choose.sample(LEAVES, choose.randint(1, len(LEAVES)))
    saved = (
        choose.sample(NORMS, choose.randint(0, 3))
        if seed % 2
        else choose.choice([["norm"], ["post_norm"], ["layers.1.norm", "tower.layers.0.post_norm"], []])
    )
    ranks = {f"^{re.escape(name)}": choose.choice([2, 6]) for name in layers if choose.random() < 0.4}
    fields = {"r": 4, "target_modules": "|".join(map(re.escape, layers)), "rank_pattern": ranks}
    model = trained({**fields, "modules_to_save": saved or None})
    done = split_of(model)
    assert set(done.base.gathers) == set(Toy().state_dict())
    config = done.adapters[0].config
    again = trained(as_peft_reads(dict(config)))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: tuple(tensor.shape) for name, tensor in again.state_dict().items()} == shapes
    assert isinstance(config["target_modules"], list | str)


def test_the_shortest_endings():
    config = split_of(trained({"r": 4, "target_modules": ["my_proj", "conv"]})).adapters[0].config
    assert config["target_modules"] == ["my_proj", "conv"]
    config = split_of(trained({"r": 4, "target_modules": r"layers\.\d+\.(my_proj|conv)"})).adapters[0].config
    assert isinstance(config["target_modules"], str)  # every ending hits the tower too
    blocks = {
        "r": 4,
        "target_modules": ["my_proj", "conv"],
        "rank_pattern": {"conv": 2, r"^layers\.7\.conv": 4},
    }
    config = split_of(trained(blocks)).adapters[0].config
    assert (config["r"], config["rank_pattern"]) == (4, {"conv": 2})


def test_the_rank_that_most_have_is_r():
    fields = {"r": 4, "target_modules": ["my_proj", "image"], "rank_pattern": {"my_proj": 2}}
    config = split_of(trained(fields)).adapters[0].config
    assert (config["r"], config["rank_pattern"]) == (2, {"image": 4})


class Stack(nn.Module):
    """Two parameters of one shape in a module, and a third."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        for name in ("w1", "w2", "w3"):
            shape = (3, 8, 6) if name == "w3" else (3, 4, 6)
            self.experts.register_parameter(name, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize(
    ("parameters", "clear"), [(["w1", "w2"], True), (["w3"], True), (["w2"], False), (["w1", "w3"], False)]
)
def test_parameters_by_their_shapes(tmp_path, parameters, clear):
    fields = {"r": 2, "target_modules": [], "target_parameters": [f"experts.{name}" for name in parameters]}
    model = trained(fields, Stack())
    if not clear:
        with pytest.raises(PlanError, match="fit several tensors of experts"):
            split_of(model)
        from peft import LoraConfig

        LoraConfig(**fields, lora_alpha=4).save_pretrained(tmp_path)
        done = split_of(model, LoraOptions(config=str(tmp_path)))
    else:
        done = split_of(model)
    assert set(done.base.gathers) == {f"experts.{name}" for name in ("w1", "w2", "w3")}
    config = done.adapters[0].config
    assert config["target_parameters"] == parameters
    assert config["r"] == 2
    assert set(trained(as_peft_reads(dict(config)), Stack()).state_dict()) == set(model.state_dict())
