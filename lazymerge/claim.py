"""Who may write into a folder: nobody where a result cannot go, and one merge at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lazymerge.checkpoint import Note
from lazymerge.errors import OutputError
from lazymerge.files.lock import take_lock
from lazymerge.journal import listed, read_lines
from lazymerge.output import ENDED, JOURNAL, LOCK, MANIFEST, PARTIAL, STAGING, Destination, check_empty


@contextmanager
def claim(folder: Path, sources: Sequence[Path], *, overwrite: bool) -> Iterator[Destination]:
    """The destination, held by this process alone for the length of the block.

    Raises `OutputError` if it is a file, lies inside a source, cannot be written, holds something
    already (unless `overwrite`, or an unfinished merge) or another merge is writing there.
    """
    check_destination(folder, sources, overwrite=overwrite)
    made = _missing_parents(folder)
    staging = folder / STAGING
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if staging.is_symlink():
            raise OutputError(f"{staging}: is a link", "remove it; the files under way go there")
        staging.mkdir(exist_ok=True)
        lock = os.open(staging / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise OutputError(f"{folder}: {error.strerror}", "choose a folder that you may write to") from None
    try:
        notes: tuple[Note, ...] = ()
        if not take_lock(lock, staging / LOCK, folder):
            text = f"{folder}: the file system has no locks; see to it that no other merge writes there too"
            notes = (Note("warning", text),)
        try:
            yield Destination(folder, overwrite, notes)
        except BaseException:
            _tidy(folder, made)
            raise
    except BrokenPipeError:
        raise  # of whom the progress is told
    except OSError as error:
        raise OutputError(
            f"{error.filename2 or error.filename or folder}: {error.strerror}",
            "run the same command again when that can be written; what is finished is kept",
        ) from error
    finally:
        with suppress(OSError):  # nothing was written there that counts
            os.close(lock)
    if staging.is_dir():
        with suppress(OSError):  # it holds what another increment needs
            staging.rmdir()


def check_destination(folder: Path, sources: Sequence[Path], *, overwrite: bool) -> None:
    """Raise `OutputError` where a result cannot go, as far as that can be seen without writing."""
    try:
        _check_place(folder, sources)
        if folder.is_dir() and not overwrite:
            check_empty(folder, _published(folder))
    except OSError as error:
        raise OutputError(
            f"{error.filename or folder}: {error.strerror}", "choose a folder that you may write to"
        ) from None


def _check_place(folder: Path, sources: Sequence[Path]) -> None:
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file", "give a folder for the result")
    resolved = folder.resolve()
    for source in sources:
        place = source.resolve()
        if resolved == (place.parent if place.is_file() else place):
            raise OutputError(f"{folder}: holds the source {source}", "give another folder for the result")
        if place in resolved.parents:
            raise OutputError(f"{folder}: lies inside the source {source}", "give a folder outside of it")


def _published(folder: Path) -> set[str]:
    """What unfinished merges may have renamed into the folder: names of files and of folders there."""
    staging = folder / STAGING
    names = {*listed(read_lines(staging / JOURNAL)), *listed(read_lines(folder / ENDED))}
    names |= {MANIFEST} if names else set()  # it is put there before the end
    if (staging / PARTIAL).exists():
        names.add(MANIFEST)
    for line in read_lines(staging / PARTIAL):
        names |= {*(line["files"] if isinstance(line.get("files"), dict) else ())}
    return {name.partition("/")[0] for name in names}


def _missing_parents(folder: Path) -> list[Path]:
    """The folder and those above it that do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _tidy(folder: Path, made: Sequence[Path]) -> None:
    """After a failure before the first byte: leave no folder behind that was not there."""
    staging = folder / STAGING
    try:
        if staging.is_dir():
            names = {path.name for path in staging.iterdir()}
            if names <= {LOCK, JOURNAL} and len(read_lines(staging / JOURNAL)) < 2:
                shutil.rmtree(staging)
        for path in made:
            path.rmdir()
    except OSError:
        pass  # something is in it
