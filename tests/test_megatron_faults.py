"""Rank files of the `torch` layout that were changed after they were saved: each is refused, none misread."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import set_crc32_options

import lazymerge
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    LazymergeError,
    UnsupportedCheckpoint,
)
from lazymerge.formats.megatron.ranks import read_ranks
from tests.checks import refused
from tests.makers.megatron_edits import change as change_file

SAMPLES = Path(__file__).parent / "data" / "megatron"
MOE, VIRTUAL = "torch_te_qwen3moe_tp2ep2pp2", "torch_local_llama_vpp"
LINEAR = "decoder.layers.0.self_attention.linear_proj.weight"

State = dict[str, Any]


def copy_of(case: str, folder: Path) -> Path:
    return Path(shutil.copytree(SAMPLES / case / "ckpt" / "iter_0000100", folder / "iter_0000100"))


def files(step: Path) -> list[Path]:
    return sorted(step.glob("*/model_optim_rng.pt"))


def change(paths: list[Path], edit: Callable[[State], object]) -> None:
    for path in paths:
        change_file(path, edit)


# ---- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["00", "\u0660", "1000000"])
def test_a_layer_has_one_spelling(tmp_path: Path, number: str) -> None:
    step = copy_of(MOE, tmp_path)
    other = LINEAR.replace(".0.", f".{number}.")
    change(files(step), lambda state: state["model"].update({other: state["model"][LINEAR] * 0 + 7}))
    with pytest.raises(UnsupportedCheckpoint, match=f"{other}: .* no layer has its number written so"):
        read_ranks(step)


def test_an_expert_has_one_spelling(tmp_path: Path) -> None:
    step = copy_of(MOE, tmp_path)
    fc2 = "decoder.layers.0.mlp.experts.linear_fc2.weight"
    change(files(step), lambda state: state["model"].update({f"{fc2}01": state["model"].pop(f"{fc2}1")}))
    with pytest.raises(LazymergeError, match="expert 1 of expert rank 0"):
        read_ranks(step)


@pytest.mark.parametrize("key", ["model01", "model\u0662", "model" + "9" * 5000])
def test_a_virtual_stage_has_one_spelling(tmp_path: Path, key: str) -> None:
    step = copy_of(VIRTUAL, tmp_path)
    change(files(step), lambda state: state.update({key: state["model1"]}))
    with pytest.raises(UnsupportedCheckpoint, match=f"holds '{key[:30]}.*expected model0, model1"):
        read_ranks(step)
    change(files(step), lambda state: state.pop("model1"))
    with pytest.raises(UnsupportedCheckpoint, match="expected model0, model1"):
        read_ranks(step)


def test_a_name_that_would_write_over_the_terminal(tmp_path: Path) -> None:
    step = copy_of(MOE, tmp_path)
    change(files(step), lambda state: state["model"].update({"a\x1b[2J\n": torch.ones(1)}))
    with pytest.raises(UnsupportedCheckpoint, match="no name of a tensor") as caught:
        read_ranks(step)
    assert caught.value.problem.isprintable()


# ---- arguments ---------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[State], object]:
    return lambda state: vars(state["args"]).pop(name, None)


def with_value(name: str, value: object) -> Callable[[State], object]:
    return lambda state: setattr(state["args"], name, value)


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("moe_mlp_glu_interleave_size", with_value("moe_mlp_glu_interleave_size", 4)),
        ("apply_layernorm_1p", with_value("apply_layernorm_1p", True)),
        ("rotary_interleaved", with_value("rotary_interleaved", True)),
        ("kv_lora_rank", with_value("kv_lora_rank", 7)),
        ("moe_extended_tp", with_value("moe_extended_tp", True)),
        ("swiglu", without("swiglu")),
        ("num_experts", without("num_experts")),
        ("num_experts", lambda state: state.pop("args")),
    ],
)
def test_an_argument_about_the_layout_that_one_rank_alone_has(
    tmp_path: Path, name: str, edit: Callable[[State], object], at: int
) -> None:
    step = copy_of(MOE, tmp_path)
    change([files(step)[at]], edit)
    with pytest.raises(InconsistentCheckpoint, match=r"args say \w+ = ") as caught:
        read_ranks(step)
    assert "args" in caught.value.problem or name in caught.value.problem


def test_an_argument_about_something_else_may_be_one_ranks_own(tmp_path: Path) -> None:
    step = copy_of(MOE, tmp_path)
    change(files(step), lambda state: None)  # so that Megatron's own classes are lost in all
    change([files(step)[0]], with_value("some_new_thing", 4))
    assert not read_ranks(step).notes


@pytest.mark.parametrize("where", ["args", "iteration", "checkpoint_version"])
def test_a_number_beyond_all_counting_is_no_traceback(tmp_path: Path, where: str) -> None:
    step = copy_of(MOE, tmp_path)

    def edit(state: State) -> None:
        if where == "args":
            state["args"].x = 10**1000
        else:
            state[where] = 10**1000

    change(files(step)[:1], edit)
    if where == "iteration":
        with pytest.raises(InconsistentCheckpoint, match="of iteration 100, and"):
            read_ranks(step)
    else:
        assert read_ranks(step).gathers


def test_more_or_fewer_layers_than_arguments_say(tmp_path: Path) -> None:
    step = copy_of(MOE, tmp_path)
    change(files(step), with_value("num_layers", 5))
    with pytest.raises(IncompleteCheckpoint, match=r"4 decoder layers, expected 5 \(num_layers\)"):
        read_ranks(step)


def test_heads_of_the_wrong_type(tmp_path: Path) -> None:
    step = copy_of(MOE, tmp_path)
    change(files(step), with_value("num_attention_heads", "8"))
    hf = SAMPLES / MOE / "hf"
    with refused(InconsistentCheckpoint, "num_attention_heads is '8'", dst=tmp_path / "out"):
        lazymerge.merge(step, tmp_path / "out", hf_config=hf)


def test_an_output_layer_taken_for_a_copy_is_not_said_to_be_absent(tmp_path: Path) -> None:
    step = copy_of("torch_oldnames_llama_tp2pp2", tmp_path)
    change(files(step), with_value("untie_embeddings_and_output_weights", False))
    hf = SAMPLES / "torch_oldnames_llama_tp2pp2" / "hf"
    with refused(InconsistentCheckpoint, "but the copy of the embedding that", dst=tmp_path / "out"):
        lazymerge.merge(step, tmp_path / "out", hf_config=hf)


# ---- bytes -------------------------------------------------------------------------------------------------


def test_a_flipped_byte_in_the_pickle_is_found(tmp_path: Path) -> None:
    """A stride, say: torch loads it, and every row but the first would be another one's."""
    step = copy_of(MOE, tmp_path)
    path = files(step)[0]
    data = bytearray(path.read_bytes())
    at = data.index(LINEAR.encode())
    data[at + 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match=r"data\.pkl has the checksum \w{8}, expected \w{8}"):
        read_ranks(step)


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    step = copy_of(MOE, tmp_path)
    set_crc32_options(False)
    try:
        change(files(step), lambda state: None)
    finally:
        set_crc32_options(True)
    assert set(read_ranks(step).gathers) == set(read_ranks(copy_of(MOE, tmp_path / "x")).gathers)
