"""Files that are on the disk when that is said of them: sized ahead, flushed, renamed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lazymerge.errors import OutputError
from lazymerge.files.copying import write_all, write_error


@contextmanager
def created(path: Path, size: int = 0) -> Iterator[int]:
    """A descriptor of a new file, sized ahead, that is on the disk when the block has ended well.

    Folders above it are made, and a link in its place is not followed. Raises `OutputError`, also where there
    is no room for `size` bytes.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise write_error(error, str(path), 0) from error
    try:
        if size:
            _size_ahead(fd, size, str(path))
        yield fd
        _flush(fd, str(path))
    finally:
        with suppress(OSError):  # what it holds is on the disk by now, or something has failed already
            os.close(fd)


def write_whole(path: Path, content: bytes, scratch: Path | None = None) -> None:
    """Write a small file that is seen whole or not at all; `OutputError` if that cannot be done.

    `scratch` is what it is called before, beside it; what has that name is removed.
    """
    scratch = scratch or path.with_name(f"{path.name}.new")
    try:
        if os.path.lexists(scratch):
            with suppress(OSError):  # then it cannot be written either
                scratch.unlink()
        with created(scratch) as fd:
            write_all(fd, str(path), memoryview(content), 0)
        try:
            scratch.rename(path)
        except OSError as error:
            raise OutputError(
                f"{path}: cannot be renamed into its place: {error.strerror}",
                "choose a folder on a file system that renames files over others",
            ) from error
    except OutputError:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the file system can; `OSError` if the disk fails at it."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno in {errno.EIO, errno.ENOSPC, errno.EDQUOT}:
            raise OSError(error.errno, error.strerror, str(folder)) from error
        # else a network file system that has no fsync of folders
    finally:
        os.close(fd)


def _size_ahead(fd: int, size: int, name: str) -> None:
    """Give the file its size, with the blocks for it where the file system can: a full disk is found now."""
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise write_error(error, name, 0) from error


def _flush(fd: int, name: str) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise write_error(error, name, 0) from error
