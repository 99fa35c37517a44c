"""`merge --verify` and `merge --push-to-hub`, whole: from rank files to a manifest, and to a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lazymerge
from lazymerge import compare, reread, verification
from lazymerge.errors import InconsistentCheckpoint, VerificationError
from lazymerge.output import Destination
from tests.checks import assert_same_model, refused, tree
from tests.makers.fake_hub import FakeHub

TRUTH = {f"layers.{i}.weight": torch.randn(30, 20) for i in range(6)}
SHARD = 2 * 30 * 20 * 4
MANIFEST = "lazymerge-manifest.json"


@pytest.fixture
def src(source, tmp_path) -> Path:
    return source(tmp_path / "src", TRUTH, {"model_type": "x"})


def run(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:Use 'content=", "-m", "lazymerge", *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1],
    )


def test_a_verified_result_is_found_unchanged_later(src: Path, out: Path):
    report = lazymerge.merge(src, out, verify=True, max_shard_size=SHARD)
    assert report.verified
    assert_same_model(out, TRUTH)
    assert lazymerge.verify(out).same
    with open(out / "model-00002-of-00003.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    found = lazymerge.verify(out)
    assert not found.same
    assert "model-00002-of-00003.safetensors" in str(found.manifest.problems)


def test_what_the_disk_gives_back_is_what_counts(src: Path, out: Path, monkeypatch: pytest.MonkeyPatch):
    """A byte that changes between writing and rereading."""
    publish = Destination.publish

    def damaged(self: Destination, *args: object, **kwargs: object) -> None:
        publish(self, *args, **kwargs)
        path = self.folder / "model.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-7] ^= 64
        path.write_bytes(raw)

    monkeypatch.setattr(Destination, "publish", damaged)
    with pytest.raises(VerificationError, match=r"layers\.5\.weight") as caught:
        lazymerge.merge(src, out, verify=True)
    _, _, expected = caught.value.problem.rpartition("expected ")
    assert float(expected.split()[0].rstrip(",;)")) == pytest.approx(float(TRUTH["layers.5.weight"][-1, -2]))
    assert not (out / MANIFEST).exists()


@pytest.mark.parametrize(
    ("module", "run"),
    [
        (reread, lambda src, out: lazymerge.merge(src, out, verify=True, overwrite=True)),
        (verification, lambda src, out: lazymerge.verify(src, against=out)),
    ],
)
def test_a_source_that_changes_while_it_is_compared(src: Path, out: Path, monkeypatch, module, run):
    """What was compared is then not what is there."""
    lazymerge.merge(src, out)
    compare = module.compare

    def changing(*args: object, **kwargs: object) -> object:
        found = compare(*args, **kwargs)
        os.utime(src / "pytorch_model.bin", ns=(1, 1))
        return found

    monkeypatch.setattr(module, "compare", changing)
    with pytest.raises(InconsistentCheckpoint, match="has changed"):
        run(src, out)
    assert not (out / MANIFEST).exists()


def test_the_next_merge_takes_the_manifest_away(src: Path, out: Path):
    lazymerge.merge(src, out, verify=True)
    lazymerge.merge(src, out, overwrite=True)
    assert not (out / MANIFEST).exists()


def test_increments(src: Path, out: Path):
    lazymerge.merge(src, out, include="layers.[01].*", verify=True)
    assert lazymerge.verify(out).same
    lazymerge.merge(src, out, include="layers.[23].*", verify=True)
    assert lazymerge.verify(out).same
    lazymerge.merge(src, out, verify=True)
    assert_same_model(out, TRUTH)
    assert lazymerge.verify(out).same


@pytest.mark.parametrize("output_format", ["safetensors", "bin"])
def test_a_cast(src: Path, out: Path, output_format: str):
    lazymerge.merge(src, out, verify=True, dtype="bfloat16", output_format=output_format)
    assert lazymerge.verify(out).same


def test_verls_upload(src: Path, out: Path):
    """--hf_upload_path: the result, verified, and not the manifest; a second command sends nothing again."""
    with FakeHub() as hub:
        where = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
        flags = ("--local_dir", src, "--target_dir", out, "--hf_upload_path", "lab/model", "--private")
        done = run("merge", *flags, "--json", **where)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["url"] == f"{hub.url}/lab/model"
        names = {path.name for path in out.iterdir()} - {MANIFEST}
        assert hub.files("lab/model") == {name: (out / name).read_bytes() for name in names}
        sent = len(hub.received)
        done = run("upload", out, "lab/model", **where)
        assert done.returncode == 0, done.stderr
        assert (len(hub.received), len(hub.commits)) == (sent, 1)
    assert hub.token not in done.stdout + done.stderr


def test_no_access_is_known_before_the_merge(src: Path, out: Path, tmp_path: Path):
    where = {"HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_x"}
    done = run("merge", src, out, "--push-to-hub", "lab/model", **where)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 2, done.stderr
    assert not out.exists()


def test_an_unverified_result_is_not_uploaded(src: Path, out: Path):
    lazymerge.merge(src, out)
    before = tree(out)
    with FakeHub() as hub:
        where = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
        done = run("upload", out, "lab/model", **where)
        assert (done.returncode, hub.commits) == (3, [])
    assert "was not verified" in done.stderr
    assert tree(out) == before


def test_a_file_of_another_save_among_the_ranks(checkpoint, tmp_path: Path, out: Path):
    """Not one tensor that it shares with the first rank is equal: no drift, but another run."""
    from tests.makers.layout import copy_of, edit_rank

    made = copy_of(checkpoint("fsdp2-hsdp"), tmp_path / "run")

    def other(state: dict) -> None:
        for tensor in state.values():
            getattr(tensor, "_local_tensor", tensor).add_(1)

    edit_rank(made, 2, other)
    with refused(InconsistentCheckpoint, "it is of another save", dst=out):
        lazymerge.merge(made.root, out)


def test_hundreds_of_files_where_few_may_be_open(tmp_path):
    """Of both sides together: the source has 300 files, the result as many, and 64 may be open."""
    tensors = {f"w{i:03}": torch.full((8,), float(i)) for i in range(300)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"model-{name}.safetensors")
    places = {name: f"model-{name}.safetensors" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    code = (
        "import resource, lazymerge; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        f"lazymerge.merge({str(tmp_path)!r}, {str(tmp_path.parent / 'few')!r},"
        " max_shard_size=32, verify=True, check=False)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(list((tmp_path.parent / "few").glob("*.safetensors"))) == 300


def test_what_was_merged_is_verified_in_the_least_memory_rather_than_refused(src, tmp_path, monkeypatch):
    """The process has grown by more than was foretold."""
    monkeypatch.setattr(compare, "check_budget", lambda gathers, max_ram: None)
    monkeypatch.setattr(compare, "resident", lambda: 1 << 40)
    assert lazymerge.merge(src, tmp_path / "out", verify=True, check=False).verified
    assert (tmp_path / "out" / MANIFEST).exists()
