"""Layout functions on numbered elements: every expectation is written out, row by row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lazymerge.arrays import Array
from lazymerge.compute import read
from lazymerge.conversions.megatron import layouts
from lazymerge.conversions.megatron.family import Config, Misfit
from lazymerge.elements import in_memory
from lazymerge.tensor import LazyTensor


def config(hf: dict[str, Any], vision: dict[str, Any] | None = None, **megatron: Any) -> Config:
    return Config(hf, {**hf, **({"vision_config": vision} if vision else {})}, megatron)


def numbered(rows: int, columns: int | None = 3, start: int = 0) -> torch.Tensor:
    """A weight whose row r is [10 r, 10 r + 1, ...], or a bias whose element r is 10 r."""
    first = (torch.arange(rows) + start) * 10.0
    return first if columns is None else first[:, None] + torch.arange(columns)


def rows(weight: torch.Tensor) -> list[int]:
    """Which rows of a numbered tensor these are."""
    first = weight if weight.dim() == 1 else weight[:, 0]
    assert weight.dim() == 1 or torch.equal(weight, first[:, None] + torch.arange(weight.shape[1]))
    return [int(value) // 10 for value in first]


def lazily(layout: Callable[..., Any], config: Config, *tensors: Any) -> Any:
    """The layout of arrays, read; lazy tensors and real ones give the same."""

    def given(wrap: Callable[[torch.Tensor], Any], tensor: Any) -> Any:
        return [wrap(each) for each in tensor] if isinstance(tensor, list) else wrap(tensor)

    def made(wrap: Callable[[torch.Tensor], Any], unwrap: Callable[[Any], torch.Tensor]) -> Any:
        result = layout(config, *(given(wrap, tensor) for tensor in tensors))
        return tuple(map(unwrap, result)) if isinstance(result, tuple | list) else unwrap(result)

    arrays = made(lambda tensor: Array(in_memory(tensor)), lambda array: read(array.gather))
    lazy = made(lambda tensor: LazyTensor(in_memory(tensor)), lambda tensor: tensor.materialize())
    real = made(lambda tensor: tensor, lambda tensor: tensor)
    for one, *others in zip(
        *(each if isinstance(each, tuple) else (each,) for each in (arrays, lazy, real)), strict=True
    ):
        assert all(torch.equal(one, other) for other in others)
    return arrays


@pytest.fixture(autouse=True)
def nothing_is_read(caplog: pytest.LogCaptureFixture) -> Any:
    """No operator of a layout reads what it is given."""
    from lazymerge import tensor

    tensor._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "lazymerge.tensor"):
        yield
    assert "has no lazy form" not in caplog.text


# ---- attention ---------------------------------------------------------------------------------------------

GQA = config({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "hidden_size": 99})
# group 0: heads 0, 1 = rows 0-3, key 4-5, value 6-7; group 1: heads 2, 3 = rows 8-11, key 12-13, value 14-15
Q, K, V = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]


@pytest.mark.parametrize("columns", [3, None, 1])
def test_qkv_rows_are_grouped(columns):
    q, k, v = lazily(layouts.split_qkv, GQA, numbered(16, columns))
    assert (rows(q), rows(k), rows(v)) == (Q, K, V)
    assert q.dim() == (1 if columns is None else 2)


def test_fused_qkv_has_all_q_then_all_k_then_all_v():
    assert rows(lazily(layouts.joined_qkv, GQA, numbered(16))) == Q + K + V


@pytest.mark.parametrize("groups", [{}, {"num_key_value_heads": None}, {"num_key_value_heads": 2}])
def test_without_groups_of_its_own_every_head_is_one(groups):
    q, k, v = lazily(layouts.split_qkv, config({"num_attention_heads": 2, **groups}), numbered(12))
    assert (rows(q), rows(k), rows(v)) == ([0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11])


def test_head_dim_is_what_the_rows_say_and_never_hidden_over_heads():
    known = config({"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 3})
    q, k, v = lazily(layouts.split_qkv, known, numbered(16))
    assert (rows(q), rows(k), rows(v)) == (Q, K, V)


def test_gated_attention_has_query_and_gate_by_head():
    # group 0: q heads 0-3, gates 4-7, k 8-9, v 10-11; group 1 from 12
    q, k, v = lazily(layouts.split_gated_qkv, GQA, numbered(24))
    assert rows(q) == [0, 1, 4, 5, 2, 3, 6, 7, 12, 13, 16, 17, 14, 15, 18, 19]
    assert (rows(k), rows(v)) == ([8, 9, 20, 21], [10, 11, 22, 23])


def test_vision_heads_are_taken_apart():
    tower = config({}, vision={"num_heads": 2})
    expected = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert rows(lazily(layouts.vision_qkv, tower, numbered(12))) == expected
    assert rows(lazily(layouts.vision_qkv, tower, numbered(12, None))) == expected


def test_fused_mla_down_projection():
    mla = config({"q_lora_rank": 3, "kv_lora_rank": 2, "qk_rope_head_dim": 1})
    query, latent = lazily(layouts.split_mla_down, mla, numbered(6))
    assert (rows(query), rows(latent)) == ([0, 1, 2], [3, 4, 5])


# ---- gated delta net ---------------------------------------------------------------------------------------

DELTA = config(
    {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 1,
        "linear_value_head_dim": 2,
    }
)
SIZES = (2, 2, 8, 8, 4, 4)  # query, key, value, z, beta, alpha: rows 0-1, 2-3, 4-11, 12-19, 20-23, 24-27
QKVZ = [0, 2, 4, 5, 6, 7, 12, 13, 14, 15, 1, 3, 8, 9, 10, 11, 16, 17, 18, 19]
BA = [20, 21, 24, 25, 22, 23, 26, 27]


def test_a_delta_net_has_its_parts_by_key_head():
    starts = [sum(SIZES[:at]) for at in range(6)]
    parts = [numbered(size, 3, start) for size, start in zip(SIZES, starts, strict=True)]
    qkvz, ba = lazily(layouts.join_delta_net, DELTA, *parts)
    assert (rows(qkvz), rows(ba)) == (QKVZ, BA)
    qkvz, ba = lazily(layouts.split_delta_net, DELTA, numbered(28))
    assert (rows(qkvz), rows(ba)) == (QKVZ, BA)


def test_a_convolution_keeps_its_kernel_dimensions():
    parts = [numbered(size, 3, start)[:, None] for size, start in ((2, 0), (2, 2), (3, 4))]
    joined = lazily(layouts.join_rows, DELTA, *parts)
    assert joined.shape == (7, 1, 3) and rows(joined[:, 0]) == list(range(7))


# ---- feed-forward and experts ------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [3, None])
def test_gate_and_up_are_halves(columns):
    gate, up = lazily(layouts.split_gate_up, GQA, numbered(6, columns))
    assert (rows(gate), rows(up)) == ([0, 1, 2], [3, 4, 5])


def experts(count: int, height: int, columns: int | None) -> list[torch.Tensor]:
    return [numbered(height, columns, start=100 * index) for index in range(count)]


def test_experts_are_stacked():
    whole = lazily(layouts.stacked, GQA, experts(2, 3, 3))
    assert [rows(expert) for expert in whole] == [[0, 1, 2], [100, 101, 102]]


@pytest.mark.parametrize("layout", [layouts.stacked_transposed, layouts.published_stacked])
def test_experts_are_transposed(layout):
    whole = lazily(layout, GQA, experts(2, 4, 3))
    assert whole.shape == (2, 3, 4)
    assert whole[1].tolist() == [[1000, 1010, 1020, 1030], [1001, 1011, 1021, 1031], [1002, 1012, 1022, 1032]]


def test_square_published_experts_are_as_transformers_takes_them():
    whole = lazily(layouts.published_stacked, GQA, experts(2, 3, 3))
    assert [rows(expert) for expert in whole] == [[0, 1, 2], [100, 101, 102]]


def test_gpt_oss_experts_are_interleaved_and_transposed():
    whole = lazily(layouts.interleaved, GQA, experts(2, 4, 3))  # gate: rows 0, 1; up: rows 2, 3
    assert whole.shape == (2, 3, 4)
    assert whole[0].tolist() == [[0, 20, 10, 30], [1, 21, 11, 31], [2, 22, 12, 32]]
    bias = lazily(layouts.interleaved, GQA, experts(2, 4, None))
    assert [rows(expert) for expert in bias] == [[0, 2, 1, 3], [100, 102, 101, 103]]


# ---- norms -------------------------------------------------------------------------------------------------

NORMS = [
    # layout, Megatron's setting, what is added
    (layouts.norm, {}, 0),
    (layouts.norm, {"apply_layernorm_1p": False}, 0),
    (layouts.norm, {"apply_layernorm_1p": True}, 1),
    (layouts.norm, {"layernorm_zero_centered_gamma": True}, 1),
    (layouts.centred_norm, {}, 0),
    (layouts.centred_norm, {"apply_layernorm_1p": True}, 0),
    (layouts.centred_norm, {"apply_layernorm_1p": False}, -1),
    (layouts.uncentred_norm, {}, 1),
    (layouts.uncentred_norm, {"apply_layernorm_1p": True}, 1),
    (layouts.uncentred_norm, {"apply_layernorm_1p": False}, 0),
]


@pytest.mark.parametrize(("layout", "settings", "added"), NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_are_centred_as_the_hub_has_them(layout, settings, added, dtype):
    weight = torch.tensor([-0.5, 0.25, 1.5], dtype=dtype)
    made = lazily(layout, config({}, **settings), weight)
    assert made.dtype == dtype and made.tolist() == [-0.5 + added, 0.25 + added, 1.5 + added]


# ---- multi-token prediction --------------------------------------------------------------------------------


def test_mimo_swaps_the_halves_of_its_projection():
    made = lazily(layouts.swapped_halves, GQA, torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]))
    assert made.tolist() == [[2, 3, 0, 1], [6, 7, 4, 5]]


# ---- what does not fit -------------------------------------------------------------------------------------

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}
MISFITS: list[tuple[Callable[..., Any], Config, Sequence[Any], str, str]] = [
    (layouts.split_qkv, config({**HEADS, "head_dim": 3}), [numbered(16)], "16 rows, expected 24", "head_dim"),
    (
        layouts.split_qkv,
        config({**HEADS, "num_key_value_heads": 1}),
        [numbered(16)],
        "16 rows, expected 12",
        "num_key_value_heads",
    ),
    (layouts.split_qkv, config({"num_attention_heads": 3}), [numbered(16)], "a multiple of", "head_dim"),
    (
        layouts.split_qkv,
        config({**HEADS, "num_key_value_heads": 3}),
        [numbered(16)],
        "no multiple of 3",
        "num_key_value_heads",
    ),
    (layouts.split_qkv, config({}), [numbered(16)], "needs num_attention_heads", "num_attention_heads"),
    (
        layouts.split_qkv,
        config({"num_attention_heads": "4"}),
        [numbered(16)],
        "'4'",
        "num_attention_heads",
    ),
    (
        layouts.split_qkv,
        config({"num_attention_heads": 10**30}),
        [numbered(16)],
        "100",
        "num_attention_heads",
    ),
    (layouts.split_qkv, GQA, [torch.tensor(1.0)], "single number", ""),
    (layouts.split_gated_qkv, GQA, [numbered(16)], "16 rows, expected 24", "num_attention_heads"),
    (layouts.vision_qkv, GQA, [numbered(12)], "vision_config", "vision_config"),
    (layouts.vision_qkv, config({}, {"num_heads": 5}), [numbered(12)], "multiple of 15", "num_heads"),
    (layouts.split_gate_up, GQA, [numbered(5)], "5 rows", "intermediate_size"),
    (layouts.interleaved, GQA, [experts(2, 3, 3)], "3 rows", "intermediate_size"),
    (layouts.stacked, GQA, [[numbered(4), numbered(5)]], "differs in shape", ""),
    (layouts.stacked_transposed, GQA, [[numbered(4, None)]], "expected a matrix", ""),
    (layouts.join_delta_net, DELTA, [numbered(2)] * 6, "2 rows, expected 8", "linear_num_value_heads"),
    (layouts.split_delta_net, DELTA, [numbered(27)], "27 rows, expected 28", "linear_num_value_heads"),
    (layouts.split_mla_down, config({"q_lora_rank": 3}), [numbered(6)], "needs kv_lora_rank", "kv_lora_rank"),
    (layouts.swapped_halves, GQA, [numbered(4)], "two halves", "hidden_size"),
]


@pytest.mark.parametrize(("layout", "known", "tensors", "problem", "field"), MISFITS)
def test_a_shape_that_the_config_contradicts_is_refused(layout, known, tensors, problem, field):
    with pytest.raises(Misfit) as refused:
        lazily(layout, known, *tensors)
    assert problem in refused.value.problem
    assert field in " ".join(refused.value.fields)
