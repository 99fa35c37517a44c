"""`verify` where a side has LoRA: in a trainer's checkpoint, beside a model, or alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig
from safetensors.torch import load_file, save_file

import lazymerge
from lazymerge.cli import cli
from lazymerge.errors import AmbiguousCheckpoint, IncompleteCheckpoint, PlanError
from lazymerge.verification import verify
from tests.test_trained_lora import RECIPES, SLOW, of_recipe

MODULE = "model.layers.0.self_attn.q_proj"
ALPHA = {"r": 2, "lora_alpha": 16}


def trained(folder: Path, rank: int = 2, seed: int = 0, alpha: float = 16, base: bool = True) -> Path:
    """A state dict of one rank with LoRA on one of two layers, the same base for all, and verl's record."""
    torch.manual_seed(7)
    state = {
        f"base_model.model.{MODULE}.base_layer.weight": torch.randn(6, 5),
        "base_model.model.lm_head.weight": torch.randn(7, 5),
    }
    torch.manual_seed(seed)
    lora = {
        f"base_model.model.{MODULE}.lora_A.default.weight": torch.randn(rank, 5),
        f"base_model.model.{MODULE}.lora_B.default.weight": torch.randn(6, rank),
    }
    folder.mkdir()
    torch.save({**(state if base else {}), **lora}, folder / "model_world_size_1_rank_0.pt")
    (folder / "lora_train_meta.json").write_text(json.dumps({"r": rank, "lora_alpha": int(alpha)}))
    return folder


def saved(trainer: Path, folder: Path, adapter: bool = True, **config: object) -> Path:
    """The same as a model with PEFT's folder beside it."""
    state = torch.load(trainer / "model_world_size_1_rank_0.pt")
    clean = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): t for name, t in state.items()
    }
    folder.mkdir()
    plain = {name: tensor for name, tensor in clean.items() if "lora" not in name}
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    if adapter:
        lora = {name.replace(".default", ""): tensor for name, tensor in state.items() if "lora" in name}
        (folder / "lora_adapter").mkdir()
        save_file(lora, folder / "lora_adapter" / "adapter_model.safetensors")
        fields = {"peft_type": "LORA", **ALPHA, "target_modules": ["q_proj"], **config}
        (folder / "lora_adapter" / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def kinds(one: Path, other: Path, **options: object) -> dict[str, int]:
    """How many differences of each kind there are."""
    report = verify(one, other, **options)
    found = {kind: count for kind, count in report.comparison.counts.items() if count}
    assert report.same is (not found)
    return found


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return trained(tmp_path / "one")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RECIPES]
)
def test_a_trainers_checkpoint_is_what_peft_saved(make, tmp_path, name):
    made = of_recipe(make, name)
    model = tmp_path / "model"
    model.mkdir()
    save_file({key: each.clone() for key, each in made.base.items()}, model / "model.safetensors")
    shutil.copy(made.sidecars / "config.json", model)
    adapters = shutil.copytree(made.reference(), model / "lora_adapter")
    report = verify(made.leaf, model, exact=True)
    assert report.same, report.comparison.differences
    assert report.comparison.tensors > len(made.base)
    path = next(Path(adapters).rglob("adapter_model.safetensors"))
    tensors = load_file(path)
    lora = next(key for key in tensors if "lora_" in key)
    tensors[lora].view(-1)[-1] += 1
    save_file(tensors, path)
    assert kinds(model, made.leaf) == {"values": 1}


def test_other_values_of_another_training(one, tmp_path):
    assert kinds(one, trained(tmp_path / "same")) == {}
    assert kinds(one, trained(tmp_path / "other", seed=1)) == {"values": 2}
    assert kinds(one, saved(tmp_path / "other", tmp_path / "saved")) == {"values": 2}
    assert kinds(one, tmp_path / "other", base_only=True) == {}


def test_other_ranks(one, tmp_path):
    assert kinds(one, trained(tmp_path / "other", rank=3)) == {"shape": 2, "setting": 1}


@pytest.mark.parametrize("alpha", [16, 16.5])
def test_settings_that_are_known_on_both_sides(one, tmp_path, alpha):
    """verl's file has no fraction of alpha."""
    assert kinds(one, saved(one, tmp_path / "saved", lora_alpha=alpha)) == {}
    (one / "lora_train_meta.json").unlink()
    assert kinds(one, tmp_path / "saved") == {}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"lora_alpha": 32}, 1),
        ({"r": 4, "lora_alpha": 17}, 2),
        ({"target_modules": ["q_proj", "k_proj"]}, 1),
        ({"use_rslora": True}, 1),
        ({"rank_pattern": {}, "use_dora": False}, 0),
    ],
)
def test_settings_of_two_folders(one, tmp_path, config, count):
    sides = saved(one, tmp_path / "a"), saved(one, tmp_path / "b", **config)
    assert kinds(*sides) == ({"setting": count} if count else {})
    assert kinds(*sides, base_only=True) == {}


IDLE = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    "megatron_core",
}
"""Fields that say where a base is, or how an adapter was begun and trained, and not what it does."""


def test_every_field_that_may_change_what_an_adapter_does(one, tmp_path):
    """Against PEFT's own config: one that lacks a field, and one that has another value there."""
    written = {
        key: _json(value) for key, value in LoraConfig(**ALPHA, target_modules=["q_proj"]).to_dict().items()
    }
    assert written.keys() > IDLE
    sides = saved(one, tmp_path / "a"), saved(one, tmp_path / "b")
    paths = [side / "lora_adapter" / "adapter_config.json" for side in sides]
    for key, value in written.items():
        if key not in {"r", "lora_alpha", "target_modules"}:
            paths[0].write_text(json.dumps(written))
            paths[1].write_text(json.dumps({name: each for name, each in written.items() if name != key}))
            assert kinds(*sides) == {}, key
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else "pissa"
        paths[1].write_text(json.dumps({**written, key: other}))
        if key == "init_lora_weights":
            assert kinds(*sides) == {}
            paths[1].write_text(json.dumps({**written, key: "pissa_niter_4"}))
        assert kinds(*sides) == ({} if key in IDLE else {"setting": 1}), key
    paths[1].write_text(json.dumps({**written, "of_tomorrow": 1}))
    assert kinds(*sides) == {"setting": 1}


def _json(value: object) -> object:
    return sorted(value) if isinstance(value, set) else getattr(value, "value", value)


@pytest.mark.parametrize(
    ("key", "one_value", "other_value", "count"),
    [
        ("layers_to_transform", 0, None, 1),
        ("layers_to_transform", 0, [0], 0),
        ("trainable_token_indices", [1, 2], [2, 1], 1),
        ("init_lora_weights", "gaussian", False, 0),
        ("init_lora_weights", ["x"], True, 1),
        ("alpha_pattern", {}, None, 0),
        ("exclude_modules", ["a", "b"], ["b", "a"], 0),
        ("lora_alpha", 16, 16.0, 0),
    ],
)
def test_values_of_settings(one, tmp_path, key, one_value, other_value, count):
    sides = saved(one, tmp_path / "a", **{key: one_value}), saved(one, tmp_path / "b", **{key: other_value})
    assert kinds(*sides) == ({"setting": count} if count else {})


def test_the_order_of_modules_is_no_difference(one, tmp_path):
    names = ["q_proj", "v_proj"]
    sides = [saved(one, tmp_path / str(at), target_modules=names[::at]) for at in (1, -1)]
    assert kinds(*sides) == {}


@pytest.mark.parametrize("swapped", [False, True])
def test_an_adapter_on_one_side_alone(one, tmp_path, swapped):
    base = saved(one, tmp_path / "base", adapter=False)
    for side in (one, saved(one, tmp_path / "saved")):
        sides = (base, side) if swapped else (side, base)
        assert kinds(*sides) == {"missing" if swapped else "extra": 2}
        assert "--base-only" in verify(*sides).comparison.hint
        report = verify(*sides, base_only=True)
        assert report.same and report.comparison.tensors == 2
        assert report.left_out == {"lora_adapter/": "--base-only"}


def test_adapters_alone(one, tmp_path):
    alone = [trained(tmp_path / f"alone{seed}", seed=seed, base=False) for seed in (0, 1)]
    assert kinds(alone[0], alone[0]) == {}
    assert kinds(*alone) == {"values": 2}
    lazymerge.merge(alone[0], tmp_path / "only", lora="only")
    assert kinds(alone[0], tmp_path / "only") == kinds(tmp_path / "only", tmp_path / "only") == {}
    assert kinds(alone[1], tmp_path / "only") == {"values": 2}
    assert kinds(one, tmp_path / "only") == {"extra": 2}
    with pytest.raises(PlanError, match="nothing to compare"):
        verify(*alone, base_only=True)


def test_a_result_is_what_it_was_made_of(one, tmp_path):
    lazymerge.merge(one, tmp_path / "out")
    assert kinds(one, tmp_path / "out", exact=True) == {}


def test_an_earlier_adapter_goes_with_its_result(one, tmp_path):
    out, place = tmp_path / "out", tmp_path / "out" / "lora_adapter"
    lazymerge.merge(one, out)
    shutil.copytree(place, place / "other")
    (out / "notes.txt").write_text("of the user")
    lazymerge.merge(saved(one, tmp_path / "base", adapter=False), out, overwrite=True)
    assert not place.exists() and (out / "notes.txt").exists()
    assert kinds(out, tmp_path / "base") == {}


def test_adapters_that_are_no_whole_ones(one, tmp_path):
    model = saved(one, tmp_path / "saved")
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(AmbiguousCheckpoint, match="another one"):
        verify(one, model)
    (model / "adapter_config.json").unlink()
    (model / "lora_adapter" / "adapter_config.json").unlink()
    with pytest.raises(IncompleteCheckpoint, match="adapter_config"):
        verify(one, model)


def test_nothing_is_never_equal(tmp_path):
    folder = tmp_path / "nothing"
    folder.mkdir()
    save_file({}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(PlanError, match="neither has a tensor"):
        verify(folder, folder)


def test_the_command(one, tmp_path):
    def run(*arguments: object):
        return CliRunner().invoke(cli, ["verify", *map(str, arguments)], prog_name="lazymerge")

    other = saved(one, tmp_path / "saved", lora_alpha=32)
    done = run(one, "--against", other)
    assert done.exit_code == 3
    assert "Of other settings: 1 setting\n  lora_adapter/lora_alpha  16 in A, 32 in B" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("the weights are equal, the settings are not")
    done = run(one, "--against", other, "--base-only")
    assert done.exit_code == 0
    assert "note: not compared: lora_adapter/ (--base-only)" in done.stdout
