"""Finding the files: levels of folders, folders taken together, missing ranks, several sets of them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import lazymerge
from lazymerge.errors import (
    AmbiguousCheckpoint,
    IncompleteCheckpoint,
    NotACheckpoint,
    PlanError,
    SourceError,
    UnsupportedCheckpoint,
)
from tests.checks import assert_same_model, refused, tied_away
from tests.makers.layout import Made, copy_of, rank_file, renamed
from tests.makers.ranks import run_ranks

# ---- where the files are -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["run", "step", "component", "relative"])
def test_any_level_of_a_run(checkpoint, tmp_path, monkeypatch, level):
    made = checkpoint("fsdp2-llama")
    monkeypatch.chdir(made.leaf.parent)
    src = {"run": made.root, "step": made.leaf.parent, "component": made.leaf, "relative": "actor"}[level]
    report = lazymerge.merge(src, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)
    assert "tokenizer.json" in report.sidecars


@pytest.mark.parametrize("level", ["run", "step"])
def test_actor_and_critic_of_a_step(checkpoint, tmp_path, level):
    actor, critic = checkpoint("fsdp2-llama"), checkpoint("fsdp2-value")
    both = copy_of(actor, tmp_path / "run")
    shutil.copytree(critic.leaf, both.leaf.parent / "critic")
    src = both.root if level == "run" else both.leaf.parent
    lazymerge.merge(src, tmp_path / "actor")
    lazymerge.merge(src, tmp_path / "critic", component="critic")
    assert_same_model(tmp_path / "actor", actor.truth)
    assert_same_model(tmp_path / "critic", critic.truth)


def test_an_actor_is_not_taken_for_a_critic(checkpoint, tmp_path):
    made = checkpoint("fsdp2-llama")
    with refused(NotACheckpoint, "is the actor", "--component", dst=tmp_path / "out"):
        lazymerge.merge(made.leaf, tmp_path / "out", component="critic")


def test_another_backend_than_the_files_are_of(checkpoint, tmp_path):
    made = checkpoint("fsdp2-llama")
    with refused(NotACheckpoint, "no checkpoint of megatron, but one of fsdp", dst=tmp_path / "out"):
        lazymerge.merge(made.root, tmp_path / "out", backend="megatron")


def test_an_adapter_is_no_model(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with refused(NotACheckpoint, "is a PEFT adapter", f"--adapter {adapter}", dst=tmp_path / "out"):
        lazymerge.merge(adapter, tmp_path / "out")


def test_a_critic_is_not_taken_for_an_actor(checkpoint, tmp_path):
    made = checkpoint("fsdp2-value")
    with refused(NotACheckpoint, "critic", "no actor", "--component critic", dst=tmp_path / "out"):
        lazymerge.merge(made.root, tmp_path / "out")


@pytest.mark.parametrize("pattern", ["rank_{rank}.pt", "pytorch_model_fsdp_0_rank{rank}.bin"])
@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("name", ["fsdp2-twelve", "sharded-tensor-uneven"])
def test_other_names_of_rank_files(checkpoint, tmp_path, pattern, with_config, name):
    made = checkpoint(name)
    folder = renamed(made, tmp_path / "ranks", pattern)
    if with_config:
        config = {"FSDP_version": made.fsdp_version, "world_size": made.world_size}
        (folder / "fsdp_config.json").write_text(json.dumps(config))
    lazymerge.merge(folder, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth)


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("name", ["fsdp2-twelve", "sharded-tensor", "fsdp2-tp-rows", "fsdp2-gpt2"])
def test_ranks_that_stayed_on_their_nodes(checkpoint, tmp_path, name, turned):
    made = checkpoint(name)
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for at, node in enumerate(nodes):
        node.mkdir()
        for rank in range(at, made.world_size, 2):
            shutil.copy(made.rank_file(rank), node)
    shutil.copytree(made.sidecars, nodes[0] / "huggingface")
    lazymerge.merge(nodes[::-1] if turned else nodes, tmp_path / "out")
    assert_same_model(tmp_path / "out", made.truth, tied=tied_away(made))
    assert (tmp_path / "out/config.json").exists()


# ---- few ranks of a large world ----------------------------------------------------------------------------


def save_part_of_64(rank: int, leaf: Path, first: int) -> None:
    """In a rank of a small world: the file of rank `first + rank` of 64, made with a fake group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=first + rank, world_size=64, store=FakeStore())
    mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("fsdp",))
    shape = {"run_check": False, "shape": torch.Size([128, 3]), "stride": (3, 1)}
    state = {
        f"layer.{i}": DTensor.from_local(torch.ones(2, 3), mesh, (Shard(0),), **shape) for i in range(40)
    }
    torch.save(state, rank_file(leaf, 64, first + rank))


def test_one_node_of_eight(tmp_path, out):
    leaf = tmp_path / "node6"
    leaf.mkdir()
    run_ranks(save_part_of_64, 8, leaf, 48)
    started = time.monotonic()
    words = ("8 of 64", "48-55", "0-47, 56-63 are missing", "other nodes", "all folders together")
    with refused(IncompleteCheckpoint, *words, dst=out):
        lazymerge.merge(leaf, out)
    assert time.monotonic() - started < 2
    assert not out.parent.exists()


@pytest.mark.parametrize("rank", range(4))
def test_one_rank_lost(four, out, rank):
    four.rank_file(rank).unlink()
    with refused(IncompleteCheckpoint, "3 of 4", f"{rank} are missing", dst=out):
        lazymerge.merge(four.root, out)


def test_a_rank_given_twice(four, tmp_path, out):
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(four.rank_file(1), again)
    with refused(AmbiguousCheckpoint, "rank 1", str(again), str(four.leaf), dst=out):
        lazymerge.merge([four.leaf, again], out)


def test_several_sources_have_to_be_rank_files(four, tmp_path, out):
    """A full state dict beside them would be left out without a word."""
    whole = tmp_path / "whole"
    whole.mkdir()
    torch.save({"x": torch.ones(2)}, whole / "pytorch_model.bin")
    for sources in ([four.leaf, whole], [whole, four.leaf], [four.leaf, whole / "pytorch_model.bin"]):
        with refused(AmbiguousCheckpoint, "pytorch_model.bin", dst=out):
            lazymerge.merge(sources, out)


# ---- more than one answer ----------------------------------------------------------------------------------

OPENED: list[str] = []
WATCHING: list[bool] = []


def watch(event: str, args: tuple[object, ...]) -> None:
    if WATCHING and event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        OPENED.append(os.fsdecode(args[0]))


sys.addaudithook(watch)


def put(kind, path):
    """Something at `path` that is no file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("gone.pt" if kind == "dangling" else path.name)


def said_of(kind, path):
    return {
        "pipe": "is a named pipe, expected a file",
        "socket": "is a socket, expected a file",
        "folder": "is a folder, expected a file",
        "dangling": "is a link to gone.pt, which is not there",
        "loop": f"is a link to {path.name}, which is not there",
    }[kind]


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "dangling", "loop"])
@pytest.mark.parametrize("ranks", [[2], [0, 1, 2, 3]], ids=str)
def test_what_stands_in_the_place_of_a_rank_file_is_named(four, out, kind, ranks):
    """Not called missing, and never opened: a pipe would wait for somebody who writes."""
    for rank in ranks:
        four.rank_file(rank).unlink()
        put(kind, four.rank_file(rank))
    place = four.rank_file(ranks[0])
    with pytest.raises(SourceError) as caught:
        lazymerge.merge(four.root, out)
    assert type(caught.value) is SourceError
    assert caught.value.problem == f"{place}: {said_of(kind, place)}"
    assert caught.value.hint
    assert not out.parent.exists()


@pytest.mark.parametrize("kind", ["pipe", "socket", "dangling", "loop"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_what_stands_in_the_place_of_a_full_state_dict_is_named(tmp_path, out, kind, name):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / name
    put(kind, path)
    with refused(SourceError, f"{path}: {said_of(kind, path)}", dst=out):
        lazymerge.merge(tmp_path / "run", out)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("name", ["S.pt", "S"])
def test_a_source_that_is_neither_file_nor_folder(tmp_path, out, kind, name):
    put(kind, tmp_path / name)
    with refused(SourceError, f"{tmp_path / name}: {said_of(kind, tmp_path / name)}", dst=out):
        lazymerge.merge(tmp_path / name, out)


@pytest.mark.parametrize("kind", ["pipe", "dangling"])
def test_what_only_looks_like_a_full_state_dict_beside_rank_files(four, out, kind):
    put(kind, four.leaf / "pytorch_model.bin")
    report = lazymerge.merge(four.root, out)
    assert any("pytorch_model.bin beside it was left alone" in note.text for note in report.warnings)
    assert_same_model(out, four.truth)


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "dangling", "loop"])
def test_what_stands_in_the_place_of_fsdp_config_is_named(four, out, kind):
    path = four.leaf / "fsdp_config.json"
    path.unlink(missing_ok=True)
    put(kind, path)
    with refused(SourceError, f"{path}: {said_of(kind, path)}", dst=out):
        lazymerge.merge(four.root, out)


def test_rank_files_may_be_links(four, out):
    for rank in range(4):
        place = four.rank_file(rank)
        place.rename(four.root / str(rank))
        place.symlink_to(four.root / str(rank))
    lazymerge.merge(four.root, out)
    assert_same_model(out, four.truth, tied=tied_away(four))


@pytest.fixture
def opened():
    """The names of the files that are opened from now on."""
    OPENED.clear()
    WATCHING.append(True)
    yield OPENED
    WATCHING.clear()


@pytest.fixture
def two_worlds(four) -> Made:
    """Four ranks complete, three of eight, and optimizer files of a gigabyte that say nothing."""
    (four.leaf / "fsdp_config.json").unlink()
    for rank in (0, 1, 5):
        shutil.copy(four.rank_file(0), rank_file(four.leaf, 8, rank))
    for rank in range(4):
        with open(four.rank_file(rank, "optim"), "wb") as file:
            file.truncate(10**9)
    return four


@pytest.mark.parametrize("level", ["root", "step", "leaf"])
def test_the_complete_set_is_taken(two_worlds, out, opened, level):
    made = two_worlds
    report = lazymerge.merge({"root": made.root, "step": made.leaf.parent, "leaf": made.leaf}[level], out)
    WATCHING.clear()
    assert_same_model(out, made.truth)
    (note,) = report.warnings
    assert "model_world_size_8_rank_{R}.pt (3 of 8 ranks)" in note.text
    assert any(path.endswith("model_world_size_4_rank_3.pt") for path in opened)
    assert [path for path in opened if "optim" in path or "extra" in path or "size_8" in path] == []


@pytest.mark.parametrize("complete", ["both", "neither"])
def test_no_set_or_two_are_complete(two_worlds, out, complete):
    if complete == "both":
        for rank in range(8):
            shutil.copy(two_worlds.rank_file(0), rank_file(two_worlds.leaf, 8, rank))
    else:
        two_worlds.rank_file(2).unlink()
    with refused(AmbiguousCheckpoint, "size_4", "size_8", "--world-size", dst=out):
        lazymerge.merge(two_worlds.root, out)


def test_a_set_is_chosen_by_its_size(two_worlds, out):
    for rank in range(8):
        shutil.copy(two_worlds.rank_file(0), rank_file(two_worlds.leaf, 8, rank))
    lazymerge.merge(two_worlds.root, out, world_size=4)
    assert_same_model(out, two_worlds.truth)


def test_no_set_has_that_size(two_worlds, tmp_path, out):
    with refused(IncompleteCheckpoint, "16", dst=out):
        lazymerge.merge(two_worlds.root, out, world_size=16)


def test_two_full_state_dicts(tmp_path, out):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("pytorch_model.bin", "model.pt"):
        torch.save({"x": torch.ones(2)}, run / name)
    with refused(AmbiguousCheckpoint, "pytorch_model.bin", "model.pt", dst=out):
        lazymerge.merge(run, out)


def test_two_state_dicts_in_a_file(tmp_path, out):
    torch.save({"model": {"x": torch.ones(2)}, "state_dict": {"x": torch.ones(2)}}, tmp_path / "model.pt")
    with refused(AmbiguousCheckpoint, "model.pt", "model and state_dict", dst=out):
        lazymerge.merge(tmp_path / "model.pt", out)


def test_steps_without_a_pointer(four, out):
    shutil.copytree(four.leaf.parent, four.root / "global_step_9")
    (four.root / "latest_checkpointed_iteration.txt").unlink()
    with refused(AmbiguousCheckpoint, "7, 9", "latest_checkpointed_iteration.txt", "global_step_9", dst=out):
        lazymerge.merge(four.root, out)


def test_a_full_state_dict_beside_rank_files_is_named(four, out):
    torch.save({"x": torch.ones(2)}, four.leaf / "pytorch_model.bin")
    report = lazymerge.merge(four.root, out)
    assert any("pytorch_model.bin beside it was left alone" in note.text for note in report.warnings)
    assert_same_model(out, four.truth)


def one_file(folder, content):
    folder.mkdir()
    torch.save(content, folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize("wrapper", ["model", "state_dict"])
def test_a_tensor_beside_the_state_dict_does_not_hide_it(tmp_path, out, wrapper):
    source = one_file(tmp_path / "run", {wrapper: {"w": torch.ones(3)}, "rng": torch.zeros(8), "epoch": 1})
    report = lazymerge.merge(source, out)
    assert_same_model(out, {"w": torch.ones(3)})
    assert set(report.left_out) == {"rng", "epoch"}


def test_wrappers_in_wrappers(tmp_path, out):
    lazymerge.merge(one_file(tmp_path / "run", {"model": {"module": {"w": torch.ones(3)}}}), out)
    assert_same_model(out, {"w": torch.ones(3)})


def test_a_wrapper_in_itself(tmp_path, out):
    wrapper: dict[str, object] = {}
    wrapper["model"] = wrapper
    with refused(UnsupportedCheckpoint, "no tensors", dst=out):
        lazymerge.merge(one_file(tmp_path / "run", wrapper), out)


@pytest.mark.parametrize("hidden", [{"b": torch.ones(2)}, [torch.ones(2)], {"x": {"y": (torch.ones(2),)}}])
def test_tensors_that_would_be_left_out_are_refused(tmp_path, out, hidden):
    source = one_file(tmp_path / "run", {"a": torch.ones(2), "sub": hidden})
    with refused(UnsupportedCheckpoint, "'sub' in", "flat state dict", dst=out):
        lazymerge.merge(source, out)


@pytest.mark.parametrize("zip_format", [True, False])
@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_a_tensor_whose_bytes_are_not_its_values_is_refused(tmp_path, out, bit, zip_format):
    value = torch.randn(4, dtype=torch.complex64).conj() if bit == "conj" else torch._neg_view(torch.randn(4))
    (tmp_path / "run").mkdir()
    torch.save({"x": value}, tmp_path / "run/model.pt", _use_new_zipfile_serialization=zip_format)
    with refused(UnsupportedCheckpoint, "x in", dst=out):
        lazymerge.merge(tmp_path / "run", out)


def test_no_source_at_all(out):
    with refused(PlanError, "no source", dst=out):
        lazymerge.merge([], out)


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers_at_all(four, out, workers):
    with refused(PlanError, "--max-workers", dst=out):
        lazymerge.merge(four.root, out, max_workers=workers)


def test_an_unknown_folder_among_several_is_the_one_that_is_named(four, tmp_path, out):
    (tmp_path / "empty").mkdir()
    with refused(NotACheckpoint, str(tmp_path / "empty"), "empty folder", dst=out):
        lazymerge.merge([four.root, tmp_path / "empty"], out)


def test_the_file_of_one_rank(four, out):
    with refused(IncompleteCheckpoint, "rank 2 alone", str(four.leaf), dst=out):
        lazymerge.merge(four.rank_file(2), out)


def test_the_file_of_the_only_rank(checkpoint, out):
    made = checkpoint("fsdp2-one-rank")
    lazymerge.merge(made.rank_file(0), out)
    assert_same_model(out, made.truth, tied=tied_away(made))
