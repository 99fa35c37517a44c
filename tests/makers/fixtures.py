"""Checkpoints made once per session. Nobody writes into them: `copy_of` gives a copy to damage.

    def test_hybrid(checkpoint):
        made = checkpoint("fsdp2-hsdp")             # by its name in `RECIPES`

    def test_each(fsdp_checkpoint): ...             # all that can be merged, one after the other

    def test_own(make):
        made = make(fsdp2, "llama", (("fsdp", 3),), dtype=torch.float16)

Tensors of one's own: `dtensors` of tests/makers/dtensors.py, a quarter of a second a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.makers.dtensors import dtensors
from tests.makers.fsdp import fsdp2
from tests.makers.fsdp1 import fsdp1
from tests.makers.layout import Made
from tests.makers.odd_tensors import EIGHT, TWO_BY_TWO, odd_meshes, odd_tensors
from tests.makers.ranks import stop_server

FOUR = (("fsdp", 4),)
HYBRID = (("ddp", 2), ("fsdp", 2))
TENSOR = (("dp", 2), ("tp", 2))
UNEVEN_TENSOR = (("dp", 3), ("tp", 2))
THREE = (("ddp", 2), ("fsdp", 2), ("tp", 2))

Recipe = tuple[Callable[..., Made], tuple[Any, ...], dict[str, Any]]
RECIPES: dict[str, Recipe] = {
    "fsdp2-llama": (fsdp2, ("llama", FOUR), {}),
    "fsdp2-llama-tied": (fsdp2, ("llama-tied", FOUR), {}),
    "fsdp2-qwen2": (fsdp2, ("qwen2", FOUR), {}),
    "fsdp2-shard1": (fsdp2, ("qwen2-151", FOUR), {}),
    "fsdp2-uneven": (fsdp2, ("qwen2-151", FOUR), {"shard_rule": "rows"}),
    "fsdp2-qwen3": (fsdp2, ("qwen3", FOUR), {}),
    "fsdp2-moe": (fsdp2, ("qwen3-moe", FOUR), {}),
    "fsdp2-gpt2": (fsdp2, ("gpt2", FOUR), {}),
    "fsdp2-value": (fsdp2, ("qwen2-value", FOUR), {"role": "critic"}),
    "fsdp2-lora": (fsdp2, ("llama-lora", FOUR), {}),
    "fsdp2-zoo": (fsdp2, ("zoo", FOUR), {"shard_rule": "rows"}),
    "fsdp2-zoo-verl": (fsdp2, ("zoo", FOUR), {}),
    "fsdp2-bf16": (fsdp2, ("qwen2-37", FOUR), {"dtype": torch.bfloat16}),
    "fsdp2-one-rank": (fsdp2, ("qwen2", (("fsdp", 1),)), {}),
    "fsdp2-twelve": (fsdp2, ("qwen2-37", (("fsdp", 12),)), {"shard_rule": "rows"}),
    "fsdp2-legacy": (fsdp2, ("qwen2", FOUR), {"zip_format": False}),
    "fsdp2-offload": (fsdp2, ("qwen2-37", FOUR), {"offload": True}),
    "fsdp2-remote-code": (fsdp2, ("llama", (("fsdp", 2),)), {"remote_code": True}),
    "fsdp2-hsdp": (fsdp2, ("qwen2-37", HYBRID), {"shard_rule": "rows"}),
    "fsdp2-tp": (fsdp2, ("llama", TENSOR), {}),
    "fsdp2-tp-rows": (fsdp2, ("qwen2-untied", TENSOR), {"shard_rule": "rows"}),
    "fsdp2-tp-uneven": (fsdp2, ("qwen2-151", UNEVEN_TENSOR), {"shard_rule": "rows"}),
    "fsdp2-hsdp-tp": (fsdp2, ("qwen2-37", THREE), {"shard_rule": "rows"}),
    "fsdp1-dtensor": (fsdp1, ("qwen2", FOUR), {}),
    "fsdp1-uneven": (fsdp1, ("qwen2-37", FOUR), {"dtype": torch.bfloat16}),
    "fsdp1-zoo": (fsdp1, ("zoo", FOUR), {"use_orig_params": True}),
    "fsdp1-hsdp": (fsdp1, ("qwen2-37", HYBRID), {}),
    "fsdp1-tp": (fsdp1, ("llama", TENSOR), {}),
    "fsdp1-one-rank": (fsdp1, ("llama", (("fsdp", 1),)), {}),
    "fsdp1-no-shard": (fsdp1, ("llama", (("fsdp", 2),)), {"kind": "no_shard"}),
    "fsdp1-legacy": (fsdp1, ("llama", FOUR), {"zip_format": False}),
    "sharded-tensor": (fsdp1, ("qwen2", FOUR), {"kind": "sharded_tensor"}),
    "sharded-tensor-uneven": (fsdp1, ("qwen2-37", FOUR), {"kind": "sharded_tensor"}),
    "sharded-tensor-zoo": (fsdp1, ("zoo", FOUR), {"kind": "sharded_tensor", "use_orig_params": True}),
    "sharded-tensor-hsdp": (fsdp1, ("qwen2-37", HYBRID), {"kind": "sharded_tensor"}),
    "sharded-tensor-legacy": (fsdp1, ("llama", FOUR), {"kind": "sharded_tensor", "zip_format": False}),
}
FULL_RECIPES: dict[str, Recipe] = {  # one file of whole tensors
    "full-bin": (fsdp1, ("qwen2", FOUR), {"kind": "full"}),
    "full-model-pt": (fsdp1, ("gpt2", FOUR), {"kind": "full", "full_name": "model.pt"}),
    "full-in-model": (fsdp1, ("llama", FOUR), {"kind": "full", "full_name": "model.pt", "wrapped": "model"}),
    "full-in-state-dict": (fsdp1, ("llama", FOUR), {"kind": "full", "wrapped": "state_dict"}),
    "full-legacy": (fsdp1, ("zoo", FOUR), {"kind": "full", "zip_format": False, "use_orig_params": True}),
}
REFUSED_RECIPES: dict[str, Recipe] = {
    "flat-parameters": (fsdp1, ("llama", FOUR), {"kind": "local"}),
}
ALL_RECIPES = {**RECIPES, **FULL_RECIPES, **REFUSED_RECIPES}


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`make(maker, *args, **kwargs)`: the checkpoint, made at the first call with these arguments."""
    made: dict[Any, Made] = {}

    def make_once(maker: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
        key = (maker, args, tuple(sorted(kwargs.items())))
        if key not in made:
            made[key] = maker(tmp_path_factory.mktemp(maker.__name__), *args, **kwargs)
        return made[key]

    yield make_once
    stop_server()


@pytest.fixture(scope="session")
def checkpoint(make: Callable[..., Made]) -> Callable[[str], Made]:
    """`checkpoint(name)`: the checkpoint of that recipe."""

    def by_name(name: str) -> Made:
        maker, args, kwargs = ALL_RECIPES[name]
        return make(maker, *args, **kwargs)

    return by_name


@pytest.fixture(scope="session", params=list(RECIPES))
def fsdp_checkpoint(request: pytest.FixtureRequest, checkpoint: Callable[[str], Made]) -> Made:
    """Each checkpoint of rank files."""
    return checkpoint(request.param)


@pytest.fixture(scope="session", params=list(FULL_RECIPES))
def full_checkpoint(request: pytest.FixtureRequest, checkpoint: Callable[[str], Made]) -> Made:
    """Each checkpoint that is one file of whole tensors."""
    return checkpoint(request.param)


@pytest.fixture(scope="session")
def odd_tensors_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Each kind of layout, shape and type, over four ranks."""
    return dtensors(tmp_path_factory.mktemp("odd_tensors"), TWO_BY_TWO, odd_tensors())


@pytest.fixture(scope="session")
def odd_meshes_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Each kind of mesh in one file, over eight ranks."""
    return dtensors(tmp_path_factory.mktemp("odd_meshes"), EIGHT, odd_meshes())
