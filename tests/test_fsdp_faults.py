"""What is wrong with an FSDP checkpoint: refused before a byte is written, by name, with what to do."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import lazymerge
from lazymerge.errors import (
    AmbiguousCheckpoint,
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    SourceError,
    UnsupportedCheckpoint,
)
from tests.checks import assert_same_model, refused, tied_away
from tests.makers.dtensors import Local, dtensors
from tests.makers.layout import Made, copy_of, edit_rank, rank_file
from tests.makers.ranks import run_ranks

NORM = "model.norm.weight"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A destination that does not exist, nor does the folder around it."""
    return tmp_path / "results" / "model"


@pytest.fixture
def hybrid(checkpoint, tmp_path) -> Made:
    """(ddp 2, fsdp 2): ranks 0 and 2 hold one half, 1 and 3 the other."""
    return copy_of(checkpoint("fsdp2-hsdp"), tmp_path / "run")


@pytest.fixture
def four(checkpoint, tmp_path) -> Made:
    """Four ranks, each with a quarter."""
    return copy_of(checkpoint("fsdp2-llama"), tmp_path / "run")


# ---- replicas ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [(2,), (0,), (0, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("name", ["fsdp2-hsdp", "fsdp1-hsdp", "sharded-tensor-hsdp"])
def test_lost_ranks_whose_shards_others_hold(checkpoint, tmp_path, out, name, lost):
    made = copy_of(checkpoint(name), tmp_path / "run")
    for rank in lost:
        made.rank_file(rank).unlink()
    report = lazymerge.merge(made.root, out)
    assert_same_model(out, made.truth, tied=tied_away(made))
    (note,) = report.warnings
    assert f"ranks {', '.join(map(str, lost)) if lost != (2, 3) else '2-3'} are missing" in note.text


@pytest.mark.parametrize("name", ["fsdp2-hsdp", "fsdp1-hsdp", "sharded-tensor-hsdp"])
def test_a_shard_that_no_rank_has(checkpoint, tmp_path, out, name):
    made = copy_of(checkpoint(name), tmp_path / "run")
    for rank in (0, 2):
        made.rank_file(rank).unlink()
    with refused(IncompleteCheckpoint, "2 of 4", "(1, 3)", "0, 2 are missing", "other nodes", dst=out):
        lazymerge.merge(made.root, out)
    assert not out.parent.exists()


def test_a_replica_that_differs(hybrid, out):
    edit_rank(hybrid, 2, lambda state: state[NORM]._local_tensor.add_(1))
    report = lazymerge.merge(hybrid.root, out)
    assert_same_model(out, hybrid.truth)
    (note,) = report.warnings
    assert note.tensor == NORM
    assert hybrid.rank_file(2).name in note.text


def test_a_replica_that_differs_strictly(hybrid, out):
    edit_rank(hybrid, 2, lambda state: state[NORM]._local_tensor.add_(1))
    with refused(InconsistentCheckpoint, NORM, hybrid.rank_file(2).name, "--strict", dst=out):
        lazymerge.merge(hybrid.root, out, strict=True)


def test_sizes_that_do_not_add_up(tmp_path, out):
    parts = tuple(torch.full((1, 2), float(rank)) for rank in range(4))
    entries = {"x": Local(parts, (Shard(0), Shard(0)), torch.Size([8, 2]))}
    made = dtensors(tmp_path / "run", (("a", 2), ("b", 2)), entries)
    with refused(InconsistentCheckpoint, "x: rank 0", "(1, 2)", "expected (2, 2)", "(8, 2)", dst=out):
        lazymerge.merge(made.root, out)


def test_replicas_of_another_size(tmp_path, out):
    parts = tuple(torch.zeros(4 + (rank == 2), 2) for rank in range(4))
    entries = {"x": Local(parts, (Replicate(), Replicate()), torch.Size([4, 2]))}
    made = dtensors(tmp_path / "run", (("a", 2), ("b", 2)), entries)
    with refused(InconsistentCheckpoint, "x: rank 2", "(5, 2)", "expected (4, 2)", dst=out):
        lazymerge.merge(made.root, out)


def test_ranks_that_disagree_on_the_shape(checkpoint, tmp_path, out):
    """A rank of another save."""
    made = copy_of(checkpoint("fsdp2-uneven"), tmp_path / "run")
    shutil.copy(checkpoint("fsdp2-qwen2").rank_file(3), made.rank_file(3))
    with refused(InconsistentCheckpoint, "embed_tokens.weight", "(151, 16)", "(32, 16)", "rank 3", dst=out):
        lazymerge.merge(made.root, out)


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


# ---- damage ------------------------------------------------------------------------------------------------


def cut(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)


@pytest.mark.parametrize("percent", [0, 1, 25, 75, 99])
@pytest.mark.parametrize("name", ["fsdp2-llama", "fsdp2-legacy"])
def test_a_rank_that_is_cut(checkpoint, tmp_path, out, name, percent):
    made = copy_of(checkpoint(name), tmp_path / "run")
    path = made.rank_file(2)
    size = path.stat().st_size * percent // 100
    cut(path, size)
    with refused(DamagedFile, str(path), f"{size}" if percent else "0", dst=out):
        lazymerge.merge(made.root, out)
    assert not out.parent.exists()


def test_a_cut_rank_says_how_long_it_should_be(tmp_path, out):
    made = dtensors(tmp_path / "run", (("a", 2),), {"x": (torch.ones(64, 512), (Shard(0),))})
    path = made.rank_file(1)
    size = path.stat().st_size
    cut(path, size * 3 // 4)
    with pytest.raises(DamagedFile) as caught:
        lazymerge.merge(made.root, out)
    numbers = [int(word) for word in re.findall(r"\b\d+\b", caught.value.problem.removeprefix(str(path)))]
    assert size * 3 // 4 in numbers
    assert any(32 * 512 * 4 < number <= size for number in numbers if number != size * 3 // 4), numbers


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"version https://git-lfs.github.com/spec/v1\noid "])
def test_a_rank_that_is_something_else(four, out, content):
    four.rank_file(1).write_bytes(content)
    with pytest.raises(SourceError) as caught:
        lazymerge.merge(four.root, out)
    assert str(four.rank_file(1)) in caught.value.problem
    assert not out.parent.exists()


def test_the_step_that_the_pointer_names(four, out):
    shutil.copytree(four.leaf.parent, four.root / "global_step_9")
    rank_file(four.root / "global_step_9/actor", 4, 1).unlink()
    report = lazymerge.merge(four.root, out)
    assert_same_model(out, four.truth)
    (note,) = report.warnings
    assert "step 7" in note.text
    assert "9" in note.text


@pytest.mark.parametrize(
    ("text", "kind"), [("8", IncompleteCheckpoint), ("x8", SourceError), ("", SourceError)]
)
def test_a_pointer_to_nowhere(four, out, text, kind):
    pointer = four.root / "latest_checkpointed_iteration.txt"
    pointer.write_text(text)
    with refused(kind, str(pointer), text, "step folder", dst=out):
        lazymerge.merge(four.root, out)


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        ("{", DamagedFile, ("JSON",)),
        ("[1]", DamagedFile, ("JSON",)),
        ('{"world_size": -1}', DamagedFile, ("-1",)),
        ('{"world_size": 0}', DamagedFile, ("0",)),
        ('{"world_size": 1000000000}', DamagedFile, ("1000000000",)),
        ('{"world_size": "4"}', DamagedFile, ("4",)),
        ('{"world_size": 8}', InconsistentCheckpoint, ("8", "4")),
        ('{"world_size": 3}', InconsistentCheckpoint, ("3", "4")),
        (json.dumps({"a": [[]] * 10}).replace("[]", "[" * 9999 + "]" * 9999), DamagedFile, ("JSON",)),
    ],
    ids=["cut", "a list", "negative", "zero", "huge", "text", "larger", "smaller", "deep"],
)
def test_fsdp_config(four, out, content, kind, words):
    path = four.leaf / "fsdp_config.json"
    path.write_text(content)
    with refused(kind, str(path), *words, dst=out):
        lazymerge.merge(four.root, out)
    assert not out.parent.exists()


# ---- what it is not ----------------------------------------------------------------------------------------


def test_flat_parameters(checkpoint, out):
    made = checkpoint("flat-parameters")
    words = ("_flat_param", str(made.rank_file(0)), "SHARDED_STATE_DICT", "FULL_STATE_DICT")
    with refused(UnsupportedCheckpoint, *words, dst=out):
        lazymerge.merge(made.root, out)


@pytest.mark.parametrize("holds", [[], ["notes.txt", "loss.csv"], ["optim_world_size_4_rank_0.pt"]], ids=str)
def test_a_folder_without_a_checkpoint(tmp_path, out, holds):
    (tmp_path / "src").mkdir()
    for name in holds:
        (tmp_path / "src" / name).write_text("x")
    words = ("model_world_size_{N}_rank_{R}.pt", "rank_{R}.pt", "pytorch_model.bin", "model.pt")
    with refused(NotACheckpoint, str(tmp_path / "src"), *(holds or ["empty"]), *words, dst=out):
        lazymerge.merge(tmp_path / "src", out)


def test_a_file_without_a_state_dict(tmp_path, out):
    (tmp_path / "notes.txt").write_text("x")
    with refused(NotACheckpoint, "notes.txt", dst=out):
        lazymerge.merge(tmp_path / "notes.txt", out)
    path = tmp_path / "model.pt"
    for value, word in [
        ([1, 2], "list"),
        ({}, "no tensors"),
        (torch.ones(2), "a tensor"),
        ({"a": 1}, "no tensors"),
    ]:
        torch.save(value, path)
        with refused(UnsupportedCheckpoint, str(path), word.lower(), dst=out):
            lazymerge.merge(path, out)


def test_an_archive_of_something_else(tmp_path, out):
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("readme.txt", "x")
    with pytest.raises(SourceError, match=r"model\.pt"):
        lazymerge.merge(tmp_path / "model.pt", out)
    assert not out.parent.exists()


def test_nothing_there(tmp_path, out):
    with refused(SourceError, str(tmp_path / "no"), "No such file", dst=out):
        lazymerge.merge(tmp_path / "no", out)


def test_a_folder_that_looks_like_a_rank_file(four, out):
    four.rank_file(1).unlink()
    four.rank_file(1).mkdir()
    with refused(IncompleteCheckpoint, "3 of 4", dst=out):
        lazymerge.merge(four.root, out)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_rank(four, out):
    four.rank_file(1).chmod(0)
    with refused(SourceError, str(four.rank_file(1)), "Permission denied", dst=out):
        lazymerge.merge(four.root, out)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "a._fsdp_wrapped_module."])
def test_names_that_differ_by_a_prefix_only(tmp_path, out, prefix):
    names = [f"{prefix}x", f"{prefix.partition('_')[0]}x"]
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "model.pt")
    with refused(InconsistentCheckpoint, *names, dst=out):
        lazymerge.merge(tmp_path / "model.pt", out)


# ---- hostile files -----------------------------------------------------------------------------------------


class Runs:
    """An object whose pickle runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_runs_a_command_does_not(four, tmp_path, out):
    edit_rank(four, 1, lambda state: state.update(evil=Runs(tmp_path / "ran")))
    report = lazymerge.merge(four.root, out)
    assert_same_model(out, four.truth)
    assert list(report.left_out) == ["evil"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("container", ["torch", "pickle"])
def test_a_file_that_is_nothing_but_a_command(four, tmp_path, out, container):
    value = Runs(tmp_path / "ran")
    path = four.rank_file(1)
    torch.save(value, path) if container == "torch" else path.write_bytes(pickle.dumps(value))
    with pytest.raises(SourceError) as caught:
        lazymerge.merge(four.root, out)
    assert str(path) in caught.value.problem
    assert not (tmp_path / "ran").exists()
    assert not out.parent.exists()
