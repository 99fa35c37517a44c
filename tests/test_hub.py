"""Upload, against a hub on loopback that answers as the real one does and fails in its ways."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import xxhash
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

import lazymerge
from lazymerge.errors import LazymergeError, OutputError, PlanError, SourceError, VerificationError
from lazymerge.hub import Target, check_access, upload
from lazymerge.report import Progress
from tests.checks import refused
from tests.makers.fake_hub import FakeHub, Repo

MANIFEST = "lazymerge-manifest.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
NAMES = ["config.json", INDEX, "tokenizer.json", *reversed(WEIGHTS), MANIFEST]  # in no good order
SOON = (0.0,) * 5
TARGET = Target("lab/model")
NO_BRANCHES = (
    "..",
    "a..b",
    "",
    "a b",
    "-x",
    "/x",
    "x/",
    "a//b",
    ".x",
    "x.lock",
    "a~1",
    "a^",
    "a:b",
    "@",
    "a\n",
)

# The library hands files to httpx in a way that httpx warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub() as fake:
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", fake.token)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        # The library's own tries of a PUT are seconds apart.
        monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))
        yield fake
        huggingface_hub.close_session()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A result of three weight files, with two things beside it that are none of its files."""
    folder = tmp_path / "result"
    (folder / ".lazymerge").mkdir(parents=True)
    (folder / ".lazymerge" / "journal.jsonl").write_text("{}")
    (folder / "notes.txt").write_text("not for the hub")
    for number, name in enumerate(WEIGHTS):
        save_file({f"w{number}": np.full((100, number + 1), number, np.float32)}, folder / name)
    index = {"metadata": {}, "weight_map": {f"w{n}": name for n, name in enumerate(WEIGHTS)}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    seal(folder)
    return folder


def seal(folder: Path, **more: dict[str, Any]) -> None:
    """The manifest of these files, as docs and module say it is made."""
    files: dict[str, Any] = {}
    for name in set(NAMES) - {MANIFEST}:
        raw = (folder / name).read_bytes()
        files[name] = {"size": len(raw), "xxh3_128": xxhash.xxh3_128_hexdigest(raw)}
    content = {"manifest": 1, "lazymerge": "0", "files": {**files, **more}}
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    content["checksum"] = xxhash.xxh3_128_hexdigest(text.encode())
    (folder / MANIFEST).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NAMES}


def hashes(folder: Path, *names: str) -> list[str]:
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]


def changing(hub: FakeHub) -> list[str]:
    """The requests that have changed something, or have sent something."""
    kept = ("GET", "POST /api/models/lab/model/preupload", "POST /lab/model.git/info/lfs/objects/batch")
    return [request for request in hub.requests if not request.startswith(kept)]


# ------------------------------------------------------------------------------------ upload


def test_the_files_of_the_result_alone_weights_first(
    hub: FakeHub, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[Progress] = []
    assert upload(folder, NAMES, TARGET, events.append) == f"{hub.url}/lab/model"
    assert hub.files("lab/model") == contents(folder)
    assert hub.received == hashes(folder, *WEIGHTS, "tokenizer.json")
    (commit,) = hub.commits
    assert commit.paths == [*WEIGHTS, "config.json", MANIFEST, "tokenizer.json", INDEX]
    assert commit.message == TARGET.commit_message and commit.ref == "main"
    total = sum(map(len, contents(folder).values()))
    manifest = contents(folder)[MANIFEST]
    read = [event for event in events if event.stage == "verify"]
    assert read == events[: len(read)] and read[-1].done == read[-1].total == total - len(manifest)
    events = events[len(read) :]
    done = [event.done for event in events]
    assert done == sorted(done) and done[0] == 0 and done[-1] == total
    assert {(event.stage, event.total) for event in events} == {("upload", total)}
    assert [event.file for event in events] == [*commit.paths, None]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("private", [True, False])
def test_a_repository_is_made_as_it_was_asked_for(hub: FakeHub, folder: Path, private: bool) -> None:
    upload(folder, NAMES, Target("lab/model", private=private, commit_message="  Step 9 "))
    assert hub.repos["lab/model"].private is private
    assert hub.commits[0].message == "Step 9"


def test_a_file_in_parts(hub: FakeHub, folder: Path) -> None:
    hub.part_size = 300
    upload(folder, NAMES, TARGET)
    assert hub.files("lab/model") == contents(folder)
    assert sum(request.endswith("/2") for request in hub.requests) == 3


def test_a_branch_is_made_for_the_revision(hub: FakeHub, folder: Path) -> None:
    hub.repos["lab/model"] = Repo(private=False)
    url = upload(folder, NAMES, Target("lab/model", revision="step-9"))
    assert url == f"{hub.url}/lab/model/tree/step-9"
    assert hub.files("lab/model") == {} and hub.files("lab/model", "step-9") == contents(folder)


def test_a_manifest_as_verify_writes_it(hub: FakeHub, folder: Path) -> None:
    from lazymerge.manifest import make_manifest

    (folder / MANIFEST).write_bytes(make_manifest(folder))
    upload(folder, NAMES, TARGET)
    assert hub.files("lab/model") == contents(folder)


def test_a_server_that_does_not_tell_what_it_holds(hub: FakeHub, folder: Path) -> None:
    hub.silent = True
    assert upload(folder, NAMES, TARGET, waits=SOON) == f"{hub.url}/lab/model"
    assert len(hub.commits) == 1


# ------------------------------------------------------------------------------------ failures in passing


@pytest.mark.parametrize("every", [2, 3, 4, 5])
def test_one_request_in_a_few_fails(hub: FakeHub, folder: Path, every: int) -> None:
    hub.fail_every = every
    target = check_access(TARGET, waits=SOON)
    assert upload(folder, NAMES, target, waits=SOON) == f"{hub.url}/lab/model"
    assert hub.files("lab/model") == contents(folder)
    assert len(hub.commits) == 1


@pytest.mark.parametrize("what", ["500", "drop", "lose", "hang"])
@pytest.mark.parametrize(
    "request_",
    ["POST /api/repos/create", "PUT /objects/", "POST /api/models/lab/model/commit/main", "GET /api"],
)
def test_one_request_fails_once(hub: FakeHub, folder: Path, request_: str, what: str) -> None:
    hub.mishaps = [(request_, what)]
    started = time.monotonic()
    upload(folder, NAMES, TARGET, waits=SOON, timeout=0.3)
    assert hub.mishaps == [] and time.monotonic() - started < 30
    assert hub.files("lab/model") == contents(folder)
    assert len(hub.commits) == 1


def test_waits_between_tries_are_those_that_were_given(hub: FakeHub, folder: Path) -> None:
    hub.mishaps = [("POST /api/models/lab/model/commit/main", "500")] * 2
    started = time.monotonic()
    upload(folder, NAMES, TARGET, waits=(0.3, 0.5))
    assert 0.8 <= time.monotonic() - started < 5


def test_a_server_that_stays_broken_is_given_up(hub: FakeHub, folder: Path) -> None:
    hub.refuse = {"POST /api/models/lab/model/commit": 503}
    with pytest.raises(OutputError, match=r"lab/model: committing the files failed \(503: no, "):
        upload(folder, NAMES, TARGET, waits=(0, 0))
    assert sum("/commit/" in request for request in hub.requests) == 3


def test_another_commit_comes_between(hub: FakeHub, folder: Path) -> None:
    hub.conflicts = 2
    upload(folder, NAMES, TARGET, waits=SOON)
    others = {"other0.txt": b"other", "other1.txt": b"other"}
    assert hub.files("lab/model") == contents(folder) | others
    assert len(hub.received) == 4  # nothing was sent again

    hub.conflicts = 9
    (folder / "config.json").write_text("{}")
    seal(folder)
    with pytest.raises(OutputError, match=r"\(412: A commit has happened since"):
        upload(folder, NAMES, TARGET, waits=SOON)


# ------------------------------------------------------------------------------------ again


def test_a_second_run_sends_nothing(hub: FakeHub, folder: Path) -> None:
    upload(folder, NAMES, TARGET)
    hub.requests.clear()
    assert upload(folder, NAMES, TARGET) == f"{hub.url}/lab/model"
    assert changing(hub) == [] and len(hub.commits) == 1


def test_only_what_has_changed_is_sent(hub: FakeHub, folder: Path) -> None:
    upload(folder, NAMES, TARGET)
    save_file({"w1": np.ones((100, 2), np.float32) * 7}, folder / WEIGHTS[1])  # of the same size
    (folder / "config.json").write_text('{"model_type": "qwen2"}')  # likewise
    seal(folder)
    upload(folder, NAMES, TARGET)
    assert hub.received[4:] == hashes(folder, WEIGHTS[1])
    assert hub.commits[1].paths == [WEIGHTS[1], "config.json", MANIFEST]
    assert hub.files("lab/model") == contents(folder)


def test_killed_half_way_and_run_again(hub: FakeHub, folder: Path) -> None:
    hub.mishaps = [("PUT", ""), ("PUT", ""), ("PUT", "hang")]
    first = subprocess.Popen([sys.executable, "-c", CLIENT, str(folder)], env=environment(hub))
    assert hub.hanging.wait(60)
    first.kill()
    first.wait()
    assert hub.received == hashes(folder, *WEIGHTS[:2])
    assert hub.files("lab/model") == {}  # nothing that looks like a model

    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(folder)],
        env=environment(hub),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{hub.url}/lab/model\n" and done.stderr == ""
    assert hub.received == hashes(folder, *WEIGHTS, "tokenizer.json")  # each once
    assert hub.files("lab/model") == contents(folder)


CLIENT = f"""
import sys
from pathlib import Path
from lazymerge.hub import Target, check_access, upload
target = check_access(Target("lab/model"))
print(upload(Path(sys.argv[1]), {NAMES!r}, target))
"""


def environment(hub: FakeHub, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1", **more}


# ------------------------------------------------------------------------------------ pull requests


def test_a_pull_request_leaves_the_branch_as_it_is(hub: FakeHub, folder: Path) -> None:
    hub.repos["lab/model"] = Repo(private=False, writable=False)
    target = check_access(Target("lab/model", create_pr=True, commit_message="Step 9"))
    assert upload(folder, NAMES, target) == f"{hub.url}/lab/model/discussions/1"
    assert hub.repos["lab/model"].requests == ["Step 9"]
    assert hub.files("lab/model") == {} and hub.files("lab/model", "refs/pr/1") == contents(folder)


def test_no_second_pull_request_for_the_same_files(hub: FakeHub, folder: Path) -> None:
    target = Target("lab/model", create_pr=True)
    hub.mishaps = [("POST /api/models/lab/model/commit", "lose")]  # it is made, and the answer is lost
    url = upload(folder, NAMES, target, waits=SOON)
    assert url == upload(folder, NAMES, target) == f"{hub.url}/lab/model/discussions/1"
    assert len(hub.commits) == 1

    (folder / "config.json").write_text('{"model_type": "mistral"}')  # other files are another proposal
    seal(folder)
    assert upload(folder, NAMES, target) == f"{hub.url}/lab/model/discussions/2"


# ------------------------------------------------------------------------------------ before a merge


def test_access_changes_nothing(hub: FakeHub) -> None:
    assert check_access(TARGET) == TARGET
    assert check_access(Target("model")) == Target("mary/model")
    assert check_access(Target("lab/unmade", create_pr=True, revision="main"))
    hub.repos["lab/model"] = Repo(private=True)
    assert check_access(Target("lab/model", private=True, revision="main"))
    assert check_access(Target("lab/model", revision="to-be-made"))
    assert check_access(Target("lab/model", create_pr=True, revision="main"))
    assert changing(hub) == [] and list(hub.repos) == ["lab/model"]


def test_the_token_of_the_target_comes_first(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(OutputError, match="refuses the token"):
        check_access(TARGET)
    check_access(Target("lab/model", token=hub.token))
    monkeypatch.delenv("HF_TOKEN")
    Path(constants.HF_TOKEN_PATH).write_text(hub.token)
    check_access(TARGET)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("a/b/c", PlanError, "cannot be the name of a repository"),
        ("https://huggingface.co/lab/model", PlanError, "cannot be the name of a repository"),
        ("", PlanError, "cannot be the name of a repository"),
        ("lab/no name", PlanError, "cannot be the name of a repository"),
        ("others/model", OutputError, "may only write to repositories of mary, lab$"),
        ("readers/model", OutputError, "may only write to repositories of mary, lab$"),
        ("others/there", OutputError, "may only write to repositories of mary, lab$"),
    ],
)
def test_names_that_will_not_do(hub: FakeHub, name: str, kind: type[Exception], said: str) -> None:
    hub.repos["others/there"] = Repo(private=False)
    with pytest.raises(kind) as caught:
        check_access(Target(name))
    told(caught.value, said)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (Target("lab/model", private=True), "is public, and --private was given"),
        (Target("lab/model", revision="v1"), "--revision v1 is a tag or a commit"),
        *((Target("lab/model", revision=name), "cannot be the name of a branch") for name in NO_BRANCHES),
        (
            Target("lab/model", revision="gone", create_pr=True),
            "has no branch gone, and --create-pr needs one",
        ),
        (Target("lab/new", revision="gone", create_pr=True), "has no branch gone, and --create-pr needs one"),
        (Target("lab/model", commit_message=" "), "the commit message is empty"),
        (Target("lab/model", token="hf_a\nb"), "the token holds a character that no token has"),
    ],
)
def test_requests_that_cannot_be_met(hub: FakeHub, target: Target, said: str) -> None:
    hub.repos["lab/model"] = Repo(private=False, tags={"v1"})
    with pytest.raises(PlanError) as caught:
        check_access(target)
    told(caught.value, said)


@pytest.mark.parametrize(
    ("status", "said", "hint"),
    [
        (401, "refuses the token", "hf auth login"),
        (403, "does not allow asking whose token it is", "--create-pr"),
        (404, "failed (404: ", "HF_ENDPOINT"),
        (418, "failed (418: ", "run the same command again"),
        (500, "failed (500: ", "run the same command again"),
    ],
)
def test_what_the_hub_says_is_explained_without_the_token(
    hub: FakeHub, status: int, said: str, hint: str
) -> None:
    hub.refuse = {"GET /api/whoami": status}
    with pytest.raises(OutputError) as caught:
        check_access(TARGET, waits=(0,))
    told(caught.value, said, hint)
    assert hub.token not in str(caught.value)
    assert len(hub.requests) == (2 if status == 500 else 1)


@pytest.mark.skipif(
    "write" not in inspect.signature(huggingface_hub.HfApi.auth_check).parameters,
    reason="this huggingface_hub does not ask",
)
def test_a_repository_that_may_not_be_written_to(hub: FakeHub) -> None:
    hub.repos["lab/model"] = Repo(private=False, writable=False)
    with pytest.raises(OutputError) as caught:
        check_access(TARGET)
    told(caught.value, "does not allow writing to it (403: You have no write access)", "--create-pr")


def test_what_a_token_may_do(hub: FakeHub) -> None:
    hub.user["auth"]["accessToken"]["role"] = "read"
    with pytest.raises(OutputError, match="the token of mary may only read"):
        check_access(TARGET)
    hub.user["auth"]["accessToken"]["role"] = "fineGrained"  # organisations may be hidden from it
    check_access(Target("others/model"))


@pytest.mark.parametrize(
    "answer", [[], "mary", {}, {"name": "mary", "orgs": ["lab"]}, {"name": "mary", "auth": "all"}]
)
def test_something_that_is_no_hub_answers(hub: FakeHub, answer: Any) -> None:
    hub.user = answer
    with pytest.raises(OutputError) as caught:
        check_access(TARGET)
    told(caught.value, f"{hub.url}: does not say whose token it is", "HF_ENDPOINT")


def test_no_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PlanError) as caught:
        check_access(TARGET)
    told(caught.value, "there is no token to upload to lab/model with", "--token")
    assert hub.requests == []


def test_no_connection(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(OutputError) as caught:
        check_access(TARGET, waits=(0,))
    told(caught.value, "http://127.0.0.1:1: no answer while asking whose token it is", "HF_ENDPOINT")


def test_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OutputError) as caught:
        check_access(TARGET)
    told(caught.value, "since HF_HUB_OFFLINE is set", "unset it")
    assert hub.requests == []


def told(error: BaseException, said: str, hint: str = "") -> None:
    """Two lines: the first says what is wrong, the second what to do."""
    assert isinstance(error, LazymergeError)
    assert said.removesuffix("$") in error.problem and hint in error.hint and error.hint
    assert not said.endswith("$") or error.problem.endswith(said[:-1])
    assert "\n" not in error.problem + error.hint and len(error.problem) < 400


# ------------------------------------------------------------------------------------ what is not uploaded


def test_a_result_that_was_not_verified(hub: FakeHub, folder: Path) -> None:
    path, manifest = folder / WEIGHTS[2], folder / MANIFEST
    whole, sealed = path.read_bytes(), manifest.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 64])
    for content, said in ((whole + b"x", "bytes, expected"), (flipped, "not those that were written")):
        path.write_bytes(content)
        with pytest.raises(VerificationError, match=rf"has changed .*00003-of-00003\.safetensors: .*{said}"):
            upload(folder, NAMES, TARGET)
    path.write_bytes(whole)
    unsealed = sealed.replace(b'"lazymerge": "0"', b'"lazymerge": "1"')
    for broken in (b"", b"[]", b'{"files": {"config.json": 3}}', b"[" * 100_000, unsealed):
        manifest.write_bytes(broken)
        with pytest.raises(VerificationError, match="not what was written"):
            upload(folder, NAMES, TARGET)
    manifest.unlink()
    with pytest.raises(VerificationError, match="was not verified"):
        upload(folder, NAMES, TARGET)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["../secret", "linked.json", "gone.json", ".lazymerge", "./config.json"])
def test_files_that_are_none_of_the_folder(hub: FakeHub, folder: Path, name: str) -> None:
    (folder.parent / "secret").write_text("secret")
    (folder / "linked.json").symlink_to(folder.parent / "secret")
    seal(folder, **{name: {"size": 6, "xxh3_128": xxhash.xxh3_128_hexdigest(b"secret")}})
    with pytest.raises(VerificationError, match=r"is no file of this folder|an entry that is none"):
        upload(folder, [*NAMES, name], TARGET)
    assert hub.requests == []


def test_files_that_were_not_verified(hub: FakeHub, folder: Path) -> None:
    with pytest.raises(VerificationError, match=r"notes\.txt: is not in the manifest"):
        upload(folder, [*NAMES, "notes.txt"], TARGET)
    with pytest.raises(PlanError, match="nothing to upload"):
        upload(folder, [], TARGET)
    assert hub.requests == []


@pytest.mark.parametrize(
    "stray",
    [
        *("model.safetensors", "model-00001-of-00007.safetensors", "pytorch_model.bin"),
        *("adapter_config.json", "adapter_model.safetensors", "lora_adapter/adapter_model.bin"),
    ],
)
def test_weights_of_another_model_are_in_the_repository(hub: FakeHub, folder: Path, stray: str) -> None:
    hub.repos["lab/model"] = repo = Repo(private=False)
    repo.refs["main"][-1] |= {stray: (b"old", True), "training_log.bin": (b"", True)}
    with pytest.raises(OutputError, match=f"may be loaded: {stray}$|may be loaded: {stray}\n"):
        upload(folder, NAMES, TARGET)
    assert changing(hub) == []


@pytest.mark.parametrize("target", [TARGET, Target("lab/model", revision="to-be-made")])
def test_weights_of_another_model_are_found_before_the_merge(hub: FakeHub, target: Target) -> None:
    """Those that the new ones replace are none."""
    hub.repos["lab/model"] = repo = Repo(private=False)
    repo.refs["main"][-1] |= {"model.safetensors": (b"old", True)}
    check_access(target, ["config.json", "model.safetensors"])
    with pytest.raises(OutputError, match=r"may be loaded: model\.safetensors"):
        check_access(target, NAMES)
    assert changing(hub) == []


def test_a_merge_into_a_repository_of_other_weights(hub: FakeHub, source: Any, tmp_path: Path) -> None:
    src, out = source(tmp_path / "src", {"w": torch.ones(3)}, {}), tmp_path / "out"
    hub.repos["lab/model"] = repo = Repo(private=False)
    repo.refs["main"][-1] |= {"model-00001-of-00002.safetensors": (b"old", True)}
    with refused(OutputError, "may be loaded: model-00001", dst=out):
        lazymerge.merge(src, out, push_to_hub="lab/model")


def test_a_merge_that_is_done_and_its_upload_is_not(hub: FakeHub, source: Any, tmp_path: Path) -> None:
    """What goes on from there is told, and does."""
    src, out = source(tmp_path / "src", {"w": torch.ones(3)}, {}), tmp_path / "out"
    hub.refuse["POST /api/models/lab/model/commit"] = 403
    with pytest.raises(OutputError) as caught:
        lazymerge.merge(src, out, push_to_hub="lab/model")
    assert f"the merge is done: `lazymerge upload {out} lab/model` goes on" in caught.value.hint
    assert load_file(out / "model.safetensors")["w"].tolist() == [1, 1, 1]
    hub.refuse.clear()
    lazymerge.upload(out, "lab/model")
    assert set(hub.files("lab/model")) == {"config.json", "model.safetensors"}


def test_a_folder_that_does_not_exist(hub: FakeHub, tmp_path: Path) -> None:
    with refused(SourceError, "nowhere: no such folder", dst=tmp_path):
        lazymerge.upload(tmp_path / "nowhere", "lab/model")
    assert hub.requests == []


def test_a_file_that_the_hub_ignores(hub: FakeHub, folder: Path) -> None:
    hub.repos["lab/model"] = Repo(private=False, ignored={"tokenizer.json"})
    with pytest.raises(OutputError, match=r"has not kept tokenizer\.json as it was sent"):
        upload(folder, NAMES, TARGET, waits=SOON)


# ------------------------------------------------------------------------------------ manners


def test_the_token_is_not_shown() -> None:
    assert "hf_secret" not in repr(Target("lab/model", token="hf_secret"))


def test_the_library_does_not_talk(hub: FakeHub, folder: Path) -> None:
    handler = logging.Handler()
    said: list[logging.LogRecord] = []
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("huggingface_hub")
    logger.addHandler(handler)
    try:
        hub.mishaps = [("PUT /objects/", "500")]  # it would show the signed URL
        upload(folder, NAMES, TARGET)
    finally:
        logger.removeHandler(handler)
    assert hub.mishaps == [] and said == []


def test_the_library_is_left_as_it_was(hub: FakeHub, folder: Path) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    logger = logging.getLogger("huggingface_hub")
    before: Any = logger.level, are_progress_bars_disabled()
    upload(folder, NAMES, TARGET)
    assert (logger.level, are_progress_bars_disabled()) == before


def test_what_is_heavy_is_not_imported() -> None:
    script = (
        "import sys, lazymerge.hub;"
        "sys.exit(bool({'huggingface_hub', 'torch', 'transformers', 'httpx', 'httpx2'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
