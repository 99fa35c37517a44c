"""What transformers said of a model before: kept in the user's cache folder, one small file a config.

    $LAZYMERGE_CACHE, else $XDG_CACHE_HOME/lazymerge, else ~/.cache/lazymerge

A file's name is a hash of the question and of the versions that answered it, so that nothing there ever
grows old. A folder that cannot be read or written costs time and nothing else. Empty LAZYMERGE_CACHE:
nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lazymerge

_LARGEST = 64 << 20
"""Bytes of an answer; DeepSeek-V3's has 3 MB."""


def remembered(question: str) -> Any:
    """The answer that was kept for this question; None if there is none."""
    path = _path(question)
    if path is None:
        return None
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        return json.loads(path.read_bytes())
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
            with os.fdopen(handle, "w") as file:
                json.dump(answer, file)
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
        versions = [lazymerge.__version__, version("transformers"), version("torch")]
    except (PackageNotFoundError, RuntimeError):  # the latter where nobody has a home
        return None
    key = hashlib.sha256(json.dumps([*versions, question]).encode()).hexdigest()
    return folder / "models" / f"{key}.json"
