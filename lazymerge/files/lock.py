"""One writer at a time: a lock that the kernel lets go when its process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from lazymerge.errors import OutputError

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_LARGEST_OWNER = 200


def take_lock(fd: int, path: Path, folder: Path) -> bool:
    """Lock `folder` by the file `path`, open as `fd`, until it is closed; False where there are no locks.

    Raises `OutputError` at once if another process holds it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            raise OutputError(f"{path}: cannot be locked: {error.strerror}", "run it again") from error
        owner = os.pread(fd, _LARGEST_OWNER, 0).decode(errors="replace")
        raise OutputError(
            f"{folder}: another merge is writing here (process {owner})",
            "wait for it, or give another folder",
        ) from None
    _refuse_removed(fd, path, folder)
    with suppress(OSError):  # a full disk; the owner is only for the message above
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} on {socket.gethostname()}".encode()[:_LARGEST_OWNER], 0)
    return True


def _refuse_removed(fd: int, path: Path, folder: Path) -> None:
    """The file may have been opened just before another merge ended and removed it: then it locks nothing."""
    try:
        there = os.stat(path).st_ino
    except OSError:
        there = None
    if there != os.fstat(fd).st_ino:
        raise OutputError(
            f"{folder}: another merge has just ended here", "look at its result, then try again"
        )
