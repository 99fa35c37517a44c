"""Merging in increments: a part with --include, then the same command without it adds what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lazymerge
from lazymerge import api
from lazymerge.errors import InconsistentCheckpoint, OutputError
from tests.checks import assert_same_model, refused

TRUTH = {f"layers.{i}.{name}": torch.randn(300, 200) for i in range(4) for name in ("a.weight", "b.lora_A")}
LORA = {name: tensor for name, tensor in TRUTH.items() if "lora" in name}
SHARD = 2 * 300 * 200 * 4  # bytes of two tensors


@pytest.fixture
def src(source, tmp_path) -> Path:
    return source(tmp_path / "src", TRUTH, {})


def part(src: Path, out: Path, **options: object) -> lazymerge.MergeReport:
    return lazymerge.merge(src, out, include="lora_*", check_copies=False, **options)


def test_another_merge_in_the_meantime(src: Path, source, out: Path, tmp_path: Path, monkeypatch):
    """A part is kept only if it is still that of this source when the merge begins."""
    other = source(tmp_path / "other", {name: tensor + 1 for name, tensor in TRUTH.items()}, {})
    part(src, out)
    held = api.held

    def overtaken(*arguments: object, **options: object) -> object:
        found = held(*arguments, **options)
        monkeypatch.setattr(api, "held", held)
        part(other, out, overwrite=True)
        return found

    monkeypatch.setattr(api, "held", overtaken)
    with pytest.raises(OutputError, match="is not the file any more"):
        lazymerge.merge(src, out)
    assert_same_model(out, {name: tensor + 1 for name, tensor in LORA.items()})


def test_a_part_is_there_under_its_names(src: Path, out: Path):
    part(src, out)
    found = load_file(out / "model.safetensors")
    assert set(found) == set(LORA)


@pytest.mark.parametrize("shard", [SHARD, 10 * SHARD])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_rest_is_added(src: Path, out: Path, shard: int, overwrite: bool):
    part(src, out, max_shard_size=shard)
    before = {os.stat(path).st_ino for path in out.glob("*.safetensors")}
    report = lazymerge.merge(src, out, max_shard_size=shard, overwrite=overwrite)
    assert_same_model(out, TRUTH)
    assert before < {os.stat(path).st_ino for path in out.glob("*.safetensors")}
    assert report.tensors == len(TRUTH) - len(LORA)
    assert report.bytes_read == sum(TRUTH[name].nbytes for name in TRUTH if name not in LORA)
    assert any(f"{len(LORA)} tensors are there" in note.text for note in report.notes)


def test_only_what_is_missing_is_read(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    """Of the source's tensors: bytes that the first run has read are poisoned before the second."""
    part(src, out)
    file = src / "pytorch_model.bin"
    raw, stat = bytearray(file.read_bytes()), file.stat()
    for tensor in LORA.values():
        at = raw.find(tensor.numpy().tobytes())
        assert at > 0
        raw[at : at + tensor.nbytes] = bytes(tensor.nbytes)
    with open(file, "r+b") as handle:
        handle.write(raw)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    lazymerge.merge(src, out)
    assert_same_model(out, TRUTH)


def test_in_three_parts(src: Path, out: Path):
    part(src, out)
    lazymerge.merge(src, out, include="layers.0.*")
    report = lazymerge.merge(src, out, include=["layers.1.*", "layers.0.*"])
    assert report.tensors == 1
    lazymerge.merge(src, out)
    assert_same_model(out, TRUTH)


@pytest.mark.parametrize("first", [{"include": "layers.0.*"}, {"exclude": ["layers.2.*", "layers.3.*"]}])
def test_parts_that_are_told_by_what_is_left_out(src: Path, out: Path, first: dict[str, object]):
    lazymerge.merge(src, out, **first)
    lazymerge.merge(src, out, exclude="layers.1.*")
    report = lazymerge.merge(src, out)
    assert report.tensors == (2 if "include" in first else 0)
    assert_same_model(out, TRUTH)
    assert not (out / ".lazymerge").exists()


def test_a_part_again_is_nothing_to_do(src: Path, out: Path):
    part(src, out)
    before = (out / "model.safetensors").stat()
    report = part(src, out)
    assert (report.tensors, report.resumed) == (0, ("model.safetensors",))
    assert (out / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    lazymerge.merge(src, out)
    assert_same_model(out, TRUTH)


def test_another_job_does_not_add_to_it(src: Path, out: Path):
    part(src, out)
    with refused(OutputError, "is not empty", dst=out):
        lazymerge.merge(src, out, dtype="bfloat16")
    lazymerge.merge(src, out, dtype="bfloat16", overwrite=True)
    assert_same_model(out, {name: tensor.bfloat16() for name, tensor in TRUTH.items()})


def test_the_source_has_changed(src: Path, out: Path, source, tmp_path: Path):
    part(src, out)
    shutil.rmtree(src)
    source(src, {name: tensor + 1 for name, tensor in TRUTH.items()}, {})
    with refused(InconsistentCheckpoint, "has changed since", dst=out):
        lazymerge.merge(src, out)


def test_another_source_is_another_job(src: Path, out: Path, source, tmp_path: Path):
    part(src, out)
    other = source(tmp_path / "other", {name: tensor + 1 for name, tensor in TRUTH.items()}, {})
    with refused(OutputError, "is not empty", dst=out):
        lazymerge.merge(other, out)
    lazymerge.merge(other, out, overwrite=True)
    assert_same_model(out, {name: tensor + 1 for name, tensor in TRUTH.items()})


@pytest.mark.parametrize("first", ["safetensors", "bin"])
def test_only_safetensors_grow(src: Path, out: Path, first: str):
    part(src, out, output_format=first)
    with refused(OutputError, "only safetensors can grow", dst=out):
        lazymerge.merge(src, out, output_format="bin")


@pytest.mark.parametrize("what", ["source", "part", "format"])
def test_what_cannot_be_kept_is_replaced_where_it_may_be(src: Path, out: Path, source, what: str):
    part(src, out)
    truth, options = TRUTH, {}
    if what == "source":
        shutil.rmtree(src)
        truth = {name: tensor + 1 for name, tensor in TRUTH.items()}
        source(src, truth, {})
    elif what == "part":
        (out / "model.safetensors").write_bytes(b"x")
    else:
        options = {"output_format": "bin"}
    lazymerge.merge(src, out, overwrite=True, **options)
    if what == "format":
        found = torch.load(out / "pytorch_model.bin")
        assert found.keys() == truth.keys() and not (out / "model.safetensors").exists()
    else:
        assert_same_model(out, truth)


def test_the_part_has_changed(src: Path, out: Path):
    part(src, out)
    with open(out / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with refused(OutputError, "is not the file that an earlier merge", dst=out):
        lazymerge.merge(src, out)


@pytest.mark.parametrize("moment", ["replace", "unlink", "link", "fsync"])
@pytest.mark.slow
def test_killed_at_every_step_of_the_second(src: Path, out: Path, tmp_path: Path, moment: str):
    """The second merge is killed at its first, second, ... call of the function, and given again."""
    script = (
        "import os, sys, lazymerge\n"
        "name, stop = sys.argv[3], int(sys.argv[4])\n"
        "real, calls = getattr(os, name), [0]\n"
        "def counted(*a, **k):\n"
        "    calls[0] += 1\n"
        "    if calls[0] == stop: os._exit(9)\n"
        "    return real(*a, **k)\n"
        "setattr(os, name, counted)\n"
        "lazymerge.merge(sys.argv[1], sys.argv[2], max_shard_size=480000)\n"
    )
    for stop in range(1, 30):
        shutil.rmtree(out, ignore_errors=True)
        part(src, out, max_shard_size=SHARD)
        done = subprocess.run([sys.executable, "-c", script, src, out, moment, str(stop)], cwd=Path.cwd())
        if done.returncode == 0:
            break
        assert done.returncode == 9
        if (out / ".lazymerge").exists():
            lazymerge.merge(src, out, max_shard_size=SHARD)
        assert_same_model(out, TRUTH)
    assert stop > 1


def test_the_record_is_no_proof_if_it_is_damaged(src: Path, out: Path):
    part(src, out)
    record = out / ".lazymerge" / "partial.json"
    assert json.loads(record.read_text())["files"]
    record.write_text("[" * 100_000)
    with refused(OutputError, "is not empty", dst=out):
        lazymerge.merge(src, out)
