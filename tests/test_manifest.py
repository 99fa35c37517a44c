"""Manifests and the structure of model folders: each kind of damage is found, and nothing else is."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lazymerge.errors import NotACheckpoint, OutputError, SourceError
from lazymerge.files.local import LocalFile
from lazymerge.manifest import MANIFEST, _loadable, check_manifest, make_manifest, write_manifest
from lazymerge.structure import check_structure
from tests.checks import raw
from tests.makers.models import build_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model of several files with sidecars and a manifest; nobody writes into it."""
    folder = tmp_path_factory.mktemp("manifest") / "model"
    build_model("llama").save_pretrained(folder, max_shard_size="6KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("of no matter")
    (folder / "lora_adapter").mkdir()
    save_file({"lora_A": torch.ones(2, 3)}, folder / "lora_adapter" / "adapter_model.safetensors")
    (folder / "lora_adapter" / "adapter_config.json").write_text('{"r": 2}')
    write_manifest(folder, make_manifest(folder, workers=2))
    return folder


@pytest.fixture
def model(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "model"))


@pytest.fixture(scope="module")
def scratch(made, tmp_path_factory):
    """A copy for tests that put back what they change."""
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("scratch") / "model"))


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def problems(folder):
    return [str(problem) for problem in check_manifest(folder).problems]


def held(folder):
    """All that the manifest is about."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(set(names) - {"README.md"})


def test_a_manifest_records_every_file_and_tensor(made):
    content = json.loads((made / MANIFEST).read_text())
    assert sorted([*content["files"], MANIFEST]) == held(made)
    for name, entry in content["files"].items():
        whole = (made / name).read_bytes()
        assert entry["size"] == len(whole)
        if not name.endswith(".safetensors"):
            assert entry["xxh3_128"] == xxhash.xxh3_128_hexdigest(whole)
            continue
        start = 8 + struct.unpack("<Q", whole[:8])[0]
        assert entry["header"] == xxhash.xxh3_128_hexdigest(whole[:start])
        tensors = load_file(made / name)
        assert entry["tensors"] == {
            each: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "xxh3_128": xxhash.xxh3_128_hexdigest(raw(tensor)),
            }
            for each, tensor in tensors.items()
        }


def test_digests_that_are_known_are_taken(made):
    plain = make_manifest(made)
    tensors = {name: tensor for path in shards(made) for name, tensor in load_file(path).items()}
    known = {name: xxhash.xxh3_128_hexdigest(raw(tensor)) for name, tensor in tensors.items()}
    assert make_manifest(made, known) == plain
    assert b"f" * 32 in make_manifest(made, {**known, "model.norm.weight": "f" * 32})


def test_an_untouched_folder_has_no_problems(made):
    report = check_manifest(made, workers=2)
    assert report.same and report.problems == ()
    assert report.files == len(held(made)) - 1
    assert report.tensors == 22
    sizes = {name: (made / name).stat().st_size for name in held(made) if name != MANIFEST}
    assert report.nbytes == sum(sizes.values())
    assert json.dumps(report.to_json())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found(scratch, data):
    name = data.draw(st.sampled_from(held(scratch)))
    path = scratch / name
    before = path.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    flipped = bytearray(before)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(flipped)
    try:
        found = check_manifest(scratch).problems
    finally:
        path.write_bytes(before)
    assert any(problem.file == name for problem in found)


def test_a_flipped_bit_of_a_tensor_names_it(model):
    path = shards(model)[1]
    (name, *_), tensors = list(load_file(path)), load_file(path)
    whole = bytearray(path.read_bytes())
    whole[whole.index(raw(tensors[name])) + 5] ^= 4
    path.write_bytes(whole)
    assert problems(model) == [f"{path.name}: {name}: its bytes are not those that were written"]


@pytest.mark.parametrize("name", ["model-00002-of-", "config.json", INDEX, "lora_adapter/", "chat_template"])
def test_an_appended_and_a_cut_byte_are_found(model, name):
    path = next(model / each for each in held(model) if each.startswith(name))
    before = path.read_bytes()
    for content in (before + b"\0", before[:-1], b""):
        path.write_bytes(content)
        (problem,) = problems(model)
        assert f"{len(content)} bytes, expected {len(before)}" in problem
    path.unlink()
    assert "is missing" in problems(model)[0]


STRAYS = [
    *("more.safetensors", "MODEL.SAFETENSORS", "model.safetensors.1", "pytorch_model.bin", "x.bin.old"),
    *("consolidated.00.pth", "x.pt", "x.pkl", "x.npz", "tf_model.h5", "flax_model.msgpack", "x.gguf", "x.so"),
    *("__0_0.distcp", ".metadata", "model.ckpt.data-00000-of-00001", "modeling_x.py", "x.JSON", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja2", "lora_adapter/x.json", "deep/down/x.safetensors"),
    *(".hidden/model.safetensors", ".x.bin", "additional_chat_templates/x.jinja"),
]


@pytest.mark.parametrize("name", STRAYS)
def test_a_stray_file_is_found(model, name):
    (model / name).parent.mkdir(parents=True, exist_ok=True)
    (model / name).write_bytes(b"x")
    assert problems(model) == [f"{name}: is not in the manifest"]


def test_every_vocabulary_of_transformers_is_no_stray_text():
    """The files that slow tokenizers load, by what their modules name."""
    found = set()
    for path in Path(transformers.__file__).parent.glob("models/*/tokenization_*.py"):
        text = path.read_text()
        for names in re.findall(r"^VOCAB_FILES_NAMES\b[^{}]*\{(.*?)\}", text, re.DOTALL | re.MULTILINE):
            found |= set(re.findall(r":\s*\"([\w.-]+)\"", names))
    assert {"vocab.json", "bpe.codes", "dict.txt", "spiece.model"} <= found
    mistral = {f"tokenizer.model.v{version}" for version in (1, 3, "11m1")}
    for name in {*found, *mistral, "vocab.bpe"}:
        assert name in loadable(name), name


def loadable(name):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(b"x")
        return list(_loadable(Path(folder)))


def test_a_file_that_a_tool_may_clear_away_is_found(model):
    """A link into .cache, whose bytes are those that were written; links to elsewhere are the hub's way."""
    first, second = shards(model)[:2]
    (model / ".cache").mkdir()
    (model.parent / "blobs").mkdir()
    for path, folder in ((first, model / ".cache"), (second, model.parent / "blobs")):
        path.rename(folder / path.name)
        path.symlink_to(folder / path.name)
    (problem,) = problems(model)
    assert problem.startswith(f"{first.name}: is a link into a folder of tools")


def test_a_folder_that_is_a_link_is_found(model, made):
    (model / "more").symlink_to(made)
    assert problems(model) == ["more: is not in the manifest"]


@pytest.mark.parametrize("name", ["notes.md", "README.md", "LICENSE", "a.txt", "Notice", ".gitattributes"])
def test_what_is_no_part_of_a_model_is_no_stray(model, name):
    (model / name).write_text("x")
    for folder in (".cache", ".git", ".lazymerge"):
        (model / folder).mkdir()
        (model / folder / "x.json").write_text("x")
    assert problems(model) == []


def rewrite_header(path, change):
    """The file with a changed header of the same length, as a careful forger would."""
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + size])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    assert len(text) == size
    path.write_bytes(whole[:8] + text + whole[8 + size :])


def test_a_renamed_tensor_is_found(model):
    path = shards(model)[0]
    (name, *_) = load_file(path)

    def rename(header):
        header[name[:-1] + "X"] = header.pop(name)

    rewrite_header(path, rename)
    found = problems(model)
    assert f"{path.name}: {name}: is missing" in found
    assert f"{path.name}: {name[:-1]}X: is not in the manifest" in found
    assert any("not in it" in str(problem) for problem in check_structure(model))


def test_another_shape_of_as_many_bytes_is_found(model):
    path = next(path for path in shards(model) if "lm_head.weight" in load_file(path))
    rewrite_header(path, lambda header: header["lm_head.weight"].update(shape=[16, 32]))
    assert any("float32 [16, 32], expected float32 [32, 16]" in problem for problem in problems(model))


def test_a_duplicate_in_another_file_is_found(model):
    first, second = shards(model)[:2]
    tensors = load_file(first)
    name = next(iter(load_file(second)))
    tensors[name] = load_file(second)[name]
    save_file(tensors, first, metadata={"format": "pt"})
    assert any(first.name in problem for problem in problems(model))
    assert f"{second.name}: {name}: is in {first.name} too" in [str(each) for each in check_structure(model)]


def test_two_swapped_files_are_found(model):
    first, second = shards(model)[:2]
    first.rename(model / "x")
    second.rename(first)
    (model / "x").rename(second)
    assert {problem.file for problem in check_manifest(model).problems} >= {first.name, second.name}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"manifest": 1, "files": {"../x": {"size": 1, "xxh3_128": ""}}, "checksum": "0"}',
    ],
    ids=["empty", "list", "object", "deep", "outside"],
)
def test_what_is_no_manifest_is_a_problem_and_no_traceback(model, content):
    (model / MANIFEST).write_bytes(content)
    report = check_manifest(model)
    assert [problem.file for problem in report.problems] == [MANIFEST]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *(
            (name, "an entry that is none")
            for name in ("../x", "/x", "", ".", "./config.json", "a//b", "x\0")
        ),
        *((f"\ud800{suffix}", "an entry that is none") for suffix in (".json", ".safetensors")),
        ("a" * 5000, "is missing, or cannot be read"),
        ("x\x1b[31m\n.json", "is missing, or cannot be read"),
    ],
)
def test_a_sealed_manifest_with_hostile_names(model, name, found):
    (model.parent / "x").write_text("x")
    body = json.loads((model / MANIFEST).read_text())
    del body["checksum"]
    body["files"][name] = {"size": 1, "xxh3_128": "0"}
    text = json.dumps(body, indent=2, sort_keys=True) + "\n"
    body["checksum"] = xxhash.xxh3_128_hexdigest(text.encode())
    (model / MANIFEST).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")
    (problem,) = problems(model)
    assert found in problem


@pytest.mark.parametrize("name", ["\ud800.json", "x\0"])
def test_a_name_that_no_file_has_is_no_bug(tmp_path, name):
    with pytest.raises(SourceError, match="no name of a file"):
        LocalFile(tmp_path / name)


def test_a_manifest_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(OutputError, match=MANIFEST):
        write_manifest(tmp_path, b"{}")
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


# ------------------------------------------------------------------------------------- structure


def said(folder):
    return [str(problem) for problem in check_structure(folder)]


def test_what_save_pretrained_writes_is_well_formed(made, tmp_path):
    assert said(made) == []
    build_model("llama").save_pretrained(tmp_path / "one")
    assert said(tmp_path / "one") == []


def test_a_folder_without_weights_is_no_model(tmp_path):
    with pytest.raises(NotACheckpoint):
        check_structure(tmp_path)


def change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_an_index_that_lies_is_found(model):
    index = json.loads((model / INDEX).read_text())
    total, places = index["metadata"]["total_size"], index["weight_map"]
    name, other = "model.norm.weight", "lm_head.weight"

    change_index(model, lambda index: index["metadata"].update(total_size=total + 1))
    assert said(model) == [f"{INDEX}: total_size {total + 1}, expected {total} by the headers"]
    change_index(model, lambda index: index.update(metadata={"total_size": total}))

    change_index(model, lambda index: index["weight_map"].pop(name))
    assert said(model) == [f"{places[name]}: {name}: is not in {INDEX}"]
    change_index(
        model, lambda index: index["weight_map"].update({name: places[name], "ghost": places[other]})
    )
    assert said(model) == [f"{places[other]}: ghost: not in it, where {INDEX} puts it"]
    change_index(model, lambda index: index["weight_map"].update(ghost="none.safetensors"))
    assert said(model) == [f"{INDEX}: ghost: puts it into 'none.safetensors', which is not there"]

    (model / INDEX).write_text("[]")
    assert "not an index" in said(model)[0]
    (model / INDEX).unlink()
    assert "no index that lists them" in said(model)[0]


def test_files_that_are_missing_or_too_many_are_found(model):
    first, *_, last = shards(model)
    content = last.read_bytes()
    last.unlink()
    assert any(f"{last.name}: is missing" in problem for problem in said(model))
    last.write_bytes(content)
    shutil.copy(first, model / "model-00001-of-00009.safetensors")
    found = said(model)
    assert any("a weight file that" in problem for problem in found)
    assert any("of a second set" in problem for problem in found)


def test_headers_that_are_no_headers_are_found(model):
    first, second, third, *_ = shards(model)
    first.write_bytes(first.read_bytes() + b"\0")
    second.write_bytes(b"\xff" * 100)
    save_file(load_file(third), third, metadata={"format": "tf"})
    found = said(model)
    assert any(problem.startswith(f"{first.name}: ") and "expected" in problem for problem in found)
    assert any(problem.startswith(f"{second.name}: ") for problem in found)
    assert f"{third.name}: its header says format 'tf', expected 'pt'" in found


def test_torch_files_are_recorded_whole(tmp_path):
    torch.save({"x": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    assert check_structure(tmp_path) == ()
    write_manifest(tmp_path, make_manifest(tmp_path))
    assert problems(tmp_path) == []
    whole = bytearray((tmp_path / "pytorch_model.bin").read_bytes())
    whole[-5] ^= 1
    (tmp_path / "pytorch_model.bin").write_bytes(whole)
    assert problems(tmp_path) == ["pytorch_model.bin: its bytes are not those that were written"]


def test_what_the_page_cache_has_is_dropped_before_a_file_is_read(model, monkeypatch):
    dropped = []
    advise = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *advice: (dropped.append(advice[1:]), advise(*advice)))
    check_manifest(model)
    for path in shards(model):
        assert (0, path.stat().st_size, os.POSIX_FADV_DONTNEED) in dropped
