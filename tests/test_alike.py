"""Rank files that are read by what they have in common: the same result, and never for files that differ."""

from __future__ import annotations

import pickletools
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

import lazymerge
from lazymerge.errors import InconsistentCheckpoint, LazymergeError
from lazymerge.files.local import LocalFile
from lazymerge.files.torch_file import ZippedObject
from lazymerge.files.zip_directory import open_archive
from lazymerge.formats import alike, rank_files
from tests.makers.dtensors import dtensors
from tests.makers.fixtures import RECIPES
from tests.makers.layout import copy_of, edit_rank
from tests.makers.old_torch import old_checkpoint

ONE_MESH = [
    "fsdp2-llama",
    "fsdp2-shard1",
    "fsdp2-uneven",
    "fsdp2-hsdp",
    "fsdp2-twelve",
    "fsdp1-dtensor",
]


@pytest.fixture
def by_template(monkeypatch):
    """Templates from two ranks on; the list says of each try whether the file was like the template."""
    tries: list[bool] = []
    read = alike.Template.read

    def watched(self, file, rank, zipped):
        entries = read(self, file, rank, zipped)
        tries.append(entries is not None)
        return entries

    monkeypatch.setattr(rank_files, "ALIKE_FROM", 2)
    monkeypatch.setattr(alike.Template, "read", watched)
    return tries


def assert_true(made, **options) -> None:
    checkpoint = lazymerge.open(made.root, **options)
    assert set(checkpoint) == set(made.truth)
    for name, truth in made.truth.items():
        result = checkpoint[name].materialize()
        assert result.dtype == truth.dtype
        assert torch.equal(result, truth), name


@pytest.mark.parametrize("name", [name for name in RECIPES if "value" not in name])
def test_every_checkpoint_reads_the_same(name, checkpoint, by_template):
    assert_true(checkpoint(name))


@pytest.mark.parametrize("name", ONE_MESH)
def test_ranks_of_one_mesh_are_alike(name, checkpoint, by_template):
    lazymerge.open(checkpoint(name).root)
    assert any(by_template)


def test_several_meshes_are_read_in_full(checkpoint, by_template):
    lazymerge.open(checkpoint("fsdp2-tp").root)
    assert by_template == []


@pytest.mark.parametrize("version", ["2.1", "2.4", "2.7", "2.9", "2.10", "2.12"])
def test_other_releases_are_alike_too(version, checkpoint, by_template, tmp_path):
    assert_true(old_checkpoint(checkpoint("fsdp2-llama"), tmp_path, version))
    assert by_template == [True] * 3


def test_files_from_gpus_differ_in_their_devices(checkpoint, by_template, tmp_path):
    from tests.makers.layout import verl_leaf, write_verl_surroundings
    from tests.makers.old_torch import old_torch

    made = checkpoint("fsdp2-llama")
    leaf = verl_leaf(tmp_path)
    for rank in range(4):
        old_torch(made.rank_file(rank), leaf / made.rank_file(rank).name, "2.13", cuda=rank)
    write_verl_surroundings(tmp_path, leaf, 4, 2)
    checkpoint_on_gpus = lazymerge.open(tmp_path)
    assert by_template == [True] * 3
    for name, truth in made.truth.items():
        assert torch.equal(checkpoint_on_gpus[name].materialize(), truth)


@pytest.mark.parametrize(("key", "alike_too"), [("group", False), ("other", True)])
def test_a_string_that_is_fetched_again_may_not_differ(key, alike_too, by_template, checkpoint, tmp_path):
    """Python has one string "group": the name of a process group may be fetched as something that counts."""
    made = copy_of(checkpoint("fsdp2-llama"), tmp_path)
    more = {"_dim_group_names": ["group"], "key": key}
    for rank in range(4):
        edit_rank(made, rank, lambda state: state.update({"more": more}))
    path = made.rank_file(2)
    pickled = zipped_pickle(path)
    assert pickled.count(b"\x05\0\0\0group") == 1
    change(path, pickled.index(b"\x05\0\0\0group") + 4, ord("G"))
    lazymerge.open(made.root)
    assert by_template == [True, alike_too, True]


def zipped_pickle(path) -> bytes:
    with open_archive(LocalFile(path)) as archive:
        return ZippedObject(archive).pickled


def test_a_file_under_another_ranks_name_is_refused(checkpoint, by_template, tmp_path):
    made = copy_of(checkpoint("fsdp2-llama"), tmp_path)
    one, two = made.rank_file(1), made.rank_file(2)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    with pytest.raises(InconsistentCheckpoint, match=r"rank_1\.pt: written by rank 2, .* named for rank 1"):
        lazymerge.open(made.root)


def change(path: Path, at: int, value: int) -> None:
    """Another byte at that place of the file's pickle."""
    path.write_bytes(with_byte(path.read_bytes(), zipped_pickle(path), at, value))


def with_byte(content: bytes, pickled: bytes, at: int, value: int) -> bytes:
    """The file with another byte in its pickle, and the checksum that goes with it."""
    other = pickled[:at] + bytes([value]) + pickled[at + 1 :]
    old, new = (zlib.crc32(each).to_bytes(4, "little") for each in (pickled, other))
    return content.replace(pickled, other).replace(old, new)


def outcome(root: Path) -> object:
    """What opening gives: the error's message, or for each tensor where its bytes are."""
    try:
        checkpoint = lazymerge.open(root)
    except LazymergeError as error:
        return str(error)
    return {
        name: [(start, r.source.name, r.offset, r.dtype, r.shape, r.strides) for start, r in gather.pieces()]
        for name, gather in checkpoint.gathers.items()
    }


def test_whichever_byte_changes_it_reads_as_in_full(checkpoint, by_template, tmp_path, monkeypatch):
    """The bytes that differ between ranks, and every 97th of all others, which are none that may differ."""
    made = copy_of(checkpoint("fsdp2-llama"), tmp_path)
    path = made.rank_file(2)
    content, pickled = path.read_bytes(), zipped_pickle(path)
    others = [zipped_pickle(made.rank_file(rank)) for rank in (0, 1, 3)]
    differing = {at for at, byte in enumerate(pickled) if any(other[at] != byte for other in others)}
    assert 0 < len(differing) < 10
    for at in sorted({*differing, *range(0, len(pickled), 97)}):
        path.write_bytes(with_byte(content, pickled, at, pickled[at] ^ 1))
        by_template.clear()
        found = outcome(made.root)
        assert by_template[:1] == [True]
        assert at in differing or by_template[1] is False, at
        with monkeypatch.context() as patch:
            patch.setattr(rank_files, "ALIKE_FROM", 1 << 20)
            assert outcome(made.root) == found, at


def coordinate_at(pickled: bytes) -> int:
    """Where the only number after ``_coordinate_on_dim`` is."""
    seen = False
    for opcode, value, at in pickletools.genops(pickled):
        if seen and opcode.name == "BININT1":
            return at + 1
        seen = seen or value == "_coordinate_on_dim"
    raise AssertionError("no coordinate")


def test_a_coordinate_outside_the_mesh_is_refused(checkpoint, by_template, tmp_path):
    made = copy_of(checkpoint("fsdp2-llama"), tmp_path)
    path = made.rank_file(2)
    change(path, coordinate_at(zipped_pickle(path)), 9)
    with pytest.raises(LazymergeError, match="outside its mesh"):
        lazymerge.open(made.root)


def test_a_smaller_storage_is_found(by_template, tmp_path):
    """The pickles are the same, and rank 1's storage is not as large as its tensor."""
    made = dtensors(tmp_path, (("fsdp", 2),), {"w": (torch.zeros(64, 64), (Shard(0),))})
    path = made.rank_file(1)
    content = path.read_bytes()
    name = f"{path.stem}/data/0".encode()
    central = content.rindex(name) - 46
    size = int.from_bytes(content[central + 24 : central + 28], "little")
    small = (size - 64).to_bytes(4, "little")
    path.write_bytes(content[: central + 20] + small + small + content[central + 28 :])
    with pytest.raises(LazymergeError, match="has 8128 bytes, expected 8192"):
        lazymerge.open(made.root)


def test_a_rank_of_something_else_is_not_the_files_rank(checkpoint, by_template, tmp_path):
    made = copy_of(checkpoint("fsdp2-llama"), tmp_path)
    for rank in range(4):
        edit_rank(made, rank, lambda state: state.update({"sampler": {"_rank": 0}}))
    assert_true(made)
