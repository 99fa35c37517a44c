"""Paths as a caller gives them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from lazymerge.errors import PlanError


def given_path(path: str | os.PathLike[str], what: str) -> Path:
    """The path of `what`; `PlanError` for an empty one, which would be the current folder, and for no path.

    Such are too long a name, one with a null in it, and a link that leads to itself.
    """
    if not os.fspath(path):
        raise PlanError(f"{what}: the path is empty", "give a path; the current folder is '.'")
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno in {errno.ENAMETOOLONG, errno.ELOOP}:
            raise PlanError(
                f"{os.fspath(path)[:300]}: {error.strerror}", f"give another path for {what}"
            ) from None
    except ValueError as error:
        raise PlanError(f"{os.fspath(path)!r:.300}: {error}", f"give another path for {what}") from None
    return Path(path)


def optional_path(path: str | os.PathLike[str] | None, what: str) -> Path | None:
    """The path, as `given_path` has it, if there is one."""
    return None if path is None else given_path(path, what)


def given_paths(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The paths of a source, given as one or as several; `PlanError` for none and for an empty one."""
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise PlanError("no source was given", "give the folder of a checkpoint")
    return [given_path(path, "the source") for path in several]
