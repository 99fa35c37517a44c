"""PEFT's folders as they are read: what is damaged, contradictory or not done is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from lazymerge.conversions.adapters.parts import take_apart
from lazymerge.conversions.adapters.read import read_adapter
from lazymerge.conversions.adapters.settings import _REFUSED, _UNDERSTOOD, NO_ARITHMETIC, understand
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    LazymergeError,
    NotACheckpoint,
    UnsupportedCheckpoint,
)
from tests import folding
from tests.makers import peft_models as makers

CONFIG, WEIGHTS, BIN = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
FRONT = "base_model.model.model.layers.0.self_attn"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return makers.save_base(makers.llama(), tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return makers.adapted(base, tmp_path / "adapter", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})


def change(adapter: Path, **fields: Any) -> None:
    path = adapter / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_every_field_of_pefts_config_has_been_looked_at() -> None:
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields - {"runtime_config"} <= NO_ARITHMETIC | _UNDERSTOOD | _REFUSED.keys()
    written = peft.LoraConfig().to_dict()
    assert written.keys() <= NO_ARITHMETIC | _UNDERSTOOD | _REFUSED.keys()


def test_a_torch_file_reads_like_safetensors(base: Path, adapter: Path, tmp_path: Path) -> None:
    expected = load_file(
        folding.write(folding.folded(base, adapter), base, tmp_path / "one") / "model.safetensors"
    )
    torch.save(load_file(adapter / WEIGHTS), adapter / BIN)
    (adapter / WEIGHTS).unlink()
    result = folding.write(folding.folded(base, adapter), base, tmp_path / "two")
    found = load_file(result / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_files_of_the_adapter_are_watched(base: Path, adapter: Path) -> None:
    result = folding.folded(base, adapter)
    assert {file.path.name for file in result.checkpoint.files} == {"model.safetensors", CONFIG, WEIGHTS}


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS])
def test_half_an_adapter_is_refused(adapter: Path, missing: str) -> None:
    (adapter / missing).unlink()
    with pytest.raises(IncompleteCheckpoint, match=missing):
        read_adapter(adapter)


def test_a_folder_without_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="neither adapter_config"):
        read_adapter(tmp_path)


DAMAGED = {
    "cut": (WEIGHTS, lambda raw: raw[:-1]),
    "longer": (WEIGHTS, lambda raw: raw + b"\0"),
    "empty": (WEIGHTS, lambda raw: b""),
    "no JSON": (CONFIG, lambda raw: raw[:-5]),
    "a list": (CONFIG, lambda raw: b"[]"),
    "deep": (CONFIG, lambda raw: b'{"r":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "twice": (CONFIG, lambda raw: b'{"r": 4, "r": 8}'),
    "not a number": (CONFIG, lambda raw: b'{"r": NaN}'),
    "no text": (CONFIG, lambda raw: b"\xff\xfe{}"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(adapter: Path, name: str) -> None:
    file, damage = DAMAGED[name]
    (adapter / file).write_bytes(damage((adapter / file).read_bytes()))
    with pytest.raises(DamagedFile, match=file):
        read_adapter(adapter)


def test_no_tensors(adapter: Path) -> None:
    save_file({}, adapter / WEIGHTS)
    with pytest.raises(DamagedFile, match="holds no tensors"):
        read_adapter(adapter)


@pytest.mark.parametrize("saved", [[torch.ones(2)], {"x": 5}, {3: torch.ones(2)}])
def test_other_torch_files_are_refused(adapter: Path, saved: Any) -> None:
    (adapter / WEIGHTS).unlink()
    torch.save(saved, adapter / BIN)
    with pytest.raises(UnsupportedCheckpoint, match=BIN):
        read_adapter(adapter)


REFUSED = [
    {"peft_type": "ADALORA"},
    {"peft_type": "IA3"},
    {"peft_type": "LOHA"},
    {"peft_type": None},
    {"alora_invocation_tokens": [1, 2]},
    {"use_qalora": True},
    {"layer_replication": [[0, 1], [0, 2]]},
    {"megatron_config": {"num_layers": 2}},
    {"kasa_config": {"beta": 0.1}},
    {"monteclora_config": {"num_samples": 4}},
    {"use_bdlora": {"nblocks": 2}},
    {"arrow_config": {"top_k": 1}},
    {"a_field_of_2030": 5},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "pissa_niter_4"},
    {"init_lora_weights": "olora"},
    {"init_lora_weights": "loftq"},
    {"init_lora_weights": "corda"},
    {"init_lora_weights": "lora_ga"},
    {"init_lora_weights": 5},
    {"bias": "some"},
    {"rank_pattern": {"(a+)+": 4}},
    {"rank_pattern": {"q_proj(": 4}},
    {"alpha_pattern": {"(ab|c)*x": 4}},
]


@pytest.mark.parametrize("fields", REFUSED, ids=json.dumps)
def test_kinds_that_are_not_done_are_refused_with_their_value(adapter: Path, fields: dict[str, Any]) -> None:
    change(adapter, **fields)
    (key, value) = next(iter(fields.items()))
    with pytest.raises(UnsupportedCheckpoint) as caught:
        understand(read_adapter(adapter))
    shown = (
        next(iter(value)) if isinstance(value, dict) and "pattern" in key else json.dumps(value).strip('"')
    )
    assert shown in caught.value.problem and (key in caught.value.problem or key == "peft_type")


UNCHANGED = [
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
    {"init_lora_weights": "orthogonal"},
    {"init_lora_weights": False},
    {"lora_dropout": 0.5},
    {"layer_replication": None, "use_qalora": False, "megatron_core": "megatron.core"},
    {"a_field_of_2030": None},
]


@pytest.mark.parametrize("fields", UNCHANGED, ids=json.dumps)
def test_fields_without_arithmetic_change_nothing(adapter: Path, fields: dict[str, Any]) -> None:
    before = understand(read_adapter(adapter))
    change(adapter, **fields)
    assert understand(read_adapter(adapter)) == before


WRONG = [
    {"r": 0},
    {"r": -1},
    {"r": 2.5},
    {"r": "8"},
    {"r": True},
    {"r": None},
    {"lora_alpha": None},
    {"lora_alpha": "16"},
    {"lora_alpha": 1e300},
    {"use_rslora": "false"},
    {"use_dora": 1},
    {"rank_pattern": {"q_proj": 0}},
    {"rank_pattern": ["q_proj"]},
    {"alpha_pattern": {"q_proj": "4"}},
    {"modules_to_save": "score"},
    {"target_parameters": [1]},
    {"trainable_token_indices": [1, 1]},
    {"trainable_token_indices": [-1]},
    {"trainable_token_indices": {"embed_tokens": "x"}},
    {"task_type": 4},
]


@pytest.mark.parametrize("fields", WRONG, ids=json.dumps)
def test_values_of_another_type_are_refused(adapter: Path, fields: dict[str, Any]) -> None:
    change(adapter, **fields)
    with pytest.raises(DamagedFile, match=next(iter(fields))):
        understand(read_adapter(adapter))


TENSORS = {
    "adalora": {f"{FRONT}.q_proj.lora_E": torch.ones(4, 1)},
    "kasa": {f"{FRONT}.q_proj.lora_diag": torch.ones(4)},
    "ia3": {f"{FRONT}.q_proj.ia3_l": torch.ones(4)},
    "loha": {f"{FRONT}.q_proj.hada_w1_a": torch.ones(4, 4)},
    "integers": {f"{FRONT}.o_proj.lora_A.weight": torch.ones(4, 16, dtype=torch.int8)},
    "half": {f"{FRONT}.o_proj.lora_A.weight": torch.ones(4, 16)},
    "twice": {f"{FRONT}.q_proj.lora_A.default.weight": torch.ones(4, 16)},
    "before training only": {f"{FRONT}.o_proj.original_module.weight": torch.ones(4, 16)},
    "two values": {
        "base_model.model.score.weight": torch.ones(2, 16),
        "base_model.model.score.modules_to_save.weight": torch.zeros(2, 16),
    },
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_without_a_meaning_are_refused(adapter: Path, name: str) -> None:
    save_file({**load_file(adapter / WEIGHTS), **TENSORS[name]}, adapter / WEIGHTS)
    with pytest.raises(LazymergeError) as caught:
        take_apart(read_adapter(adapter))
    plain = [name.removesuffix(".weight").replace(".default", "") for name in TENSORS[name]]
    assert any(name in caught.value.problem for name in plain)


def test_wrong_tokens_are_refused(base: Path, tmp_path: Path) -> None:
    lora = {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [5, 3, 9]}
    adapter = makers.adapted(base, tmp_path / "adapter", lora)
    for wrong in ([5, 3], [5, 3, 32], None):
        change(adapter, trainable_token_indices=wrong)
        with pytest.raises(LazymergeError, match="trainable_token_indices"):
            folding.folded(base, adapter)
