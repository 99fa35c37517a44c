"""Who may write into a folder: nobody where a result cannot go, and one merge at a time.

verl merges into ``actor/huggingface``, which holds the config and the tokenizer of the source: weights may go
beside those. They are the source's, so that they are neither written nor removed, whatever is replaced there.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.errors import OutputError
from lazymerge.files.lock import take_lock
from lazymerge.journal import LARGEST as LARGEST_JOURNAL
from lazymerge.journal import listed, read_lines
from lazymerge.output import (
    ENDED,
    JOURNAL,
    LOCK,
    MANIFEST,
    PARTIAL,
    STAGING,
    Destination,
    check_empty,
    replaceable,
)
from lazymerge.sidecars import find_sidecars

_OWN = "huggingface"
"""What verl calls the folder of config and tokenizer."""


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of a result, and what the source has to do with it.

    `sources` are the paths that were given, `read` the files that are read for the result. `own` are the
    source's folders of config and tokenizer, where a result may go. `stays` are the names of the sidecars in
    the folder if it is one of those, else None.
    """

    folder: Path
    sources: Sequence[Path]
    read: Sequence[Path] = ()
    own: Sequence[Path] = ()
    stays: frozenset[str] | None = None


def place_for(
    folder: Path,
    sources: Sequence[Path],
    checkpoint: Checkpoint,
    beside: Mapping[str, bytes | Path],
    linked: Path | None,
    sidecars: Sequence[Path],
    *,
    whole: bool,
) -> Place:
    """The folder as the place of a result; `beside` are its small files, `whole` says that it is a model.

    `linked` is the folder of --hf-config, `sidecars` are the files that `beside` is made of. Raises
    `OutputError` where the result has other sidecars than those of the source that lie there.
    """
    weights = [file.path for file in checkpoint.files]
    known = [each for each in checkpoint.sidecars if each.name == _OWN or each == linked]
    own = [each for each in known if not any(each.resolve() in path.resolve().parents for path in weights)]
    read = [*weights, *sidecars]
    here = next((each for each in own if each.resolve() == folder.resolve()), None)
    if here is None:
        return Place(folder, sources, read, own)
    if not whole:
        raise OutputError(
            f"{folder}: holds config and tokenizer of the source, beside which only a whole model can go",
            "give another folder for the result",
        )
    stays = frozenset(find_sidecars([here], linked).files)
    for name in sorted(stays & beside.keys()):
        if not _is_same(folder / name, beside[name]):
            raise OutputError(
                f"{folder / name}: is the source's, and that of the result would differ",
                "give another folder for the result",
            )
    return Place(folder, sources, read, own, stays)


def _is_same(path: Path, content: bytes | Path) -> bool:
    if isinstance(content, bytes):
        return path.read_bytes() == content
    return filecmp.cmp(path, content, shallow=False)


@contextmanager
def claim(place: Place, *, overwrite: bool) -> Iterator[Destination]:
    """The destination, held by this process alone for the length of the block.

    Raises `OutputError` if it is a file, lies inside a source, cannot be written, holds something
    already (unless `overwrite`, or an unfinished merge) or another merge is writing there.
    """
    check_destination(place, overwrite=overwrite)
    folder = place.folder
    made = _missing_parents(folder)
    staging = folder / STAGING
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if staging.is_symlink():
            raise OutputError(f"{staging}: is a link", "remove it; the files under way go there")
        staging.mkdir(exist_ok=True)
        lock = os.open(staging / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        where = error.filename or folder
        raise OutputError(
            f"{where}: {error.strerror}", "remove what is there, or choose a folder that you may write to"
        ) from None
    try:
        notes: tuple[Note, ...] = ()
        if not take_lock(lock, staging / LOCK, folder):
            text = f"{folder}: the file system has no locks; see to it that no other merge writes there too"
            notes = (Note("warning", text),)
        try:
            yield Destination(folder, overwrite, notes, place.stays or ())
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


def check_destination(place: Place, *, overwrite: bool) -> None:
    """Raise `OutputError` where a result cannot go, as far as that can be seen without writing."""
    folder = place.folder
    try:
        _check_place(place)
        if folder.is_dir() and not overwrite:
            check_empty(folder, {*_published(folder), *(place.stays or ())})
        elif folder.is_dir():
            _refuse_to_replace(place)
    except OSError as error:
        raise OutputError(
            f"{error.filename or folder}: {error.strerror}", "choose a folder that you may write to"
        ) from None


def _check_place(place: Place) -> None:
    folder = place.folder
    if not folder.is_dir() and os.path.lexists(folder):
        what = "is a file" if folder.exists() else "is a link to what is not there"
        raise OutputError(f"{folder}: {what}", "give a folder for the result")
    for path in (*(folder / STAGING / name for name in (LOCK, JOURNAL, PARTIAL)), folder / ENDED):
        if not os.path.lexists(path):
            continue
        found = path.lstat()
        # the lock is written to where it is, and another name of it may be that of a user's file
        if not stat.S_ISREG(found.st_mode) or (path.name == LOCK and found.st_nlink > 1):
            raise OutputError(f"{path}: is no plain file", "remove it; a merge keeps its journal there")
        if found.st_size > LARGEST_JOURNAL:
            raise OutputError(f"{path}: has {found.st_size} bytes, as no journal of a merge", "remove it")
    resolved = folder.resolve()
    for source in place.sources:
        at = source.resolve()
        if resolved == (at.parent if at.is_file() else at):
            raise OutputError(f"{folder}: holds the source {source}", "give another folder for the result")
        if at in resolved.parents and place.stays is None:
            inside = next(
                (f", or {each}, as verl does" for each in place.own if at in each.resolve().parents), ""
            )
            raise OutputError(
                f"{folder}: lies inside the source {source}", f"give a folder outside of it{inside}"
            )


def _refuse_to_replace(place: Place) -> None:
    """Refuse to remove a file that is read, such as a base model, an adapter or a config there."""
    read = {path.resolve() for path in place.read}
    for name in replaceable(place.folder):
        if name not in (place.stays or ()) and (place.folder / name).resolve() in read:
            raise OutputError(
                f"{place.folder / name}: is read for the result, which would replace it",
                "give another folder for the result",
            )


def _published(folder: Path) -> set[str]:
    """What unfinished merges may have renamed into the folder: names of files."""
    staging = folder / STAGING
    names = {*listed(read_lines(staging / JOURNAL)), *listed(read_lines(folder / ENDED))}
    names |= {MANIFEST} if names else set()  # it is put there before the end
    if (staging / PARTIAL).exists():
        names.add(MANIFEST)
    for line in read_lines(staging / PARTIAL):
        names |= {*(line["files"] if isinstance(line.get("files"), dict) else ())}
    return names


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
