"""Megatron's distributed checkpoints under canonical names: what Megatron wrote, and each kind of name."""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lazymerge.compute import read
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    LazymergeError,
    SourceError,
    UnsupportedCheckpoint,
)
from lazymerge.formats.megatron.dist import read_dist
from lazymerge.formats.megatron.format import FORMAT
from lazymerge.formats.megatron.found import Found
from lazymerge.tiling import check
from tests.checks import assert_same_tensors, raw
from tests.makers.dcp_folders import edited, save_dcp
from tests.makers.megatron_dist import Chunks, save
from tests.makers.megatron_edits import change
from tests.makers.zarr_arrays import write_array

SAMPLES = Path(__file__).parent / "data" / "megatron"
LEAVES = {
    "td_te_dsv3_tp2ep2pp2": "ckpt/iter_0000100",
    "td_te_qwen2_tp2pp2": "ckpt/iter_0000100",
    "td_te_qwen3_tp2_optim": "ckpt/iter_0000100",
    "td_te_qwen3moe_ep2grouped": "ckpt/iter_0000100",
    "verl2_te_qwen2_value": "ckpt/global_step_100/actor/model/dist_ckpt",
    "verl_te_qwen3moe_ep2_vpp": "ckpt/global_step_100/actor/dist_ckpt",
}
LAYER = r"decoder\.layers\.(\d+)\."
HF: list[tuple[str, tuple[str, ...]]] = [
    (r"embedding\.word_embeddings\.weight", ("model.embed_tokens.weight",)),
    (r"decoder\.final_layernorm\.weight", ("model.norm.weight",)),
    (r"output_layer\.weight", ("lm_head.weight",)),
    (
        LAYER + r"(?:self_attention\.linear_qkv\.layer_norm_|input_layernorm\.)weight",
        ("input_layernorm.weight",),
    ),
    (
        LAYER + r"(?:mlp\.linear_fc1\.layer_norm_|pre_mlp_layernorm\.)weight",
        ("post_attention_layernorm.weight",),
    ),
    (LAYER + r"self_attention\.linear_proj\.weight", ("self_attn.o_proj.weight",)),
    (
        LAYER + r"self_attention\.linear_qkv\.(weight|bias)",
        ("self_attn.q_proj.{1}", "self_attn.k_proj.{1}", "self_attn.v_proj.{1}"),
    ),
    (LAYER + r"self_attention\.([qk])_layernorm\.weight", ("self_attn.{1}_norm.weight",)),
    (LAYER + r"mlp\.linear_fc1\.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    (LAYER + r"mlp\.linear_fc2\.weight", ("mlp.down_proj.weight",)),
    (LAYER + r"mlp\.router\.weight", ("mlp.gate.weight",)),
    (LAYER + r"mlp\.router\.expert_bias", ("mlp.gate.e_score_correction_bias",)),
    (
        LAYER + r"mlp\.experts\.local_experts\.(\d+)\.linear_fc1\.weight",
        ("mlp.experts.{1}.gate_proj.weight", "mlp.experts.{1}.up_proj.weight"),
    ),
    (
        LAYER + r"mlp\.experts\.local_experts\.(\d+)\.linear_fc2\.weight",
        ("mlp.experts.{1}.down_proj.weight",),
    ),
    (
        LAYER + r"mlp\.shared_experts\.linear_fc1\.weight",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    ),
    (LAYER + r"mlp\.shared_experts\.linear_fc2\.weight", ("mlp.shared_experts.down_proj.weight",)),
    (LAYER + r"self_attention\.linear_q_down_proj\.weight", ("self_attn.q_a_proj.weight",)),
    (LAYER + r"self_attention\.linear_q_up_proj\.layer_norm_weight", ("self_attn.q_a_layernorm.weight",)),
    (LAYER + r"self_attention\.linear_q_up_proj\.weight", ("self_attn.q_b_proj.weight",)),
    (LAYER + r"self_attention\.linear_kv_down_proj\.weight", ("self_attn.kv_a_proj_with_mqa.weight",)),
    (LAYER + r"self_attention\.linear_kv_up_proj\.layer_norm_weight", ("self_attn.kv_a_layernorm.weight",)),
    (LAYER + r"self_attention\.linear_kv_up_proj\.weight", ("self_attn.kv_b_proj.weight",)),
]
"""The published names; the tensors of a row lie one after the other, those of linear_qkv in groups."""


def hf_names(name: str) -> list[str]:
    for pattern, targets in HF:
        match = re.fullmatch(pattern, name)
        if match is not None:
            layer, *others = match.groups() or ("",)
            prefix = f"model.layers.{layer}." if layer else ""
            return [prefix + target.replace("{1}", others[0] if others else "") for target in targets]
    raise AssertionError(f"no Hugging Face tensor for {name}")


def values(found: Found) -> dict[str, torch.Tensor]:
    """All tensors, each proved to be whole."""
    for name, gather in found.gathers.items():
        check(name, gather)
    return {name: read(gather) for name, gather in found.gathers.items()}


def rows(tensor: torch.Tensor) -> Counter[bytes]:
    return Counter(raw(row) for row in tensor)


# ---- checkpoints that Megatron wrote -----------------------------------------------------------------------


@pytest.mark.parametrize("case", list(LEAVES))
def test_samples(case):
    truth = load_file(SAMPLES / case / "hf" / "model.safetensors")
    if case.startswith("verl2"):  # a critic: one output, and its bias
        value = load_file(SAMPLES / case / "hf" / "value.safetensors")
        truth = {name: tensor for name, tensor in truth.items() if name != "lm_head.weight"}
        assert len(value) == 2
    found = read_dist(SAMPLES / case / LEAVES[case])
    unused = set(truth)
    for name, tensor in values(found).items():
        if case.startswith("verl2") and name.startswith("output_layer."):
            (expected,) = (tensor for key, tensor in value.items() if key.endswith(name.rpartition(".")[2]))
        else:
            names = hf_names(name)
            unused -= set(names)
            expected = torch.cat([truth[each] for each in names])
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensor = tensor[: len(expected)]  # the rest is padding
        if name.endswith("expert_bias"):  # in float32 whatever the model is in; the truth was rounded
            assert tensor.dtype == torch.float32
            tensor = tensor.bfloat16()
        assert tensor.dtype == expected.dtype, name
        assert tensor.shape == expected.shape, name
        if "linear_qkv.weight" in name or "linear_qkv.bias" in name:
            assert rows(tensor) == rows(expected), name
        else:
            assert raw(tensor) == raw(expected), name
    assert not unused


def test_what_a_sample_says_of_itself():
    found = read_dist(SAMPLES / "td_te_dsv3_tp2ep2pp2" / LEAVES["td_te_dsv3_tp2ep2pp2"])
    assert str(found.topology) == "4 ranks (tp=2 x pp=2)"
    assert found.settings["num_layers"] == 4
    assert found.settings["kv_lora_rank"] == 12
    assert set(found.left_out) == {"_extra_state", "rng_state"}
    assert not found.notes
    names = {file.path.name for file in found.files}
    assert {".metadata", "common.pt", "__0_0.distcp", "__3_1.distcp"} <= names


def test_an_optimizer_is_never_read(tmp_path):
    """Nor what is only its: the files may be gone."""
    case = "td_te_qwen3_tp2_optim"
    found = read_dist(SAMPLES / case / LEAVES[case])
    assert "12 entries" in found.left_out["optimizer"]
    assert not any("optimizer" in name for name in found.gathers)
    folder = save_dcp(tmp_path / "x", {"decoder.final_layernorm.weight": torch.ones(3), **OPTIMIZER})
    edited(folder, lambda metadata: [_lose(metadata, key) for key in list(metadata.storage_data)])
    found = read_dist(folder)
    assert list(found.gathers) == ["decoder.final_layernorm.weight"]
    assert set(found.left_out) == {"optimizer", "rng_state", "args", "epoch"}
    assert "3 entries" in found.left_out["optimizer"]


OPTIMIZER = {
    "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.ones(2, 1, 4),
    "chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.param": torch.ones(9),
    "optimizer.param_to_group_meta.module.decoder.final_layernorm.weight.lr": 0.1,
    "rng_state/shard_0.0_1.2": [1],
    "args": argparse.Namespace(seed=3),
    "epoch": 7,
}


def _lose(metadata: Any, key: Any) -> None:
    if key.fqn.startswith(("optimizer.", "chained_")):
        metadata.storage_data[key].relative_path = "__9_0.distcp"


# ---- each kind of name -------------------------------------------------------------------------------------


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def names_of(tmp_path: Path, state: dict[str, Any], cuts: Any = None) -> dict[str, torch.Tensor]:
    return values(read_dist(save_dcp(tmp_path / "dist", state, cuts)))


def test_stacked_and_numbered_names_side_by_side(tmp_path):
    """Decided for each name: a vision tower that is stacked, a decoder that is not, and the reverse."""
    fc2, experts, tower = numbered(2, 3, 4), numbered(2, 3, 4, 2), numbered(2, 5)
    one, mtp = numbered(3, 4, 2), numbered(2, 4, 2)
    state = {
        "decoder.layers.mlp.linear_fc2.weight": fc2,
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": experts,
        "decoder.layers.5.mlp.experts.experts.linear_fc1.weight": one,
        "decoder.layers.5.mlp.experts.experts.linear_fc2.bias": numbered(2, 4),
        "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc2.weight": mtp,
        "mtp.layers.0.eh_proj.weight": numbered(2, 4),
        "vision_model.decoder.layers.mlp.linear_fc2.bias": tower,
        "vision_model.blocks.1.norm1.weight": numbered(6),
        "decoder.layers.0.self_attention.in_proj.weight.query": numbered(4, 2),
        "output_layer.bias": numbered(1),
    }
    cuts = {
        "decoder.layers.mlp.linear_fc2.weight": [
            ((at, 0, half), (1, 3, 2)) for at in (0, 1) for half in (0, 2)
        ],
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": [
            ((0, 0, 0, 0), (1, 2, 4, 2)),  # GroupedMLP: two experts in a chunk
            ((0, 2, 0, 0), (1, 1, 4, 2)),
            ((1, 0, 0, 0), (1, 3, 2, 2)),
            ((1, 0, 2, 0), (1, 3, 2, 2)),
        ],
    }
    expected = {
        **{f"decoder.layers.{at}.mlp.linear_fc2.weight": fc2[at] for at in (0, 1)},
        **{
            f"decoder.layers.{at}.mlp.experts.local_experts.{e}.linear_fc1.weight": experts[at, e]
            for at in (0, 1)
            for e in range(3)
        },
        **{f"decoder.layers.5.mlp.experts.local_experts.{e}.linear_fc1.weight": one[e] for e in range(3)},
        **{
            f"decoder.layers.5.mlp.experts.local_experts.{e}.linear_fc2.bias": numbered(2, 4)[e]
            for e in (0, 1)
        },
        **{
            f"mtp.layers.0.transformer_layer.mlp.experts.local_experts.{e}.linear_fc2.weight": mtp[e]
            for e in (0, 1)
        },
        "mtp.layers.0.eh_proj.weight": numbered(2, 4),
        **{f"vision_model.decoder.layers.{at}.mlp.linear_fc2.bias": tower[at] for at in (0, 1)},
        "vision_model.blocks.1.norm1.weight": numbered(6),
        "decoder.layers.0.self_attention.in_proj.weight.query": numbered(4, 2),
        "output_layer.bias": numbered(1),
    }
    assert_same_tensors(names_of(tmp_path, state, cuts), expected)


@pytest.mark.parametrize(
    "prefix", ["module.", "model.", "language_model.", "model.module.", "module.language_model."]
)
def test_wrappers(tmp_path, prefix):
    state = {
        f"{prefix}decoder.layers.mlp.linear_fc2.weight": numbered(1, 2),
        f"{prefix}embedding.word_embeddings.weight": numbered(3, 2),
    }
    expected = {
        "decoder.layers.0.mlp.linear_fc2.weight": numbered(1, 2)[0],
        "embedding.word_embeddings.weight": numbered(3, 2),
    }
    assert_same_tensors(names_of(tmp_path, state), expected)


def test_gate_and_up_apart(tmp_path):
    """`singleton_local_shards`: experts by number, gate and up under names of their own."""
    name = "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight"
    dense = "decoder.layers.0.mlp.linear_fc1.bias"
    state = {
        f"{name}_v": numbered(2, 4) + 100,
        f"{name}_w": numbered(2, 4),
        f"{dense}_w": numbered(3),
        f"{dense}_v": -numbered(3),
        "decoder.layers.1.mlp.experts.experts.3.linear_fc2.weight": numbered(4, 2),
    }
    expected = {
        "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight": torch.cat(
            [numbered(2, 4), numbered(2, 4) + 100]
        ),
        dense: torch.cat([numbered(3), -numbered(3)]),
        "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight": numbered(4, 2),
    }
    assert_same_tensors(names_of(tmp_path, state), expected)


def test_torch_dcp(tmp_path):
    """FSDP2: the state dict of modules, nested; arguments and extra state beside it."""
    model = {
        "decoder.layers.0.mlp.linear_fc1.weight": numbered(4, 2),
        "decoder.layers.0.mlp.linear_fc1._extra_state": torch.empty(0),
        "mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight": numbered(2, 2),
    }
    args = argparse.Namespace(num_layers=1, tensor_model_parallel_size=1)
    state = {"model": model, "args": args, "iteration": 5, "optimizer": {"state": {"x": numbered(2)}}}
    found = read_dist(save_dcp(tmp_path / "dcp", state))
    expected = {
        "decoder.layers.0.mlp.linear_fc1.weight": numbered(4, 2),
        "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight": numbered(2, 2),
    }
    assert_same_tensors(values(found), expected)
    assert found.settings["num_layers"] == 1
    assert set(found.left_out) == {"_extra_state", "args", "iteration", "optimizer"}


def test_fsdp_dtensor(tmp_path):
    """Megatron-FSDP: gate and up apart, TE's numbers of experts behind the name."""
    layer = "module.decoder.layers.0."
    model = {
        f"{layer}mlp.experts.linear_fc1.weight3_w": numbered(2, 4),
        f"{layer}mlp.experts.linear_fc1.weight3_v": -numbered(2, 4),
        f"{layer}mlp.experts.linear_fc2.weight3": numbered(4, 2),
        f"{layer}mlp.experts.linear_fc2.bias12": numbered(4),
        f"{layer}mlp.shared_experts.linear_fc1.weight_w": numbered(1, 4),
        f"{layer}mlp.shared_experts.linear_fc1.weight_v": -numbered(1, 4),
        f"{layer}self_attention.in_proj.weight.z": numbered(2, 4),
    }
    found = read_dist(save_dcp(tmp_path / "dcp", {"model": model, "args": argparse.Namespace(swiglu=True)}))
    experts = "decoder.layers.0.mlp.experts.local_experts."
    expected = {
        f"{experts}3.linear_fc1.weight": torch.cat([numbered(2, 4), -numbered(2, 4)]),
        f"{experts}3.linear_fc2.weight": numbered(4, 2),
        f"{experts}12.linear_fc2.bias": numbered(4),
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight": torch.cat([numbered(1, 4), -numbered(1, 4)]),
        "decoder.layers.0.self_attention.in_proj.weight.z": numbered(2, 4),
    }
    assert_same_tensors(values(found), expected)


def test_zarr(tmp_path):
    """The same names as folders; SwiGLU in chunks of half a shard."""
    fc1, experts = numbered(2, 8, 4), numbered(1, 3, 4, 2)
    write_array(tmp_path / "decoder.layers.mlp.linear_fc1.weight", fc1.bfloat16(), (1, 2, 4))
    write_array(tmp_path / "decoder.layers.mlp.experts.experts.linear_fc2.weight", experts, (1, 1, 4, 1))
    write_array(tmp_path / "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", fc1, (1, 2, 4))
    (tmp_path / "decoder.layers.mlp.linear_fc1._extra_state").mkdir()
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    torch.save({"args": argparse.Namespace(num_layers=2)}, tmp_path / "common.pt")
    found = read_dist(tmp_path)
    expected = {
        **{f"decoder.layers.{at}.mlp.linear_fc1.weight": fc1[at].bfloat16() for at in (0, 1)},
        **{
            f"decoder.layers.0.mlp.experts.local_experts.{e}.linear_fc2.weight": experts[0, e]
            for e in range(3)
        },
    }
    assert_same_tensors(values(found), expected)
    assert found.settings["num_layers"] == 2
    assert set(found.left_out) == {"optimizer", "_extra_state"}


# ---- gate and up in turn -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_blocks_of_gate_and_up_in_turn(tmp_path, ranks, apart):
    """mcore's `moe_mlp_glu_interleave_size`: each rank's rows are alternating blocks, saved in halves."""
    block, per_rank = 2, 4  # rows of gate on a rank
    gate = numbered(per_rank * ranks, 3)
    up = gate + 1000
    first, second = [], []
    for rank in range(ranks):
        local = []
        for at in range(rank * per_rank, (rank + 1) * per_rank, block):
            local += [*gate[at : at + block], *up[at : at + block]]
        first += local[:per_rank]
        second += local[per_rank:]
    name = "decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight"
    halves = torch.stack(first), torch.stack(second)
    state: dict[str, Any] = {name: torch.cat(halves)}
    if apart:
        state = {f"{name}_w": halves[0], f"{name}_v": halves[1]}
    state["decoder.layers.0.mlp.linear_fc1.weight"] = numbered(8, 2)
    state["args"] = argparse.Namespace(
        swiglu=True,
        moe_grouped_gemm=True,
        moe_mlp_glu_interleave_size=block,
        tensor_model_parallel_size=4,
        expert_tensor_parallel_size=ranks,
    )
    expected = {
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight": torch.cat([gate, up]),
        "decoder.layers.0.mlp.linear_fc1.weight": numbered(8, 2),
    }
    assert_same_tensors(names_of(tmp_path, state), expected)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"moe_mlp_glu_interleave_size": 3}, InconsistentCheckpoint, "8 rows"),
        ({"moe_mlp_glu_interleave_size": "x"}, InconsistentCheckpoint, "expected a positive number"),
        ({"moe_mlp_glu_interleave_size": 0}, InconsistentCheckpoint, "expected a positive number"),
        (
            {"moe_shared_expert_glu_interleave_size": 2, "use_grouped_gemm_for_shared_expert": True},
            UnsupportedCheckpoint,
            "moe_shared_expert_glu_interleave_size",
        ),
    ],
)
def test_blocks_that_cannot_be_put_in_order(tmp_path, settings, kind, words):
    state = {
        "decoder.layers.0.mlp.experts.experts.linear_fc1.weight": numbered(1, 8, 2),
        "args": argparse.Namespace(swiglu=True, moe_grouped_gemm=True, **settings),
    }
    with pytest.raises(kind, match=words):
        names_of(tmp_path, state)


BLOCKS = {"swiglu": True, "moe_mlp_glu_interleave_size": 2}
STACK = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
SINGLE = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
IN_TURN = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])  # rows of [gate; up] where they are in blocks of 2


@pytest.mark.parametrize(
    ("key", "settings", "grouped"),
    [
        (STACK, {"moe_grouped_gemm": True}, True),
        (STACK, {"moe_grouped_gemm": True, "transformer_impl": "transformer_engine"}, True),
        (STACK, {"moe_grouped_gemm": False}, False),
        (STACK, {"moe_grouped_gemm": True, "transformer_impl": "local"}, False),
        (SINGLE, {}, False),
        (SINGLE, {"moe_grouped_gemm": True}, False),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight0", {}, True),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_only_grouped_experts_have_blocks(tmp_path, key, settings, grouped, apart):
    """mcore's SequentialMLP ignores `moe_mlp_glu_interleave_size`: its gate and up are halves."""
    fc1 = numbered(8, 2)
    stored = fc1[IN_TURN] if grouped else fc1
    if apart:
        key = key.replace("experts.experts.", "experts.experts.0.")
    elif key == STACK:
        stored = stored[None]
    state = {f"{key}_w": stored[:4], f"{key}_v": stored[4:]} if apart else {key: stored}
    state["args"] = argparse.Namespace(**BLOCKS, **settings)
    assert_same_tensors(names_of(tmp_path, state), {SINGLE: fc1})


def test_whether_experts_are_grouped_is_not_guessed(tmp_path):
    state = {STACK: numbered(1, 8, 2), "args": argparse.Namespace(**BLOCKS)}
    with pytest.raises(UnsupportedCheckpoint, match="moe_grouped_gemm is 'None'"):
        names_of(tmp_path, state)


@pytest.mark.parametrize("rows", [4, 8])
def test_gate_and_up_that_the_arguments_do_not_know(tmp_path, rows):
    """As many rows as columns of linear_fc2 are one projection, twice as many are gate and up."""
    gated = rows == 8
    layer = "decoder.layers.0.mlp.linear_fc"
    state: dict[str, Any] = {f"{layer}1.weight": numbered(rows, 2), f"{layer}2.weight": numbered(2, 4)}
    for number, said in enumerate((gated, None, not gated)):
        if said is not None:
            state["args"] = argparse.Namespace(swiglu=said, gated_linear_unit=False, quick_geglu=False)
        if said is (not gated):
            with pytest.raises(InconsistentCheckpoint, match=rf"args say {'not ' * gated}gated"):
                names_of(tmp_path / str(number), state)
        else:
            names_of(tmp_path / str(number), state)


# ---- the trainer's arguments -------------------------------------------------------------------------------

ONE = {"decoder.final_layernorm.weight": torch.ones(2)}
NORM = Chunks((2,), {(0,): torch.ones(2)})
ARGS = argparse.Namespace(hidden_size=2, pipeline_model_parallel_size=4)


def test_arguments_inside(tmp_path):
    """mcore 0.19 on: what common.pt held, in a list, as an object of the checkpoint."""
    common = io.BytesIO()
    torch.save([{"args": ARGS, "iteration": 3}], common)
    common.seek(0)
    save(tmp_path, {"decoder.final_layernorm.weight": NORM, "common_state/shard_0_1": common})
    found = read_dist(tmp_path)
    assert found.settings["hidden_size"] == 2
    assert found.topology.mesh == (("pp", 4),)
    assert found.topology.world_size == 4
    assert set(found.left_out) == {"common_state"}


def test_arguments_of_megatron_bridge(tmp_path):
    folder = save_dcp(tmp_path / "x", ONE)
    torch.save({"iteration": 3}, folder / "common.pt")
    (folder / "run_config.yaml").write_text("model:\n  kv_channels: 7\n  num_moe_experts: 4\n")
    found = read_dist(folder)
    assert found.settings["kv_channels"] == 7
    assert found.settings["num_experts"] == 4
    assert folder / "run_config.yaml" in {file.path for file in found.files}, "a resumed merge checks it"


VERL = {
    "num_moe_experts": 4,
    "num_query_groups": 2,
    "layernorm_zero_centered_gamma": True,
    "params_dtype": "torch.bfloat16",
    "attention_backend": "AttnBackend.flash",
    "moe_layer_freq": [0, 1],
    "gated_linear_unit": True,
}
"""Spelled as `_to_json_safe_config_value` of verl's megatron_checkpoint_manager.py does."""


@pytest.mark.parametrize("inner", ["actor/dist_ckpt", "actor/model/dist_ckpt"])  # verl up to 0.8, from 0.9
def test_the_config_that_verl_leaves_beside(tmp_path, inner, monkeypatch):
    folder = save_dcp(tmp_path / inner, ONE)
    path = tmp_path / "actor" / "transformer_config.json"
    path.write_text(json.dumps(VERL))
    monkeypatch.chdir(folder)
    for each in (folder, Path()):
        found = read_dist(each)
        expected = {"num_experts": 4, "apply_layernorm_1p": True, "group_query_attention": True}
        expected["params_dtype"] = "bfloat16"
        assert {name: found.settings.get(name) for name in expected} == expected
        assert path in {file.path for file in found.files}, "a resumed merge checks it"
    (folder / "run_config.yaml").write_text("model:\n  num_moe_experts: 8\n")
    assert read_dist(folder).settings["num_experts"] == 8, "what lies with the tensors goes first"
    (folder / "run_config.yaml").unlink()
    path.write_text('{"num_moe_')
    with pytest.raises(DamagedFile, match=r"transformer_config\.json: not the JSON that verl writes"):
        read_dist(folder)


def test_a_config_of_verl_beside_another_folder(tmp_path):
    folder = save_dcp(tmp_path / "actor" / "x", ONE)
    (tmp_path / "actor" / "transformer_config.json").write_text(json.dumps(VERL))
    assert read_dist(folder).settings == {}


def test_no_arguments(tmp_path):
    folder = save_dcp(tmp_path / "x", ONE)
    assert read_dist(folder).settings == {}
    torch.save({}, folder / "common.pt")
    assert read_dist(folder).settings == {}


def test_damaged_arguments(tmp_path):
    folder = save_dcp(tmp_path / "x", ONE)
    torch.save([1], folder / "common.pt")
    with pytest.raises(DamagedFile, match=r"common\.pt"):
        read_dist(folder)
    (folder / "common.pt").write_bytes(b"")
    with pytest.raises(LazymergeError, match=r"common\.pt"):
        read_dist(folder)


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["linear_qkv.adapter.linear_in.weight", "linear_qkv.to_wrap.weight", "linear_qkv.lora_a.weight"],
)
def test_adapters(tmp_path, name):
    key = f"decoder.layers.self_attention.{name}"
    with pytest.raises(UnsupportedCheckpoint, match=re.escape(key)):
        names_of(tmp_path, {**ONE, key: torch.ones(1, 2)})


def test_no_model_beside_weights_in_huggingface(tmp_path):
    """verl with mbridge."""
    folder = save_dcp(tmp_path / "actor" / "dist_ckpt", OPTIMIZER)
    with pytest.raises(
        UnsupportedCheckpoint, match="holds no model, only args, epoch, optimizer, rng_state"
    ) as caught:
        read_dist(folder)
    assert "huggingface/" in caught.value.hint
    (tmp_path / "actor" / "huggingface").mkdir()
    (tmp_path / "actor" / "huggingface" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedCheckpoint) as caught:
        read_dist(folder)
    assert f"form already: {tmp_path / 'actor' / 'huggingface'}" in caught.value.hint


def test_the_extra_folder_says_where_the_model_is():
    actor = SAMPLES / "verl2_te_qwen2_value" / "ckpt" / "global_step_100" / "actor"
    with pytest.raises(UnsupportedCheckpoint, match="holds no model, only rng_state") as caught:
        read_dist(actor / "extra" / "dist_ckpt")
    assert caught.value.hint == f"give {actor / 'model' / 'dist_ckpt'}"


def test_half_of_a_pair(tmp_path):
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    with pytest.raises(IncompleteCheckpoint, match=f"{name}_v: not in the checkpoint"):
        names_of(tmp_path, {f"{name}_w": numbered(2, 2)})


@pytest.mark.parametrize(
    "more",
    [
        {"_v": numbered(3, 2)},
        {"_v": numbered(2, 2).bfloat16()},
        {"_v": numbered(2, 2), "": numbered(4, 2)},
    ],
)
def test_pairs_that_do_not_fit(tmp_path, more):
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    state = {f"{name}_w": numbered(2, 2), **{name + end: tensor for end, tensor in more.items()}}
    with pytest.raises(InconsistentCheckpoint, match=re.escape(f"{name}: gate of shape (2, 2)")):
        names_of(tmp_path, state)


def test_two_names_for_one_tensor(tmp_path):
    state = {
        "decoder.layers.mlp.linear_fc2.weight": numbered(2, 3),
        "module.decoder.layers.1.mlp.linear_fc2.weight": numbered(3),
    }
    with pytest.raises(
        InconsistentCheckpoint, match=r"both hold decoder\.layers\.1\.mlp\.linear_fc2\.weight"
    ):
        names_of(tmp_path, state)


def test_a_stack_without_its_axes(tmp_path):
    key = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    with pytest.raises(UnsupportedCheckpoint, match=f"{key}: .* expected 2 leading axes"):
        names_of(tmp_path, {key: numbered(2)})


def test_an_object_under_the_name_of_a_weight(tmp_path):
    """Left out, it would be missed by nobody where names are not checked."""
    folder = save_dcp(tmp_path / "x", {**ONE, "output_layer.weight": "lost"})
    with pytest.raises(IncompleteCheckpoint, match=r"output_layer\.weight: is no tensor"):
        read_dist(folder)


def test_a_zarr_array_that_has_lost_its_header(tmp_path):
    for name in ("decoder.final_layernorm.weight", "output_layer.weight"):
        write_array(tmp_path / name, torch.ones(3), (3,))
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert len(read_dist(tmp_path).gathers) == 2
    (tmp_path / "output_layer.weight" / ".zarray").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"output_layer\.weight: is no tensor"):
        read_dist(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight",
        "decoder.layers.0.mlp.shared_experts.gate_weight",
        "decoder.layers.0.mlp.router.expert_bias",
        "decoder.layers.0.self_attention.A_log",
        "decoder.layers.0.self_attention.in_proj.weight.query",
    ],
)
def test_a_weight_of_any_name_that_has_lost_its_data(tmp_path, name):
    folder = save_dcp(tmp_path / "x", {**ONE, f"{name}/shard_0_1": "lost"})
    with pytest.raises(IncompleteCheckpoint, match=re.escape(name) + ".*: is no tensor"):
        read_dist(folder)
    write_array(tmp_path / "zarr" / "decoder.final_layernorm.weight", torch.ones(3), (3,))
    (tmp_path / "zarr" / name).mkdir()
    with pytest.raises(IncompleteCheckpoint, match=re.escape(name) + ": is no tensor"):
        read_dist(tmp_path / "zarr")


def test_common_state_that_has_to_be_there(tmp_path):
    """Without it, blocks of gate and up stay as they are, and norms that are centred at zero."""
    case = SAMPLES / "td_te_qwen3moe_ep2grouped" / LEAVES["td_te_qwen3moe_ep2grouped"]
    shutil.copytree(case, tmp_path, dirs_exist_ok=True)
    (tmp_path / "common.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"common\.pt: not there, though metadata\.json"):
        read_dist(tmp_path)
    (tmp_path / "common.pt").mkdir()
    with pytest.raises(SourceError, match=r"common\.pt: is a folder"):
        read_dist(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 3}, "4 decoder layers, expected 3 (num_layers)"),
        ({"num_layers": 28}, "4 decoder layers, expected 28 (num_layers)"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"ffn_hidden_size": 56}, "ffn_hidden_size"),
        ({"moe_ffn_hidden_size": 32}, "moe_ffn_hidden_size"),
        ({"moe_ffn_hidden_size": None}, "ffn_hidden_size"),
        ({"moe_shared_expert_intermediate_size": 24}, "moe_shared_expert_intermediate_size"),
        ({"num_experts": 8}, "4 experts in the files, expected 8"),
        ({"apply_layernorm_1p": "True"}, "apply_layernorm_1p is 'True', expected True or False"),
        ({"rotary_interleaved": 1}, "rotary_interleaved is '1'"),
        ({"moe_grouped_gemm": 1}, "moe_grouped_gemm is '1'"),
        ({"swiglu": False}, "gate and up, where args say not gated"),
    ],
)
def test_arguments_of_another_model(tmp_path, changes, words):
    case = SAMPLES / "td_te_dsv3_tp2ep2pp2" / LEAVES["td_te_dsv3_tp2ep2pp2"]
    shutil.copytree(case, tmp_path, dirs_exist_ok=True)
    read_dist(tmp_path)
    change(tmp_path / "common.pt", lambda common: vars(common["args"]).update(changes))
    with pytest.raises((InconsistentCheckpoint, IncompleteCheckpoint), match=re.escape(words)):
        read_dist(tmp_path)


def test_a_common_file_of_another_model(tmp_path):
    case = SAMPLES / "td_te_qwen3moe_ep2grouped" / LEAVES["td_te_qwen3moe_ep2grouped"]
    shutil.copytree(case, tmp_path, dirs_exist_ok=True)
    shutil.copy(SAMPLES / "td_te_dsv3_tp2ep2pp2" / LEAVES["td_te_dsv3_tp2ep2pp2"] / "common.pt", tmp_path)
    with pytest.raises(InconsistentCheckpoint, match=r"linear_qkv.*: args say multi_latent_attention = True"):
        read_dist(tmp_path)  # of the same sizes, as it happens


def test_zarr_without_its_metadata_is_known_by_its_names(tmp_path):
    for name in ("decoder.final_layernorm.weight", "embedding.word_embeddings.weight"):
        write_array(tmp_path / name, torch.ones(3), (3,))
    assert FORMAT.recognises(tmp_path)
    for path in tmp_path.iterdir():
        path.rename(tmp_path / f"x.{path.name}")
    assert not FORMAT.recognises(tmp_path)


def test_an_empty_checkpoint_holds_nothing(tmp_path):
    folder = save_dcp(tmp_path / "x", {"a": torch.ones(1)})
    edited(folder, lambda metadata: (metadata.state_dict_metadata.clear(), metadata.storage_data.clear()))
    with pytest.raises(UnsupportedCheckpoint, match="holds no model, nor anything else"):
        read_dist(folder)
