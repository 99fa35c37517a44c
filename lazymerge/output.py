"""The destination: nothing incomplete ever has its final name, and what is finished is never done twice.

    DST/.lazymerge/lock             held by the one merge that writes here
    DST/.lazymerge/journal.jsonl    what is being written from what, then a line for each finished file
    DST/.lazymerge/<file>           files under way or finished, until all are
    DST/.lazymerge-ended            the journal, while the folder is removed when all is done

When every file is there, those of an earlier result are removed, its index first, and the new ones renamed
into DST, the index (or the only weight file) last. Then the folder is removed, and the journal at the very
end: as long as it is there it proves what the files in DST are. It names each by size, time of change and
inode, which renaming leaves as they are: the checkpoint before has files of the same names and sizes. A run
that was killed at any moment is finished by running the same command again.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.errors import OutputError
from lazymerge.files.copying import Copier, write_all
from lazymerge.files.local import LocalFile
from lazymerge.files.writing import created, sync_folder, write_whole
from lazymerge.formats.staged import STAGE
from lazymerge.journal import agree, append, identity_of, is_file, listed, read_lines, refuse_changed, rewrite
from lazymerge.sidecars import is_sidecar

STAGING = ".lazymerge"
ENDED = ".lazymerge-ended"
LOCK = "lock"
JOURNAL = "journal.jsonl"
PARTIAL = "partial.json"
"""What a merge of some tensors leaves in the staging folder: lazymerge.increments says what is in it."""
MANIFEST = "lazymerge-manifest.json"
"""What `lazymerge.manifest` writes of a result that was verified; it is of no use beside another one."""
WEIGHTS = re.compile(
    r"(model|consolidated)[\w.-]*\.safetensors(\.index\.json)?|pytorch_model[\w.-]*\.bin(\.index\.json)?"
)
"""Weights that a loader would take for the model's, or mix with it."""
_ADAPTER = re.compile(r"lora_adapter/([^/]+/)?adapter_(model\.safetensors|config\.json)")
_DERIVED = ("files", "kept", "config", "adapters")
"""What of a job follows from the source, and is not asked for."""


class Destination:
    """A folder that is being filled, made by `lazymerge.claim`. `finished` need not be written again.

    `complete` says that an earlier run of this very job has published all of them, sidecars included, and
    `ended` that it has nothing left to do. `notes` are what the user should know of the file system. `stays`
    are names of files there that are the source's: they are as the result has them, and are never touched.
    """

    def __init__(
        self, folder: Path, overwrite: bool, notes: tuple[Note, ...] = (), stays: Collection[str] = ()
    ) -> None:
        self.folder = folder
        self.stays = stays
        self.notes = notes
        self.staging = folder / STAGING
        self.overwrite = overwrite
        self.finished: set[str] = set()
        self.complete = False
        self.ended = False
        self._journal = self.staging / JOURNAL
        self._ended = folder / ENDED
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
        if os.path.lexists(self.folder / f".{MANIFEST}.part"):
            (self.folder / f".{MANIFEST}.part").unlink()  # of a verification that was killed
        lines = read_lines(self._ended)
        if agree(lines, head, ("files", "kept")) and lines[0].get("sources") == head["sources"]:
            self.ended = self._is_published(lines[-1].get("publishing"))
            if self.ended:
                self.finished = {line["done"] for line in lines[1:] if self._is_finished(line)}
                return
        lines = read_lines(self._journal)
        if agree(lines, head, _DERIVED):
            refuse_changed(lines[0].get("sources"), head["sources"], self.staging)
        if agree(lines, head, ()):
            self.finished = {line["done"] for line in lines[1:] if self._is_finished(line)}
            self.complete = self._is_published(lines[-1].get("publishing"))
            self._renamed = listed(lines)
            self._clear({LOCK, PARTIAL, JOURNAL, *self.finished})
            rewrite(self._journal, lines)  # without a line that was cut
            return
        if not self.overwrite and not grows:
            check_empty(self.folder, self.stays)  # not even of files that another job has published
        for journal in (self._journal, self._ended):
            if journal.exists():
                journal.unlink()  # before what it lists
        self._clear({LOCK, PARTIAL} if grows else {LOCK})
        self._journal.touch()  # so that a file system that renames over no file is found out now
        rewrite(self._journal, [head])

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
        if not is_file(place, identity):  # another merge has published in the meantime
            place.unlink()
            if not self.finished:
                self._journal.unlink()  # nothing was begun
            raise OutputError(
                f"{path}: is not the file any more that it was when this merge was planned",
                "run the same command again when no other merge writes there",
            )
        append(self._journal, {"done": name, "identity": identity})
        self.finished.add(name)

    def _clear(self, kept: set[str]) -> None:
        """Remove what an earlier run began and did not finish: it takes space and is written anew."""
        for path in sorted(self.staging.rglob("*"), reverse=True):  # a folder after what is in it
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # something in it is kept
                    path.rmdir()
            elif path.relative_to(self.staging).as_posix() not in kept:
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
        with created(self.staging / name, size) as fd:
            yield fd
        append(self._journal, {"done": name, "identity": identity_of(self.staging / name)})
        self.finished.add(name)

    def write(self, name: str, content: bytes) -> None:
        """A small file, staged whole; not journalled, since it is as quickly written again.

        Not staged if a complete result holds it already.
        """
        if name in self.stays:
            return
        there = self.folder / name
        if self.complete and there.is_file() and there.read_bytes() == content:
            return
        with created(self.staging / name) as fd:
            write_all(fd, str(self.staging / name), memoryview(content), 0)

    def copy(self, name: str, source: Path) -> None:
        """A small file, staged as a copy of `source`; no more of it than a buffer is ever in memory.

        Not staged if a complete result holds it already.
        """
        if name in self.stays:
            return
        there = self.folder / name
        if self.complete and there.is_file() and filecmp.cmp(source, there, shallow=False):
            return
        file = LocalFile(source)
        with created(self.staging / name) as fd:
            Copier(fd, str(self.staging / name)).copy(file, 0, 0, file.size)

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
        the staging folder for the next one, if this is not the whole result. If it is, `end` comes next.
        """
        append(self._journal, {"publishing": {name: identity_of(self._place(name)) for name in names}})
        # an adapter comes before its base, and nothing after the index
        self._publish(sorted(names, key=lambda name: WEIGHTS.fullmatch(name) is not None))
        for name in renamed:
            if name not in names:
                (self.folder / name).unlink(missing_ok=True)
        if part is not None:
            write_whole(self.staging / PARTIAL, part())
            self._clear({LOCK, PARTIAL, JOURNAL})
            self._journal.unlink()
            sync_folder(self.folder)

    def _publish(self, names: Sequence[str]) -> None:
        for name in names:
            for above in Path(name).parents[:-1]:
                if (self.folder / above).is_symlink():
                    raise OutputError(
                        f"{self.folder / above}: is a link, which leads elsewhere",
                        "remove it, and run the same command again",
                    )
            if (self.folder / name).is_dir():
                raise OutputError(
                    f"{self.folder / name}: is a folder", "remove it, and run the same command again"
                )
        sync_folder(self.staging)
        sync_folder(self.folder)
        if self.overwrite:
            for name in replaceable(self.folder):
                if name not in self.stays and (name not in names or (self.staging / name).exists()):
                    (self.folder / name).unlink()
                    with suppress(OSError):  # another file is in it
                        for above in Path(name).parents[:-1]:
                            (self.folder / above).rmdir()
        for name, identity in self._renamed.items():  # a sidecar that the source no longer has
            if name not in {*names, *self.stays} and is_file(self.folder / name, identity):
                (self.folder / name).unlink()
        (self.folder / MANIFEST).unlink(missing_ok=True)
        for name in names:
            if (self.staging / name).exists():
                if name == names[-1]:
                    self._sync(names)
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self.staging / name, self.folder / name)
        self._sync(names)

    def _sync(self, names: Sequence[str]) -> None:
        """Make the renames so far durable."""
        for place in {self.folder, *((self.folder / name).parent for name in names)}:
            if place.is_dir():
                sync_folder(place)

    def end(self) -> None:
        """Remove what says what the files are: from now on the result is one like any other.

        The journal goes last and at once: until then the same command again finds that all is done.
        """
        if self._journal.exists():
            os.replace(self._journal, self._ended)
        self._clear({LOCK})
        (self.staging / LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # another merge has just begun there, or a network file system keeps the lock
            self.staging.rmdir()
        sync_folder(self.folder)
        self._ended.unlink(missing_ok=True)


def replaceable(folder: Path) -> list[str]:
    """The files of a result in the folder that no other may be mixed with, the index first."""
    patterns = ("*", "additional_chat_templates/*", "huggingface/**/*", "lora_adapter/**/*")
    found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in found]
    staged = (folder / STAGE).is_file()
    names = [name for name in names if _is_results(name, staged)]
    return sorted(names, key=lambda name: not name.endswith(".index.json"))


def _is_results(name: str, staged: bool) -> bool:
    """Whether a merge writes files of that name; `staged`: one that leaves the trainer's names does."""
    if staged and name.startswith("huggingface/"):
        return is_sidecar(name.partition("/")[2])
    return name == STAGE or is_sidecar(name) or any(kind.fullmatch(name) for kind in (WEIGHTS, _ADAPTER))


def sources_of(files: Sequence[LocalFile]) -> dict[str, Any]:
    """Path -> identity of files that are read: what must not change until the result is whole."""
    return {str(file.path.resolve()): file.identity for file in files}


def check_empty(folder: Path, known: Collection[str]) -> None:
    """Raise `OutputError` if the folder holds anything but what a merge leaves and what is `known`."""
    found = (path.name for path in folder.iterdir() if not path.name.startswith(STAGING))
    names = sorted({*found} - {name.partition("/")[0] for name in known})
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise OutputError(
            f"{folder}: is not empty ({shown})",
            "give an empty or new folder, or --overwrite to replace the model in it",
        )
