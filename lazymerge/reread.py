"""A result of a merge, reread from the disk and compared with what it was made of."""

from __future__ import annotations

from pathlib import Path

from lazymerge.checkpoint import Checkpoint
from lazymerge.compare import compare
from lazymerge.comparison import CompareOptions, Comparison
from lazymerge.errors import VerificationError
from lazymerge.formats.huggingface import read_model
from lazymerge.manifest import OnBytes, drop_cached, make_manifest, write_manifest
from lazymerge.structure import check_structure


def verify_result(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    max_ram: int | None = None,
    workers: int = 1,
    on_bytes: OnBytes | None = None,
) -> Comparison:
    """Reread what a merge has published in `folder`, compare it bytewise, and leave a manifest there.

    `checkpoint` is what was planned: converted, selected, cast. The result is read from the disk, not from
    memory, and once. Raises `VerificationError` naming the first difference.
    """
    problems = check_structure(folder)
    if problems:
        raise _failed(folder, str(problems[0]), len(problems))
    tensors, files = read_model(folder)
    for file in files:
        drop_cached(file)
    comparison = compare(
        checkpoint,
        Checkpoint(tensors, "huggingface"),
        CompareOptions(exact=True),
        max_ram=max_ram,
        workers=workers,
        hashed=True,
        on_bytes=on_bytes,
    )
    for source in checkpoint.files:
        source.check_unchanged()
    if not comparison.same:
        raise _failed(folder, str(comparison.differences[0]), sum(comparison.counts.values()))
    write_manifest(folder, make_manifest(folder, comparison.digests, workers=workers))
    return comparison


def _failed(folder: Path, first: str, count: int) -> VerificationError:
    more = f" (and {count - 1} more)" if count > 1 else ""
    return VerificationError(
        f"{folder}: not what the source holds: {first}{more}",
        "do not use this result: merge again with --overwrite; if it fails again, check disk and memory",
    )
