"""Folders of zarr arrays, written by hand after version 2 of zarr's specification."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lazymerge.compute import read
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    SourceError,
    UnsupportedCheckpoint,
)
from lazymerge.formats.zarr import holds_zarr, read_zarr
from lazymerge.tiling import check
from tests.makers.zarr_arrays import write_array


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Arrays of several shapes, and an object."""
    write_array(tmp_path / "a.weight", WEIGHT, (1, 4, 3))
    write_array(tmp_path / "scalar", torch.tensor(5), ())
    write_array(tmp_path / "flags", torch.tensor([True, False, True]), (2,))
    (tmp_path / "a._extra_state").mkdir()
    (tmp_path / "a._extra_state" / "shard_0_4.pt").write_bytes(b"")
    return tmp_path


WEIGHT = torch.arange(2 * 7 * 5).view(2, 7, 5).bfloat16()


def test_arrays(folder):
    assert holds_zarr(folder)
    store = read_zarr(folder)
    truth = {"a.weight": WEIGHT, "scalar": torch.tensor(5), "flags": torch.tensor([True, False, True])}
    assert set(store.tensors) == set(truth)
    assert store.objects == ("a._extra_state",)
    for name, tensor in truth.items():
        gather = store.gather(name)
        check(name, gather)
        assert read(gather).dtype == tensor.dtype
        assert torch.equal(read(gather), tensor)
    assert len(store.files) == 2 * 2 * 2 + 1 + 2 + 3
    assert {file.path for file in store.files if file.path.name == ".zarray"} == {
        folder / name / ".zarray" for name in truth
    }


def test_a_stack_is_taken_apart(folder):
    layers = read_zarr(folder).unstacked("a.weight", 1)
    assert list(layers) == [(0,), (1,)]
    for index, gather in layers.items():
        check(str(index), gather)
        assert torch.equal(read(gather), WEIGHT[index])


def test_what_is_not_wanted_is_only_named(folder):
    (folder / "scalar" / ".zarray").write_text("")
    store = read_zarr(folder, lambda name: name != "scalar")
    assert store.others == ("scalar",)


def test_other_folders(tmp_path):
    (tmp_path / "x").mkdir()
    assert not holds_zarr(tmp_path)
    assert not holds_zarr(tmp_path / "nothing")


def test_a_chunk_that_is_not_there(folder):
    (folder / "a.weight" / "1.0.1").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"a\.weight: no chunk 1\.0\.1 .* of 8"):
        read_zarr(folder)


def test_a_chunk_that_is_cut(folder):
    path = folder / "a.weight" / "1.0.1"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match=r"a\.weight: .*1\.0\.1 has 23 bytes, expected 24"):
        read_zarr(folder)


def test_a_chunk_that_is_a_link(folder, tmp_path_factory):
    path = folder / "a.weight" / "1.0.1"
    elsewhere = path.rename(tmp_path_factory.mktemp("elsewhere") / "chunk")
    path.symlink_to(elsewhere)
    with pytest.raises(DamagedFile, match="is a link"):
        read_zarr(folder)


@pytest.mark.parametrize(
    ("header", "kind", "words"),
    [
        ({"compressor": {"id": "blosc"}}, UnsupportedCheckpoint, "compressed"),
        ({"filters": [{"id": "delta"}]}, UnsupportedCheckpoint, "filtered"),
        ({"order": "F"}, UnsupportedCheckpoint, "Fortran"),
        ({"dimension_separator": "/"}, UnsupportedCheckpoint, "folders of their own"),
        ({"dtype": ">f4"}, UnsupportedCheckpoint, "'>f4'"),
        ({"dtype": [["x", "<f4"]]}, UnsupportedCheckpoint, "type"),
        ({"zarr_format": 3}, DamagedFile, "version 2"),
        ({"shape": [2, -7, 5]}, DamagedFile, "'shape'"),
        ({"shape": [2, True, 5]}, DamagedFile, "'shape'"),
        ({"shape": "big"}, DamagedFile, "'shape'"),
        ({"chunks": [1, 4]}, DamagedFile, "chunks of shape"),
        ({"chunks": [1, 0, 3]}, DamagedFile, "chunks of shape"),
        ({"shape": [1 << 50, 7, 5]}, IncompleteCheckpoint, "no chunk 2.0.0"),
        ({"chunks": [1 << 60, 1 << 60, 1 << 60]}, DamagedFile, "expected"),
    ],
)
def test_headers_that_are_wrong(folder, header, kind, words):
    path = folder / "a.weight" / ".zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), **header}))
    with pytest.raises(kind, match=words) as caught:
        read_zarr(folder)
    assert "a.weight" in caught.value.problem
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"zarr_format": 2}'])
def test_headers_that_are_none(folder, text):
    (folder / "a.weight" / ".zarray").write_text(text)
    with pytest.raises(SourceError, match=r"a\.weight"):
        read_zarr(folder)


@pytest.mark.parametrize("other", ["a.weight/1.0.0", "b.weight/0.0.0"])
def test_a_chunk_under_two_names(folder, other):
    write_array(folder / "b.weight", WEIGHT, (1, 4, 3))
    assert len(read_zarr(folder).tensors) == 4
    (folder / other).unlink()
    (folder / other).hardlink_to(folder / "a.weight/0.0.0")
    with pytest.raises(InconsistentCheckpoint, match=r"0\.0\.0: the same file as|the same file as .*0\.0\.0"):
        read_zarr(folder)


def test_a_stack_without_elements(folder):
    header = folder / "a.weight" / ".zarray"
    header.write_text(header.read_text().replace("[2, 7, 5]", f"[{1 << 18}, 0, 5]"))
    for chunk in header.parent.glob("[0-9]*"):
        chunk.unlink()
    with pytest.raises(UnsupportedCheckpoint, match=r"expected 1 leading axes .* and elements"):
        read_zarr(folder).unstacked("a.weight", 1)


@pytest.mark.parametrize(("path", "name"), [("a.weight", "2.0.0"), ("a.weight", "0.0"), ("scalar", "1")])
def test_chunks_that_an_array_does_not_have(folder, path, name):
    """The header is that of another array: what is in them would be lost."""
    chunk = next(each for each in sorted((folder / path).iterdir()) if each.name != ".zarray")
    (folder / path / name).write_bytes(chunk.read_bytes())
    with pytest.raises(InconsistentCheckpoint, match=f"{path}: chunk {name} .* grid"):
        read_zarr(folder)


def test_a_name_that_would_write_over_the_terminal(folder):
    write_array(folder / "a\x1b[2J.weight", WEIGHT, (1, 4, 3))
    with pytest.raises(DamagedFile, match="proper name") as caught:
        read_zarr(folder)
    assert caught.value.problem.isprintable()
