"""Megatron's own arguments, out of a pickled Namespace and out of Megatron-Bridge's run_config.yaml."""

from __future__ import annotations

import argparse
import enum
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lazymerge.errors import DamagedFile, SourceError, UnsupportedCheckpoint
from lazymerge.files.local import LocalFile
from lazymerge.files.torch_file import read_torch_file
from lazymerge.formats.megatron.arguments import read_arguments
from lazymerge.formats.megatron.found import Found
from lazymerge.formats.megatron.settings import (
    is_gated,
    read_run_config,
    read_transformer_config,
    settings_of,
)
from lazymerge.formats.zarr import read_zarr


class Backend(enum.Enum):
    auto = 5


class Odd:
    def __init__(self) -> None:
        self.inside = 1


def saved(tmp_path: Path, value: object) -> object:
    torch.save({"args": value}, tmp_path / "args.pt")
    return read_torch_file(LocalFile(tmp_path / "args.pt"))["args"]


def test_a_pickled_namespace_gives_plain_values(tmp_path: Path) -> None:
    args = argparse.Namespace(
        num_layers=4,
        swiglu=True,
        norm_epsilon=1e-6,
        num_experts=None,
        moe_layer_freq=[0, 1, 1],
        window_size=(4095, 0),
        params_dtype=torch.bfloat16,
        attention_backend=Backend.auto,
        exit_signal=signal.SIGTERM,
        data={"path": "x"},
        odd=Odd(),
        odd_list=[1, Odd()],
        function=torch.nn.functional.silu,
    )
    settings = settings_of(saved(tmp_path, args))
    assert settings == {
        "num_layers": 4,
        "swiglu": True,
        "norm_epsilon": 1e-6,
        "num_experts": None,
        "moe_layer_freq": [0, 1, 1],
        "window_size": (4095, 0),
        "params_dtype": "bfloat16",
        "attention_backend": 5,
        "exit_signal": 15,
        "data": {"path": "x"},
    }
    assert settings_of(saved(tmp_path, {"num_layers": 4})) == {"num_layers": 4}
    assert settings_of(saved(tmp_path, None)) == {}


def test_arguments_of_the_newest_megatron_come_under_their_usual_names_too(tmp_path: Path) -> None:
    settings = settings_of(saved(tmp_path, argparse.Namespace(layernorm_zero_centered_gamma=True)))
    assert settings["apply_layernorm_1p"] is True


def test_lists_that_share_lists_cost_a_bounded_amount(tmp_path: Path) -> None:
    bomb: list[object] = []
    for _ in range(30):
        bomb = [bomb] * 30
    endless: list[object] = []
    endless.append(endless)
    settings = settings_of(saved(tmp_path, argparse.Namespace(a=1, bomb=bomb, endless=endless)))
    assert settings == {"a": 1}


RUN_CONFIG = """
checkpoint: {save: /x}
model:
  _target_: megatron.bridge.models.qwen.qwen_provider.Qwen3MoEModelProvider
  activation_func: {_call_: false, _target_: torch.nn.functional.silu}
  attention_backend: {_args_: [5], _call_: true, _name_: auto, _target_: megatron.core.enums.AttnBackend}
  gated_linear_unit: true
  generation_config: {_call_: true, _target_: x.GenerationConfig.from_dict, config_dict: {}}
  layernorm_zero_centered_gamma: false
  num_attention_heads: 4
  num_layers: 4
  num_layers_in_first_pipeline_stage: 1
  num_moe_experts: 64
  num_query_groups: 2
  params_dtype: {_call_: false, _target_: torch.bfloat16}
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 2
  moe_layer_freq: &id001 [0, 1, 1, 1]
  other: *id001
"""


def run_config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run_config.yaml"
    path.write_text(text)
    return path


def settings_in(path: Path) -> dict[str, object]:
    return read_run_config(LocalFile(path))


def test_bridge_names_become_arguments(tmp_path: Path) -> None:
    settings = settings_in(run_config(tmp_path, RUN_CONFIG))
    expected = {
        "num_layers": 4,
        "num_experts": 64,
        "num_query_groups": 2,
        "group_query_attention": True,
        "tensor_model_parallel_size": 2,
        "untie_embeddings_and_output_weights": True,
        "apply_layernorm_1p": False,
        "decoder_first_pipeline_num_layers": 1,
        "swiglu": True,
        "quick_geglu": False,
        "params_dtype": "bfloat16",
        "attention_backend": 5,
        "moe_layer_freq": [0, 1, 1, 1],
        "other": [0, 1, 1, 1],
    }
    assert {name: settings.get(name) for name in expected} == expected
    assert "generation_config" not in settings


def test_a_tied_gelu_model_without_groups(tmp_path: Path) -> None:
    text = (
        RUN_CONFIG.replace("functional.silu", "functional.gelu")
        .replace("groups: 2", "groups: null")
        .replace("weights: false", "weights: true")
    )
    settings = settings_in(run_config(tmp_path, text))
    assert settings["swiglu"] is False
    assert settings["gated_linear_unit"] is True
    assert settings["group_query_attention"] is False
    assert settings["untie_embeddings_and_output_weights"] is False


@pytest.mark.parametrize(
    ("settings", "gated"),
    [
        ({}, None),
        ({"swiglu": None}, None),
        ({"swiglu": False}, False),
        ({"swiglu": True}, True),
        ({"swiglu": False, "quick_geglu": True}, True),
        ({"swiglu": False, "gated_linear_unit": True}, True),
    ],
)
def test_gated_is_what_any_argument_says(settings: dict[str, object], gated: bool | None) -> None:
    assert is_gated(settings) is gated


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("model: [", DamagedFile),
        ("model: !!python/object/apply:os.system [touch ran]", DamagedFile),
        ("a: &a {x: 1}\nmodel: {<<: [*a, *a]}", DamagedFile),
        ("model: " + "[" * 100_000, DamagedFile),
        ("model: 2026-99-99", DamagedFile),
        ("model: 3", UnsupportedCheckpoint),
        ("- 1", UnsupportedCheckpoint),
        ("", UnsupportedCheckpoint),
        ("model: [" + "1," * 100_000 + "]", DamagedFile),
        ("model: {" + "".join(f"{n * (2**61 - 1)}: 1, " for n in range(30_000)) + "}", DamagedFile),
        ("model: " + "[" * 400 + "1," * 20_000, DamagedFile),
    ],
)
def test_what_is_no_run_config_is_refused_with_its_name(
    tmp_path: Path, text: str, kind: type[Exception]
) -> None:
    path, before = run_config(tmp_path, text), time.process_time()
    with pytest.raises(kind, match=r"run_config\.yaml: ") as caught:
        settings_in(path)
    assert time.process_time() - before < 4
    assert len(caught.value.problem) < 300 + len(str(path))


def test_a_large_or_absent_run_config_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(UnsupportedCheckpoint, match=str(1 << 33)):
        settings_in(tmp_path / "large.yaml")
    with pytest.raises(SourceError):
        settings_in(tmp_path / "absent.yaml")


@pytest.mark.parametrize("number", ["1:1", "!!int 1:1", "!!float 1:1", "-1:30", "1:1.5"])
def test_numbers_of_the_base_60_are_texts(tmp_path: Path, number: str) -> None:
    """A number takes the square of its length: 400 KB took a quarter of a minute."""
    settings = settings_in(run_config(tmp_path, f"model: {{x: {number}, n: 12, f: 1.5}}"))
    assert settings == {"x": number.rpartition(" ")[2], "n": 12, "f": 1.5}
    long = run_config(tmp_path, f"model:\n  x: {number.replace('1:1', '1' + ':1' * 200_000)}\n")
    before = time.process_time()
    assert set(settings_in(long)) == {"x"}
    assert time.process_time() - before < 4


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "{" * 100_000, "[0," * (1 << 20)])
def test_what_is_no_config_of_verl_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path, before = tmp_path / "transformer_config.json", time.process_time()
    path.write_text(text)
    with pytest.raises(DamagedFile, match=r"transformer_config\.json: not the JSON that verl writes"):
        read_transformer_config(LocalFile(path))
    assert time.process_time() - before < 4


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


@pytest.mark.parametrize("name", ["run_config.yaml", "transformer_config.json", "common.pt", "metadata.json"])
@pytest.mark.parametrize("made", [dangling, Path.mkdir, os.mkfifo, device])
def test_settings_that_are_no_file_are_not_as_good_as_none(
    tmp_path: Path, made: Callable[[Path], None], name: str
) -> None:
    """Without them norms are taken as they are, one less than the model's."""
    folder = tmp_path / "dist_ckpt"
    folder.mkdir()
    store, found = read_zarr(folder), Found()
    assert read_arguments(folder, store, found) == {}
    made((tmp_path if name == "transformer_config.json" else folder) / name)
    with pytest.raises(SourceError, match=rf"{name}: is a "):
        read_arguments(folder, store, found)


def test_a_number_beyond_all_counting_is_a_text_that_says_so(tmp_path: Path) -> None:
    """Python refuses to print it: that would be a traceback in some message."""
    args = argparse.Namespace(seed=2**63, x=10**1000, many=[-(10**1000)])
    settings = settings_of(saved(tmp_path, args))
    assert settings["seed"] == 2**63
    assert settings["x"] == "a number of 3322 bits"
    assert settings["many"] == ["a number of 3322 bits"]


def test_a_text_that_is_there_many_times_costs_a_bounded_amount(tmp_path: Path) -> None:
    text = "x" * 10**6
    settings = settings_of(saved(tmp_path, argparse.Namespace(bomb=[text] * 3000, num_layers=4, more=text)))
    assert "bomb" not in settings
    assert settings["num_layers"] == 4
    assert len(repr(settings)) < 2 * 10**6
