"""Durability under attack: killed at any step, disks that fail, sources that change, two merges at once.

After every one of these the same command is given again, and must end with the bytes of an undisturbed merge.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lazymerge
from lazymerge.errors import DamagedFile, InconsistentCheckpoint, OutputError, VerificationError
from tests.checks import assert_same_model, refused, tree
from tests.makers.faults import ROOT, Done, Merges, compiled

STAGING = (".lazymerge", ".lazymerge-ended")
LARGE, SMALL = (160, 128), (30, 20)  # copied by the kernel, and through a buffer
SHARD = {"max_shard_size": 85_000}  # one of each in each of three files
SHARDS = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]


def drawn(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {f"w{i}.weight": torch.randn(SMALL if i % 2 else LARGE, generator=draw) for i in range(6)}


TRUTH, OLDER = drawn(1), drawn(2)


def with_lora() -> dict[str, torch.Tensor]:
    """A state dict of PEFT's: two layers, one of them with LoRA."""
    draw = torch.Generator().manual_seed(3)
    layer = "base_model.model.model.layers.0.self_attn"
    return {
        f"{layer}.q_proj.base_layer.weight": torch.randn(LARGE, generator=draw),
        f"{layer}.q_proj.lora_A.default.weight": torch.randn(4, 128, generator=draw),
        f"{layer}.q_proj.lora_B.default.weight": torch.randn(160, 4, generator=draw),
        f"{layer}.k_proj.weight": torch.randn(LARGE, generator=draw),
    }


@pytest.fixture
def src(source, tmp_path: Path) -> Path:
    """A full state dict with two sidecars, one of them in a folder of its own."""
    folder = source(tmp_path / "src", TRUTH, {"model_type": "x"})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool.jinja").write_text("x")
    return folder


@pytest.fixture(scope="module")
def merges() -> Iterator[Merges]:
    with Merges() as merges:
        yield merges


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Merges]:
    library = compiled(tmp_path_factory.mktemp("faults"))
    if library is None:
        pytest.skip("no C compiler")
    with Merges(library) as merges:
        yield merges


# ---- killed ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A merge that is killed: `before` puts into the folder what is there when it begins."""

    options: dict[str, Any]
    before: Callable[[Merges, Path, Path], object] = lambda merges, src, out: None
    state: Callable[[], dict[str, torch.Tensor]] = lambda: TRUTH


def older(merges: Merges, src: Path, out: Path) -> None:
    """A verified result of more files, an adapter beside it, and files of somebody else."""
    folder = src.parent / f"older-{out.name}"
    folder.mkdir()
    torch.save(OLDER, folder / "pytorch_model.bin")
    (folder / "tokenizer_config.json").write_text("{}")
    assert merges(src=folder, dst=out, max_shard_size=2_000, verify=True).status == 0
    for name in ("README.md", "lora_adapter/README.md", "runs/x.log", "lora_adapter/adapter_config.json"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("{}")
    (out / "lora_adapter/adapter_model.safetensors").write_text("old")


def a_part(merges: Merges, src: Path, out: Path) -> None:
    assert merges(src=src, dst=out, include=["w[01].*"], **SHARD).status == 0


VARIANTS = {
    "plain": Variant(SHARD),
    "overwrite": Variant({**SHARD, "overwrite": True}, older),
    "a part": Variant({**SHARD, "include": ["w[0123].*"]}),
    "increments": Variant(SHARD, a_part),
    "adapters": Variant({"max_shard_size": 85_000, "lora_alpha": 8}, state=with_lora),
    "verify": Variant({**SHARD, "verify": True}),
    "bin": Variant({"output_format": "bin"}),
}
MOMENTS = [3, pytest.param(50, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", MOMENTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_killed_at_any_step(merges: Merges, source, tmp_path: Path, name: str, count: int):
    """SIGKILL in the midst of a step; then the same command ends as if nothing had been.

    What is finished is not read again: its bytes in the source are zeroed before. The last step is always one
    of those that are tried.
    """
    variant = VARIANTS[name]
    src = source(tmp_path / "src", variant.state(), {"model_type": "x"})
    (src / "additional_chat_templates").mkdir()
    (src / "additional_chat_templates/tool.jinja").write_text("x")
    whole = tmp_path / "whole"
    for folder in (tmp_path / "first", whole):  # the first one may ask transformers, and keeps its answer
        variant.before(merges, src, folder)
        undisturbed = merges(src=src, dst=folder, **variant.options)
        assert undisturbed.status == 0, undisturbed
    expected = tree(whole)
    steps = len(undisturbed.steps)
    moments = sorted({*random.Random(name).sample(range(steps), min(count, steps)), steps - 1})
    for die in moments:
        out = tmp_path / "out"
        variant.before(merges, src, out)
        before = published(out)
        killed = merges(src=src, dst=out, die=die, **variant.options)
        assert killed.status == -signal.SIGKILL, (die, killed)
        check_between(out, before, whole)
        with zeroed(src, whole, () if "verify" in variant.options else finished(out)):
            again = merges(src=src, dst=out, **variant.options)
        assert again.status == 0, (die, undisturbed.steps[die], again)
        assert differing(out, expected) == [], (die, undisturbed.steps[die])
        for folder in tmp_path.glob("older-out"):
            shutil.rmtree(folder)
        shutil.rmtree(out)


def published(folder: Path) -> dict[str, Any]:
    """What is there under its final name."""
    return {name: x for name, x in (tree(folder) or {}).items() if not name.startswith(STAGING)}


def journal(out: Path) -> list[dict[str, Any]]:
    """Its lines that are whole."""
    places = (out / ".lazymerge/journal.jsonl", out / ".lazymerge-ended")
    raw = next((path.read_bytes() for path in places if path.exists()), b"")
    return [json.loads(line) for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]


def finished(out: Path) -> list[str]:
    return [line["done"] for line in journal(out) if "done" in line]


def check_between(out: Path, before: dict[str, Any], whole: Path) -> None:
    """Nothing incomplete has its final name; the old result stays until the new one is whole."""
    now = published(out)
    for name, content in now.items():
        new = whole / name
        assert content is None or content == before.get(name) or content == new.read_bytes(), name
    if not any("publishing" in line for line in journal(out)) and not (out / ".lazymerge-ended").exists():
        if (out / ".lazymerge/partial.json").exists() and not before:
            return  # a part that is complete
        assert now == before
    index = "model.safetensors.index.json"
    if now.get(index) is not None and now[index] != before.get(index):
        assert {name for name, x in (tree(whole) or {}).items() if name.endswith(".safetensors")} <= set(now)
    elif index in now:  # the old one: all that it names is there
        assert set(json.loads(now[index])["weight_map"].values()) <= set(now)


class zeroed:
    """The bytes of these finished files are zero in the source while the block runs, its times as before."""

    def __init__(self, src: Path, whole: Path, names: list[str] | tuple[str, ...]) -> None:
        self.file = src / "pytorch_model.bin"
        self.raw = self.file.read_bytes()
        self.without = bytearray(self.raw)
        for name in names:
            path = whole / name
            tensors = torch.load(path) if name.endswith(".bin") else load_file(path)
            for tensor in tensors.values():
                at = self.raw.find(tensor.numpy().tobytes())
                assert at > 0
                self.without[at : at + tensor.nbytes] = bytes(tensor.nbytes)

    def __enter__(self) -> None:
        self._write(bytes(self.without))

    def __exit__(self, *_: object) -> None:
        self._write(self.raw)

    def _write(self, content: bytes) -> None:
        stat = self.file.stat()
        with open(self.file, "r+b") as file:
            file.write(content)
        os.utime(self.file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def differing(out: Path, expected: dict[str, Any] | None) -> list[str]:
    """Names of what is not as expected; what an increment records of times and inodes apart."""
    found = tree(out) or {}
    names = {*found, *(expected or {})} - {".lazymerge/partial.json", ".lazymerge/lock"}
    return sorted(name for name in names if found.get(name, 0) != (expected or {}).get(name, 0))


def test_overwriting_leaves_nothing_of_the_older_result(merges: Merges, src: Path, out: Path):
    older(merges, src, out)
    lazymerge.merge(src, out, overwrite=True, **SHARD)
    assert_same_model(out, TRUTH)
    assert sorted(name for name, x in published(out).items() if x is not None) == sorted(
        [
            *("README.md", "additional_chat_templates/tool.jinja", "config.json", "lora_adapter/README.md"),
            *(*SHARDS, "model.safetensors.index.json", "runs/x.log"),
        ]
    )


def test_a_stage_is_not_taken_for_one_after_it_was_overwritten(src: Path, out: Path):
    """What `--stage merge` leaves beside the weights would have the next merge read them as a trainer's."""
    lazymerge.merge(src, out, stage="merge")
    assert (out / "lazymerge-stage.json").exists()
    lazymerge.merge(src, out, overwrite=True)
    assert {*published(out)} == {
        *("config.json", "model.safetensors"),
        *("additional_chat_templates", "additional_chat_templates/tool.jinja"),
    }


def killed_while_ending(merges: Merges, src: Path, out: Path, **options: Any) -> None:
    """All is done but the last step."""
    out.parent.mkdir(exist_ok=True)
    whole = out.parent / "undisturbed"
    for _ in range(2):  # the first one may have to ask transformers, and keeps its answer
        steps = len(merges(src=src, dst=whole, **options).steps)
        shutil.rmtree(whole)
    assert merges(src=src, dst=out, die=steps - 1, **options).status == -signal.SIGKILL
    assert (out / ".lazymerge-ended").exists()


def test_what_is_ended_is_not_written_again(merges: Merges, src: Path, out: Path):
    killed_while_ending(merges, src, out, **SHARD)
    before = {path: path.stat().st_ino for path in out.iterdir()}
    again = merges(src=src, dst=out, at=["pwrite", "copy_file_range"], **SHARD)
    assert (again.status, again.resumed, again.steps) == (0, tuple(SHARDS), ("pwrite",))  # of the lock
    before.pop(out / ".lazymerge-ended")
    assert {path: path.stat().st_ino for path in out.iterdir()} == before


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"max_shard_size": 10**6}, {"exclude": ["w0.*"]}])
def test_what_is_ended_is_no_result_of_another_job(merges: Merges, src: Path, out: Path, other):
    killed_while_ending(merges, src, out, **SHARD)
    with refused(OutputError, "is not empty", dst=out):
        lazymerge.merge(src, out, **{**SHARD, **other})
    lazymerge.merge(src, out, overwrite=True, **{**SHARD, **other})
    left = {path.name for path in out.glob("**/*") if ".lazymerge" in str(path)} - {".lazymerge", "lock"}
    assert left == ({"partial.json"} if "exclude" in other else set())  # the rest can still be added


@pytest.mark.parametrize("change", ["result", "source"])
def test_what_is_ended_and_was_changed(merges: Merges, src: Path, out: Path, change: str):
    """It is not said to be done, and not replaced unasked."""
    killed_while_ending(merges, src, out, **SHARD)
    path = out / SHARDS[0] if change == "result" else src / "pytorch_model.bin"
    os.utime(path, ns=(1, 1))
    with refused(OutputError, "is not empty", dst=out):
        lazymerge.merge(src, out, **SHARD)
    lazymerge.merge(src, out, overwrite=True, **SHARD)
    assert_same_model(out, TRUTH)


def test_a_result_that_failed_its_verification_is_not_gone_on_from(src: Path, out: Path, monkeypatch):
    from lazymerge.output import Destination

    publish = Destination.publish

    def damaged(self: Destination, *args: Any, **options: Any) -> None:
        publish(self, *args, **options)
        raw = bytearray((self.folder / SHARDS[0]).read_bytes())
        raw[-1] ^= 1
        (self.folder / SHARDS[0]).write_bytes(raw)

    with monkeypatch.context() as patch:
        patch.setattr(Destination, "publish", damaged)
        with pytest.raises(VerificationError):
            lazymerge.merge(src, out, verify=True, **SHARD)
    assert not list(out.glob(".lazymerge*"))
    assert lazymerge.merge(src, out, verify=True, overwrite=True, **SHARD).resumed == ()
    assert_same_model(out, TRUTH)


def test_an_upload_that_was_stopped(src: Path, out: Path, monkeypatch):
    """The same command does not merge again, and sends the rest."""
    sent = []

    def send(folder: Path, *_: object) -> str:
        sent.append(sorted(path.name for path in folder.iterdir()))
        if len(sent) == 1:
            raise KeyboardInterrupt
        return "url"

    monkeypatch.setattr("lazymerge.api.accessible", lambda *_: "hub")
    monkeypatch.setattr("lazymerge.api.send", send)
    with pytest.raises(KeyboardInterrupt):
        lazymerge.merge(src, out, push_to_hub="a/b", **SHARD)
    report = lazymerge.merge(src, out, push_to_hub="a/b", **SHARD)
    assert (report.resumed, report.url, report.verified) == (tuple(SHARDS), "url", True)
    assert sent[0] == sent[1]
    assert not list(out.glob(".lazymerge*"))


# ---- stopped -----------------------------------------------------------------------------------------------

STOPPED = """
import os, sys
name, number, signal = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
real, calls = getattr(os, name), []
def stop(*arguments):
    calls.append(name)
    if len(calls) == number:
        os.kill(os.getpid(), signal)
    return real(*arguments)
setattr(os, name, stop)
sys.argv = ["lazymerge", *sys.argv[4:]]
from lazymerge.cli import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", [("copy_file_range", 2), ("fsync", 5), ("replace", 3)], ids=str)
def test_stopped_by_a_signal(src: Path, out: Path, tmp_path: Path, moment, number: int, code: int):
    """While a shard is written, between it and the journal, and while all is published."""
    command = ["merge", src, out, "--max-shard-size", "85000", "--max-workers", "1", "-q"]
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, *map(str, (*moment, int(number), *command))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background
    )
    assert done.returncode == code
    assert done.stderr == "interrupted: the same command again goes on where this one stopped\n"
    assert not (out / "model.safetensors.index.json").exists()
    assert SHARDS[0] in lazymerge.merge(src, out, **SHARD).resumed
    lazymerge.merge(src, tmp_path / "whole", **SHARD)
    assert tree(out) == tree(tmp_path / "whole")


# ---- sources that change -----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["time", "size", "header"])
@pytest.mark.parametrize("die", [20, 30])
def test_the_source_changes_between_two_runs(merges: Merges, src: Path, out: Path, change: str, die: int):
    file = src / "pytorch_model.bin"
    assert merges(src=src, dst=out, die=die, **SHARD).status == -signal.SIGKILL
    if change == "time":
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    elif change == "size":
        file.write_bytes(file.read_bytes() + b"x")
    else:  # which makes another plan of it
        torch.save({f"{name}.of.another": tensor for name, tensor in TRUTH.items()}, file)
    kind = DamagedFile if change == "size" else InconsistentCheckpoint  # as a zip file is read from its end
    before = tree(out)
    with pytest.raises(kind) as caught:
        lazymerge.merge(src, out, **SHARD)
    assert caught.value.problem.startswith(f"{file}: ")
    assert differing(out, before) == []  # the lock apart


def test_another_source_begins_anew(merges: Merges, source, src: Path, out: Path, tmp_path: Path):
    assert merges(src=src, dst=out, die=30, **SHARD).status == -signal.SIGKILL
    other = source(tmp_path / "other", OLDER)
    assert lazymerge.merge(other, out, **SHARD).resumed == ()
    assert_same_model(out, OLDER)


@pytest.mark.parametrize("output_format", ["safetensors", "bin"])
@pytest.mark.parametrize("shape", [SMALL, (1000, 500)], ids=["buffer", "kernel"])
def test_the_source_is_truncated_during_the_run(source, tmp_path: Path, out: Path, output_format, shape):
    state = {f"w{i}": torch.full(shape, float(i)) for i in range(6)}
    src = source(tmp_path / "src", state)
    file = src / "pytorch_model.bin"
    raw, stat = file.read_bytes(), file.stat()
    nbytes = state["w0"].nbytes
    cut = raw.find(state["w4"].numpy().tobytes()) + nbytes // 2
    options = {"output_format": output_format, "max_shard_size": 2 * nbytes, "max_workers": 1}

    def truncate(progress) -> None:
        if progress.stage == "write" and file.stat().st_size == len(raw):
            os.truncate(file, cut)

    with pytest.raises(DamagedFile) as caught:
        lazymerge.merge(src, out, on_progress=truncate, **options)
    assert f"{file}: ends at byte {cut}, expected" in caught.value.problem
    assert published(out) == {}
    with open(file, "r+b") as handle:
        handle.write(raw)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    resumed = lazymerge.merge(src, out, **options).resumed
    assert resumed == (() if output_format == "bin" else tuple(SHARDS[:2]))
    if output_format == "bin":
        found = torch.load(out / "pytorch_model.bin", weights_only=True)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    else:
        assert_same_model(out, state)


# ---- disks that fail ---------------------------------------------------------------------------------------


def fault(call: str, path: str, what: str, first: int = 1, count: int = 0) -> str:
    return f"{call}|{path}|{first}|{count}|{what}"


def code(name: str) -> str:
    return f"errno={getattr(errno, name)}"


NO_COPY = fault("copy_file_range", "/out/", code("ENOSYS"))
NO_SENDFILE = fault("sendfile", "/out/", code("EINVAL"))
HARMLESS = {
    "short copies": [fault("copy_file_range", "/out/", "short=777")],
    "no copy, then short": [fault("copy_file_range", "/out/", code("EOPNOTSUPP"), 2), NO_SENDFILE],
    "short sendfile": [NO_COPY, fault("sendfile", "/out/", "short=777")],
    "short buffers": [NO_COPY, NO_SENDFILE, fault("pread", "/src/", "short=777")],
    "short writes": [NO_COPY, NO_SENDFILE, fault("pwrite", "/out/", "short=777")],
    "short reads": [fault("preadv", "/src/", "short=777"), fault("pread", "/", "short=777")],
    "short lines": [fault("write", "/out/", "short=7")],
    "copies nothing": [fault("copy_file_range", "/out/", "short=0")],
    "sends nothing": [NO_COPY, fault("sendfile", "/out/", "short=0")],
    **{
        f"{name} of a copy": [fault("copy_file_range", "/out/", code(name))]
        for name in ("EXDEV", "ENOSYS", "EINVAL", "EOPNOTSUPP", "EPERM")
    },
    **{
        f"EINTR of {call}": [fault(call, "/", code("EINTR"), 1, 3), *more]
        for call, more in {
            **{"copy_file_range": [], "fsync": [], "posix_fallocate": [], "ftruncate": [], "preadv": []},
            **{"write": [], "pwrite": [], "open": [], "flock": []},
            **{"sendfile": [NO_COPY], "pread": [NO_COPY, NO_SENDFILE]},
        }.items()
    },
    "no fallocate": [fault("posix_fallocate", "/out/", code("EOPNOTSUPP"))],
    "no advice": [fault("posix_fadvise", "/", code("ENOSYS"))],
    "no locks": [fault("flock", "/out/", code("ENOLCK"))],
    "no fsync of folders": [fault("fsync", "/out", code("EINVAL"), 30)],
    "close says EIO": [fault("close", "/out/.lazymerge/model", code("EIO"))],
}


@pytest.mark.parametrize("output_format", ["safetensors", "bin"])
def test_what_is_no_failure(faulty: Merges, src: Path, tmp_path: Path, output_format: str):
    """Partial calls, interruptions, calls that a file system does not have: the same bytes."""
    options = {"output_format": output_format, **SHARD}
    lazymerge.merge(src, tmp_path / "whole", **options)
    expected = tree(tmp_path / "whole")
    for name, faults in HARMLESS.items():
        done = faulty(src=src, dst=tmp_path / "out", faults=faults, **options)
        assert done.status == 0, (name, done)
        assert differing(tmp_path / "out", expected) == [], name
        assert any("no locks" in note for note in done.notes) == (name == "no locks")
        shutil.rmtree(tmp_path / "out")


SECOND = SHARDS[1]
HARMFUL = {
    **{
        f"{name} of a {call}": (
            [*more, fault(call, SECOND, code(name))],
            ("OutputError", SECOND, "writing at byte", os.strerror(getattr(errno, name))),
        )
        for name in ("ENOSPC", "EDQUOT", "EIO", "EAGAIN")
        for call, more in {"pwrite": [], "copy_file_range": [], "sendfile": [NO_COPY]}.items()
    },
    **{
        f"{name} of {call}": (
            [fault(call, SECOND, code(name))],
            ("OutputError", SECOND, os.strerror(getattr(errno, name))),
        )
        for name in ("ENOSPC", "EDQUOT", "EIO")
        for call in ("fsync", "posix_fallocate", "ftruncate", "open")
    },
    "writes nothing": ([fault("pwrite", SECOND, "short=0")], ("OutputError", SECOND, "byte 0")),
    "a copy fails in its midst": (
        [fault("copy_file_range", SECOND, "short=777", 1, 3), fault("copy_file_range", SECOND, "errno=5", 4)],
        ("OutputError", SECOND, "writing at byte"),
    ),
    "reading fails": (
        [fault("preadv", "/src/pytorch_model", code("EIO"), 2)],
        ("SourceError", "src/pytorch_model.bin: reading 2400 bytes at", os.strerror(errno.EIO)),
    ),
    "the source fails below a copy": (
        [fault("copy_file_range", SECOND, code("EIO")), fault("preadv", "/src/pytorch_model", "errno=5", 2)],
        ("SourceError", "src/pytorch_model.bin: reading", os.strerror(errno.EIO)),
    ),
    "the journal cannot be written": (
        [fault("write", "journal", "short=10", 2, 1), fault("write", "journal", code("ENOSPC"), 3)],
        ("OutputError", "journal.jsonl", "No space left"),
    ),
    "no file can be renamed": (
        [fault("rename", "/out/model", code("EXDEV"))],
        ("OutputError", SHARDS[0], "cross-device"),
    ),
    "the index cannot be renamed": (
        [fault("rename", "index.json", code("EIO"))],
        ("OutputError", "index.json", os.strerror(errno.EIO)),
    ),
    "the folder cannot be flushed": ([fault("fsync", "/out", code("EIO"), 13)], ("OutputError", "/out")),
    "the end": ([fault("unlink", "-ended", code("EIO"))], ("OutputError", ".lazymerge-ended")),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMFUL)
def test_a_failure_is_named_and_gone_on_from(faulty: Merges, src: Path, tmp_path: Path, name: str):
    faults, words = HARMFUL[name]
    out = tmp_path / "out"
    done = faulty(src=src, dst=out, faults=faults, **SHARD)
    assert done.status == 2, done
    assert done.error is not None
    for word in words:
        assert word in f"{done.error[0]} {done.error[1]}", done.error
    if name != "the end":
        assert "same command" in done.error[2]
        assert not (out / "model.safetensors.index.json").exists()
    again = faulty(src=src, dst=out, **SHARD)
    assert again.status == 0, again
    assert again.resumed[:1] == (SHARDS[0],) or "journal" in name
    assert_same_model(out, TRUTH)
    lazymerge.merge(src, tmp_path / "whole", **SHARD)
    assert tree(out) == tree(tmp_path / "whole")


CALLS = (
    *("pread", "preadv", "pwrite", "write", "copy_file_range", "sendfile", "fsync", "ftruncate", "flock"),
    *("posix_fallocate", "open", "close", "rename", "link", "unlink", "mkdir", "rmdir", "statvfs"),
)


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["overwrite", "increments", "adapters"])
def test_any_call_may_fail(faulty: Merges, source, tmp_path: Path, name: str, count: int):
    """EIO of the n-th call on the destination, for good: an error that names something, or success."""
    variant = VARIANTS[name]
    src, out, whole = source(tmp_path / "src", variant.state(), {}), tmp_path / "out", tmp_path / "whole"
    variant.before(faulty, src, whole)
    assert faulty(src=src, dst=whole, **variant.options).status == 0
    expected = tree(whole)
    draw = random.Random(name)
    for call in CALLS:
        for first in draw.sample(range(1, 30), count):
            variant.before(faulty, src, out)
            done = faulty(
                src=src, dst=out, faults=[fault(call, "/out", code("EIO"), first)], **variant.options
            )
            where = (call, first, done)
            assert done.status in {0, 2}, where
            if done.status:
                assert done.error is not None
                assert "LazymergeError" in done.error[0], where
                assert str(tmp_path) in done.error[1] or ".safetensors" in done.error[1], where
                assert "\n" not in done.error[1], where
                again = faulty(src=src, dst=out, **variant.options)
                assert again.status == 0, (where, again)
            if call == "rmdir" and done.status == 0 and (out / ".lazymerge").is_dir():
                (out / ".lazymerge").rmdir()  # empty: a folder that could not be removed is no failed merge
            assert differing(out, expected) == [], where
            shutil.rmtree(out)
            shutil.rmtree(tmp_path / "older-out", ignore_errors=True)


def test_a_line_of_the_journal_that_was_cut(faulty: Merges, src: Path, tmp_path: Path):
    """What follows it counts, also when the next run is killed too."""
    faults, _ = HARMFUL["the journal cannot be written"]
    assert faulty(src=src, dst=tmp_path / "out", faults=faults, **SHARD).status == 2
    assert not (tmp_path / "out/.lazymerge/journal.jsonl").read_bytes().endswith(b"\n")
    assert faulty(src=src, dst=tmp_path / "out", at=["replace"], die=3, **SHARD).status == -signal.SIGKILL
    again = faulty(src=src, dst=tmp_path / "out", **SHARD)
    assert (again.status, again.resumed) == (0, tuple(SHARDS))
    assert_same_model(tmp_path / "out", TRUTH)


def test_a_finished_adapter_is_kept(merges: Merges, source, tmp_path: Path, out: Path):
    """Though it is staged in a folder of its own."""
    src, variant = source(tmp_path / "src", with_lora(), {}), VARIANTS["adapters"]
    assert merges(src=src, dst=out, at=["replace"], die=0, **variant.options).status == -signal.SIGKILL
    again = merges(src=src, dst=out, **variant.options)
    assert again.status == 0
    assert "lora_adapter/adapter_model.safetensors" in again.resumed


# ---- too little room ---------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`disk(size)`: a file system of its own of so many bytes, where the machine allows one."""
    place = tmp_path / "disk"
    place.mkdir()

    def mounted(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("no file system can be mounted")
        return place

    yield mounted
    subprocess.run(["umount", place], capture_output=True)


def test_a_disk_without_room_is_found_before_work(src: Path, disk):
    place = disk(200 << 10)  # of 254 kB
    with refused(OutputError, "takes 253,", "has 196,608", "free 57,", dst=place):
        lazymerge.merge(src, place / "out", **SHARD)
    assert list(place.iterdir()) == []


def test_a_disk_with_just_enough_room(src: Path, disk):
    """Every file takes whole pages, the journal and the lock one each."""
    place = disk(300 << 10)
    lazymerge.merge(src, place / "out", **SHARD)
    assert_same_model(place / "out", TRUTH)


def test_a_disk_that_fills_meanwhile(src: Path, disk):
    """Found when the next file is given its size; what it takes up until then is not needed twice."""
    place = disk(400 << 10)

    def fill(progress) -> None:
        if progress.stage == "finish" and progress.file == SHARDS[0]:
            (place / "filler").write_bytes(bytes(250 << 10))

    with pytest.raises(OutputError, match=rf"{SECOND}: writing at byte 0: No space left"):
        lazymerge.merge(src, place / "out", on_progress=fill, **SHARD)
    (place / "filler").unlink()
    (place / "filler").write_bytes(
        bytes(120 << 10)
    )  # beside which there is no room for the whole result again
    assert lazymerge.merge(src, place / "out", **SHARD).resumed == (SHARDS[0],)
    assert_same_model(place / "out", TRUTH)


def test_bytes_that_only_root_may_use_do_not_count(faulty: Merges, src: Path, tmp_path: Path):
    """`f_bavail`, not `f_bfree`."""
    done = faulty(src=src, dst=tmp_path / "out", faults=[fault("statvfs", "/out", "free=8192")], **SHARD)
    assert done.status == 2
    assert done.error is not None
    assert "8,192 free" in done.error[1]
    assert not (tmp_path / "out").exists()


# ---- others ------------------------------------------------------------------------------------------------


def test_two_merges_at_once(src: Path, out: Path):
    """The second is refused at once, and harms nothing; its message says who is at work."""
    told = []

    def second(progress) -> None:
        if progress.stage == "finish":
            before = tree(out)
            with pytest.raises(OutputError) as caught:
                lazymerge.merge(src, out, **SHARD)
            told.append(caught.value.problem)
            assert tree(out) == before

    lazymerge.merge(src, out, on_progress=second, **SHARD)
    assert len(told) == 3
    assert f"another merge is writing here (process {os.getpid()} on {os.uname().nodename})" in told[0]
    assert_same_model(out, TRUTH)


def test_a_file_system_that_renames_over_no_file(faulty: Merges, src: Path, tmp_path: Path):
    """Found out before work."""
    faults = [fault("rename", "journal", code("EPERM"))]
    done = faulty(src=src, dst=tmp_path / "out", faults=faults, **SHARD)
    assert_refused(
        done, "cannot be renamed into its place", "that renames files over others", steps="copy_file_range"
    )
    assert not (tmp_path / "out").exists()


def test_a_lock_that_cannot_be_taken(faulty: Merges, src: Path, tmp_path: Path):
    """Which is no other merge."""
    done = faulty(src=src, dst=tmp_path / "out", faults=[fault("flock", "/out", code("EIO"))], **SHARD)
    assert_refused(done, "cannot be locked: Input/output error", steps="copy_file_range")


def assert_refused(done: Done, *words: str, steps: str) -> None:
    """The error says this, and it came before these steps."""
    assert (done.status, done.steps.count(steps)) == (2, 0)
    assert done.error is not None
    for word in words:
        assert word in " ".join(done.error)


def test_a_journal_that_names_files_elsewhere(merges: Merges, src: Path, out: Path, tmp_path: Path):
    """Nothing outside of the folder is removed, whatever a journal lists as once published."""
    assert merges(src=src, dst=out, die=30, **SHARD).status == -signal.SIGKILL
    precious = tmp_path / "precious"
    precious.write_text("keep")
    stat = precious.stat()
    identity = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    names = {str(precious): identity, os.path.relpath(precious, out): identity}
    with open(out / ".lazymerge/journal.jsonl", "a") as file:
        file.write(json.dumps({"publishing": names}) + "\n")
    lazymerge.merge(src, out, **SHARD)
    assert precious.read_text() == "keep"
    assert_same_model(out, TRUTH)
