"""Megatron's `torch` layout: real samples, and grids written here as Megatron-LM's source writes them.

megatron/training/checkpointing.py: ``get_checkpoint_name`` has the folders' names, ``generate_state_dict``
what is in a file. The cases of shared/CASES.md: "stages" and "MoE".
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lazymerge.compute import read
from lazymerge.errors import (
    AmbiguousCheckpoint,
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    SourceError,
    UnsupportedCheckpoint,
)
from lazymerge.formats.megatron.found import Found
from lazymerge.formats.megatron.ranks import holds_ranks, read_ranks

SAMPLES = Path(__file__).parent / "data" / "megatron"
H, F, V = 8, 6, 16  # hidden, feed-forward, vocabulary of the grids written here

Model = dict[str, Any]


def values(found: Found) -> dict[str, torch.Tensor]:
    return {name: read(gather) for name, gather in found.gathers.items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


# ------------------------------------------------------------------------------ Megatron's own files


def sample(name: str) -> tuple[Found, dict[str, torch.Tensor]]:
    folder = SAMPLES / name
    return read_ranks(folder / "ckpt" / "iter_0000100"), load_file(folder / "hf" / "model.safetensors")


def qkv_rows(truth: dict[str, torch.Tensor], layer: str, groups: int, head: int) -> torch.Tensor:
    """The published order: for each query group its queries, its key, its value."""
    q, k, v = (truth[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv")
    heads = q.shape[0] // head // groups
    rows = []
    for group in range(groups):
        rows.append(q[group * heads * head : (group + 1) * heads * head])
        rows += [part[group * head : (group + 1) * head] for part in (k, v)]
    return torch.cat(rows)


def fc1_rows(truth: dict[str, torch.Tensor], mlp: str) -> torch.Tensor:
    return torch.cat([truth[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")])


def layer_names(*rest: str) -> set[str]:
    return {f"decoder.layers.{layer}.{name}" for layer in range(4) for name in rest}


ENDS = {"embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"}


@pytest.mark.parametrize("name", ["torch_local_llama_vpp", "torch_oldnames_llama_tp2pp2"])
def test_llama_of_mcore_with_virtual_stages_and_of_the_models_before(name: str) -> None:
    found, truth = sample(name)
    assert set(found.gathers) == ENDS | layer_names(
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    )
    got = values(found)
    vocab = truth["model.embed_tokens.weight"].shape[0]
    assert same(got["embedding.word_embeddings.weight"][:vocab], truth["model.embed_tokens.weight"])
    assert same(got["output_layer.weight"][:vocab], truth["lm_head.weight"])
    assert same(got["decoder.final_layernorm.weight"], truth["model.norm.weight"])
    for number in range(4):
        mine, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
        for here, there in {
            "input_layernorm": "input_layernorm",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "self_attention.linear_proj": "self_attn.o_proj",
            "mlp.linear_fc2": "mlp.down_proj",
        }.items():
            assert same(got[f"{mine}.{here}.weight"], truth[f"{theirs}.{there}.weight"])
        assert same(got[f"{mine}.mlp.linear_fc1.weight"], fc1_rows(truth, f"{theirs}.mlp"))
        assert same(
            got[f"{mine}.self_attention.linear_qkv.weight"], qkv_rows(truth, theirs, groups=2, head=8)
        )
    assert found.settings["num_layers"] == 4
    assert found.settings["params_dtype"] == "bfloat16"
    assert not found.notes


def test_qwen3_moe_over_tensor_pipeline_and_expert_ranks_with_its_diagonal_alone() -> None:
    found, truth = sample("torch_te_qwen3moe_tp2ep2pp2")
    experts = [
        f"mlp.experts.local_experts.{expert}.linear_fc{n}.weight" for expert in range(4) for n in (1, 2)
    ]
    assert set(found.gathers) == ENDS | layer_names(
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        *experts,
    )
    got = values(found)
    for number in range(4):
        mine, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
        assert same(got[f"{mine}.mlp.router.weight"], truth[f"{theirs}.mlp.gate.weight"])
        assert same(
            got[f"{mine}.self_attention.q_layernorm.weight"], truth[f"{theirs}.self_attn.q_norm.weight"]
        )
        assert same(
            got[f"{mine}.self_attention.linear_qkv.weight"], qkv_rows(truth, theirs, groups=2, head=16)
        )
        for expert in range(4):
            at, there = f"{mine}.mlp.experts.local_experts.{expert}", f"{theirs}.mlp.experts.{expert}"
            assert same(got[f"{at}.linear_fc1.weight"], fc1_rows(truth, there))
            assert same(got[f"{at}.linear_fc2.weight"], truth[f"{there}.down_proj.weight"])
    assert str(found.topology) == "4 ranks (tp=2 x pp=2 x ep=2)"
    assert len(found.files) == 4


def test_what_the_ranks_hold_twice_can_be_compared() -> None:
    found, _ = sample("torch_te_qwen3moe_tp2ep2pp2")
    copies = list(found.copies())
    assert {copy.name for copy in copies} >= {"decoder.final_layernorm.weight"} | layer_names(
        "mlp.router.weight", "self_attention.linear_qkv.layer_norm_weight"
    )
    for copy in copies:
        assert copy.used.source is not copy.other.source
        one, other = (region.source.read(region.offset, region.extent) for region in (copy.used, copy.other))
        assert one == other


# ---------------------------------------------------------------------------------- grids made here


def arguments(**others: Any) -> argparse.Namespace:
    plain = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "num_layers": None,
        "num_experts": None,
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
    }
    return argparse.Namespace(**(plain | others))


def save(root: Path, name: str, args: argparse.Namespace | None, *chunks: Model, **more: Any) -> None:
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 100, **more}
    if args is None:
        del state["args"]
    if len(chunks) == 1:
        state["model"] = chunks[0]
    else:
        state |= {f"model{number}": chunk for number, chunk in enumerate(chunks)}
    (root / name).mkdir(parents=True, exist_ok=True)
    torch.save(state, root / name / "model_optim_rng.pt")


def filled(shape: tuple[int, ...], value: float) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.bfloat16)


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def chunk(*layers: int, first: bool = False, last: bool = False) -> Model:
    """A stage's tensors with local numbers; each layer is filled with its global number."""
    model: Model = {}
    if first:
        model["embedding.word_embeddings.weight"] = filled((V, H), 100)
    for local, number in enumerate(layers):
        layer = f"decoder.layers.{local}"
        model[f"{layer}.self_attention.linear_qkv.layer_norm_weight"] = filled((H,), number)
        model[f"{layer}.self_attention.linear_qkv._extra_state"] = io.BytesIO(b"state")
        model[f"{layer}.mlp.linear_fc1.weight"] = filled((2 * F, H), number)
        model[f"{layer}.mlp.linear_fc1._extra_state"] = b""
        model[f"{layer}.mlp.linear_fc2.weight"] = filled((H, F), number)
        model[f"{layer}.mlp.linear_fc2._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    if last:
        model["decoder.final_layernorm.weight"] = filled((H,), 101)
        model["output_layer.weight"] = filled((V, H), 102)
        model["output_layer._extra_state"] = None
    return model


def stages(root: Path, **others: Any) -> None:
    """Five layers over PP=2, VPP=2: virtual stage 0 of both ranks comes before virtual stage 1."""
    settings = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers": 5,
        **others,
    }
    save(root, "mp_rank_00_000", arguments(**settings), chunk(0, first=True), chunk(3), optimizer={"x": 1})
    save(root, "mp_rank_00_001", arguments(**settings), chunk(1, 2), chunk(4, last=True))


def layer_values(found: Found, rest: str) -> dict[str, float]:
    """What each layer's tensor is filled with; its elements are all equal."""
    tensors = {name: tensor for name, tensor in values(found).items() if name.endswith(rest)}
    assert all(torch.all(tensor == tensor.flatten()[0]) for tensor in tensors.values())
    return {name: float(tensor.flatten()[0]) for name, tensor in tensors.items()}


def test_layers_of_interleaved_stages_get_their_global_numbers(tmp_path: Path) -> None:
    stages(tmp_path)
    found = read_ranks(tmp_path)
    for rest in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "linear_qkv.layer_norm_weight"):
        expected = {
            f"decoder.layers.{n}.{'self_attention.' if 'qkv' in rest else ''}{rest}": n for n in range(5)
        }
        assert layer_values(found, rest) == expected
    assert len(found.gathers) == 5 * 3 + 3
    assert not any("_extra_state" in name for name in [*found.gathers, *found.left_out])
    assert found.left_out == {"optimizer": "beside the model"}
    (note,) = found.notes
    assert note.level == "warning" and "none of the 2 folders was renamed" in note.text


def test_a_virtual_stage_that_is_absent_is_refused(tmp_path: Path) -> None:
    stages(tmp_path)
    args = arguments(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, num_layers=5)
    save(tmp_path, "mp_rank_00_001", args, chunk(1, 2))
    with pytest.raises(IncompleteCheckpoint, match=r"mp_rank_00_001.*1 virtual stages, expected 2"):
        read_ranks(tmp_path)
    save(tmp_path, "mp_rank_00_001", args, model1=chunk(4))
    with pytest.raises(IncompleteCheckpoint, match="no model0"):
        read_ranks(tmp_path)


def test_fewer_or_more_layers_than_the_arguments_say_are_refused(tmp_path: Path) -> None:
    stages(tmp_path, num_layers=6)
    with pytest.raises(IncompleteCheckpoint, match=r"5 decoder layers, expected 6 \(num_layers\)"):
        read_ranks(tmp_path)
    stages(tmp_path, num_layers=4)
    with pytest.raises(InconsistentCheckpoint, match=r"5 decoder layers, expected 4 \(num_layers\)"):
        read_ranks(tmp_path)


def test_a_gap_in_the_layers_of_a_stage_is_refused(tmp_path: Path) -> None:
    model = chunk(0, 1, 2, first=True, last=True)
    save(tmp_path, "mp_rank_00", arguments(), {k: v for k, v in model.items() if "layers.1." not in k})
    with pytest.raises(IncompleteCheckpoint, match="decoder layer 2 and no layer 1"):
        read_ranks(tmp_path)


def test_stages_without_layers_count_for_nothing(tmp_path: Path) -> None:
    args = arguments(pipeline_model_parallel_size=3, num_layers=2)
    save(tmp_path, "mp_rank_00_000", args, chunk(first=True))
    save(tmp_path, "mp_rank_00_001", args, chunk(0, 1))
    save(tmp_path, "mp_rank_00_002", args, chunk(last=True))
    found = read_ranks(tmp_path)
    assert layer_values(found, "fc2.weight") == {
        f"decoder.layers.{n}.mlp.linear_fc2.weight": n for n in range(2)
    }
    assert set(found.gathers) >= ENDS


@pytest.mark.parametrize("absent", ["mp_rank_00_000", "mp_rank_00_001"])
def test_a_pipeline_rank_that_is_absent_is_named(tmp_path: Path, absent: str) -> None:
    stages(tmp_path)
    shutil.rmtree(tmp_path / absent)
    with pytest.raises(IncompleteCheckpoint, match=f"{absent} is missing"):
        read_ranks(tmp_path)


def test_a_tensor_rank_that_is_absent_is_named_and_so_is_one_with_only_its_optimizer(tmp_path: Path) -> None:
    args = arguments(tensor_model_parallel_size=2)
    save(tmp_path, "mp_rank_00", args, chunk(0, first=True, last=True))
    (tmp_path / "mp_rank_01").mkdir()
    (tmp_path / "mp_rank_01" / "distrib_optim.pt").write_bytes(b"never opened")
    with pytest.raises(IncompleteCheckpoint, match="mp_rank_01 is missing"):
        read_ranks(tmp_path)


# ------------------------------------------------------------------------- what a folder's name means


def two(root: Path, expert: bool) -> None:
    if expert:
        args = arguments(expert_model_parallel_size=2, num_experts=4, expert_tensor_parallel_size=1)
        for ep in range(2):
            save(root, f"mp_rank_00_{ep:03d}", args, moe(ep, 2, sequential))
    else:
        args = arguments(pipeline_model_parallel_size=2)
        save(root, "mp_rank_00_000", args, chunk(0, first=True))
        save(root, "mp_rank_00_001", args, chunk(1, last=True))


def sequential(local: int, number: int) -> Model:
    return {
        f"experts.local_experts.{local}.linear_fc1.weight": filled((2 * F, H), number),
        f"experts.local_experts.{local}.linear_fc2.weight": filled((H, F), number),
    }


def grouped(local: int, number: int) -> Model:
    return {
        f"experts.linear_fc1.weight{local}": filled((2 * F, H), number),
        f"experts.linear_fc2.weight{local}": filled((H, F), number),
        "experts.linear_fc1._extra_state": io.BytesIO(),
    }


def moe(ep: int, count: int, write: Callable[[int, int], Model]) -> Model:
    """One layer of a rank with `count` experts, each filled with its number in the whole model."""
    model: Model = {"decoder.layers.0.mlp.router.weight": filled((4, H), 50)}
    for local in range(count):
        for name, value in write(local, ep * count + local).items():
            model[f"decoder.layers.0.mlp.{name}"] = value
    return model


def test_the_same_folder_names_are_pipeline_or_expert_ranks_as_the_arguments_say(tmp_path: Path) -> None:
    two(tmp_path / "pp", expert=False)
    two(tmp_path / "ep", expert=True)
    pipeline, expert = read_ranks(tmp_path / "pp"), read_ranks(tmp_path / "ep")
    assert pipeline.topology.mesh == (("pp", 2),)
    assert "decoder.layers.1.mlp.linear_fc2.weight" in pipeline.gathers
    assert expert.topology.mesh == (("ep", 2),)
    assert "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight" in expert.gathers


def test_without_arguments_two_numbers_are_ambiguous_and_three_are_not(tmp_path: Path) -> None:
    for pp in range(2):
        save(tmp_path / "two", f"mp_rank_00_{pp:03d}", None, chunk(pp))
        save(tmp_path / "three", f"mp_rank_00_{pp:03d}_000", None, chunk(pp))
    with pytest.raises(AmbiguousCheckpoint, match="a pipeline or an expert rank"):
        read_ranks(tmp_path / "two")
    found = read_ranks(tmp_path / "three")
    assert layer_values(found, "fc2.weight") == {
        f"decoder.layers.{n}.mlp.linear_fc2.weight": n for n in range(2)
    }
    assert found.settings == {}
    assert [note.level for note in found.notes] == ["warning"]


@pytest.mark.parametrize(
    ("names", "others"),
    [
        (["mp_rank_00", "mp_rank_01"], {"pipeline_model_parallel_size": 2}),
        (["mp_rank_00", "mp_rank_02"], {"tensor_model_parallel_size": 2}),
        (["mp_rank_00_000", "mp_rank_00_001"], {"tensor_model_parallel_size": 2}),
        (
            ["mp_rank_00_000", "mp_rank_00_001"],
            {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
        ),
    ],
)
def test_names_that_the_arguments_contradict_are_refused(
    tmp_path: Path, names: list[str], others: dict[str, int]
) -> None:
    for name in names:
        save(tmp_path, name, arguments(**others), chunk(0))
    with pytest.raises(InconsistentCheckpoint, match=r"mp_rank_0\d(_00\d)?: no rank of a model over"):
        read_ranks(tmp_path)


@pytest.mark.parametrize("size", [0, -1, "2", True, [2]])
def test_sizes_that_are_no_numbers_are_refused(tmp_path: Path, size: object) -> None:
    save(tmp_path, "mp_rank_00", arguments(tensor_model_parallel_size=size), chunk(0))
    with pytest.raises(InconsistentCheckpoint, match="tensor_model_parallel_size"):
        read_ranks(tmp_path)


def test_absurd_sizes_cost_nothing(tmp_path: Path) -> None:
    huge = 10**15
    save(tmp_path, "mp_rank_00", arguments(tensor_model_parallel_size=huge), chunk(0))
    with pytest.raises(IncompleteCheckpoint, match="mp_rank_01 is missing"):
        read_ranks(tmp_path)
    save(tmp_path, "mp_rank_00", arguments(num_experts=huge), moe(0, 2, grouped))
    with pytest.raises(IncompleteCheckpoint, match=r"local_experts\.2"):
        read_ranks(tmp_path)
    flat = {"decoder.layers.0.mlp.experts.weight1": torch.zeros(1).expand(H, huge)}
    save(tmp_path, "mp_rank_00", arguments(num_experts=huge), flat)
    with pytest.raises(UnsupportedCheckpoint, match="experts in a layer"):
        read_ranks(tmp_path)


def test_files_of_two_runs_or_steps_are_refused(tmp_path: Path) -> None:
    args = {"pipeline_model_parallel_size": 2}
    save(tmp_path, "mp_rank_00_000", arguments(**args), chunk(0, first=True))
    save(tmp_path, "mp_rank_00_001", arguments(**args, tensor_model_parallel_size=2), chunk(1))
    with pytest.raises(InconsistentCheckpoint, match="tensor_model_parallel_size = 2, and 1 in"):
        read_ranks(tmp_path)
    save(tmp_path, "mp_rank_00_001", arguments(**args), chunk(1), iteration=101)
    with pytest.raises(InconsistentCheckpoint, match="iteration 101"):
        read_ranks(tmp_path)


def test_only_folders_with_a_model_are_ours(tmp_path: Path) -> None:
    assert not holds_ranks(tmp_path)
    assert not holds_ranks(tmp_path / "absent")
    (tmp_path / "mp_rank_00").mkdir()
    assert not holds_ranks(tmp_path)
    with pytest.raises(NotACheckpoint):
        read_ranks(tmp_path)
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"PK\x03\x04 cut")
    assert holds_ranks(tmp_path)
    with pytest.raises((DamagedFile, NotACheckpoint), match=r"mp_rank_00/model_optim_rng\.pt"):
        read_ranks(tmp_path)


# ------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("write", [sequential, grouped])
def test_experts_of_all_ranks_get_their_global_numbers(
    tmp_path: Path, write: Callable[[int, int], Model]
) -> None:
    args = arguments(expert_model_parallel_size=2, num_experts=4)
    for ep in range(2):
        save(tmp_path, f"mp_rank_00_{ep:03d}", args, moe(ep, 2, write))
    found = read_ranks(tmp_path)
    for rest in ("linear_fc1.weight", "linear_fc2.weight"):
        assert layer_values(found, rest) == {
            f"decoder.layers.0.mlp.experts.local_experts.{number}.{rest}": number for number in range(4)
        }
    assert [copy.name for copy in found.copies()] == ["decoder.layers.0.mlp.router.weight"]


@pytest.mark.parametrize("said", [4, None])
@pytest.mark.parametrize("lost", ["1", "0"])
def test_an_expert_that_is_absent_is_named(tmp_path: Path, lost: str, said: int | None) -> None:
    args = arguments(expert_model_parallel_size=2, num_experts=said)
    for ep in range(2):
        model = moe(ep, 2, grouped)
        if ep == 1:
            model = {name: value for name, value in model.items() if not name.endswith(f"weight{lost}")}
        save(tmp_path, f"mp_rank_00_{ep:03d}", args, model)
    with pytest.raises(IncompleteCheckpoint, match=rf"local_experts\.{2 + int(lost)}\.linear_fc1\.weight"):
        read_ranks(tmp_path)


def test_more_experts_than_the_arguments_say_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "mp_rank_00", arguments(num_experts=2), moe(0, 3, grouped))
    with pytest.raises(InconsistentCheckpoint, match="3 experts in the files, expected 2"):
        read_ranks(tmp_path)


def test_an_expert_rank_that_is_absent_is_named(tmp_path: Path) -> None:
    two(tmp_path, expert=True)
    shutil.rmtree(tmp_path / "mp_rank_00_001")
    with pytest.raises(IncompleteCheckpoint, match=r"mp_rank_\*_001 is missing"):
        read_ranks(tmp_path)


def wholes(experts: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """fc1 as [gate; up] and fc2 of every expert, all values different."""
    fc1 = [numbered(2 * F, H, start=1000 * number) for number in range(experts)]
    fc2 = [numbered(H, F, start=1000 * number + 500) for number in range(experts)]
    return fc1, fc2


def shard_fc1(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Column parallel with a gated unit: each rank has its rows of the gate, then its rows of up."""
    gate, up = whole[:F], whole[F:]
    return torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])


def check_experts(found: Found, fc1: list[torch.Tensor], fc2: list[torch.Tensor]) -> None:
    got = values(found)
    for number in range(len(fc1)):
        at = f"decoder.layers.0.mlp.experts.local_experts.{number}"
        assert same(got[f"{at}.linear_fc1.weight"], fc1[number])
        assert same(got[f"{at}.linear_fc2.weight"], fc2[number])
    assert sum(".experts." in name for name in got) == 2 * len(fc1)


def test_experts_over_expert_tensor_ranks_in_the_old_grouped_layers(tmp_path: Path) -> None:
    """megatron/core/transformer/moe/experts.py (GroupedMLP, core 0.8 to 0.16): x @ weight1, transposed."""
    fc1, fc2 = wholes(4)
    args = arguments(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        num_experts=4,
    )
    for ep in range(2):
        for tp in range(2):
            mine = range(2 * ep, 2 * ep + 2)
            weight1 = torch.stack([shard_fc1(fc1[n], tp, 2).T for n in mine])  # (E, hidden, 2f)
            weight2 = torch.stack([fc2[n].chunk(2, dim=1)[tp].T for n in mine])  # (E, f, hidden)
            model = {
                "decoder.layers.0.mlp.experts.weight1": weight1.contiguous().view(H, -1),
                "decoder.layers.0.mlp.experts.weight2": weight2.contiguous().view(-1, H),
            }
            save(tmp_path, f"mp_rank_{tp:02d}_{ep:03d}", args, model)
    check_experts(read_ranks(tmp_path), fc1, fc2)


@pytest.mark.parametrize("full", [True, False])
def test_without_expert_tensor_ranks_a_diagonal_is_enough(tmp_path: Path, full: bool) -> None:
    fc1, fc2 = wholes(4)
    proj = numbered(H, H)
    args = arguments(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        num_experts=4,
    )
    for tp in range(2):
        for ep in range(2):
            if full or tp == ep:
                model = {"decoder.layers.0.self_attention.linear_proj.weight": proj.chunk(2, dim=1)[tp]}
                for local in range(2):
                    at = "decoder.layers.0.mlp.experts"
                    model[f"{at}.linear_fc1.weight{local}"] = fc1[2 * ep + local]
                    model[f"{at}.linear_fc2.weight{local}"] = fc2[2 * ep + local]
                save(tmp_path, f"mp_rank_{tp:02d}_{ep:03d}", args, model)
    found = read_ranks(tmp_path)
    check_experts(found, fc1, fc2)
    assert same(values(found)["decoder.layers.0.self_attention.linear_proj.weight"], proj)
    assert len(list(found.copies())) == (10 if full else 0)  # of 2 projections and 8 experts' matrices


def test_experts_as_one_tensor_with_biases(tmp_path: Path) -> None:
    """moe_single_grouped_weight and moe_single_grouped_bias (core 0.20): a leading expert axis."""
    fc1, fc2 = wholes(3)
    at = "decoder.layers.0.mlp.experts"
    model = {
        f"{at}.linear_fc1.weight": torch.stack(fc1),
        f"{at}.linear_fc1.bias": numbered(3, 2 * F),
        f"{at}.linear_fc2.weight": torch.stack(fc2),
    }
    save(tmp_path, "mp_rank_00", arguments(num_experts=3), model)
    got = values(read_ranks(tmp_path))
    for number in range(3):
        one = f"{at}.local_experts.{number}"
        assert same(got[f"{one}.linear_fc1.weight"], fc1[number])
        assert same(got[f"{one}.linear_fc2.weight"], fc2[number])
        assert same(got[f"{one}.linear_fc1.bias"], numbered(3, 2 * F)[number])


def test_blocks_of_gate_and_up_in_turn_become_gate_and_up(tmp_path: Path) -> None:
    """moe_mlp_glu_interleave_size (core 0.17): TEGroupedMLP takes its rows as (n, 2, size)."""
    fc1, fc2 = wholes(2)
    args = arguments(
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        num_experts=2,
        moe_mlp_glu_interleave_size=1,
    )
    for tp in range(2):
        model = {}
        for number in range(2):
            gate, up = shard_fc1(fc1[number], tp, 2).chunk(2)
            rows = [row for pair in zip(gate, up, strict=True) for row in pair]
            at = "decoder.layers.0.mlp.experts"
            model[f"{at}.linear_fc1.weight{number}"] = torch.stack(rows)
            model[f"{at}.linear_fc2.weight{number}"] = fc2[number].chunk(2, dim=1)[tp]
        save(tmp_path, f"mp_rank_{tp:02d}", args, model)
    check_experts(read_ranks(tmp_path), fc1, fc2)


# ------------------------------------------------------------------------------------ tensor ranks


def joined(root: Path, shards: dict[str, tuple[torch.Tensor, ...]], **others: Any) -> Found:
    ranks = len(next(iter(shards.values())))
    args = arguments(tensor_model_parallel_size=ranks, **others)
    for tp in range(ranks):
        save(root, f"mp_rank_{tp:02d}", args, {name: parts[tp] for name, parts in shards.items()})
    return read_ranks(root)


def test_each_kind_of_tensor_is_joined_in_its_way(tmp_path: Path) -> None:
    """More tensor ranks than KV groups among them: rows are cut evenly across the groups' borders."""
    layer = "decoder.layers.0"
    qkv, square, gated, down = numbered(16, H), numbered(H, H), numbered(2 * F, H), numbered(H, F)
    shards = {
        f"{layer}.self_attention.linear_qkv.weight": qkv.chunk(2),
        f"{layer}.self_attention.linear_qkv.bias": qkv[:, 0].chunk(2),
        f"{layer}.self_attention.linear_proj.weight": square.chunk(2, dim=1),
        f"{layer}.self_attention.linear_proj.bias": (square[0],) * 2,
        f"{layer}.self_attention.core_attention.softmax_offset": square[1].chunk(2),
        f"{layer}.mlp.linear_fc1.weight": tuple(shard_fc1(gated, tp, 2) for tp in range(2)),
        f"{layer}.mlp.linear_fc1.bias": tuple(shard_fc1(gated[:, 0], tp, 2) for tp in range(2)),
        f"{layer}.mlp.linear_fc2.weight": down.chunk(2, dim=1),
        f"{layer}.post_mlp_layernorm.weight": (square[2],) * 2,
        "mtp.layers.0.eh_proj.weight": square.chunk(2),
        "mtp.layers.0.enorm.weight": (square[3],) * 2,
        "mtp.layers.0.mtp_model_layer.self_attention.linear_proj.weight": square.chunk(2, dim=1),
    }
    shards = {f"module.language_model.{name}": parts for name, parts in shards.items()}
    found = joined(tmp_path, shards)
    got = values(found)
    expected = {
        f"{layer}.self_attention.linear_qkv.weight": qkv,
        f"{layer}.self_attention.linear_qkv.bias": qkv[:, 0],
        f"{layer}.self_attention.linear_proj.weight": square,
        f"{layer}.self_attention.linear_proj.bias": square[0],
        f"{layer}.self_attention.core_attention.softmax_offset": square[1],
        f"{layer}.mlp.linear_fc1.weight": gated,
        f"{layer}.mlp.linear_fc1.bias": gated[:, 0],
        f"{layer}.mlp.linear_fc2.weight": down,
        f"{layer}.post_mlp_layernorm.weight": square[2],
        "mtp.layers.0.eh_proj.weight": square,
        "mtp.layers.0.enorm.weight": square[3],
        "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight": square,
    }
    assert set(got) == set(expected)
    assert all(same(got[name], expected[name]) for name in expected)
    assert sorted(copy.name for copy in found.copies()) == sorted(
        [
            f"{layer}.self_attention.linear_proj.bias",
            f"{layer}.post_mlp_layernorm.weight",
            "mtp.layers.0.enorm.weight",
        ]
    )


def test_shapes_say_whether_a_vision_towers_feed_forward_is_gated(tmp_path: Path) -> None:
    plain, down = numbered(F, H), numbered(H, F)
    at = "vision_model.decoder.layers.0.mlp"
    shards = {f"{at}.linear_fc1.weight": plain.chunk(2), f"{at}.linear_fc2.weight": down.chunk(2, dim=1)}
    assert same(values(joined(tmp_path, shards))[f"{at}.linear_fc1.weight"], plain)
    text = {name.removeprefix("vision_model."): parts for name, parts in shards.items()}
    with pytest.raises(InconsistentCheckpoint, match=r"linear_fc1\.weight.*args: gated"):
        joined(tmp_path, text)
    assert same(values(joined(tmp_path, text, swiglu=False))["decoder.layers.0.mlp.linear_fc1.weight"], plain)


def test_a_value_head_is_whole_on_every_rank(tmp_path: Path) -> None:
    found = joined(tmp_path, {"output_layer.weight": (filled((1, H), 3),) * 2})
    assert found.gathers["output_layer.weight"].shape == (1, H)


def test_an_output_layer_that_is_not_the_vocabularys_is_not_joined_by_guess(tmp_path: Path) -> None:
    """A value head of two rows on each rank: two labels on all of them, or four over them."""
    name = "output_layer.weight"
    vocabulary = numbered(64, H)
    found = joined(tmp_path / "words", {name: vocabulary.chunk(2)}, padded_vocab_size=64)
    assert same(values(found)[name], vocabulary)
    found = joined(tmp_path / "head", {name: (filled((2, H), 3),) * 2}, padded_vocab_size=64)
    with pytest.raises(UnsupportedCheckpoint, match="how their parts"):
        list(found.gathers[name].pieces())


def test_a_value_head_of_a_model_that_was_tied_is_no_copy(tmp_path: Path) -> None:
    args = {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": False}
    save(tmp_path, "mp_rank_00_000", arguments(**args, rank=0), chunk(0, first=True))
    head = chunk(1, last=True) | {"output_layer.weight": filled((1, H), 3)}
    save(tmp_path, "mp_rank_00_001", arguments(**args, rank=1), head)
    assert same(values(read_ranks(tmp_path))["output_layer.weight"], filled((1, H), 3))


def test_down_projections_are_sharded_or_whole_by_their_rows(tmp_path: Path) -> None:
    q, kv = numbered(4, H), numbered(6, H, start=100)
    ranks = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_pos_emb_head_dim": 2, "multi_latent_attention": True}
    at = "decoder.layers.0.self_attention"
    names = {"q": f"{at}.linear_q_down_proj.weight", "kv": f"{at}.linear_kv_down_proj.weight"}
    fused = f"{at}.linear_qkv_down_proj.weight"
    for shards in (
        {names["q"]: q.chunk(2), names["kv"]: kv.chunk(2)},
        {names["q"]: (q, q), names["kv"]: (kv, kv)},
        {fused: tuple(torch.cat([q.chunk(2)[tp], kv.chunk(2)[tp]]) for tp in range(2))},
        {fused: (torch.cat([q, kv]),) * 2},
        {fused: (torch.cat([q, kv]),)},
    ):
        shutil.rmtree(tmp_path / "ckpt", ignore_errors=True)
        got = values(joined(tmp_path / "ckpt", shards, **ranks))
        assert set(got) == set(names.values())
        assert same(got[names["q"]], q)
        assert same(got[names["kv"]], kv)
    with pytest.raises(InconsistentCheckpoint, match="3 rows on each of 2 tensor ranks, expected 4"):
        joined(tmp_path, {names["q"]: (q[:3], q[:3])}, **ranks)
    with pytest.raises(InconsistentCheckpoint, match="4 rows on each of 2 tensor ranks"):  # 1.5 and 2.5
        joined(tmp_path, {fused: (numbered(4, H),) * 2}, **ranks | {"q_lora_rank": 3, "kv_lora_rank": 3})
    with pytest.raises(UnsupportedCheckpoint, match="q_lora_rank"):
        joined(tmp_path, {names["q"]: q.chunk(2)})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gated_delta_net_comes_in_its_parts(tmp_path: Path, ranks: int) -> None:
    """megatron/core/ssm/gated_delta_net: the order of the parts, each sharded."""
    sizes = {"query": 4, "key": 4, "value": 8, "z": 8, "beta": 4, "alpha": 4}
    parts = {name: numbered(size, H, start=1000 * n) for n, (name, size) in enumerate(sizes.items())}
    conv = {name: parts[name].view(-1, 2, 4) for name in ("query", "key", "value")}
    at = "decoder.layers.0.self_attention"
    shards = {
        f"{at}.in_proj.weight": tuple(
            torch.cat([part.chunk(ranks)[tp] for part in parts.values()]) for tp in range(ranks)
        ),
        f"{at}.conv1d.weight": tuple(
            torch.cat([part.chunk(ranks)[tp] for part in conv.values()]) for tp in range(ranks)
        ),
        f"{at}.A_log": numbered(4).chunk(ranks),
        f"{at}.out_norm.weight": (numbered(2),) * ranks,
    }
    heads = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 2,
    }
    found = joined(tmp_path, shards, **heads)
    got = values(found)
    assert all(same(got[f"{at}.in_proj.weight.{name}"], part) for name, part in parts.items())
    assert same(got[f"{at}.A_log"], numbered(4))
    assert same(got[f"{at}.out_norm.weight"], numbered(2))
    assert all(same(got[f"{at}.conv1d.weight.{name}"], part) for name, part in conv.items())
    assert len(got) == 6 + 3 + 2
    with pytest.raises(InconsistentCheckpoint, match="linear_"):
        joined(tmp_path, shards, **(heads | {"linear_num_value_heads": 6}))


def test_a_name_that_no_rule_knows_is_refused_over_ranks_and_taken_from_one(tmp_path: Path) -> None:
    name = "decoder.layers.0.self_attention.something_new.weight"
    found = joined(tmp_path / "two", {name: numbered(4, H).chunk(2)})
    assert set(found.gathers) == {name}  # so that the user can leave it out
    with pytest.raises(UnsupportedCheckpoint, match="something_new"):
        list(found.gathers[name].pieces())
    assert set(joined(tmp_path / "one", {name: (numbered(4, H),)}).gathers) == {name}


@pytest.mark.parametrize(
    ("rest", "others", "problem"),
    [
        # a norm over all heads is sharded with them; one of a head is not
        ("self_attention.q_layernorm.weight", {"kv_channels": 2}, "how their parts"),
        # names of Mamba's mixers, whose norm is sharded
        ("mixer.norm.weight", {}, "how their parts"),
        (
            "mlp.shared_experts.linear_fc1.weight",
            {"moe_shared_expert_glu_interleave_size": 2, "use_grouped_gemm_for_shared_expert": True},
            "gate and up in turn",
        ),
        ("mlp.experts.linear_fc1.weight0", {"expert_tensor_parallel_size": 4}, "4 expert tensor ranks"),
        ("mlp.experts.linear_fc1.weight0", {"moe_extended_tp": True}, "expert_tensor_parallel_size"),
        (
            "self_attention.in_proj.weight",
            {"experimental_attention_variant": "gdn2"},
            "of the second kind",
        ),
    ],
)
def test_what_is_shared_in_a_way_that_is_not_known_is_refused(
    tmp_path: Path, rest: str, others: dict[str, object], problem: str
) -> None:
    def wanted() -> None:
        found = joined(tmp_path, {f"decoder.layers.0.{rest}": (numbered(4, H),) * 2}, **others)
        for gather in found.gathers.values():
            list(gather.pieces())

    with pytest.raises(UnsupportedCheckpoint, match=problem):
        wanted()


def test_parts_that_differ_are_refused(tmp_path: Path) -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    with pytest.raises(InconsistentCheckpoint, match=r"linear_qkv.*\(4, 8\).*\(3, 8\)"):
        joined(tmp_path, {name: (numbered(4, H), numbered(3, H))})
    save(
        tmp_path,
        "mp_rank_01",
        arguments(tensor_model_parallel_size=2),
        {"output_layer.weight": numbered(4, H)},
    )
    with pytest.raises(IncompleteCheckpoint, match="tensor rank 1 does not hold it"):
        read_ranks(tmp_path)


# ---------------------------------------------------------------------------------- shared tensors


def test_the_last_stages_copy_of_a_tied_embedding_is_no_tensor(tmp_path: Path) -> None:
    args = arguments(pipeline_model_parallel_size=2, untie_embeddings_and_output_weights=False)
    save(tmp_path, "mp_rank_00_000", args, chunk(0, first=True))
    save(tmp_path, "mp_rank_00_001", args, chunk(1, last=True))
    found = read_ranks(tmp_path)
    assert "output_layer.weight" not in found.gathers
    assert "tied" in found.left_out["output_layer.weight"]
    (copy,) = found.copies()
    assert copy.name == "embedding.word_embeddings.weight"
    assert copy.used.source.name.endswith("mp_rank_00_000/model_optim_rng.pt")
    assert copy.other.source.name.endswith("mp_rank_00_001/model_optim_rng.pt")


def test_an_mtp_stages_copy_of_the_embedding_is_no_tensor(tmp_path: Path) -> None:
    args = arguments(pipeline_model_parallel_size=2)
    save(tmp_path, "mp_rank_00_000", args, chunk(0, first=True))
    copied = {"embedding.word_embeddings.weight": filled((V, H), 100)}
    save(tmp_path, "mp_rank_00_001", args, {**chunk(1, last=True), **copied})
    found = read_ranks(tmp_path)
    assert set(found.gathers) >= ENDS
    assert [copy.name for copy in found.copies()] == ["embedding.word_embeddings.weight"]
    assert list(found.left_out) == ["embedding.word_embeddings.weight (again)"]


def test_other_tensors_on_two_stages_are_refused(tmp_path: Path) -> None:
    args = arguments(pipeline_model_parallel_size=2)
    other = {"unknown.weight": filled((H,), 1)}
    save(tmp_path, "mp_rank_00_000", args, {**chunk(0, first=True), **other})
    save(tmp_path, "mp_rank_00_001", args, {**chunk(1, last=True), **other})
    with pytest.raises(InconsistentCheckpoint, match=r"unknown\.weight: is on two"):
        read_ranks(tmp_path)


# ----------------------------------------------------------------------------- models before mcore


def legacy(version: float | None) -> dict[str, Any]:
    """The nested dicts and the oldest names (Megatron-LM 2.x: `transformer`, `attention`)."""
    model = {
        "language_model": {
            "embedding": {
                "word_embeddings": {"weight": numbered(V, H)},
                "position_embeddings": {"weight": numbered(4, H)},
            },
            "transformer": {
                "layers.0.input_layernorm.weight": numbered(H),
                "layers.0.attention.query_key_value.weight": numbered(3 * H, H),
                "layers.0.attention.dense.bias": numbered(H),
                "layers.0.post_attention_layernorm.bias": numbered(H),
                "layers.0.mlp.dense_h_to_4h.weight": numbered(F, H),
                "layers.0.mlp.dense_4h_to_h.weight": numbered(H, F),
                "final_layernorm.weight": numbered(H),
            },
        },
        "word_embeddings_for_head": {"weight": numbered(V, H)},
    }
    state = {"args": arguments(swiglu=False), "checkpoint_version": version, "iteration": 1, "model": model}
    return {name: value for name, value in state.items() if value is not None}


def test_the_oldest_names_become_mcores(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(legacy(3.0), tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    found = read_ranks(tmp_path)
    assert set(found.gathers) == {
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.bias",
        "decoder.layers.0.pre_mlp_layernorm.bias",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
    }
    assert [copy.name for copy in found.copies()] == ["embedding.word_embeddings.weight"]


@pytest.mark.parametrize("version", [None, 0, 1.0])
def test_the_other_order_of_query_key_value_is_refused(tmp_path: Path, version: float | None) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(legacy(version), tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(UnsupportedCheckpoint, match="checkpoint_version"):
        read_ranks(tmp_path)


# --------------------------------------------------------------------------------- what is no model


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ([1], "holds list"),
        ({"optimizer": {}}, "holds no model"),
        ({"model": {"decoder.layers.0.x": object()}}, "expected a tensor"),
        ({"model": {"decoder.layers.0.x.adapter.linear_in.weight": torch.zeros(1)}}, "adapter"),
        ({"model": {"module.a": torch.zeros(1), "a": torch.zeros(1)}}, "two tensors that are a"),
    ],
)
def test_what_is_no_model_is_refused_with_the_file(tmp_path: Path, state: object, problem: str) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(state, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(UnsupportedCheckpoint, match=problem) as error:
        read_ranks(tmp_path)
    assert "mp_rank_00/model_optim_rng.pt" in str(error.value)


def test_dicts_that_hold_each_other_are_refused(tmp_path: Path) -> None:
    inner: dict[str, Any] = {}
    inner["again"] = inner
    save(tmp_path, "mp_rank_00", arguments(), {"decoder": inner})
    with pytest.raises(UnsupportedCheckpoint, match="twice"):
        read_ranks(tmp_path)


# ------------------------------------------------------------ files that are not where they belong


def swap(one: Path, other: Path) -> None:
    aside = one.parent / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def test_swapped_stages_are_known_by_what_they_hold(tmp_path: Path) -> None:
    stages(tmp_path)
    swap(tmp_path / "mp_rank_00_000", tmp_path / "mp_rank_00_001")
    with pytest.raises(
        InconsistentCheckpoint, match=r"chunk 0 .* rank 0 holds decoder\.final|holds embedding"
    ):
        read_ranks(tmp_path)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((chunk(3), chunk(0, first=True)), (chunk(1, 2), chunk(4, last=True))),
        ((chunk(0, first=True), chunk(3)), (chunk(4, last=True), chunk(1, 2))),
    ],
)
def test_swapped_virtual_stages_are_refused(
    tmp_path: Path, first: tuple[Model, Model], second: tuple[Model, Model]
) -> None:
    args = arguments(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, num_layers=5)
    save(tmp_path, "mp_rank_00_000", args, *first)
    save(tmp_path, "mp_rank_00_001", args, *second)
    with pytest.raises(InconsistentCheckpoint, match="not in the order of the model"):
        read_ranks(tmp_path)


def predicting(*layers: int, last: bool = False) -> Model:
    """A stage with a layer of multi-token prediction, and the copies that it needs."""
    model = chunk(*layers, first=True, last=last)
    model["mtp.layers.0.eh_proj.weight"] = filled((H, 2 * H), 9)
    return model


def test_a_stage_of_multi_token_prediction_has_copies(tmp_path: Path) -> None:
    """Alone on its stage too (core 0.15): the final norm is then where the last layer is."""
    args = arguments(pipeline_model_parallel_size=3, num_layers=2, mtp_num_layers=1)
    ends = chunk(1)
    ends["decoder.final_layernorm.weight"] = filled((H,), 101)
    mtp = predicting(last=True)
    del mtp["decoder.final_layernorm.weight"]
    for number, model in enumerate((chunk(0, first=True), ends, mtp)):
        save(tmp_path, f"mp_rank_00_{number:03d}", args, model)
    found = read_ranks(tmp_path)
    assert {"mtp.layers.0.eh_proj.weight", "decoder.layers.1.mlp.linear_fc2.weight"} | ENDS <= set(
        found.gathers
    )
    swap(tmp_path / "mp_rank_00_000", tmp_path / "mp_rank_00_001")
    with pytest.raises(InconsistentCheckpoint, match="not in the order of the model"):
        read_ranks(tmp_path)


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_no_other_order_of_a_stage_of_multi_token_prediction(tmp_path: Path, order: tuple[int, ...]) -> None:
    args = arguments(pipeline_model_parallel_size=3, num_layers=3, mtp_num_layers=1)
    models = (chunk(0, first=True), chunk(1), predicting(2, last=True))
    for number, model in enumerate(order):
        save(tmp_path, f"mp_rank_00_{number:03d}", args, models[model])
    with pytest.raises(InconsistentCheckpoint, match="not in the order of the model"):
        read_ranks(tmp_path)


def test_swapped_ranks_are_known_by_who_wrote_them(tmp_path: Path) -> None:
    name = "torch_te_qwen3moe_tp2ep2pp2"
    step = tmp_path / "iter_0000100"
    for one, other in (("00_000_000", "01_000_001"), ("00_000_000", "00_001_000")):
        shutil.copytree(SAMPLES / name / "ckpt" / "iter_0000100", step)
        swap(step / f"mp_rank_{one}", step / f"mp_rank_{other}")
        with pytest.raises(InconsistentCheckpoint, match=r"written by rank [01] \(args\.rank\)"):
            read_ranks(step)
        shutil.rmtree(step)


def test_swapped_expert_ranks_of_one_tensor_rank(tmp_path: Path) -> None:
    sizes = {"expert_model_parallel_size": 2, "num_experts": 4, "expert_tensor_parallel_size": 1}
    for ep, rank in ((0, 1), (1, 0)):
        save(tmp_path, f"mp_rank_00_{ep:03d}", arguments(**sizes, rank=rank), moe(ep, 2, sequential))
    with pytest.raises(InconsistentCheckpoint, match=r"mp_rank_00_001.*by rank 0 .*before, by rank 1"):
        read_ranks(tmp_path)


def test_a_file_under_the_names_of_two_ranks(tmp_path: Path) -> None:
    """Known by its writer, or by its bytes; a conversion tool writes all ranks with one number."""
    for numbers in ((0, 0, 2, 3), (0, 0, 0, 0)):
        args = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 2}
        for at, rank in enumerate(numbers):
            tp, pp = at % 2, at // 2
            model = chunk(pp, first=not pp, last=bool(pp))
            model["decoder.layers.0.self_attention.linear_qkv.weight"] = numbered(3, H, start=at)
            save(tmp_path, f"mp_rank_{tp:02d}_{pp:03d}", arguments(**args, rank=rank), model)
        if numbers[-1]:
            with pytest.raises(InconsistentCheckpoint, match=r"01_000.* by rank 0 .* as was .*00_000"):
                read_ranks(tmp_path)
            continue
        assert len(read_ranks(tmp_path).gathers) == 2 * 4 + 3
        shutil.copy(tmp_path / "mp_rank_00_001/model_optim_rng.pt", tmp_path / "mp_rank_01_001")
        with pytest.raises(
            InconsistentCheckpoint, match=r"mp_rank_01_001.*the same bytes as .*mp_rank_00_001"
        ):
            read_ranks(tmp_path)


def test_expert_ranks_without_experts_are_honestly_alike(tmp_path: Path) -> None:
    sizes = {"expert_model_parallel_size": 2, "num_experts": 4, "pipeline_model_parallel_size": 2}
    for ep in range(2):
        save(tmp_path, f"mp_rank_00_000_{ep:03d}", arguments(**sizes), chunk(0, first=True))
        save(tmp_path, f"mp_rank_00_001_{ep:03d}", arguments(**sizes), moe(ep, 2, sequential))
    read_ranks(tmp_path)
    shutil.copy(tmp_path / "mp_rank_00_001_000/model_optim_rng.pt", tmp_path / "mp_rank_00_001_001")
    with pytest.raises(InconsistentCheckpoint, match="the same bytes"):
        read_ranks(tmp_path)


def test_any_argument_tells_runs_apart_but_those_of_a_rank(tmp_path: Path) -> None:
    args = {"pipeline_model_parallel_size": 2, "loss_cap": float("nan"), "sizes": [1, 2]}
    save(tmp_path, "mp_rank_00_000", arguments(**args, rank=0, local_rank=0, seed=1), chunk(0, first=True))
    save(tmp_path, "mp_rank_00_001", arguments(**args, rank=1, local_rank=1, only_here=2, seed=1), chunk(1))
    assert len(read_ranks(tmp_path).gathers) == 2 * 3 + 1
    save(tmp_path, "mp_rank_00_001", arguments(**args, rank=1, seed=77), chunk(1))
    with pytest.raises(InconsistentCheckpoint, match="args say seed = 77, and 1 in"):
        read_ranks(tmp_path)


def test_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "mp_rank_00", arguments(), chunk(0), model0=chunk(1))
    with pytest.raises(AmbiguousCheckpoint, match="two models, model and model0"):
        read_ranks(tmp_path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("pipe", "a named pipe"), ("device", "a link to /dev/zero, a device"), ("broken", "which is not there")],
)
def test_what_stands_in_the_place_of_a_model_is_named(tmp_path: Path, kind: str, words: str) -> None:
    args = arguments(tensor_model_parallel_size=2)
    save(tmp_path, "mp_rank_00", args, chunk(0, first=True, last=True))
    path = tmp_path / "mp_rank_01" / "model_optim_rng.pt"
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "gone")
    with pytest.raises(SourceError, match=f"mp_rank_01/model_optim_rng.pt: is .*{words}"):
        read_ranks(tmp_path)


def test_stacks_of_repeated_experts_are_not_taken_apart(tmp_path: Path) -> None:
    """One element stands for any number of experts: not as many as num_experts, or more than the file has."""
    many = 1 << 16
    for said, words in (
        (4, r"not that of 4 experts"),
        (many, "only 4 of them in the file"),
        (None, "only 4"),
    ):
        model = {
            f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight": torch.zeros(1).expand(many, 1, 1)
            for layer in range(20)
        }
        save(tmp_path, "mp_rank_00", arguments(num_experts=said), model)
        with pytest.raises(InconsistentCheckpoint, match=words):
            read_ranks(tmp_path)


def test_a_stage_before_the_embedding_may_hold_a_tower(tmp_path: Path) -> None:
    args = arguments(pipeline_model_parallel_size=2, num_layers=1)
    save(tmp_path, "mp_rank_00_000", args, {"vision_model.ln_pre.weight": filled((H,), 7)})
    save(tmp_path, "mp_rank_00_001", args, chunk(0, first=True, last=True))
    assert set(read_ranks(tmp_path).gathers) > ENDS


def test_an_argument_of_neither_model_nor_run_is_a_warning(tmp_path: Path) -> None:
    args = {"pipeline_model_parallel_size": 2, "seed": 1}
    save(tmp_path, "mp_rank_00_000", arguments(**args, rank=0, log_file="a"), chunk(0, first=True))
    save(tmp_path, "mp_rank_00_001", arguments(**args, rank=1, log_file="b"), chunk(1))
    (note,) = read_ranks(tmp_path).notes
    assert note.level == "warning"
    assert "args say log_file = b, and a in" in note.text
