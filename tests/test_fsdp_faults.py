"""What is wrong with an FSDP checkpoint: refused before a byte is written, by name, with what to do."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import lazymerge
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    PlanError,
    SourceError,
    UnsupportedCheckpoint,
)
from tests.checks import assert_same_model, refused, tied_away
from tests.makers.dtensors import Local, Placed, dtensors
from tests.makers.layout import Made, copy_of, edit_rank, rank_file

NORM = "model.norm.weight"


@pytest.fixture
def hybrid(checkpoint, tmp_path) -> Made:
    """(ddp 2, fsdp 2): ranks 0 and 2 hold one half, 1 and 3 the other."""
    return copy_of(checkpoint("fsdp2-hsdp"), tmp_path / "run")


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
        (json.dumps({"a": [[]] * 3}).replace("[]", "[" * 9999 + "]" * 9999), DamagedFile, ("JSON",)),
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


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("output_format", ["safetensors", "bin"])
def test_a_name_that_is_no_text(tmp_path, out, protocol, output_format):
    """Half of a surrogate pair: spelled out it would be another name, which may be there too."""
    state = {"a\\ud800b": torch.ones(2), "a\ud800b": torch.zeros(2)}
    torch.save(state, tmp_path / "model.pt", pickle_protocol=protocol)
    words = (str(tmp_path / "model.pt"), r"'a\ud800b'", "surrogate")
    with refused(UnsupportedCheckpoint, *words, dst=out):
        lazymerge.merge(tmp_path / "model.pt", out, output_format=output_format)


def test_a_text_that_is_no_text_beside_the_tensors(tmp_path, out):
    torch.save({"a": torch.ones(2), "note\ud800": "\ud800"}, tmp_path / "model.pt")
    report = lazymerge.merge(tmp_path / "model.pt", out)
    assert_same_model(out, {"a": torch.ones(2)})
    assert json.loads(json.dumps(report.to_json()))["left_out"] == {"note\ud800": "no tensor but str"}


# ---- what another torch may write --------------------------------------------------------------------------


def respecified(path: Path, change: Callable[[object], object]) -> None:
    """Rewrites a rank file with `change` made to the spec of each DTensor."""
    state = torch.load(path, weights_only=False)
    for tensor in state.values():
        change(tensor._spec)
    torch.save(state, path)


def as_lists(spec: object) -> None:
    object.__setattr__(spec, "shard_order", [tuple(entry) for entry in spec.shard_order])


def under_another_name(spec: object) -> None:
    entries = tuple(types.SimpleNamespace(dim=0, over=entry.mesh_dims) for entry in spec.shard_order)
    object.__setattr__(spec, "shard_order", entries)


@pytest.mark.parametrize("change", [as_lists, under_another_name])
def test_an_order_of_cuts_that_is_not_understood(tmp_path, out, change):
    """It is not taken for none: rows would be mixed up."""
    entries = {"w": Placed(torch.arange(32.0).view(8, 4), (Shard(0), Shard(0)), order={0: (1, 0)})}
    made = dtensors(tmp_path / "run", (("dp", 2), ("tp", 2)), entries)
    for rank in range(4):
        respecified(made.rank_file(rank), change)
    with refused(UnsupportedCheckpoint, "w in ", "shard_order", "torch", dst=out):
        lazymerge.merge(made.root, out)


def test_a_reduction_that_is_not_named(tmp_path, out):
    parts = (torch.ones(2), torch.ones(2))
    made = dtensors(tmp_path / "run", (("tp", 2),), {"w": Local(parts, (Partial(),), torch.Size([2]))})
    for rank in range(2):
        with zipfile.ZipFile(made.rank_file(rank)) as archive:
            content = {info: archive.read(info) for info in archive.infolist()}
        assert sum(raw.count(b"reduce_op") for raw in content.values()) == 1
        with zipfile.ZipFile(made.rank_file(rank), "w") as archive:
            for info, raw in content.items():
                archive.writestr(info, raw.replace(b"reduce_op", b"reduceall"))
    with refused(UnsupportedCheckpoint, "w: partial values", "full_tensor", dst=out):
        lazymerge.merge(made.root, out)


def test_partial_values_whose_sum_overflows(tmp_path, out):
    parts = (torch.full((3, 3), 40000.0).half(),) * 2
    made = dtensors(tmp_path / "run", (("tp", 2),), {"w": Local(parts, (Partial(),), torch.Size([3, 3]))})
    with pytest.raises(PlanError, match=r"w: 9 of its values, such as 80000, do not fit float16\nsave it"):
        lazymerge.merge(made.root, out)
