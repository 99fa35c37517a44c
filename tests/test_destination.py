"""The destination: what it has to be, what becomes of an earlier result, what an interruption leaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections import namedtuple
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lazymerge
from lazymerge import api
from lazymerge.errors import InconsistentCheckpoint, OutputError, PlanError
from lazymerge.output import Destination
from tests.checks import assert_same_model, assert_well_formed, refused, tree

Usage = namedtuple("Usage", "total used free")
TRUTH = {f"layers.{i}.weight": torch.full((30, 20), float(i)) for i in range(6)}
NEWER = {name: tensor + 100 for name, tensor in TRUTH.items()}
LARGE = {f"layers.{i}.weight": torch.full((300, 200), float(i)) for i in range(3)}  # copied by the kernel
SHARD = {"max_shard_size": 2 * 30 * 20 * 4}  # two tensors in each of three files
SHARDS = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
ALL_RENAMED = 1 + 6
"""Steps of publishing after which all files have their names: a manifest of before goes first."""
LARGE_SHARD = {"max_shard_size": 300 * 200 * 4}


@pytest.fixture
def src(source, tmp_path) -> Path:
    """A full state dict with two sidecars, one of them in a folder of its own."""
    folder = source(tmp_path / "src", TRUTH, {})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool.jinja").write_text("x")
    return folder


# ---- places ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["src/model", "src/a/b/model", "link/model"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_inside_of_the_source(src, tmp_path, place, overwrite):
    (tmp_path / "link").symlink_to(src)
    before = tree(src)
    with refused(OutputError, str(tmp_path / place), "inside the source", dst=tmp_path / place):
        lazymerge.merge(src, tmp_path / place, overwrite=overwrite)
    assert tree(src) == before


@pytest.mark.parametrize("name", ["", "pytorch_model.bin"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_source_is_not_overwritten(src, name, overwrite):
    """Not that of a single file either: `overwrite` would remove it."""
    with refused(OutputError, str(src), "holds the source", dst=src):
        lazymerge.merge(src / name, src, overwrite=overwrite)


def test_a_file(src, tmp_path):
    (tmp_path / "out").write_text("x")
    with refused(OutputError, str(tmp_path / "out"), "is a file", dst=tmp_path / "out"):
        lazymerge.merge(src, tmp_path / "out", overwrite=True)


def test_a_link_to_nothing(src, tmp_path):
    (tmp_path / "out").symlink_to("gone")
    with refused(OutputError, str(tmp_path / "out"), "is a link to what is not there", dst=tmp_path / "gone"):
        lazymerge.merge(src, tmp_path / "out")


@pytest.mark.parametrize("name", [".lazymerge/journal.jsonl", ".lazymerge/partial.json", ".lazymerge-ended"])
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_journal_that_is_no_file(src, tmp_path, name, kind):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with refused(OutputError, f"{path}: is no plain file", "remove it", dst=tmp_path / "none"):
        lazymerge.merge(src, tmp_path / "out")


OWN = [".lazymerge/lock", ".lazymerge/journal.jsonl", ".lazymerge/partial.json", ".lazymerge-ended"]


@pytest.mark.parametrize(
    ("name", "kind"), [*product(OWN, ["link", "dangling"]), (".lazymerge/lock", "hard link")]
)
def test_a_strangers_link_where_a_merge_keeps_its_own(src, tmp_path, name, kind):
    """In a checkpoint of verl, whose folder of the result comes with it."""
    path, victim = tmp_path / "out" / name, tmp_path / "victim"
    path.parent.mkdir(parents=True)
    if kind != "dangling":
        victim.write_text("x")
    path.hardlink_to(victim) if kind == "hard link" else path.symlink_to(victim)
    with refused(OutputError, f"{path}: is no plain file", "remove it", dst=tmp_path / "none"):
        lazymerge.merge(src, tmp_path / "out")
    assert victim.exists() == (kind != "dangling")
    assert kind == "dangling" or victim.read_text() == "x"


@pytest.mark.parametrize("name", [".lazymerge-manifest.json.part", ".lazymerge/journal.jsonl.new"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_strangers_link_where_a_file_is_under_way(src, tmp_path, name, dangling):
    path, victim = tmp_path / "out" / name, tmp_path / "victim"
    path.parent.mkdir(parents=True)
    if not dangling:
        victim.write_text("x")
    path.symlink_to(victim)
    lazymerge.merge(src, tmp_path / "out", verify=True, overwrite=True)
    assert_same_model(tmp_path / "out", TRUTH)
    assert victim.exists() != dangling
    assert dangling or victim.read_text() == "x"


@pytest.mark.parametrize("name", OWN[1:])
def test_a_strangers_journal_without_end(src, tmp_path, name):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    with open(path, "wb") as file:
        file.truncate(5 << 30)
    with refused(OutputError, f"{path}: has 5368709120 bytes", "remove it", dst=tmp_path / "none"):
        lazymerge.merge(src, tmp_path / "out")


@pytest.mark.parametrize("name", [".lazymerge", ".lazymerge/lock"])
def test_what_is_in_the_way_is_named(src, tmp_path, name):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("x") if name == ".lazymerge" else path.mkdir()
    with refused(OutputError, f"{path}:", "remove ", dst=tmp_path / "none"):
        lazymerge.merge(src, tmp_path / "out")


def test_a_config_that_is_read_is_not_replaced(src, tmp_path):
    """Not even where it lies as that of an earlier stage does."""
    out = tmp_path / "out"
    given = out / "huggingface"
    lazymerge.merge(src, out, stage="merge")
    (given / "config.json").write_text('{"model_type": "x"}')
    for kwargs in ({}, {"stage": "merge"}):
        with refused(OutputError, "config.json: is read for the result", dst=tmp_path / "none"):
            lazymerge.merge(src, out, hf_config=given, overwrite=True, **kwargs)
    assert (given / "config.json").read_text() == '{"model_type": "x"}'


def test_what_was_understood_is_what_is_written(src, tmp_path, monkeypatch):
    """config.json changes while the weights are written."""
    config = src / "config.json"
    config.write_text('{"model_type": "x", "num_attention_heads": 4}')
    write = api.write_file

    def changing(*arguments, **options):
        config.write_text('{"model_type": "x", "num_attention_heads": 8}')
        write(*arguments, **options)

    monkeypatch.setattr(api, "write_file", changing)
    lazymerge.merge(src, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["num_attention_heads"] == 4


def test_below_a_file(src, tmp_path):
    (tmp_path / "file").write_text("x")
    with refused(OutputError, str(tmp_path / "file/out"), dst=tmp_path / "file"):
        lazymerge.merge(src, tmp_path / "file/out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(src, tmp_path):
    (tmp_path / "out").mkdir(mode=0o555)
    with refused(OutputError, str(tmp_path / "out"), "Permission denied", dst=tmp_path / "out"):
        lazymerge.merge(src, tmp_path / "out")


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_folder_that_holds_something(src, out, dry_run):
    out.mkdir(parents=True)
    (out / "notes.txt").write_text("x")
    with refused(OutputError, str(out), "notes.txt", "--overwrite", dst=out):
        lazymerge.merge(src, out, dry_run=dry_run)


def test_an_empty_folder_and_a_relative_one(src, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    lazymerge.merge("src", "out")
    lazymerge.merge("src", "other/out")
    assert_same_model(tmp_path / "out", TRUTH)
    assert_same_model(tmp_path / "other/out", TRUTH)


def test_a_dry_run_writes_nothing_and_tells_all(src, out):
    foretold = lazymerge.merge(src, out, dry_run=True, **SHARD)
    assert not out.parent.exists()
    report = lazymerge.merge(src, out, **SHARD)
    sizes = {path.name: path.stat().st_size for path in out.glob("*.safetensors*")}
    assert dict(foretold.files) == dict(report.files) == sizes
    assert foretold.bytes_written == report.bytes_written == sum(sizes.values())


# ---- an earlier result -------------------------------------------------------------------------------------


@pytest.fixture
def earlier(out) -> Path:
    """A folder with a model of seven shards, a second one as `.bin`, and files of somebody else."""
    out.mkdir(parents=True)
    for name in [f"model-{i:05}-of-00007.safetensors" for i in range(1, 8)]:
        (out / name).write_bytes(b"old")
    for name in ("model.safetensors", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"):
        (out / name).write_bytes(b"old")
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "old"}}))
    for name in ("README.md", "config.json", "runs/events.log"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("old")
    return out


def test_an_earlier_result_is_not_touched_unasked(src, earlier):
    with refused(OutputError, str(earlier), "not empty", "--overwrite", dst=earlier):
        lazymerge.merge(src, earlier)


@pytest.mark.parametrize("options", [{}, SHARD], ids=["one file", "three files"])
def test_an_earlier_result_is_replaced(src, earlier, options):
    lazymerge.merge(src, earlier, overwrite=True, **options)
    assert_same_model(earlier, TRUTH)
    assert not list(earlier.glob("*.bin*"))
    assert (earlier / "README.md").read_text() == (earlier / "runs/events.log").read_text() == "old"
    assert (earlier / "config.json").read_text() == "{}"


def test_an_earlier_result_stays_until_the_new_one_is_there(src, earlier, disk_full):
    before = tree(earlier)
    disk_full(SHARDS[1])
    with pytest.raises(OutputError):
        lazymerge.merge(src, earlier, overwrite=True, **SHARD)
    assert {name: content for name, content in tree(earlier).items() if ".lazymerge" not in name} == before


def test_an_unfinished_overwrite_is_no_leave_to_overwrite(src, earlier, disk_full):
    """The same command without `overwrite` would leave old shards beside the new ones."""
    disk_full(SHARDS[1])
    with pytest.raises(OutputError):
        lazymerge.merge(src, earlier, overwrite=True, **SHARD)
    disk_full(None)
    with refused(OutputError, "not empty", "--overwrite", dst=earlier):
        lazymerge.merge(src, earlier, **SHARD)
    lazymerge.merge(src, earlier, overwrite=True, **SHARD)
    assert_same_model(earlier, TRUTH)


def test_a_folder_in_the_place_of_a_file(src, out):
    (out / "config.json").mkdir(parents=True)
    with pytest.raises(OutputError, match=r"config\.json"):
        lazymerge.merge(src, out, overwrite=True)


# ---- interruption ------------------------------------------------------------------------------------------


@pytest.fixture
def disk_full(monkeypatch):
    """`disk_full(name)`: from now on nothing can be written into a file of that name (None: all can)."""
    full: list[str | None] = [None]

    def failing(real):
        def write(fd, *args):
            if full[0] is not None and full[0] in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, *args)

        return write

    real_copy = os.copy_file_range

    def copy(source_fd, fd, *args):
        return failing(lambda fd, *args: real_copy(source_fd, fd, *args))(fd, *args)

    monkeypatch.setattr(os, "pwrite", failing(os.pwrite))
    monkeypatch.setattr(os, "copy_file_range", copy)
    return lambda name: full.__setitem__(0, name)


@pytest.mark.parametrize(("state", "options"), [(TRUTH, SHARD), (LARGE, LARGE_SHARD)], ids=["small", "large"])
def test_a_disk_that_is_full_half_way(source, tmp_path, out, disk_full, state, options):
    """What is finished is kept, and not written again."""
    src = source(tmp_path / "src", state)
    disk_full(SHARDS[1])
    with pytest.raises(OutputError) as caught:
        lazymerge.merge(src, out, **options)
    assert SHARDS[1] in caught.value.problem
    assert "No space left" in caught.value.problem
    assert "same command" in caught.value.hint
    assert [path.name for path in out.iterdir()] == [".lazymerge"]
    first = (out / ".lazymerge" / SHARDS[0]).stat()
    disk_full(None)
    report = lazymerge.merge(src, out, **options)
    assert_same_model(out, state)
    assert report.resumed == (SHARDS[0],)
    after = (out / SHARDS[0]).stat()
    assert (after.st_ino, after.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert (out / SHARDS[1]).stat().st_ino != first.st_ino


def test_no_room_for_a_file(src, out, monkeypatch):
    real = os.posix_fallocate

    def full(fd, at, size):
        if SHARDS[1] in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, at, size)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OutputError, match=rf"{SHARDS[1]}.*No space left"):
            lazymerge.merge(src, out, **SHARD)
    assert lazymerge.merge(src, out, **SHARD).resumed == (SHARDS[0],)
    assert_same_model(out, TRUTH)


def test_an_interrupt_by_the_user(src, out):
    def stop(progress):
        if progress.file == SHARDS[1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lazymerge.merge(src, out, on_progress=stop, max_workers=1, **SHARD)  # in the thread of the caller
    assert [path.name for path in out.iterdir()] == [".lazymerge"]
    assert lazymerge.merge(src, out, **SHARD).resumed == (SHARDS[0],)
    assert_same_model(out, TRUTH)


@pytest.mark.parametrize("renamed", range(6))
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_failure_among_the_last_steps(src, out, monkeypatch, renamed, overwrite):
    """Two sidecars, three shards and the index are renamed: the index last."""
    if overwrite:
        out.mkdir(parents=True)
        (out / "model-00001-of-00007.safetensors").write_bytes(b"old")
    real, count = os.replace, iter(range(100))

    def failing(old, new):
        if next(count) == renamed:
            raise OSError(errno.EIO, "Input/output error")
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(OutputError, match="Input/output error"):
            lazymerge.merge(src, out, overwrite=overwrite, **SHARD)
    assert not list(out.glob("*.index.json"))
    report = lazymerge.merge(src, out, overwrite=overwrite, **SHARD)
    assert report.resumed == tuple(SHARDS)
    assert_same_model(out, TRUTH)


@pytest.mark.parametrize("renamed", range(3))
def test_the_only_weight_file_comes_last(src, out, monkeypatch, renamed):
    real, count = os.replace, iter(range(100))
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "replace", lambda old, new: real(old, new) if next(count) < renamed else os.stat("")
        )
        with pytest.raises(OutputError):
            lazymerge.merge(src, out)
    assert not (out / "model.safetensors").exists()
    lazymerge.merge(src, out)
    assert_same_model(out, TRUTH)


class Killed(BaseException):
    """Nothing that follows is run, as after SIGKILL."""


@pytest.fixture
def killed_at(monkeypatch):
    """`killed_at(n)`: the n-th removal or renaming from now on is the last thing that a merge does.

    What would tidy up afterwards does not either. None: nothing is killed any more; `steps` counts.
    """
    state = {"last": None, "steps": 0}

    def counting(real):
        def step(*args, **kwargs):
            if state["last"] is not None and state["steps"] >= state["last"]:
                raise Killed
            state["steps"] += 1
            return real(*args, **kwargs)

        return step

    for name in ("replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    monkeypatch.setattr("lazymerge.claim._tidy", lambda folder, made: None)

    def start(last):
        state.update(last=last, steps=0)
        return state

    return start


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    """What changes if a file is written or put in its place again."""
    files = [path for path in folder.rglob("*") if path.is_file() and ".lazymerge" not in str(path)]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_any_moment_of_publishing(source, src, tmp_path, killed_at, overwrite):
    """Six files are renamed; from then on the same command finds the result, and writes nothing anew."""
    state = killed_at(None)
    lazymerge.merge(src, tmp_path / "whole", overwrite=overwrite, **SHARD)
    steps = state["steps"]
    found = []
    for last in range(steps):
        out = tmp_path / str(last)
        killed_at(last)
        with pytest.raises(Killed):
            lazymerge.merge(src, out, overwrite=overwrite, **SHARD)
        killed_at(None)
        before = identities(out)
        report = lazymerge.merge(src, out, overwrite=overwrite, **SHARD)
        assert report.resumed == tuple(SHARDS)
        assert_same_model(out, TRUTH)
        if len(before) == 6:
            assert identities(out) == before
            found.append(last)
    assert len(found) > 2  # after the last renaming, and while the staging folder is removed
    assert found[-1] == steps - 1


def test_a_result_is_not_taken_for_that_of_another_job(src, out, killed_at):
    killed_at(ALL_RENAMED)
    with pytest.raises(Killed):
        lazymerge.merge(src, out, **SHARD)
    killed_at(None)
    assert len(identities(out)) == 6
    with refused(OutputError, "not empty", dst=out):
        lazymerge.merge(src, out, dtype="bfloat16", **SHARD)
    (out / SHARDS[0]).write_bytes(b"cut")
    assert SHARDS[0] not in lazymerge.merge(src, out, **SHARD).resumed
    assert_same_model(out, TRUTH)


def test_a_sidecar_that_changed_since_is_copied_into_the_result(src, out, killed_at):
    killed_at(ALL_RENAMED)
    with pytest.raises(Killed):
        lazymerge.merge(src, out, **SHARD)
    killed_at(None)
    before = identities(out)
    name = "additional_chat_templates/tool.jinja"
    (src / name).write_text("y")
    lazymerge.merge(src, out, **SHARD)
    assert (out / name).read_text() == "y"
    changed = {path for path, identity in identities(out).items() if before[path] != identity}
    assert changed == {str(out / name)}


@pytest.fixture
def newer(source, src, tmp_path, out) -> Path:
    """The next checkpoint of the model whose result `out` holds: the same names and sizes, other values."""
    lazymerge.merge(src, out, **SHARD)
    return source(tmp_path / "newer", NEWER, {})


@pytest.mark.parametrize("until", ["the second file", "publishing"])
def test_files_of_the_model_before_do_not_count_as_finished(newer, out, disk_full, killed_at, until):
    """The journal lists files that are gone; those in the folder have their names and sizes."""
    if until == "publishing":
        killed_at(0)
    else:
        disk_full(SHARDS[1])
    with pytest.raises((OutputError, Killed)):
        lazymerge.merge(newer, out, overwrite=True, **SHARD)
    killed_at(None)
    disk_full(None)
    for path in (out / ".lazymerge").rglob("*"):
        if path.is_file() and path.name != "journal.jsonl":
            path.unlink()
    report = lazymerge.merge(newer, out, overwrite=True, **SHARD)
    assert report.resumed == ()
    assert_same_model(out, NEWER)


@pytest.mark.parametrize("last", range(6))
def test_killed_where_another_job_begins(newer, out, killed_at, last):
    killed_at(0)
    with pytest.raises(Killed):
        lazymerge.merge(newer, out, overwrite=True, **SHARD)
    killed_at(last)
    with pytest.raises(Killed):
        lazymerge.merge(newer, out, dtype="bfloat16", overwrite=True, **SHARD)
    killed_at(None)
    assert (out / ".lazymerge/journal.jsonl").exists() == (not last)  # it goes before what it lists
    assert lazymerge.merge(newer, out, overwrite=True, **SHARD).resumed == (() if last else tuple(SHARDS))
    assert_same_model(out, NEWER)


def test_a_published_file_that_was_changed_in_its_place(src, out, killed_at):
    killed_at(ALL_RENAMED)
    with pytest.raises(Killed):
        lazymerge.merge(src, out, **SHARD)
    killed_at(None)
    with open(out / SHARDS[0], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert lazymerge.merge(src, out, **SHARD).resumed == tuple(SHARDS[1:])
    assert_same_model(out, TRUTH)


def test_a_sidecar_that_came_since_is_put_into_the_result(src, out, killed_at):
    killed_at(ALL_RENAMED)
    with pytest.raises(Killed):
        lazymerge.merge(src, out, **SHARD)
    killed_at(None)
    (src / "tokenizer_config.json").write_text("{}")
    assert lazymerge.merge(src, out, **SHARD).resumed == tuple(SHARDS)
    assert (out / "tokenizer_config.json").read_text() == "{}"
    assert_same_model(out, TRUTH)


@pytest.mark.parametrize("renamed", [0, 2, 6])
@pytest.mark.parametrize("edited", [False, True])
def test_a_sidecar_that_went_since_is_taken_away_again(src, out, killed_at, renamed, edited):
    """Not if somebody has changed it: then it is theirs."""
    killed_at(renamed)
    with pytest.raises(Killed):
        lazymerge.merge(src, out, **SHARD)
    killed_at(None)
    name = "additional_chat_templates/tool.jinja"
    (src / name).unlink()
    if renamed and edited:
        (out / name).write_text("theirs")
    lazymerge.merge(src, out, **SHARD)
    assert (out / name).exists() == bool(renamed and edited)
    assert_same_model(out, TRUTH)


@pytest.mark.parametrize("renamed", [0, 4])
def test_another_merge_into_what_is_half_published(src, out, monkeypatch, renamed):
    """Nothing of the first result may stay beside the second."""
    real, count = os.replace, iter(range(100))
    failing = lambda old, new: real(old, new) if next(count) < renamed else os.stat("/no/such/file")  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(OutputError):
            lazymerge.merge(src, out, **SHARD)
    if renamed:
        with refused(OutputError, "not empty", dst=out):
            lazymerge.merge(src, out, dtype="bfloat16")
    lazymerge.merge(src, out, dtype="bfloat16", overwrite=bool(renamed))
    assert_same_model(out, {name: tensor.bfloat16() for name, tensor in TRUTH.items()})


@pytest.mark.parametrize("change", ["time", "size", "content"])
def test_a_source_that_changed_in_between(src, out, disk_full, change):
    disk_full(SHARDS[1])
    with pytest.raises(OutputError):
        lazymerge.merge(src, out, **SHARD)
    disk_full(None)
    file = src / "pytorch_model.bin"
    before = tree(out)
    if change == "time":
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    else:
        torch.save({**TRUTH, **({"x": 1} if change == "size" else {})}, file)
    with pytest.raises(InconsistentCheckpoint) as caught:
        lazymerge.merge(src, out, **SHARD)
    assert str(file) in caught.value.problem
    assert str(out / ".lazymerge") in caught.value.hint
    assert tree(out) == before
    shutil.rmtree(out / ".lazymerge")
    lazymerge.merge(src, out, **SHARD)
    assert_same_model(out, TRUTH)


@pytest.mark.parametrize(
    "options", [{"dtype": "float16", **SHARD}, {}, {"exclude": ["*.3.*"], **SHARD}], ids=str
)
def test_other_options_start_again(src, out, disk_full, options):
    disk_full(SHARDS[1])
    with pytest.raises(OutputError):
        lazymerge.merge(src, out, **SHARD)
    disk_full(None)
    assert lazymerge.merge(src, out, **options).resumed == ()
    assert len(assert_well_formed(out)) == 6 - len(options.get("exclude", ()))


# ---- the source's own folder of config and tokenizer -------------------------------------------------------


@pytest.fixture
def actor(source, tmp_path) -> Path:
    """A full state dict, its sidecars in huggingface/ as verl has them."""
    folder = source(tmp_path / "actor", TRUTH)
    own = folder / "huggingface"
    (own / "additional_chat_templates").mkdir(parents=True)
    (own / "config.json").write_text('{ "dtype": "float32" }')
    (own / "tokenizer.json").write_text("{}")
    (own / "additional_chat_templates/tool.jinja").write_text("x")
    return folder


def kept(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """What is told of each file of the source but for weights in its folder of config and tokenizer."""
    files = [path for path in folder.rglob("*") if path.is_file() and ".lazymerge" not in str(path)]
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
        for path in files
        if not path.match("model*.safetensors*") and not path.match("lazymerge-manifest.json")
    }


@pytest.mark.parametrize("overwrite", [False, True])
def test_beside_the_sources_own_config(actor, overwrite):
    before = kept(actor)
    lazymerge.merge(actor, actor / "huggingface", overwrite=overwrite, verify=True, **SHARD)
    assert_same_model(actor / "huggingface", TRUTH)
    assert kept(actor) == before
    assert lazymerge.verify(actor / "huggingface").same
    assert set(lazymerge.open(actor)) == set(TRUTH)
    assert lazymerge.verify(actor, actor / "huggingface").same


def test_a_second_time_beside_the_sources_own_config(actor):
    before = kept(actor)
    lazymerge.merge(actor, actor / "huggingface", **SHARD)
    with refused(OutputError, "is not empty (model-00001", "--overwrite", dst=actor):
        lazymerge.merge(actor, actor / "huggingface", **SHARD)
    lazymerge.merge(actor, actor / "huggingface", overwrite=True)
    assert_same_model(actor / "huggingface", TRUTH)
    assert kept(actor) == before
    lazymerge.merge(actor, actor / "huggingface", include="layers.0.*", overwrite=True)
    lazymerge.merge(actor, actor / "huggingface", overwrite=True)
    assert_same_model(actor / "huggingface", TRUTH)
    assert kept(actor) == before


@pytest.mark.parametrize("where", ["inside", "elsewhere"])
@pytest.mark.parametrize("earlier", [False, True])
def test_killed_beside_the_sources_own_config(actor, tmp_path, killed_at, where, earlier):
    """At no moment a sidecar is away, and the same command goes on. So too where --hf-config is replaced."""

    def merge(root: Path, **options):
        own = root / "huggingface" if where == "inside" else root.with_suffix(".config")
        src = root if where == "inside" else root / "pytorch_model.bin"
        config = None if where == "inside" else own
        lazymerge.merge(src, own, hf_config=config, overwrite=earlier, **options)
        return own

    def fresh(name: str) -> Path:
        root = shutil.copytree(actor, tmp_path / name / "actor")
        if where == "elsewhere":
            (root / "huggingface").rename(root.with_suffix(".config"))
        if earlier:
            merge(root)
        return root

    root, state = fresh("whole"), killed_at(None)
    state["steps"] = 0
    merge(root, **SHARD)
    steps = state["steps"]
    assert steps > 5
    for last in range(steps):
        root = fresh(str(last))
        before = kept(root.parent)
        killed_at(last)
        with pytest.raises(Killed):
            merge(root, **SHARD)
        killed_at(None)
        assert kept(root.parent).items() >= before.items()
        assert_same_model(merge(root, **SHARD), TRUTH)
        assert kept(root.parent) == before


@pytest.mark.parametrize("published", [False, True], ids=["never", "by a run that was killed"])
def test_what_stays_is_not_removed_though_no_file_of_the_result_has_its_name(tmp_path, published):
    (tmp_path / ".lazymerge").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    for names in [["config.json", "model.safetensors"]] * published + [["model.safetensors"]]:
        destination = Destination(tmp_path, overwrite=True, stays={"config.json"})
        destination.begin({}, [])
        with destination.file("model.safetensors", 3) as fd:
            os.write(fd, b"new")
        destination.publish(names)
    assert (tmp_path / "config.json").read_text() == "{}"
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bfloat16"}, "config.json: is the source's, and that of the result would differ"),
        ({"hf_config": "other"}, "config.json: is the source's, and that of the result would differ"),
        ({"stage": "merge"}, "only a whole model can go"),
    ],
)
@pytest.mark.parametrize("overwrite", [True, False])
def test_the_sources_own_config_is_not_changed(actor, tmp_path, options, words, overwrite):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text("{}")
    if "hf_config" in options:
        options = {"hf_config": tmp_path / "other"}
    with refused(OutputError, words, "another folder", dst=actor):
        lazymerge.merge(actor, actor / "huggingface", overwrite=overwrite, **options)


def test_any_other_folder_of_the_source_is_refused_and_that_one_named(actor):
    for place in ("out", "huggingface/out"):
        with refused(OutputError, "inside the source", str(actor / "huggingface"), dst=actor):
            lazymerge.merge(actor, actor / place, overwrite=True)


def test_beside_rank_files_is_no_place_whoever_names_it(actor):
    """--hf-config may be the folder of the weights themselves, above or below what was given."""
    step = actor.parent / "global_step_1" / "actor"
    shutil.copytree(actor, step)
    shutil.rmtree(actor)
    with refused(OutputError, "inside the source", dst=step):
        lazymerge.merge(actor.parent, step, hf_config=step, overwrite=True)


def test_an_adapter_that_is_read_is_not_replaced(source, tmp_path, out):
    """It is given by another option than SRC, and would be removed before the result has its names."""
    src = source(tmp_path / "src", {"layers.0.q_proj.weight": torch.ones(30, 20)}, {})
    adapter = out / "lora_adapter"
    adapter.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    front = "base_model.model.layers.0.q_proj.lora_"
    halves = {f"{front}A.weight": torch.ones(1, 20), f"{front}B.weight": torch.ones(30, 1)}
    save_file(halves, adapter / "adapter_model.safetensors")
    with refused(OutputError, "adapter_model.safetensors: is read for the result", dst=out):
        lazymerge.merge(src, out, adapter=str(adapter), overwrite=True)
    lazymerge.merge(src, tmp_path / "other", adapter=str(adapter), overwrite=True)
    assert_same_model(tmp_path / "other", {"layers.0.q_proj.weight": torch.full((30, 20), 2.0)})


# ---- others, and too little room ---------------------------------------------------------------------------


def test_another_merge_is_writing_here(src, out):
    (out / ".lazymerge").mkdir(parents=True)
    lock = os.open(out / ".lazymerge/lock", os.O_RDWR | os.O_CREAT)
    os.write(lock, b"4711")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with refused(OutputError, str(out), "another merge", "4711", dst=out):
        lazymerge.merge(src, out)
    os.close(lock)
    lazymerge.merge(src, out)
    assert_same_model(out, TRUTH)


@pytest.mark.parametrize("existing", [True, False])
def test_a_disk_that_is_too_small(src, out, monkeypatch, existing):
    if existing:
        out.mkdir(parents=True)
    size = lazymerge.merge(src, out, dry_run=True, **SHARD).bytes_written
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 0, 12_345))
        with pytest.raises(OutputError) as caught:
            lazymerge.merge(src, out, **SHARD)
    assert "12,345" in caught.value.problem
    needed = int(caught.value.problem.partition("takes ")[2].split()[0].replace(",", ""))
    assert size <= needed <= size + 4096
    assert tree(out) == ({} if existing else None)
    assert out.parent.exists() == existing
    lazymerge.merge(src, out, **SHARD)
    assert_same_model(out, TRUTH)


def test_a_cast_that_overflows_leaves_nothing_that_loads(source, tmp_path, out):
    state = {"fine": torch.ones(2), "too.large": torch.tensor([1.0, 70000.0, torch.inf])}
    src = source(tmp_path / "src", state)
    with pytest.raises(PlanError) as caught:
        lazymerge.merge(src, out, dtype="float16")
    assert "too.large" in caught.value.problem
    assert "70000" in caught.value.problem
    assert "bfloat16" in caught.value.hint
    assert [path.name for path in out.iterdir()] in ([], [".lazymerge"])
    lazymerge.merge(src, out, dtype="bfloat16")
    assert_same_model(out, {name: tensor.bfloat16() for name, tensor in state.items()})


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_link_inside_the_destination_is_not_followed(src, out, tmp_path, overwrite):
    """A file of the result would go to where it leads."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    lazymerge.merge(src, out)
    shutil.rmtree(out / "additional_chat_templates")
    (out / "additional_chat_templates").symlink_to(elsewhere)
    with pytest.raises(OutputError):
        lazymerge.merge(src, out, overwrite=overwrite)
    assert not list(elsewhere.iterdir())
