"""Bringing the files of a result to the hub.

They go up one by one, weights first and the index last, and become visible by one commit: the repository
holds the model before or the whole new one, never a part. What the hub has already (by sha256, or by git's
own hash for small files) is not sent again, so that an upload which was killed is finished by running it
again. Large files are kept by the hub under their sha256 from when they are sent, commit or no commit.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazymerge.budget import resident
from lazymerge.errors import LazymergeError, OutputError, PlanError, SourceError, VerificationError
from lazymerge.files.local import LocalFile
from lazymerge.hub.access import held_files, prepare, refuse_strays
from lazymerge.hub.connection import Hub, Target, connect, is_transient, status_of
from lazymerge.manifest import check_manifest, has_manifest, read_manifest
from lazymerge.output import MANIFEST
from lazymerge.report import Meter, OnProgress, Progress

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, CommitOperationAdd, ModelInfo

_WORKERS = 4
"""Threads that read what is to be sent once before."""

_AGAIN = "do not upload it: merge again with --verify"

log = logging.getLogger("lazymerge")


def upload(
    folder: Path,
    names: Sequence[str],
    target: Target,
    on_progress: OnProgress | None = None,
    *,
    waits: Sequence[float] = (1.0, 2.0, 4.0, 8.0, 16.0),
    timeout: float = 120.0,
) -> str:
    """Upload the files `names` of a result in `folder`, and nothing else. Returns the URL of what was made.

    waits    seconds before the second, third, ... try of a request that failed in passing
    timeout  seconds without a byte after which a request has failed

    Before anything is sent, every byte is read and compared with the manifest. `on_progress` is told of
    that, then before each file: bytes that are at the hub, of how many. Raises `VerificationError` if the
    result was not verified or is not what was, else as `check_access`.
    """
    files = _verified(folder, sorted(names, key=_rank), on_progress)
    with connect(target, waits, timeout) as hub:
        prepare(hub)
        url, info = _look(hub, files)
        if url is None:
            _send(hub, files, info, on_progress)
            url = _commit(hub, files)
        return url


# ------------------------------------------------------------------------------------ the files


@dataclass(frozen=True)
class _File:
    """A file to upload; its hashes are worked out when they are asked for, and once."""

    name: str
    path: Path
    size: int

    @cached_property
    def operation(self) -> CommitOperationAdd:
        """The library's own record of the file: what it has sent, and the sha256 that it knows."""
        from huggingface_hub import CommitOperationAdd

        return CommitOperationAdd(self.name, self.path)

    @cached_property
    def git_hash(self) -> str:
        digest = hashlib.sha1(b"blob %d\0" % self.size)
        with open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    def is_same(self, held: Any) -> bool:
        """Whether the hub holds this very file: by sha256 where it is a large one, else by git's hash."""
        if held.lfs is None:
            return bool(held.size == self.size and held.blob_id == self.git_hash)
        large = held.lfs
        return bool(large.size == self.size and large.sha256 == self.operation.upload_info.sha256.hex())


def _rank(name: str) -> tuple[int, str]:
    """The order of upload: weights, sidecars, index."""
    if name.endswith(".index.json"):
        return 2, name
    return 0 if name.endswith((".safetensors", ".bin")) else 1, name


def _verified(folder: Path, names: Sequence[str], on_progress: OnProgress | None) -> list[_File]:
    """The files, each in the manifest and byte for byte what it says, none of them a link elsewhere."""
    if not names:
        raise PlanError(f"{folder}: there is nothing to upload", "name the files of a finished merge")
    sizes = verified_sizes(folder)
    for name in names:
        path = folder / name
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            raise VerificationError(f"{path}: is no file of this folder", _AGAIN)
        if name != MANIFEST and name not in sizes:
            raise VerificationError(f"{path}: is not in the manifest", _AGAIN)
    meter = Meter(on_progress)
    report = check_manifest(
        folder, workers=_WORKERS, on_bytes=lambda count, total, name: meter.add("verify", total, name, count)
    )
    changed = [problem for problem in report.problems if problem.file in {*names, MANIFEST}]
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise VerificationError(f"{folder}: has changed since it was verified: {changed[0]}{more}", _AGAIN)
    return [_File(name, folder / name, LocalFile(folder / name).size) for name in names]


def verified_sizes(folder: Path) -> Mapping[str, Any]:
    """Name -> size of the files that were verified."""
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "no such folder"
        raise SourceError(f"{folder}: {what}", "give the folder of a result")
    if not has_manifest(folder):
        raise VerificationError(
            f"{folder}: has no {MANIFEST}, so it was not verified",
            "merge with --verify, which writes it when the result has been read again and compared",
        )
    try:
        return {name: entry["size"] for name, entry in read_manifest(folder).items()}
    except (LazymergeError, ValueError, RecursionError) as error:
        text = error.problem if isinstance(error, LazymergeError) else str(error)[:200]
        raise VerificationError(f"{folder / MANIFEST}: not what was written ({text})", _AGAIN) from None


# ------------------------------------------------------------------------------------ what is there


def _look(hub: Hub, files: Sequence[_File]) -> tuple[str | None, ModelInfo | None]:
    """Where all of the files are already, if they are, and what the branch holds (None: that is not told).

    They may be in a pull request that an earlier run has opened.
    """
    info = hub.info(hub.target.revision or "main")
    refuse_strays(hub, info, {file.name for file in files})
    if not _missing(info, files):
        return _url(hub), info
    for request in _requests(hub) if hub.target.create_pr else ():
        if not _missing(hub.info(request.git_reference), files):
            return str(request.url), info
    return None, info


def _url(hub: Hub) -> str:
    url = f"{hub.api.endpoint}/{hub.repo_id}"
    return f"{url}/tree/{hub.target.revision}" if hub.target.revision else url


def _requests(hub: Hub) -> list[Any]:
    """The open pull requests of the target's title."""
    found = hub.ask(
        "looking at its pull requests",
        lambda: list(hub.api.get_repo_discussions(hub.repo_id, discussion_type="pull_request")),
    )
    title = hub.target.commit_message.strip()
    return [each for each in found if each.title == title and each.status in {"open", "draft"}]


def _missing(info: ModelInfo | None, files: Sequence[_File]) -> list[_File]:
    """The files that are not there, or not with this content."""
    held = held_files(info)
    return [file for file in files if file.name not in held or not file.is_same(held[file.name])]


# ------------------------------------------------------------------------------------ sending


def _send(hub: Hub, files: Sequence[_File], info: ModelInfo | None, on_progress: OnProgress | None) -> None:
    """Bring the content of the large files to the hub; the small ones are in the commit itself."""
    missing = _missing(info, files)
    total = sum(file.size for file in files)
    done = total - sum(file.size for file in missing)
    for file in missing:
        if on_progress is not None:
            on_progress(Progress("upload", done, total, resident(), file.name))
        hub.ask(
            f"sending {file.name}",
            hub.api.preupload_lfs_files,
            hub.repo_id,
            additions=[file.operation],
            revision=hub.target.revision,
            create_pr=hub.target.create_pr,
            free_memory=False,
        )
        done += file.size
    if on_progress is not None:
        on_progress(Progress("upload", done, total, resident()))


def _commit(hub: Hub, files: Sequence[_File]) -> str:
    """Make the one commit, and see that it holds every file; returns the URL.

    An answer can be lost after the commit was made, and somebody else can have made another one (412): so
    each try looks at what is there now, and says which commit it follows.
    """
    waits = iter(hub.waits)
    made: CommitInfo | None = None
    while True:
        url, info = _look(hub, files)
        if url is not None:
            return url
        missing = _missing(info, files)
        try:
            if made is None:
                made = hub.once(
                    hub.api.create_commit,
                    hub.repo_id,
                    [file.operation for file in missing],
                    commit_message=hub.target.commit_message.strip(),
                    revision=hub.target.revision,
                    create_pr=hub.target.create_pr,
                    parent_commit=info.sha if info is not None else None,
                )
                continue
        except Exception as error:  # as in Hub.ask
            wait = next(waits, None) if is_transient(error) or status_of(error) == 412 else None
            if wait is None:
                raise hub.explained("committing the files", error) from None
        else:
            if not any(held.blob_id for held in held_files(info).values()):  # a mirror need not tell
                return made.pr_url or _url(hub)
            wait = next(waits, None)  # the hub may be slow to show it
            if wait is None:
                raise OutputError(
                    f"{hub.repo_id}: has not kept {', '.join(file.name for file in missing)} as it was sent",
                    "a .gitignore there may exclude it, or somebody has changed it; look, and upload again",
                )
        log.debug("%s: the commit is not there, again in %s s", hub.repo_id, wait)
        time.sleep(wait)
