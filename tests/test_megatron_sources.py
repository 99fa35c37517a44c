"""Finding a Megatron checkpoint: runs, steps, pointers, verl's and NeMo's folders, and what lies beside."""

from __future__ import annotations

import argparse
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch

import lazymerge
from lazymerge.checkpoint import Checkpoint
from lazymerge.errors import (
    AmbiguousCheckpoint,
    IncompleteCheckpoint,
    NotACheckpoint,
    SourceError,
    UnsupportedCheckpoint,
)
from lazymerge.formats.registry import OpenOptions, open_checkpoint
from tests.makers.dcp_folders import save_dcp
from tests.makers.zarr_arrays import write_array

SAMPLES = Path(__file__).parent / "data" / "megatron"
LM = SAMPLES / "td_te_qwen2_tp2pp2" / "ckpt"
VERL = SAMPLES / "verl_te_qwen3moe_ep2_vpp" / "ckpt"
VERL_2 = SAMPLES / "verl2_te_qwen2_value" / "ckpt"
RANKS = SAMPLES / "torch_oldnames_llama_tp2pp2" / "ckpt"
NORM = "decoder.final_layernorm.weight"
ONE = {NORM: torch.ones(2), "embedding.word_embeddings.weight": torch.ones(3, 2)}


def opened(*paths: Path, **options: str) -> Checkpoint:
    return open_checkpoint(paths, OpenOptions(**options))


def run_with(folder: Path, *names: str, pointer: str | None = None) -> Path:
    """A run with a checkpoint at each of these places; the first element of the norm says which one."""
    for at, name in enumerate(names):
        path = save_dcp(folder / name, {**ONE, NORM: torch.tensor([float(at), 0.0])})
        (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    if pointer is not None:
        (folder / "latest_checkpointed_iteration.txt").write_text(pointer)
    return folder


def which(checkpoint: Checkpoint) -> int:
    """The place that a checkpoint of `run_with` was read from."""
    return int(checkpoint[NORM].materialize()[0])


# ---- levels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [LM, LM / "iter_0000100", RANKS, RANKS / "iter_0000100"]
    + [run / part for run in (VERL, VERL_2) for part in ("", "global_step_100", "global_step_100/actor")]
    + [VERL / "global_step_100/actor/dist_ckpt", VERL_2 / "global_step_100/actor/model/dist_ckpt"]
    + [VERL_2 / "global_step_100/actor/model"],
    ids=lambda path: str(path.relative_to(SAMPLES)),
)
def test_any_level(path):
    checkpoint = lazymerge.open(path)
    assert checkpoint.format == "megatron"
    assert NORM in checkpoint
    assert "decoder.layers.3.mlp.linear_fc2.weight" in checkpoint or (
        "decoder.layers.3.mlp.experts.local_experts.3.linear_fc2.weight" in checkpoint
    )


def test_what_is_known_of_a_checkpoint():
    checkpoint = opened(LM)
    assert checkpoint.settings["num_layers"] == 4
    assert checkpoint.topology.mesh == (("tp", 2), ("pp", 2))
    assert {"_extra_state", "rng_state"} <= set(checkpoint.left_out)
    assert checkpoint.files
    assert not checkpoint.notes


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        (VERL, VERL / "global_step_100/actor/huggingface"),
        (VERL / "global_step_100/actor/dist_ckpt", VERL / "global_step_100/actor/huggingface"),
        (VERL_2, VERL_2 / "global_step_100/actor/model/huggingface"),
    ],
)
def test_sidecars_of_verl(path, folder):
    assert opened(path).sidecars[0] == folder


def test_sidecars_of_megatron(tmp_path):
    """What the user names, the checkpoint's own folder, the run's."""
    run = run_with(tmp_path / "run", "iter_0000100")
    (run / "iter_0000100" / "huggingface").mkdir()
    hf = tmp_path / "hf"
    hf.mkdir()
    checkpoint = open_checkpoint([run], OpenOptions(hf_config=hf))
    step = run / "iter_0000100"
    assert checkpoint.sidecars == (hf, step / "huggingface", step, run)


def test_component(tmp_path):
    run = run_with(tmp_path, "global_step_5/actor/dist_ckpt", "global_step_5/critic/model/dist_ckpt")
    assert which(opened(run)) == 0
    assert which(opened(run, component="critic")) == 1
    assert which(opened(run / "global_step_5", component="critic")) == 1
    shutil.rmtree(run / "global_step_5" / "actor")
    with pytest.raises(NotACheckpoint, match="holds critic, and no actor"):
        opened(run)


def test_nemo(tmp_path):
    run_with(tmp_path, "weights")
    with pytest.raises(NotACheckpoint):
        opened(tmp_path)
    (tmp_path / "context").mkdir()
    assert which(opened(tmp_path)) == 0


# ---- steps and pointers ------------------------------------------------------------------------------------


def test_the_pointer_names_the_step(tmp_path):
    run = run_with(tmp_path, "iter_0000100", "iter_0000200", pointer="100\n")
    checkpoint = opened(run)
    assert which(checkpoint) == 0
    (note,) = checkpoint.notes
    assert note.level == "warning"
    assert "taking step 100" in note.text
    assert "200" in note.text


def test_a_release(tmp_path):
    run = run_with(tmp_path, "iter_0000100", "release", pointer="release")
    checkpoint = opened(run)
    assert which(checkpoint) == 1
    assert not checkpoint.notes


def test_a_release_alone(tmp_path):
    assert which(opened(run_with(tmp_path, "release"))) == 0


def test_several_steps_and_no_pointer(tmp_path):
    run = run_with(tmp_path, "iter_0000100", "iter_0000020", "release")
    with pytest.raises(AmbiguousCheckpoint, match="holds steps release, 20, 100 and no latest_checkpointed"):
        opened(run)
    assert which(opened(run / "iter_0000020")) == 1


def test_two_folders_of_one_step(tmp_path):
    run = run_with(tmp_path, "iter_0000100", "iter_100", pointer="100")
    with pytest.raises(AmbiguousCheckpoint, match="iter_0000100 and iter_100 are both step 100"):
        opened(run)


@pytest.mark.parametrize("pointer", ["300", "release"])
def test_a_pointer_to_nothing(tmp_path, pointer):
    run = run_with(tmp_path, "iter_0000100", pointer=pointer)
    with pytest.raises(IncompleteCheckpoint, match=f"names step {pointer}, but .* holds 100"):
        opened(run)


@pytest.mark.parametrize("pointer", ["", "latest", "²", "-1"])
def test_a_pointer_that_is_no_number(tmp_path, pointer):
    run = run_with(tmp_path, "iter_0000100", pointer=pointer)
    with pytest.raises(SourceError, match="is no step number"):
        opened(run)


# ---- what is not a checkpoint of Megatron's ----------------------------------------------------------------


def test_a_dcp_folder_of_something_else(tmp_path):
    folder = save_dcp(tmp_path / "dcp", {"model.layers.0.mlp.down_proj.weight": torch.ones(2)})
    with pytest.raises(NotACheckpoint, match=r"\.metadata"):
        opened(folder)


def test_a_dcp_folder_without_a_backend(tmp_path):
    """torch_dcp and fsdp_dtensor are known by their names."""
    folder = save_dcp(tmp_path / "dcp", {f"model.module.{name}": tensor for name, tensor in ONE.items()})
    checkpoint = opened(folder)
    assert checkpoint.format == "megatron"
    assert set(checkpoint) == set(ONE)


def test_an_unfinished_save(tmp_path):
    run = run_with(tmp_path, "iter_0000100")
    (run / "iter_0000100" / ".metadata").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"no \.metadata: the save did not finish"):
        opened(run)


def test_weights_in_hugging_faces_form_already(tmp_path):
    """verl with mbridge, in its older and in its newer folders."""
    old = save_dcp(tmp_path / "old" / "actor" / "dist_ckpt", {"rng_state/shard_0_1": [1]})
    new = save_dcp(tmp_path / "new" / "actor" / "optimizer" / "dist_ckpt", {"rng_state/shard_0_1": [1]})
    for path in (old, new):
        (path / "metadata.json").write_text("{}")
    for done in (tmp_path / "old/actor/huggingface", tmp_path / "new/actor/model/huggingface"):
        done.mkdir(parents=True)
        (done / "model.safetensors").write_bytes(b"")
        with pytest.raises(UnsupportedCheckpoint, match="holds no model") as caught:
            opened(tmp_path / done.relative_to(tmp_path).parts[0])
        assert str(done) in caught.value.hint


def test_folders_taken_together(tmp_path):
    run = run_with(tmp_path, "one", "two")
    with pytest.raises(AmbiguousCheckpoint, match="2 folders"):
        opened(run / "one", run / "two")


# ---- a part of a checkpoint, or two of them ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "folder"),
    [
        (RANKS / "iter_0000100/mp_rank_00_000", RANKS / "iter_0000100"),
        (RANKS / "iter_0000100/mp_rank_00_000/model_optim_rng.pt", RANKS / "iter_0000100"),
        (LM / "iter_0000100/.metadata", LM / "iter_0000100"),
        (LM / "iter_0000100/metadata.json", LM / "iter_0000100"),
        (LM / "iter_0000100/common.pt", LM / "iter_0000100"),
        (LM / "iter_0000100/__0_0.distcp", LM / "iter_0000100"),
    ],
    ids=lambda path: path.name,
)
def test_a_part_alone_is_refused(part, folder):
    assert part.exists()
    with pytest.raises(IncompleteCheckpoint, match="a part of a Megatron checkpoint alone") as caught:
        opened(part)
    assert caught.value.hint == f"give the folder {folder}"


def test_a_rank_file_from_anywhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(RANKS / "iter_0000100" / "mp_rank_00_000")
    for path in (Path("."), Path("model_optim_rng.pt")):
        with pytest.raises(IncompleteCheckpoint, match="a part of a Megatron") as caught:
            opened(path)
        assert caught.value.hint == f"give the folder {RANKS / 'iter_0000100'}"
    shutil.copy("model_optim_rng.pt", tmp_path)
    with pytest.raises(IncompleteCheckpoint, match="a part of a Megatron") as caught:
        opened(tmp_path / "model_optim_rng.pt")
    assert "all mp_rank_XX" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("iter_0000100", "model.pt"),
        ("iter_0000100", "iter_0000100/model.pt"),
        ("iter_0000100", "iter_0000100/model_world_size_1_rank_0.pt"),
        ("global_step_5/actor/dist_ckpt", "global_step_5/actor/model.pt"),
        ("global_step_5/actor/dist_ckpt", "global_step_5/actor/model_world_size_1_rank_0.pt"),
        ("global_step_5/actor/dist_ckpt", "model.pt"),
    ],
)
def test_another_format_beside_it(tmp_path, name, stray):
    run = run_with(tmp_path, name)
    torch.save({"model.x": torch.ones(3)}, run / stray)
    with pytest.raises(AmbiguousCheckpoint, match=r"holds two checkpoints, .*fsdp.*megatron"):
        opened(run)
    if (run / stray).parent != run / name:
        assert which(opened(run / name)) == 0
    (run / stray).unlink()
    assert which(opened(run)) == 0


@pytest.mark.parametrize(
    "other", ["global_step_5/actor/model/dist_ckpt", "global_step_5/dist_ckpt", "dist_ckpt"]
)
def test_another_place_of_the_same_format(tmp_path, other):
    run = run_with(tmp_path, "global_step_5/actor/dist_ckpt", other)
    with pytest.raises(AmbiguousCheckpoint, match="holds two checkpoints") as caught:
        opened(run)
    assert str(run / other) in caught.value.problem
    assert which(opened(run / other)) == 1


def test_two_layouts_in_one_folder(tmp_path):
    run = run_with(tmp_path, "iter_0000100")
    step = run / "iter_0000100"
    shutil.copytree(RANKS / "iter_0000100", step, dirs_exist_ok=True)
    with pytest.raises(AmbiguousCheckpoint, match=r"mp_rank_XX/model_optim_rng.pt and \.metadata"):
        opened(run)
    for path in step.glob("mp_rank_*"):
        shutil.rmtree(path)
    write_array(step / "decoder.layers.self_attention.linear_qkv.weight", torch.ones(1, 2, 2), (1, 2, 2))
    with pytest.raises(AmbiguousCheckpoint, match=r"\.metadata or \.distcp files and <name>/\.zarray"):
        opened(run)


def test_steps_of_something_else_are_in_nobodys_way(tmp_path):
    """DeepSpeed's, beside the model that transformers' trainer saves."""
    for name in ("global_step100", "global_step200"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mp_rank_00_model_states.pt").write_bytes(b"")
    torch.save({"model.x": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    assert opened(tmp_path).format == "fsdp"


def test_an_actor_and_a_critic_of_two_formats(tmp_path):
    run = run_with(tmp_path, "global_step_5/critic/dist_ckpt")
    actor = run / "global_step_5/actor"
    actor.mkdir()
    torch.save({"model.x": torch.ones(3)}, actor / "model_world_size_1_rank_0.pt")
    assert opened(run).format == "fsdp"
    assert opened(run, component="critic").format == "megatron"


# ---- pointers and steps that are odd -----------------------------------------------------------------------


def test_a_pointer_to_a_step_without_a_checkpoint(tmp_path):
    run = run_with(tmp_path, "iter_0000100", pointer="200")
    (run / "iter_0000200").mkdir()
    with pytest.raises(
        NotACheckpoint, match=r"latest_checkpointed_iteration.txt: names .*200, which is an empty"
    ):
        opened(run)


def test_a_pointer_is_not_read_whole(tmp_path):
    run = run_with(tmp_path, "iter_0000100", pointer="100\n")
    opened(run / "iter_0000100")  # what is imported once
    os.truncate(run / "latest_checkpointed_iteration.txt", 64 << 20)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="is no step number"):
            opened(run)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_files_of_another_iteration_are_noted(tmp_path):
    shutil.copytree(RANKS / "iter_0000100", tmp_path / "iter_0000200")
    (note,) = opened(tmp_path / "iter_0000200").notes
    assert note.level == "warning"
    assert "iter_0000200: its files say that they are of iteration 100" in note.text
    shutil.copytree(LM / "iter_0000100", tmp_path / "iter_0000300")
    assert "of iteration 100" in opened(tmp_path / "iter_0000300").notes[0].text


def test_whole_numbers_among_the_weights_are_noted(tmp_path):
    state = {"args": argparse.Namespace(params_dtype=torch.bfloat16), "iteration": 100}
    layers = {f"decoder.layers.{n}.input_layernorm.weight": torch.ones(4) for n in range(2)}
    (tmp_path / "mp_rank_00").mkdir()
    for dtype in (torch.int32, torch.float32):
        model = {name: tensor.to(dtype) for name, tensor in layers.items()}
        torch.save({**state, "model": model}, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
        notes = [(note.level, note.tensor, note.text) for note in opened(tmp_path).notes]
        name = "decoder.layers.0.input_layernorm.weight"
        text = f"{name}: is int32, as are 1 more tensors, in a model trained in bfloat16"
        assert notes == ([("warning", name, text)] if dtype is torch.int32 else [])
