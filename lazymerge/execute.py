"""Execution: the bytes of one output file of a plan, moved within a budget.

    runs of at least 64 KiB on both sides    the kernel copies them: no byte enters the process
    everything else                          block by block through a buffer

Which of the two applies is decided for each group of rows that pieces share; neighbouring runs are
joined. Workers are threads that take steps from one queue: every step writes its own range of the
file, so that their number and order change nothing in the result.
"""

from __future__ import annotations

import heapq
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lazymerge.boxes import Box, Piece, Shape
from lazymerge.errors import OutputError
from lazymerge.files.copying import Copier, start_writeback, write_all
from lazymerge.files.local import LocalFile
from lazymerge.files.region import contiguous_strides
from lazymerge.fill import SCRATCH, fill, windows
from lazymerge.plan import SMALLEST_RUN, OutputFile, PlannedTensor, run_of
from lazymerge.threads import share

FORGOTTEN_FROM = 1 << 20
"""Bytes of a tensor whose source is worth a call that drops it from the page cache."""

LARGEST_COPY = 64 << 20
"""Bytes that one step copies, so that workers share a large tensor and progress moves."""


@dataclass(frozen=True, slots=True)
class CopyRun:
    """`size` bytes that stand in one run at `source_at` of a file and at `at` of the output."""

    source: LocalFile
    source_at: int
    at: int
    size: int


@dataclass(frozen=True, slots=True)
class FillBlock:
    """A window of a tensor, one run of the output, that is put together in a buffer and written at `at`."""

    tensor: PlannedTensor
    window: Box
    at: int
    size: int

    @property
    def is_last(self) -> bool:
        """Whether it ends its tensor."""
        return self.at + self.size == self.tensor.offset + self.tensor.nbytes


Step = CopyRun | FillBlock


def write_tensors(
    file: OutputFile,
    target: int,
    *,
    block: int,
    scattered: int = 0,
    workers: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Write the tensors of `file` to the descriptor `target`, which has the file's size already.

    `block` is the size of a worker's buffer in bytes, `scattered` that for tensors which are read in
    longer runs then. `on_bytes` is called, from any worker, with the
    number of bytes that a step has written. The first error of any worker ends all of them and is raised.
    """
    queue = _joined(step for tensor in file.tensors for step in steps(tensor, block, scattered))
    copier = Copier(target, file.name)
    share(queue, lambda taken: _work(taken, copier, block, on_bytes), workers)


def _work(queue: Iterator[Step], copier: Copier, block: int, on_bytes: Callable[[int], None]) -> None:
    """Take steps until there are none."""
    buffer = bytearray()
    for step in queue:
        if isinstance(step, CopyRun):
            copier.copy(step.source, step.source_at, step.at, step.size)
            step.source.forget(step.source_at, step.size)
        else:
            if len(buffer) < step.size:
                buffer = bytearray()  # the smaller one goes first, so that there is one at a time
                buffer = bytearray(step.size)
            with memoryview(buffer)[: step.size] as view:
                fill(step.tensor.gather, step.window, view, min(block, SCRATCH))
                write_all(copier.target, copier.name, view, step.at)
            if step.is_last and step.tensor.nbytes >= FORGOTTEN_FROM:
                _forget(step.tensor)
        start_writeback(copier.target, step.at, step.size)
        on_bytes(step.size)


def write_file(
    file: OutputFile,
    target: int,
    *,
    block: int,
    scattered: int = 0,
    workers: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Write all of an output file: its tensors as `write_tensors` does, and the headers around them."""
    if file.archive is None:
        write_all(target, file.name, memoryview(file.header), 0)
    write_tensors(file, target, block=block, scattered=scattered, workers=workers, on_bytes=on_bytes)
    if file.archive is not None:
        checksums = [_checksum(target, file.name, tensor) for tensor in file.tensors]
        for at, content in file.archive.seal(checksums):
            write_all(target, file.name, memoryview(content), at)


def _checksum(target: int, name: str, tensor: PlannedTensor, block: int = 1 << 20) -> int:
    """The CRC-32 of a tensor's bytes, read back from the output: most never were in the process."""
    crc = done = 0
    while done < tensor.nbytes:
        at = tensor.offset + done
        try:
            content = os.pread(target, min(block, tensor.nbytes - done), at)
        except OSError as error:
            raise OutputError(
                f"{name}: reading back at byte {at}: {error.strerror}",
                "run the same command again when the disk works; what is finished is kept",
            ) from error
        if not content:
            raise OutputError(
                f"{name}: ends at byte {at} while it is written", "let nothing else write there"
            )
        crc = zlib.crc32(content, crc)
        done += len(content)
    return crc


def _forget(tensor: PlannedTensor) -> None:
    """Let the kernel drop what was read of the source: other programs have a use for the memory."""
    for _, region in tensor.gather.pieces():
        if isinstance(region.source, LocalFile):
            region.source.forget(region.offset, region.extent)


def steps(tensor: PlannedTensor, block: int, scattered: int = 0) -> Iterator[Step]:
    """What has to be done for one tensor, in the order of the output."""
    gather = tensor.gather
    block = tensor.block(block, scattered)
    if any(source.whole for source in tensor.computed) or gather.nbytes < SMALLEST_RUN:
        yield from _blocks(tensor, 0, gather.shape, block)
    else:
        for first, last, pieces in _groups(gather.pieces()):
            if all(run_of(piece, gather.shape)[0] for piece in pieces):
                yield from heapq.merge(*(_runs(piece, tensor) for piece in pieces), key=lambda run: run.at)
            else:
                yield from _blocks(tensor, first, (last - first, *gather.shape[1:]), block)


def _groups(pieces: Iterable[Piece]) -> Iterator[tuple[int, int, list[Piece]]]:
    """(first row, row after the last, pieces) of the groups of pieces that share rows, in order."""
    group: list[Piece] = []
    first = last = 0
    for piece in sorted(pieces, key=lambda piece: piece.start[0]):
        low, high = piece.start[0], piece.start[0] + piece.region.shape[0]
        if low == high or 0 in piece.region.shape:
            continue
        if group and low >= last:
            yield first, last, group
            group = []
        if not group:
            first = low
        group.append(piece)
        last = max(last, high) if len(group) > 1 else high
    if group:
        yield first, last, group


def _runs(piece: Piece, tensor: PlannedTensor) -> Iterator[CopyRun]:
    """The runs of a file that the piece is made of, in the order of the output; made one by one."""
    region, shape, itemsize = piece.region, tensor.gather.shape, tensor.dtype.itemsize
    size, dim = run_of(piece, shape)
    if not isinstance(region.source, LocalFile):
        return
    steps = contiguous_strides(shape)
    start = sum(at * step for at, step in zip(piece.start, steps, strict=True))
    for index in _indices(region.shape[:dim]):
        there = sum(i * stride for i, stride in zip(index, region.strides, strict=False))
        here = start + sum(i * step for i, step in zip(index, steps, strict=False))
        yield CopyRun(region.source, region.offset + there * itemsize, tensor.offset + here * itemsize, size)


def _indices(shape: Shape) -> Iterator[Shape]:
    """All indices in row-major order; `itertools.product` would hold every number of each range."""
    if not shape:
        yield ()
        return
    for index in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (index, *rest)


def _blocks(tensor: PlannedTensor, first: int, shape: Shape, limit: int) -> Iterator[FillBlock]:
    """The rows from `first` on as blocks of at most `limit` bytes (or one element)."""
    itemsize = tensor.dtype.itemsize
    at = tensor.offset + first * (contiguous_strides(tensor.gather.shape)[0] if shape else 0) * itemsize
    for start, size in windows(shape, itemsize, limit):
        window = Box((start[0] + first, *start[1:]) if start else start, size)
        nbytes = window.numel * itemsize
        if nbytes:
            yield FillBlock(tensor, window, at, nbytes)
        at += nbytes


def _joined(steps: Iterable[Step]) -> Iterator[Step]:
    """The steps with runs that follow each other on both sides joined, and long ones cut."""
    run: CopyRun | None = None
    for step in steps:
        if isinstance(step, FillBlock):
            if run is not None:
                yield from _cut(run)
                run = None
            yield step
        elif run is not None and _follows(run, step):
            run = CopyRun(run.source, run.source_at, run.at, run.size + step.size)
        else:
            if run is not None:
                yield from _cut(run)
            run = step
    if run is not None:
        yield from _cut(run)


def _follows(run: CopyRun, after: CopyRun) -> bool:
    return (
        run.source is after.source
        and run.source_at + run.size == after.source_at
        and run.at + run.size == after.at
    )


def _cut(run: CopyRun) -> Iterator[CopyRun]:
    for done in range(0, run.size, LARGEST_COPY):
        size = min(LARGEST_COPY, run.size - done)
        yield CopyRun(run.source, run.source_at + done, run.at + done, size)
