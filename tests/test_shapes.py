"""Forced shapes: what is cropped or padded, that it is said, and that it is lazy; torch is the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lazymerge
from lazymerge.boxes import Piece
from lazymerge.checkpoint import Checkpoint
from lazymerge.conversions.architecture import Architecture, check
from lazymerge.conversions.shapes import force_shapes
from lazymerge.errors import InconsistentCheckpoint
from lazymerge.execute import write_file
from lazymerge.files.dtype import DTYPES
from lazymerge.files.region import Region, contiguous_strides
from lazymerge.gather import Constant, Gather, Shards
from lazymerge.plan import Plan, make_plan
from lazymerge.plan_json import plan_from_json, plan_to_json
from lazymerge.tensor import LazyTensor
from lazymerge.tiling import check as check_tiling
from tests.checks import raw


class Untouched:
    """A file of any size that nothing may read."""

    name = "untouched"

    def __init__(self, size: int) -> None:
        self.size = size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        pytest.fail("read")


def untouched(*shape: int) -> Gather:
    dtype = DTYPES["bfloat16"]
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    region = Region(Untouched(nbytes), 0, dtype, shape, contiguous_strides(shape))
    return Shards(shape, dtype, Constant([Piece((0,) * len(shape), region)]))


def architecture(**shapes: tuple[int, ...]) -> Architecture:
    return Architecture("SomeForCausalLM", shapes)


def checkpoint_of(source, folder: Path, state: dict[str, torch.Tensor]) -> Checkpoint:
    return lazymerge.open(source(folder, state))


def written(plan: Plan, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the plan's file, after the plan has been through JSON."""
    plan = plan_from_json(json.loads(json.dumps(plan_to_json(plan))))
    (file,) = plan.files
    with open(folder / file.name, "wb+") as target:
        target.truncate(file.size)
        write_file(file, target.fileno(), block=1 << 16, workers=2, on_bytes=lambda count: None)
    return load_file(folder / file.name)


def resized(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    result = torch.zeros(shape, dtype=tensor.dtype)
    common = tuple(slice(min(a, b)) for a, b in zip(tensor.shape, shape, strict=True))
    result[common] = tensor[common]
    return result


SIZES = [
    ((5, 6), (5, 6)),
    ((5, 6), (3, 6)),
    ((5, 6), (5, 4)),
    ((5, 6), (8, 6)),
    ((5, 6), (5, 9)),
    ((5, 6), (7, 9)),
    ((5, 6), (3, 9)),
    ((5, 6), (7, 2)),
    ((5, 6), (1, 1)),
    ((7,), (3,)),
    ((7,), (9,)),
    ((0, 4), (2, 4)),
    ((2, 4), (0, 4)),
    ((2, 3, 4), (3, 2, 5)),
    ((2, 3, 4), (2, 5, 4)),
    ((400, 300), (300, 400)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_cropped_and_padded_as_torch_does_it_also_after_json(source, tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    state, shapes = {}, {}
    for number, (found, expected) in enumerate(SIZES):
        drawn = torch.randint(1, 100, found, generator=generator)  # no zeros that could be padding
        state[f"t{number}"], shapes[f"t{number}"] = drawn.to(dtype), expected
    forced = force_shapes(checkpoint_of(source, tmp_path / "in", state), architecture(**shapes))
    for name, gather in forced.gathers.items():
        check_tiling(name, gather)
    result = written(make_plan(forced.gathers), tmp_path)
    assert set(result) == set(state)
    for name, tensor in state.items():
        truth = resized(tensor, shapes[name])
        assert result[name].dtype == truth.dtype
        assert result[name].shape == truth.shape
        assert raw(result[name]) == raw(truth), name


def test_a_warning_for_each_with_both_shapes_and_one_that_marks_the_whole(source, tmp_path):
    state = {
        "embed": torch.ones(10, 4),
        "up": torch.ones(4, 4),
        "both": torch.ones(2, 9),
        "same": torch.ones(3),
    }
    opened = checkpoint_of(source, tmp_path / "in", state)
    model = architecture(embed=(8, 4), up=(6, 4), both=(3, 5), same=(3,))
    forced = force_shapes(opened, model)
    first, *each = forced.notes[len(opened.notes) :]
    assert {note.level for note in (first, *each)} == {"warning"}
    assert first.tensor is None
    assert first.text.startswith("3 tensors are not the checkpoint's")
    assert "--force-shape-match" in first.text
    assert {note.tensor: note.text for note in each} == {
        "embed": "embed is cropped from [10, 4] to [8, 4]",
        "up": "up is padded with zeros from [4, 4] to [6, 4]",
        "both": "both is cropped and padded with zeros from [2, 9] to [3, 5]",
    }
    assert check(forced, model).notes == forced.notes


def test_nothing_to_force_says_nothing(source, tmp_path):
    opened = checkpoint_of(source, tmp_path / "in", {"a": torch.ones(2, 3)})
    forced = force_shapes(opened, architecture(a=(2, 3), absent=(7,)))
    assert forced.notes == opened.notes
    assert forced.gathers == opened.gathers


def test_what_the_model_does_not_have_stays_as_it_is(source, tmp_path):
    state = {"a": torch.ones(2, 3), "v_head": torch.arange(5.0)}
    forced = force_shapes(checkpoint_of(source, tmp_path / "in", state), architecture(a=(1, 3)))
    assert torch.equal(forced["v_head"].materialize(), state["v_head"])


@pytest.mark.parametrize("shape", [(12,), (3, 4, 1), ()])
def test_another_number_of_dimensions_is_refused(source, tmp_path, shape):
    opened = checkpoint_of(source, tmp_path / "in", {"fine": torch.ones(2), "w": torch.ones(3, 4)})
    with pytest.raises(InconsistentCheckpoint) as caught:
        force_shapes(opened, architecture(fine=(3,), w=shape))
    assert "w has 2 dimensions, [3, 4]" in caught.value.problem
    assert str(list(shape)) in caught.value.problem
    assert "--force-shape-match" in caught.value.hint


FUSED = [  # as the hub has them
    "model.layers.0.mlp.gate_up_proj.weight",  # Phi-3, GLM-4
    "model.layers.0.self_attn.qkv_proj.weight",  # Phi-3
    "model.language_model.layers.0.feed_forward.experts.gate_up_proj",  # Llama 4
    "model.layers.0.mlp.experts.gate_up_proj_bias",  # gpt-oss
    "model.layers.0.linear_attn.in_proj_qkvz.weight",  # Qwen3-Next
    "model.layers.0.linear_attn.in_proj_ba.weight",
    "model.layers.0.linear_attn.conv1d.weight",
    "visual.blocks.0.attn.qkv.bias",  # Qwen2.5-VL
    "transformer.h.0.attn.c_attn.weight",  # GPT-2
    "transformer.encoder.layers.0.self_attention.query_key_value.weight",  # ChatGLM
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",  # DeepSeek
    "model.layers.0.self_attn.kv_b_proj.weight",
    "backbone.layers.0.mixer.in_proj.weight",  # Mamba
]


@pytest.mark.parametrize("name", FUSED)
def test_a_tensor_of_several_projections_is_not_forced(name):
    checkpoint = Checkpoint({name: untouched(96, 16), "fine": untouched(4)}, "made")
    with pytest.raises(InconsistentCheckpoint) as caught:
        force_shapes(checkpoint, architecture(**{name: (100, 16), "fine": (5,)}))
    assert f"{name} is [96, 16], [100, 16] by config.json" in caught.value.problem
    assert "several projections in one" in caught.value.problem
    assert force_shapes(checkpoint, architecture(**{name: (96, 16)})).notes == ()


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.bias"]
)
def test_a_tensor_of_one_projection_is_forced(name):
    checkpoint = Checkpoint({name: untouched(96, 16)}, "made")
    assert force_shapes(checkpoint, architecture(**{name: (100, 16)})).gathers[name].shape == (100, 16)


def test_neither_data_nor_zeros_are_held(tmp_path):
    """A terabyte of each is planned, and neither read nor allocated; the plan stays small."""
    checkpoint = Checkpoint({"w": untouched(1 << 20, 1 << 19)}, "made")
    forced = force_shapes(checkpoint, architecture(w=(1 << 21, 1 << 18)))
    assert forced.gathers["w"].shape == (1 << 21, 1 << 18)
    pieces = list(forced.gathers["w"].pieces())
    assert len(pieces) == 2
    assert pieces[1].region.source.size == 2  # one element
    check_tiling("w", forced.gathers["w"])


def test_a_forced_tensor_goes_on_through_other_conversions(source, tmp_path):
    truth: Any = torch.arange(12.0).reshape(3, 4)
    forced = force_shapes(checkpoint_of(source, tmp_path / "in", {"w": truth}), architecture(w=(4, 6)))
    lazy = forced["w"]
    assert isinstance(lazy, LazyTensor)
    turned = lazy.t()[1:].to(torch.bfloat16).materialize()
    assert torch.equal(turned, resized(truth, (4, 6)).t()[1:].to(torch.bfloat16))
