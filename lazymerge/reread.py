"""A result of a merge, reread from the disk and compared with what it was made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lazymerge.checkpoint import Checkpoint
from lazymerge.compare import compare
from lazymerge.comparison import CompareOptions
from lazymerge.errors import VerificationError
from lazymerge.formats.huggingface import read_model
from lazymerge.gather import Gather
from lazymerge.manifest import OnBytes, drop_cached, make_manifest, write_manifest


def verify_result(
    checkpoint: Checkpoint,
    folder: Path,
    names: Sequence[str],
    beside: Mapping[str, Mapping[str, Gather]] | None = None,
    *,
    max_ram: int | None = None,
    workers: int = 1,
    on_bytes: OnBytes | None = None,
) -> None:
    """Reread what a merge has published in `folder`, compare it bytewise, and leave a manifest there.

    `checkpoint` is what was planned: converted, selected, cast; `names` are all files of the result, `beside`
    the tensors of those that are no part of the model, by file. The result is read from the disk, not from
    memory, and once. Raises `VerificationError` naming the first difference.
    """
    digests: Mapping[str, str] = {}
    parts = [(folder / name, Checkpoint(dict(gathers), "")) for name, gathers in (beside or {}).items()]
    if checkpoint.gathers:
        parts.insert(0, (folder, checkpoint))
    for path, expected in parts:
        tensors, files = read_model(path)
        for file in files:
            drop_cached(file)
        comparison = compare(
            Checkpoint(tensors, ""),
            expected,
            CompareOptions(exact=True),
            max_ram=max_ram,
            workers=workers,
            hashed=expected is checkpoint,
            refuses=False,  # after a night of merging; what it takes was looked at before
            on_bytes=on_bytes,
        )
        if not comparison.same:
            raise _failed(path, str(comparison.differences[0]), sum(comparison.counts.values()))
        digests = comparison.digests if expected is checkpoint else digests
    for source in checkpoint.files:
        source.check_unchanged()
    write_manifest(folder, make_manifest(folder, digests, names=names, workers=workers))


def _failed(folder: Path, first: str, count: int) -> VerificationError:
    more = f" (and {count - 1} more)" if count > 1 else ""
    return VerificationError(
        f"{folder}: not what the source holds: {first}{more}",
        "do not use this result: merge again with --overwrite; if it fails again, check disk and memory",
    )
