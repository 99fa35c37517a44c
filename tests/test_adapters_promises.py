"""Configs that are not of the tensors beside them: which modules PEFT would load, and what is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lazymerge
from lazymerge.conversions.adapters.settings import targeted_in
from lazymerge.errors import InconsistentCheckpoint, PlanError, UnsupportedCheckpoint
from tests import folding
from tests.makers import peft_models as makers

WEIGHTS = "model.safetensors"
LORA = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "up_proj"]}
SELECTIONS: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "mlp.up_proj"]},
    "whole names": {"target_modules": ["model.layers.1.self_attn.q_proj"], "layers_to_transform": [0]},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 0},
    "layers": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1, 11]},
    "layers by name": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "layers by names": {
        "target_modules": ["q_proj", "gate"],
        "layers_to_transform": [0],
        "layers_pattern": ["blocks", "experts"],
    },
    "layers by pattern": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "(layers|h)",
    },
    "excluded": {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["0.self_attn.q_proj"]},
    "excluded by pattern": {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.1\..*proj"},
    "pattern": {"target_modules": r".*\.0\..*q_proj"},
    "pattern of an end": {"target_modules": "q_proj"},
    "pattern of several": {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.(q|up)_proj"},
}
MODULES = [
    "q_proj",
    "h.0.q_proj",
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.mlp.up_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.1.mlp.experts.0.gate",
    "transformer.h.1.attn.q_proj",
    "model.blocks.0.q_proj",
    "model.layers.0.mlp.gate_up_proj",
]


@pytest.mark.parametrize("name", SELECTIONS)
def test_modules_are_those_that_peft_loads(name: str) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config = LoraConfig()
    for key, value in SELECTIONS[name].items():
        setattr(config, key, value)
    expected = {module for module in MODULES if check_target_module_exists(config, module)}
    targeted = targeted_in("a", SELECTIONS[name])
    assert {module for module in MODULES if targeted.has(module)} == expected


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plain")
    base = makers.save_base(makers.llama(), folder / "base")
    return base, makers.adapted(base, folder / "adapter", LORA)


def altered(adapter: Path, folder: Path, **fields: Any) -> Path:
    shutil.copytree(adapter, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


@pytest.mark.parametrize(
    "name", ["one layer", "excluded", "excluded by pattern", "pattern", "layers by name", "layers by pattern"]
)
def test_tensors_that_peft_would_leave_are_refused(
    plain: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    adapter = altered(plain[1], tmp_path / "adapter", **SELECTIONS[name])
    with pytest.raises(InconsistentCheckpoint, match="does not target"):
        folding.folded(plain[0], adapter)


@pytest.mark.parametrize(
    "fields",
    [
        {"layers_to_transform": [0, 1]},
        {"exclude_modules": ["v_proj"]},
        {"target_modules": r".*(q|up)_proj"},
        {"target_modules": r".*(?<!v_)(q|up)_proj"},  # not followed
        {"target_modules": "all-linear"},
        {"layers_to_transform": [0, 1], "layers_pattern": ["layers"]},
    ],
)
def test_tensors_that_peft_loads_are_folded(
    plain: tuple[Path, Path], tmp_path: Path, fields: dict[str, Any]
) -> None:
    adapter = altered(plain[1], tmp_path / "adapter", **fields)
    notes = folding.folded(plain[0], adapter).checkpoint.notes
    assert [note.level for note in notes] == ["info"]


def test_lora_of_modules_beside_parameters_is_refused_too(tmp_path: Path) -> None:
    """Also where target_parameters name others."""
    base = makers.save_base(makers.llama(), tmp_path / "base")
    adapter = makers.adapted(base, tmp_path / "made", {**LORA, "target_parameters": ["mlp.down_proj.weight"]})
    assert folding.folded(base, adapter)
    adapter = altered(adapter, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(InconsistentCheckpoint, match=r"has LoRA of \S+up_proj, \S+up_proj, which"):
        folding.folded(base, adapter)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_hit_nothing_are_told(plain: tuple[Path, Path], tmp_path: Path, key: str) -> None:
    adapter = altered(plain[1], tmp_path / "adapter", **{key: {"v_proj": 7, "q_proj": 2}})
    notes = folding.folded(plain[0], adapter).checkpoint.notes
    assert [note.text for note in notes if note.level == "warning" and f"{key} has v_proj, and" in note.text]


def test_what_is_folded_is_said(plain: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = lazymerge.merge(plain[0], out, adapter=[f"{plain[1]}=0.5", str(plain[1])], dry_run=True)
    texts = [note.text for note in report.notes]
    assert f"{plain[1]}: folded into 4 tensors with the weight 0.5" in texts
    assert f"{plain[1]}: folded into 4 tensors" in texts
    assert f"{plain[1]}: given twice, and added twice" in texts


def test_no_adapter_is_none(plain: tuple[Path, Path], tmp_path: Path) -> None:
    lazymerge.merge(plain[0], tmp_path / "out", adapter=None)  # type: ignore[arg-type]
    base, out = load_file(plain[0] / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(out[name], base[name]) for name in base)


# -------------------------------------------------------------- what two adapters mean, or one twice


def test_lora_of_a_layer_that_another_adapter_saved_whole(plain: tuple[Path, Path], tmp_path: Path) -> None:
    whole = makers.adapted(
        plain[0], tmp_path / "whole", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    )
    lora = makers.adapted(plain[0], tmp_path / "lora", {"target_modules": ["lm_head"]})
    for pair in ((whole, lora), (lora, whole)):
        with pytest.raises(PlanError, match=r"lm_head\.weight was trained whole.*LoRA of it"):
            folding.folded(plain[0], *pair)


def test_lora_of_an_embedding_of_which_another_adapter_trained_rows(
    plain: tuple[Path, Path], tmp_path: Path
) -> None:
    rows = makers.adapted(
        plain[0], tmp_path / "rows", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}
    )
    lora = makers.adapted(plain[0], tmp_path / "lora", {"target_modules": ["embed_tokens"]})
    for pair in ((rows, lora), (lora, rows)):
        with pytest.raises(PlanError, match=r"embed_tokens\.weight was trained whole, or rows of it"):
            folding.folded(plain[0], *pair)
    with pytest.raises(PlanError, match=r"a weight of 0.5 for \S+, of which it has trained rows"):
        folding.folded(plain[0], rows, weights=[0.5])


def test_modules_that_peft_saves_inside_of_one_another(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    config = transformers.YolosConfig(
        **sizes, image_size=[8, 8], patch_size=4, num_detection_tokens=2, use_mid_position_embeddings=False
    )
    model = transformers.YolosForObjectDetection(config)
    base = makers.save_base(model, tmp_path / "base")
    make = transformers.YolosForObjectDetection.from_pretrained
    lora = {"target_modules": ["up_proj", "fc1", "dense"], "modules_to_save": ["embeddings"]}
    adapter = makers.adapted(base, tmp_path / "adapter", lora, make=make)
    with pytest.raises(KeyError):
        makers.with_adapter(base, adapter, make)
    with pytest.raises(UnsupportedCheckpoint, match=r"inside of it, vit\.embeddings\.patch_embeddings"):
        folding.folded(base, adapter)


# ------------------------------------------------------------------------- parameters that are weights


@pytest.mark.parametrize(
    "lora",
    [
        {"target_parameters": ["attn.c_proj.weight"]},
        {"target_parameters": ["attn.c_proj.weight", "c_fc.weight"]},
    ],
    ids=["alone", "beside one that is not square"],
)
def test_a_parameter_is_added_to_as_it_lies(tmp_path: Path, lora: dict[str, Any]) -> None:
    """The square weight of a Conv1D, [in, out], which LoRA of the layer is added to turned round."""
    base = makers.save_base(makers.gpt2(), tmp_path / "base")
    adapter = makers.adapted(base, tmp_path / "adapter", {"r": 2, "target_modules": [], **lora})
    out = folding.write(folding.folded(base, adapter), base, tmp_path / "out")
    adapted = makers.with_adapter(base, adapter)
    torch.testing.assert_close(makers.logits(makers.load(out)), makers.logits(adapted))
