"""Local files as ranges of bytes: positional reads, and descriptors that are never too many.

Nothing is memory-mapped: a mapped page counts against the process until it is dropped, and a
file that is truncated under a mapping is a bus error, where a short `preadv` is an exception
(docs/decisions/0002-positional-reads.md has the measurements).
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from lazymerge.errors import DamagedFile, InconsistentCheckpoint, SourceError


class Source(Protocol):
    """Where the bytes of a region are: a file, or something that can compute them."""

    @property
    def name(self) -> str:
        """What to call it in a message."""
        ...

    @property
    def size(self) -> int:
        """Bytes it holds."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on, or raise a `SourceError`."""
        ...


def _idle_limit() -> int:
    """An eighth of what this process may have open, since there are pools of both sides and of adapters."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 128 if allowed == resource.RLIM_INFINITY else max(1, min(128, allowed // 8))


class Descriptors:
    """Open descriptors of many files, at most `limit` of them idle: hundreds of ranks, a ulimit of 1024.

    One pool serves all files of a checkpoint. Positional reads share a descriptor between threads. The limit
    is 128 by default, and less where the process may have few open.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = _idle_limit() if limit is None else limit
        self._lock = threading.Lock()
        self._fds: OrderedDict[Path, int] = OrderedDict()  # least recently used first
        self._users: Counter[Path] = Counter()

    @contextmanager
    def using(self, path: Path) -> Iterator[int]:
        """A read-only descriptor of `path` for the length of the block; `OSError` if it cannot be opened."""
        with self._lock:
            fd = self._fds.get(path)
            if fd is None:
                fd = self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._fds.move_to_end(path)
            self._users[path] += 1
        try:
            yield fd
        finally:
            with self._lock:
                self._users[path] -= 1
                if len(self._fds) > self.limit:
                    self._close_idle(len(self._fds) - self.limit)

    def close(self) -> None:
        """Close every descriptor that nobody is using."""
        with self._lock:
            self._close_idle(len(self._fds))

    def __del__(self) -> None:
        if hasattr(self, "_lock"):  # not if __init__ never ran
            self.close()

    def _close_idle(self, count: int) -> None:
        for path in [path for path in self._fds if not self._users[path]][: max(count, 0)]:
            os.close(self._fds.pop(path))
            del self._users[path]


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def refuse_no_file(path: Path) -> None:
    """Raise `SourceError`, saying what it is, for what has the name of a file and is none."""
    if path.is_file():
        return
    target = f"a link to {os.readlink(path)}" if path.is_symlink() else ""
    if not path.exists():
        raise SourceError(
            f"{path}: is {target}, which is not there", "put the file itself there, or repair the link"
        )
    kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode), "a special file")
    what = f"{target}, {kind}" if target else kind
    raise SourceError(f"{path}: is {what}, expected a file", "put the file itself there")


class LocalFile:
    """One regular file, read by position; safe to share between threads.

    `size` (bytes), `mtime_ns` and `inode` are those of the moment when it was opened; `identity` is
    what a resumed run compares. Raises `SourceError` if the path is not a readable regular file.
    """

    __slots__ = ("inode", "mtime_ns", "path", "pool", "size")

    def __init__(self, path: Path, pool: Descriptors | None = None) -> None:
        try:
            found = os.stat(path)
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}", "check the path and its permissions") from None
        except ValueError as error:  # a null or a lone surrogate, which no path has
            raise SourceError(f"{str(path)!r}: no name of a file ({error})", "check the path") from None
        if not os.path.isfile(path):
            raise SourceError(f"{path}: not a regular file", "give a checkpoint file or folder")
        self.path = path
        self.pool = pool or Descriptors()
        self.size = found.st_size
        self.mtime_ns = found.st_mtime_ns
        self.inode = found.st_ino
        with self.opened():  # an unreadable file is found now, not after an hour
            pass

    def __repr__(self) -> str:
        return f"LocalFile({str(self.path)!r}, size={self.size})"

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> list[int]:
        """What tells the file from a later one under its name: size, time of change, inode."""
        return [self.size, self.mtime_ns, self.inode]

    def check_unchanged(self) -> None:
        """Raise `InconsistentCheckpoint` if the file is not the one any more that was opened."""
        try:
            now = LocalFile(self.path, self.pool).identity
        except SourceError:
            now = []
        if now != self.identity:
            raise InconsistentCheckpoint(
                f"{self.path}: has changed while it was read (size, time, inode {self.identity}, now {now})",
                "what was read may be of either version; run again when nothing writes there",
            )

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A read-only descriptor of the file for the length of the block."""
        with ExitStack() as stack:
            try:
                fd = stack.enter_context(self.pool.using(self.path))
            except OSError as error:
                hint = "check the path and its permissions"
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    hint = "allow more open files: ulimit -n 1024"
                raise SourceError(f"{self.path}: {error.strerror}", hint) from None
            yield fd

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on; `DamagedFile` if the file ends before."""
        done = 0
        with self.opened() as fd:
            while done < len(buffer):
                try:
                    count = os.preadv(fd, [buffer[done:]], offset + done)
                except OSError as error:
                    raise SourceError(
                        f"{self.path}: reading {len(buffer)} bytes at {offset}: {error.strerror}",
                        "the disk or network file system failed; run the same command again",
                    ) from error
                if count == 0:
                    raise DamagedFile(
                        f"{self.path}: ends at byte {offset + done}, expected {offset + len(buffer)}",
                        "the file is truncated, or shrank while it was read; copy it again",
                    )
                done += count

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on; `DamagedFile` if the file ends before."""
        if size < 0 or offset < 0 or offset + size > self.size:
            raise DamagedFile(
                f"{self.path}: bytes {offset} to {offset + size} lie outside the file of {self.size} bytes",
                "the file is truncated or overwritten; copy it again",
            )
        buffer = bytearray(size)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def forget(self, offset: int, size: int) -> None:
        """Let the kernel drop the cached pages of a range that is done with (advice, never an error)."""
        with suppress(OSError), self.opened() as fd:
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
