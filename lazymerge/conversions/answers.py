"""What transformers said of a model before: kept in the user's cache folder, one small file a config.

    $LAZYMERGE_CACHE, else $XDG_CACHE_HOME/lazymerge, else ~/.cache/lazymerge

A file's name is a hash of the question, of the versions that answered it and of the code that put it, so
that nothing there ever grows old. It begins with a checksum of the rest. A file that is not the user's own,
or that others may write, is not read: what it says decides bytes. A folder that cannot be read or written
costs time and nothing else. Empty LAZYMERGE_CACHE: nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lazymerge
from lazymerge.conversions.model_process import ANSWER

_LARGEST = ANSWER + 65  # with the checksum


def remembered(question: str) -> Any:
    """The answer that was kept for this question; None if there is none."""
    path = _path(question)
    if path is None:
        return None
    try:
        if not path.is_file():  # opening a pipe would wait
            return None
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if not _is_ours(stat) or stat.st_size > _LARGEST:
                return None
            checksum, _, answer = file.read(stat.st_size).partition(b"\n")
        return json.loads(answer) if checksum == _checksum(answer) else None
    except (OSError, ValueError, RecursionError):
        return None


def remember(question: str, answer: Any) -> None:
    """Keep the answer, if that can be done."""
    path = _path(question)
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            content = json.dumps(answer).encode()
            with os.fdopen(handle, "wb") as file:
                file.write(_checksum(content) + b"\n" + content)
            Path(scratch).replace(path)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise


def _path(question: str) -> Path | None:
    given = os.environ.get("LAZYMERGE_CACHE")
    if given == "":
        return None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        folder = Path(given) if given else Path(base) / "lazymerge"
        transformers = version("transformers")
        if ".dev" in transformers or "+" in transformers:  # one name for what is other code every day
            return None
        versions = [lazymerge.__version__, transformers, version("torch"), _digest_of_code()]
    except (PackageNotFoundError, RuntimeError, OSError):  # where nobody has a home, or there is no source
        return None
    key = hashlib.sha256(json.dumps([*versions, question]).encode()).hexdigest()
    return folder / "models" / f"{key}.json"


def _is_ours(status: os.stat_result) -> bool:
    """Whether a file is the user's own, written by nobody else, and of no unlikely size."""
    if status.st_size >= _LARGEST:
        return False
    owner = getattr(os, "geteuid", lambda: status.st_uid)()  # Windows has none
    return status.st_uid == owner and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@functools.cache
def _digest_of_code() -> str:
    """Of all modules as they are on the disk: some decide an answer, and which is hard to keep true."""
    digest = hashlib.sha256()
    for path in sorted(Path(lazymerge.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
