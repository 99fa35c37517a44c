"""Moving bytes from file to file, through the kernel where it can.

`copy_file_range` where both files are on file systems that know it, else `sendfile`, else a buffer;
which of them works is found out once for each pair of devices.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from lazymerge.errors import DamagedFile, OutputError, SourceError
from lazymerge.files.local import LocalFile

_NOT_HERE = {
    errno.EXDEV,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.EPERM,
    errno.EBADF,
    errno.ETXTBSY,
}
"""What the kernel answers where it cannot copy between these two files."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_BUFFER = 1 << 20


class Copier:
    """Copies ranges of files into one output file; safe to share between threads.

    `target` is a descriptor of a file that has its full size. Raises `DamagedFile` if a source ends
    early, `SourceError` and `OutputError` for what the file systems answer.
    """

    def __init__(self, target: int, name: str) -> None:
        self.target = target
        self.name = name
        self._ways: dict[int, int] = {}  # source device -> the first way that may still work
        self._sendfile = threading.Lock()  # it writes at the descriptor's own position

    def copy(self, source: LocalFile, source_at: int, at: int, size: int) -> None:
        """Copy `size` bytes from `source_at` of the source to `at` of the target."""
        ways: tuple[Callable[[int, int, int, int], int], ...] = (
            self._copy_file_range,
            self._send_file,
            self._through_buffer,
        )
        done = 0
        with source.opened() as fd:
            device = os.fstat(fd).st_dev
            while done < size:
                way = self._ways.get(device, 0)
                try:
                    count = ways[way](fd, source_at + done, at + done, size - done)
                except OSError as error:
                    if error.errno in _NOT_HERE and way + 1 < len(ways):
                        self._ways[device] = way + 1
                        continue
                    raise self._blame(error, source, source_at + done, at + done) from error
                if count == 0 and way + 1 < len(ways):
                    self._ways[device] = way + 1  # some file systems copy nothing and call it success
                    continue
                if count == 0:
                    raise DamagedFile(
                        f"{source.path}: ends at byte {source_at + done}, expected {source_at + size}",
                        "the file is truncated, or shrank while it was read; copy it again",
                    )
                done += count

    def _copy_file_range(self, fd: int, source_at: int, at: int, size: int) -> int:
        return os.copy_file_range(fd, self.target, size, source_at, at)

    def _send_file(self, fd: int, source_at: int, at: int, size: int) -> int:
        with self._sendfile:
            os.lseek(self.target, at, os.SEEK_SET)
            return os.sendfile(self.target, fd, source_at, min(size, 16 * _BUFFER))

    def _through_buffer(self, fd: int, source_at: int, at: int, size: int) -> int:
        block = os.pread(fd, min(size, _BUFFER), source_at)
        write_all(self.target, self.name, memoryview(block), at)
        return len(block)

    def _blame(self, error: OSError, source: LocalFile, source_at: int, at: int) -> SourceError | OutputError:
        """Which side failed: only a full disk says; for anything else the source is tried alone."""
        if error.errno not in _FULL:
            try:
                source.read(source_at, max(1, min(_BUFFER, source.size - source_at)))
            except SourceError as failed:
                return failed
        return write_error(error, self.name, at)


def write_all(target: int, name: str, data: memoryview, at: int) -> None:
    """Write all of `data` at `at` of the descriptor `target`; `OutputError` naming `name` if it cannot be."""
    done = 0
    while done < len(data):
        try:
            count = os.pwrite(target, data[done:], at + done)
        except OSError as error:
            raise write_error(error, name, at + done) from error
        if count == 0:
            raise write_error(OSError(errno.EIO, ""), name, at + done)
        done += count


def write_error(error: OSError, name: str, at: int) -> OutputError:
    """What the user is told when writing `name` fails at byte `at`."""
    hint = "run the same command again when the disk works; what is finished is kept"
    if error.errno in _FULL:
        hint = "free some space (or raise the quota) and run the same command again; what is finished is kept"
    return OutputError(f"{name}: writing at byte {at}: {os.strerror(error.errno or errno.EIO)}", hint)


def start_writeback(target: int, at: int, size: int) -> None:
    """Ask the kernel to begin writing a range out and to drop it from the cache (advice, never an error)."""
    with suppress(OSError):
        os.posix_fadvise(target, at, size, os.POSIX_FADV_DONTNEED)
