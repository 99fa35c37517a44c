"""The destination: nothing incomplete ever has its final name, and what is finished is never done twice.

    DST/.lazymerge/lock             held by the one merge that writes here
    DST/.lazymerge/journal.jsonl    what is being written from what, then a line for each finished file
    DST/.lazymerge/<file>           files under way or finished, until all are

When every file is there they are renamed into DST, the index (or the only weight file) last, and the
folder is removed, the journal when nothing else is left to do: as long as it is there it proves what the
files in DST are. It names each by size, time of change and inode, which renaming leaves as they are: the
checkpoint before has files of the same names and sizes. A run that was killed at any moment is finished by
running the same command again.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lazymerge.errors import OutputError
from lazymerge.files.copying import Copier, write_error
from lazymerge.files.local import LocalFile
from lazymerge.journal import append, identity_of, is_file, listed, read_lines, refuse_changed
from lazymerge.sidecars import is_sidecar

STAGING = ".lazymerge"
ENDED = ".lazymerge-ended"
"""The staging folder while it is removed, after everything was published."""
JOURNAL = "journal.jsonl"
PARTIAL = "partial.json"
"""What a merge of some tensors leaves in the staging folder: lazymerge.increments says what is in it."""
MANIFEST = "lazymerge-manifest.json"
"""What `lazymerge.manifest` writes of a result that was verified; it is of no use beside another one."""
WEIGHTS = re.compile(
    r"(model|consolidated)[\w.-]*\.safetensors(\.index\.json)?|pytorch_model[\w.-]*\.bin(\.index\.json)?"
)
"""Weights that a loader would take for the model's, or mix with it."""


class Destination:
    """A folder that is being filled. Use `claim`; `finished` are the files that need not be written again.

    `complete` says that an earlier run of this very job has published all of them, sidecars included.
    """

    def __init__(self, folder: Path, overwrite: bool) -> None:
        self.folder = folder
        self.staging = folder / STAGING
        self.overwrite = overwrite
        self.finished: set[str] = set()
        self.complete = False
        self._journal = self.staging / JOURNAL
        self._renamed: dict[str, Any] = {}  # what earlier runs of this job were to publish

    # -------------------------------------------------------------------- beginning

    def begin(self, job: dict[str, Any], files: Sequence[LocalFile], *, grows: bool = False) -> None:
        """Start, or go on with, the job: `job` is everything that decides the result's bytes.

        `grows` says that what is in the folder is a part of this very result, to be kept.
        Raises `InconsistentCheckpoint` if an unfinished run here read files that have changed since.
        """
        sources = sources_of(files)
        head = {"job": {**job, "sources": sorted(sources)}, "sources": sources}
        head = json.loads(json.dumps(head))  # as it is read again: tuples are lists there
        lines = read_lines(self._journal)
        if lines and lines[0].get("job") == head["job"]:
            refuse_changed(lines[0].get("sources", {}), head["sources"], self.staging)
            self.finished = {line["done"] for line in lines[1:] if self._is_finished(line)}
            self.complete = self._is_published(lines[-1].get("publishing"))
            self._renamed = listed(lines)
            self._clear({"lock", PARTIAL, self._journal.name, *self.finished})
            return
        if not self.overwrite and not grows:
            _check_empty(self.folder, ())  # not even of files that another job has published
        if self._journal.exists():
            self._journal.unlink()  # before what it lists
        self._clear({"lock", PARTIAL} if grows else {"lock"})
        append(self._journal, head)

    def keep(self, name: str, path: Path, identity: Any) -> None:
        """Take a file that an earlier increment wrote as the finished file `name`, without a copy."""
        if name in self.finished:
            return
        place = self.staging / name
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            os.link(path, place)
        except OSError as error:
            raise OutputError(
                f"{place}: {error.strerror}: a part that is there cannot be kept under another name",
                "merge everything at once into another folder",
            ) from error
        append(self._journal, {"done": name, "identity": identity})
        self.finished.add(name)

    def _clear(self, kept: set[str]) -> None:
        """Remove what an earlier run began and did not finish: it takes space and is written anew."""
        for path in self.staging.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in kept:
                path.unlink()

    def _is_finished(self, line: dict[str, Any]) -> bool:
        """Whether a file that the journal says is finished is there (staged, or already published)."""
        name = line.get("done")
        return isinstance(name, str) and is_file(self._place(name), line.get("identity"))

    def _is_published(self, identities: object) -> bool:
        """Whether all files have been renamed: none of them is staged, and those in the folder are they."""
        return isinstance(identities, dict) and not any(
            (self.staging / name).exists() or not is_file(self.folder / name, identity)
            for name, identity in identities.items()
        )

    def _place(self, name: str) -> Path:
        """Where a file of this job is: staged, or in the folder if it is no longer."""
        return (self.staging if (self.staging / name).exists() else self.folder) / name

    def need(self, nbytes: int) -> None:
        """Raise `OutputError` if the file system has less than `nbytes` free."""
        if self.complete:
            return
        free = shutil.disk_usage(self.staging).free
        if free < nbytes:
            raise OutputError(
                f"{self.folder}: the result takes {nbytes:,} bytes and the disk has {free:,} free",
                f"free {nbytes - free:,} bytes or choose another disk",
            )

    # -------------------------------------------------------------------- files

    @contextmanager
    def file(self, name: str, size: int) -> Iterator[int]:
        """A descriptor of a staged file of `size` bytes; finished and journalled when the block ends well."""
        path = self.staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _size_ahead(fd, size, name)
            yield fd
            _synced(fd, name)
        finally:
            os.close(fd)
        append(self._journal, {"done": name, "identity": identity_of(path)})
        self.finished.add(name)

    def write(self, name: str, content: bytes) -> None:
        """A small file, staged whole; not journalled, since it is as quickly written again.

        Not staged if a complete result holds it already.
        """
        there = self.folder / name
        if self.complete and there.is_file() and there.read_bytes() == content:
            return
        path = self.staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise write_error(error, str(path), 0) from error

    def copy(self, name: str, source: Path) -> None:
        """A small file, staged as a copy of `source`; no more of it than a buffer is ever in memory.

        Not staged if a complete result holds it already.
        """
        there = self.folder / name
        if self.complete and there.is_file() and filecmp.cmp(source, there, shallow=False):
            return
        path = self.staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = LocalFile(source)
        with open(path, "wb") as target:
            Copier(target.fileno(), str(path)).copy(file, 0, 0, file.size)
            _synced(target.fileno(), str(path))

    # -------------------------------------------------------------------- the end

    def publish(
        self,
        names: Sequence[str],
        *,
        renamed: Collection[str] = (),
        part: Callable[[], bytes] | None = None,
    ) -> None:
        """Rename the staged files into the folder in this order, after what they replace is gone.

        `renamed` are files of an earlier increment that have other names now; `part` makes what is left in
        the staging folder for the next one, if this is not the whole result.
        """
        append(self._journal, {"publishing": {name: identity_of(self._place(name)) for name in names}})
        try:
            self._publish(names)
            for name in renamed:
                if name not in names:
                    (self.folder / name).unlink(missing_ok=True)
            self._end(part)
        except OSError as error:
            place = error.filename2 or error.filename or self.folder
            raise OutputError(
                f"{place}: {os.strerror(error.errno or errno.EIO)}",
                "run the same command again when that can be written; what is finished is kept",
            ) from error

    def _publish(self, names: Sequence[str]) -> None:
        for name in names:
            if (self.folder / name).is_dir():
                raise OutputError(
                    f"{self.folder / name}: is a folder", "remove it, and run the same command again"
                )
        if self.overwrite:
            for path in list(self.folder.iterdir()):
                published = path.name in names and not (self.staging / path.name).exists()
                known = WEIGHTS.fullmatch(path.name) or is_sidecar(path.name)
                if path.is_file() and known and not published:
                    path.unlink()
        for name, identity in self._renamed.items():  # a sidecar that the source no longer has
            if name not in names and is_file(self.folder / name, identity):
                (self.folder / name).unlink()
        (self.folder / MANIFEST).unlink(missing_ok=True)
        sync_folder(self.staging)
        for name in names:
            if (self.staging / name).exists():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self.staging / name, self.folder / name)
        sync_folder(self.folder)

    def _end(self, part: Callable[[], bytes] | None) -> None:
        """Leave a result like any other, or one that says what it is a part of."""
        if part is not None:
            scratch = self.staging / f"{PARTIAL}.new"
            with open(scratch, "wb") as file:
                file.write(part())
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, self.staging / PARTIAL)
        self._clear({"lock", PARTIAL, self._journal.name})
        if part is None:
            os.replace(self.staging, self.folder / ENDED)  # all that proves what the files are, at once
            shutil.rmtree(self.folder / ENDED)
        else:
            self._journal.unlink()
        sync_folder(self.folder)


def sources_of(files: Sequence[LocalFile]) -> dict[str, Any]:
    """Path -> identity of files that are read: what must not change until the result is whole."""
    return {str(file.path.resolve()): file.identity for file in files}


@contextmanager
def claim(folder: Path, sources: Sequence[Path], *, overwrite: bool) -> Iterator[Destination]:
    """The destination, held by this process alone for the length of the block.

    Raises `OutputError` if it is a file, lies inside a source, cannot be written, holds something
    already (unless `overwrite`, or an unfinished merge) or another merge is writing there.
    """
    check_destination(folder, sources, overwrite=overwrite)
    made = _missing_parents(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / STAGING).is_symlink():
            raise OutputError(f"{folder / STAGING}: is a link", "remove it; the files under way go there")
        if (folder / ENDED).is_dir() and not (folder / ENDED).is_symlink():
            shutil.rmtree(folder / ENDED)  # of a run that was killed just then
        (folder / STAGING).mkdir(exist_ok=True)
        lock = os.open(folder / STAGING / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise OutputError(f"{folder}: {error.strerror}", "choose a folder that you may write to") from None
    try:
        _lock(lock, folder)
        try:
            yield Destination(folder, overwrite)
        finally:
            _tidy(folder, made)
    finally:
        os.close(lock)


def check_destination(folder: Path, sources: Sequence[Path], *, overwrite: bool) -> None:
    """Raise `OutputError` where a result cannot go, as far as that can be seen without writing."""
    try:
        _check_place(folder, sources)
        if folder.is_dir() and not overwrite:
            _check_empty(folder, _published(folder / STAGING))
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


def _published(staging: Path) -> set[str]:
    """What unfinished merges may have renamed into the folder: names of files and of folders there."""
    names = {*listed(read_lines(staging / JOURNAL))}
    if (staging / PARTIAL).exists():
        names.add(MANIFEST)
    for line in read_lines(staging / PARTIAL):
        names |= {*(line["files"] if isinstance(line.get("files"), dict) else ())}
    return {name.partition("/")[0] for name in names}


def _check_empty(folder: Path, known: Collection[str]) -> None:
    """Raise `OutputError` if the folder holds anything but the staging folder and what is `known`."""
    names = sorted(path.name for path in folder.iterdir() if path.name not in {STAGING, ENDED, *known})
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise OutputError(
            f"{folder}: is not empty ({shown})",
            "give an empty or new folder, or --overwrite to replace the model in it",
        )


def _missing_parents(folder: Path) -> list[Path]:
    """The folder and those above it that do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _tidy(folder: Path, made: Sequence[Path]) -> None:
    """After a failure before the first byte: leave no folder behind that was not there."""
    staging = folder / STAGING
    try:
        if staging.is_dir():
            names = {path.name for path in staging.iterdir()}
            if names <= {"lock", JOURNAL} and len(read_lines(staging / JOURNAL)) < 2:
                shutil.rmtree(staging)
        for path in made:
            path.rmdir()
    except OSError:
        pass  # something is in it


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
            return  # a file system without locks: the user alone keeps two merges apart
        owner = os.pread(fd, 20, 0).decode(errors="replace")
        raise OutputError(
            f"{folder}: another merge is writing here (process {owner})",
            "wait for it, or give another folder",
        ) from None
    _refuse_removed(fd, folder)
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)


def _refuse_removed(fd: int, folder: Path) -> None:
    """The lock may have been opened just before another merge ended and removed it: then it locks nothing."""
    try:
        there = os.stat(folder / STAGING / "lock")
    except OSError:
        there = None
    if there is None or there.st_ino != os.fstat(fd).st_ino:
        raise OutputError(
            f"{folder}: another merge has just ended here", "look at its result, then try again"
        )


def _size_ahead(fd: int, size: int, name: str) -> None:
    """Give the file its size, with the blocks for it where the file system can: a full disk is found now."""
    try:
        os.ftruncate(fd, size)
        if size:
            os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise write_error(error, name, 0) from error


def _synced(fd: int, name: str) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise write_error(error, name, 0) from error


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the file system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError:
        pass  # some network file systems have no fsync of folders
    finally:
        os.close(fd)
