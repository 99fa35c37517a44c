"""The journal of a destination: JSON lines that say what is being written from what, and what is finished.

A file is named by size, time of change and inode, which renaming leaves as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from lazymerge.errors import InconsistentCheckpoint
from lazymerge.files.copying import write_error
from lazymerge.files.json_text import bounded
from lazymerge.files.writing import write_whole

LARGEST = 64 << 20
"""Bytes that a journal has at most: of 100,000 sources and 10,000 files there are half as many."""


def append(journal: Path, line: dict[str, Any]) -> None:
    """Add a line, on disk when this returns; `OutputError` where it cannot be written."""
    try:
        with open(journal, "ab") as file:
            file.write(_line(line))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_error(error, str(journal), 0) from error


def rewrite(journal: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Replace the journal by one of these lines; `OutputError` where it cannot be written or renamed."""
    write_whole(journal, b"".join(map(_line, lines)))


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def read_lines(journal: Path) -> list[dict[str, Any]]:
    """The journal's lines; the last one may be cut, and whatever is no JSON object ends it."""
    lines: list[dict[str, Any]] = []
    try:
        if journal.stat().st_size > LARGEST:
            return lines
        raw = bounded(journal.read_bytes())
    except (OSError, ValueError):
        return lines
    for line in raw.splitlines(keepends=True):
        try:
            content = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            break
        if not isinstance(content, dict):
            break
        lines.append(content)
    return lines


def agree(lines: Sequence[dict[str, Any]], head: dict[str, Any], but: Collection[str]) -> bool:
    """Whether a journal is of the job that this head names, whatever it says of the keys `but`."""
    job = lines[0].get("job") if lines else None
    if not isinstance(job, dict):
        return False
    return {**job, **dict.fromkeys(but)} == {**head["job"], **dict.fromkeys(but)}


def listed(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Name -> identity of all files that the journal says were to be renamed."""
    listed = [line["publishing"] for line in lines if isinstance(line.get("publishing"), dict)]
    return {name: identity for each in listed for name, identity in each.items() if is_inside(name)}


def is_inside(name: str) -> bool:
    """Whether a name leads to nowhere outside of the folder that it is relative to."""
    return not name.startswith("/") and ".." not in name.split("/")


def identity_of(path: Path) -> list[int]:
    """What tells a file from another of its name and size, before and after it is renamed."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def is_file(path: Path, identity: object) -> bool:
    """Whether the file with this identity is there."""
    return path.is_file() and identity_of(path) == identity


def refuse_changed(before: object, now: dict[str, Any], staging: Path) -> None:
    """Raise `InconsistentCheckpoint` if the sources are not those that an unfinished run began with."""
    before = before if isinstance(before, dict) else {}
    for path in sorted({*before, *now}):
        if before.get(path) != now.get(path):
            raise InconsistentCheckpoint(
                f"{path}: has changed since the unfinished merge in {staging.parent} read it"
                f" (size, time and inode {before.get(path)}, now {now.get(path)})",
                f"remove {staging} to start again from what is there now",
            )
