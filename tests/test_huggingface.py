"""Hugging Face folders: index and files have to agree, and nothing outside the folder is read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from lazymerge.compute import read
from lazymerge.errors import DamagedFile, IncompleteCheckpoint, InconsistentCheckpoint, NotACheckpoint
from lazymerge.formats.huggingface import INDEX, read_model

A, B, C = torch.arange(4.0), torch.ones(2, 3), torch.zeros(5)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": A, "b": B}, tmp_path / FIRST)
    save_file({"c": C}, tmp_path / SECOND)
    index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND})
    return tmp_path


def index(folder, places):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_shards(sharded):
    tensors, files = read_model(sharded)
    assert [file.path.name for file in files] == [FIRST, SECOND]
    for name, truth in {"a": A, "b": B, "c": C}.items():
        assert torch.equal(read(tensors[name]), truth)


def test_one_file(tmp_path):
    save_file({"a": A}, tmp_path / "model.safetensors")
    assert torch.equal(read(read_model(tmp_path)[0]["a"]), A)


def test_no_model(tmp_path):
    with pytest.raises(NotACheckpoint, match=r"model\.safetensors"):
        read_model(tmp_path)


def test_a_shard_is_missing(sharded):
    (sharded / SECOND).unlink()
    with pytest.raises(IncompleteCheckpoint, match=f"1 of 2 files.*{SECOND}"):
        read_model(sharded)


@pytest.mark.parametrize(
    ("places", "kind", "words"),
    [
        ({"a": FIRST, "b": FIRST, "c": FIRST}, IncompleteCheckpoint, "does not hold c"),
        ({"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}, IncompleteCheckpoint, "does not hold d"),
        ({"a": FIRST, "c": SECOND}, InconsistentCheckpoint, "holds b, which is in no file"),
    ],
)
def test_index_and_files_differ(sharded, places, kind, words):
    index(sharded, places)
    with pytest.raises(kind, match=words):
        read_model(sharded)


def test_a_tensor_in_two_files(sharded):
    save_file({"a": A, "c": C}, sharded / SECOND)
    with pytest.raises(InconsistentCheckpoint, match=f"holds a, which is in {FIRST}"):
        read_model(sharded)


@pytest.mark.parametrize("place", ["../x.safetensors", "/x.safetensors", "x.bin", "..", "", 3, None, ["x"]])
def test_places_outside_of_the_folder(sharded, place):
    index(sharded, {"a": place})
    with pytest.raises(DamagedFile, match="weight_map"):
        read_model(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 1}', "[" * 100_000, "\0"])
def test_an_index_that_is_none(sharded, text):
    (sharded / INDEX).write_text(text)
    with pytest.raises(DamagedFile):
        read_model(sharded)
