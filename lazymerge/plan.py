"""The plan: which output files there will be, what is where in them, and what that will take.

Making a plan reads nothing but metadata. It proves for every tensor that each of its elements is
written exactly once, and it is data: `lazymerge.plan_json` turns it into JSON and back, so that
another process or machine can execute a part of it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lazymerge.boxes import Piece, Shape
from lazymerge.computation import Computation, bytes_read, computations, long_runs_from
from lazymerge.errors import PlanError
from lazymerge.files.dtype import DType
from lazymerge.files.local import LocalFile
from lazymerge.files.safetensors_file import safetensors_layout
from lazymerge.files.torch_archive import Archive, torch_archive
from lazymerge.fill import scratch
from lazymerge.gather import Constant, Gather, Shards, View
from lazymerge.tiling import check

SMALLEST_RUN = 64 << 10
"""Bytes from which on a run goes through the kernel; below, a call costs more than a copy."""

SAFETENSORS = "safetensors"
BIN = "bin"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of an output file: `offset` is where its bytes start in the file.

    `gather` holds its elements in row-major order, though perhaps under another shape: bytes in a
    file have none, so a trailing reshape is left out.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    gather: Gather
    reads: int  # bytes of files that it is made of
    computed: tuple[Computation, ...]  # what has to be computed for it, if anything
    buffered: int  # bytes that go through a buffer: all of them, unless the kernel copies all of them
    long_runs_from: int  # bytes of a block from which on it is read in long runs; 0: blocks do not matter

    @property
    def scratch(self) -> int:
        """Bytes that blocks of it are read through, at most; 0: they are read straight."""
        return scratch(self.gather.pieces(), self.gather.shape, self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.gather.nbytes

    def block(self, limit: int, scattered: int) -> int:
        """Bytes of a block of it where `limit` are wanted: all of it, or as many as are computed together.

        `scattered` is the limit where larger blocks are read in longer runs.
        """
        if any(source.whole for source in self.computed):
            return self.nbytes
        limit = max(limit, min(scattered, self.long_runs_from))
        step = max((source.step for source in self.computed), default=0)
        return max(step, limit - limit % step) if step else limit


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write: its tensors in file order, and the bytes around them.

    `size` is its length in bytes. `header` is what stands before the tensors of a safetensors
    file; a torch archive has headers between them, which `archive` makes once the data is there.
    """

    name: str
    size: int
    tensors: tuple[PlannedTensor, ...]
    header: bytes = b""
    archive: Archive | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that will be written: the weight files, and the index where there are several."""

    files: tuple[OutputFile, ...]
    index: bytes | None
    index_name: str | None

    @property
    def tensors(self) -> Iterable[PlannedTensor]:
        """All tensors, file by file."""
        return (tensor for file in self.files for tensor in file.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def size(self) -> int:
        """Bytes of all files, headers and index included."""
        return sum(file.size for file in self.files) + len(self.index or b"")

    @property
    def reads(self) -> int:
        """Bytes that will be read from the source."""
        return sum(tensor.reads for tensor in self.tensors)

    def per_dtype(self) -> dict[str, tuple[int, int]]:
        """dtype name -> (tensors, bytes), the largest first."""
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.dtype.name] += 1
            sizes[tensor.dtype.name] += tensor.nbytes
        return {name: (counts[name], size) for name, size in sizes.most_common()}


def make_plan(
    gathers: Mapping[str, Gather], *, output_format: str = SAFETENSORS, max_shard_size: int = 5 * 10**9
) -> Plan:
    """The plan that writes these tensors, proved complete.

    `max_shard_size` is in bytes and applies to safetensors; a ``bin`` is always one file. Raises
    `PlanError` if there is nothing to write or a dtype has no place in the format, and what
    `lazymerge.tiling.check` raises.
    """
    if not gathers:
        raise PlanError("no tensor is left to write", "check --include and --exclude")
    if output_format == BIN:
        return Plan((bin_file(gathers),), None, None)
    if "__metadata__" in gathers:
        raise PlanError(
            "__metadata__: safetensors keeps this name for itself",
            "leave it out with --exclude, or write --output-format bin",
        )
    for name, gather in gathers.items():
        if gather.dtype.code is None:
            raise PlanError(
                f"{name}: safetensors has no {gather.dtype}",
                "leave it out with --exclude, or write --output-format bin",
            )
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(gathers),
        get_storage_size=lambda gather: gather.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    files = [
        safetensors_file(filename, {name: gathers[name] for name in names})
        for filename, names in split.filename_to_tensors.items()
    ]
    if not split.is_sharded:
        return Plan(tuple(files), None, None)
    return Plan(tuple(files), index_file(split.metadata, split.tensor_to_filename), INDEX)


def index_file(metadata: Mapping[str, object], places: Mapping[str, str]) -> bytes:
    """The index, as transformers writes it: `places` says which file holds which tensor."""
    index = {"metadata": metadata, "weight_map": places}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def safetensors_file(filename: str, gathers: Mapping[str, Gather]) -> OutputFile:
    """The safetensors file of these tensors, each of them proved complete."""
    layout = safetensors_layout({name: (g.dtype, g.shape, g.nbytes) for name, g in gathers.items()})
    tensors = tuple(planned(name, gathers[name], offset) for name, offset in layout.offsets.items())
    return OutputFile(filename, layout.size, tensors, layout.header)


def bin_file(gathers: Mapping[str, Gather]) -> OutputFile:
    """The ``pytorch_model.bin`` of these tensors, each of them proved complete."""
    archive = torch_archive({name: (g.dtype, g.shape, g.nbytes) for name, g in gathers.items()})
    places = [record.data_at for record in archive.records if record.content is None]
    tensors = tuple(planned(name, g, at) for (name, g), at in zip(gathers.items(), places, strict=True))
    return OutputFile("pytorch_model.bin", archive.size, tensors, archive=archive)


def planned(name: str, gather: Gather, offset: int) -> PlannedTensor:
    """The tensor at its place, after the proof that its gather is complete."""
    flat = gather.base if isinstance(gather, View) else gather
    pieces = list(flat.pieces())
    check(name, flat, pieces)
    if len(pieces) == 1:  # what it was picked from need not be gone through again
        flat = Shards(flat.shape, flat.dtype, Constant(pieces), flat.depth, flat.steps)
    computed = computations(pieces)
    reads = bytes_read(pieces)
    copied = gather.nbytes >= SMALLEST_RUN and all(run_of(piece, flat.shape)[0] for piece in pieces)
    buffered = 0 if copied else gather.nbytes
    runs = 0 if copied else long_runs_from(pieces, flat.shape)
    return PlannedTensor(
        name, gather.dtype, gather.shape, offset, flat, reads, tuple(computed), buffered, runs
    )


def run_of(piece: Piece, shape: Shape) -> tuple[int, int]:
    """(bytes, dimension): how long a run of a file a piece is made of, and the first dimension inside a run.

    (0, 0) for a piece that is made of no runs that are worth a call of the kernel.
    """
    region = piece.region
    if not isinstance(region.source, LocalFile):
        return 0, 0
    size, dim = region.dtype.itemsize, len(shape)  # dimensions from `dim` on are one run on both sides
    while dim and (region.shape[dim - 1] == 1 or region.strides[dim - 1] * region.dtype.itemsize == size):
        dim -= 1
        size *= region.shape[dim]
        if region.shape[dim] != shape[dim]:
            break
    return (size, dim) if size >= SMALLEST_RUN else (0, 0)
