"""Megatron's `torch` layout: a file for each model-parallel rank, joined into one model.

Which rank a folder is, is found out in grid, what is in a file in rank_file, and how the parts of the
tensor ranks make up a tensor in joining and experts. Here layers get their numbers: those in a file
count from 0 in each pipeline chunk. The chunks of a model are in the order

    virtual stage 0 of pipeline rank 0, 1, ...; virtual stage 1 of pipeline rank 0, 1, ...; ...

and a layer's number is its own plus the layers of all chunks before. They are counted, so that stages
of any sizes come out right, those with nothing but an embedding among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lazymerge.boxes import Piece
from lazymerge.checkpoint import Copy, Note, Topology
from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint, UnsupportedCheckpoint
from lazymerge.files.local import Descriptors, LocalFile
from lazymerge.files.torch_file import StoredTensor
from lazymerge.formats.megatron.evidence import check_alike, check_distinct, check_order, check_ranks
from lazymerge.formats.megatron.experts import Experts
from lazymerge.formats.megatron.found import Found
from lazymerge.formats.megatron.grid import (
    FILE,
    Place,
    Sizes,
    check_complete,
    expert_tensor_rank,
    holds_ranks,
    places_of,
    rank_folders,
    size,
)
from lazymerge.formats.megatron.joining import Joiner, Unjoined
from lazymerge.formats.megatron.names import HEAD_COPY, STACKS, layer_of, with_layer
from lazymerge.formats.megatron.rank_file import RankFile, read_rank_file
from lazymerge.formats.megatron.told import check_told
from lazymerge.formats.stacks import Allowance
from lazymerge.gather import Gather, Shards, of_region

__all__ = ["holds_ranks", "read_ranks"]

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def read_ranks(folder: Path) -> Found:
    """The model in the mp_rank_ folders of `folder`; nothing but metadata is read.

    Raises a `SourceError` for a rank, chunk, layer or expert that is not there, and for files or
    arguments that contradict each other.
    """
    pool = Descriptors()
    folders = rank_folders(folder)
    files = {numbers: read_rank_file(LocalFile(path / FILE, pool)) for numbers, path in folders.items()}
    first = next(iter(files.values()), None)
    settings = first.settings if first else {}
    notes = [note for file in files.values() if (note := check_alike(first or file, file)) is not None]
    sizes, places = places_of(folder, files, settings)
    check_complete(folder, places.values(), sizes)
    placed = {places[numbers]: file for numbers, file in files.items()}
    known = check_ranks(placed, sizes)
    model = _Model(settings, sizes, placed)
    model.read()
    check_told(folder, model.gathers, settings)
    if not known:
        check_distinct(placed, model.sharded, model.with_experts)
    return Found(
        gathers=model.gathers,
        settings=settings,
        iteration=first.iteration if first else None,
        topology=Topology(
            len(files),
            tuple(range(len(files))),
            tuple(axis for axis in (("tp", sizes.tp), ("pp", sizes.pp), ("ep", sizes.ep)) if axis[1] > 1),
        ),
        notes=[*notes[:1], *_doubts(folder, sizes, len(files), known=known, told=bool(settings))],
        left_out=model.left_out,
        copies=model.copies,
        files=[file.file for file in files.values()],
    )


class _Copies(NamedTuple):
    """Tensors that should hold the same bytes."""

    name: str
    used: StoredTensor
    other: StoredTensor


class _Model:
    """Reads chunk after chunk, and keeps what is known of the chunks before."""

    def __init__(self, settings: dict[str, Any], sizes: Sizes, files: dict[Place, RankFile]) -> None:
        self.gathers: dict[str, Gather] = {}
        self.left_out: dict[str, str] = {}
        self.sharded: set[Place] = set()  # ranks that hold parts of tensors which the tensor ranks divide
        self.with_experts: set[Place] = set()
        self._settings = settings
        self._sizes = sizes
        self._files = files
        self._stacks = Allowance()
        self._copies: list[_Copies] = []
        self._layers = {"decoder": 0, "mtp": 0}  # in the chunks before
        self._shared: dict[str, list[StoredTensor]] = {}  # embeddings and output layer: their ranks' parts

    def read(self) -> None:
        """All chunks, in the order of the model's layers."""
        chunks = self._chunk_count()
        for file in self._files.values():
            self.left_out.update(file.left_out)
        order = [(pp, virtual) for virtual in range(chunks) for pp in range(self._sizes.pp)]
        check_order(self._folder, [(_chunk(*at), self._names(*at)) for at in order])
        for pp, virtual in order:
            self._read_chunk(pp, virtual)

    def copies(self) -> Iterator[Copy]:
        """The pairs of regions that should be equal."""
        for name, used, other in self._copies:
            yield Copy(name, used.region(), other.region())

    @property
    def _folder(self) -> Path:
        return next(iter(self._files.values())).file.path.parent.parent

    def _chunk_count(self) -> int:
        """How many virtual stages every rank has."""
        most = max(self._files.values(), key=lambda file: len(file.chunks))
        said = size(self._settings, "virtual_pipeline_model_parallel_size", None)
        expected = said or len(most.chunks)
        for file in self._files.values():
            if len(file.chunks) != expected:
                why = "virtual_pipeline_model_parallel_size" if said else f"as in {most.file.path}"
                kind = IncompleteCheckpoint if len(file.chunks) < expected else InconsistentCheckpoint
                raise kind(
                    f"{file.file.path}: holds {len(file.chunks)} virtual stages, expected {expected} ({why})",
                    "the files do not belong together; save the checkpoint again",
                )
        return expected

    def _stage(self, pp: int) -> list[tuple[Place, RankFile]]:
        return [(place, self._files[place]) for place in sorted(self._files) if place.pp == pp]

    def _names(self, pp: int, virtual: int) -> dict[str, None]:
        """The names in a chunk, on any of its ranks."""
        return dict.fromkeys(name for _, file in self._stage(pp) for name in file.chunks[virtual])

    def _read_chunk(self, pp: int, virtual: int) -> None:
        names = self._names(pp, virtual)
        renamed = self._numbered(names, _chunk(pp, virtual))
        tensors: dict[str, dict[Place, StoredTensor]] = {renamed[name]: {} for name in names}
        for place, file in self._stage(pp):
            for name, tensor in file.chunks[virtual].items():
                tensors[renamed[name]][place] = tensor
        shapes = {name: next(iter(parts.values())).shape for name, parts in tensors.items()}
        joiner = Joiner(self._settings, shapes)
        experts = Experts(self._settings, self._sizes, self._stacks)
        for name, parts in tensors.items():
            if Experts.kind(name) is not None:
                self._add_experts(experts, name, parts)
            else:
                self._add_dense(joiner, name, parts)
        for name, gather in experts.joined():
            self._put(name, gather)

    def _numbered(self, names: Iterable[str], where: str) -> dict[str, str]:
        """The names with the numbers that their layers have in the whole model; refuses a gap in them."""
        renamed, here = {}, {stack: set[int]() for stack in self._layers}
        for name in names:
            layer = layer_of(name)
            if layer is None and name.startswith(STACKS):
                raise UnsupportedCheckpoint(
                    f"{name}: in {where} of {self._folder}, and no layer has its number written so",
                    "the file was changed after it was saved; copy the checkpoint again",
                )
            renamed[name] = name
            if layer is not None:
                stack, number = layer
                here[stack].add(number)
                renamed[name] = with_layer(name, self._layers[stack] + number)
        for stack, numbers in here.items():
            missing = next((number for number in range(len(numbers)) if number not in numbers), None)
            if missing is not None:
                raise IncompleteCheckpoint(
                    f"{self._folder}: {where} has {stack} layer {max(numbers)} and no layer {missing}",
                    "the layer was left out when the checkpoint was saved",
                )
            self._layers[stack] += len(numbers)
        return renamed

    def _add_dense(self, joiner: Joiner, name: str, ranks: dict[Place, StoredTensor]) -> None:
        """A tensor that the tensor ranks share; ranks are in the order of `Place`, so expert rank 0 first."""
        parts: dict[int, StoredTensor] = {}
        for place, tensor in ranks.items():
            used = parts.setdefault(place.tp, tensor)
            if used is not tensor:
                self._copy(name, used, tensor)
        for tp in range(self._sizes.tp):
            if tp not in parts:
                raise IncompleteCheckpoint(
                    f"{name}: tensor rank {tp} does not hold it, though others do",
                    "the files do not belong together; save the checkpoint again",
                )
        ordered = [parts[tp] for tp in range(self._sizes.tp)]
        if self._is_copy(name, ordered):
            return
        regions = [of_region(part.region()) for part in ordered]
        try:
            joined = joiner.join(name, regions)
        except Unjoined as error:  # refused where it is wanted: the user may leave it out
            self._put(name, Shards(regions[0].shape, regions[0].dtype, _refusing(error)))
            return
        if joined.same:
            for other in ordered[1:]:
                self._copy(name, ordered[0], other)
        elif len(ordered) > 1:
            self.sharded.update(ranks)
        for part, gather in joined.tensors.items():
            self._put(part, gather)

    def _add_experts(self, experts: Experts, name: str, ranks: dict[Place, StoredTensor]) -> None:
        used: dict[tuple[int, int], tuple[str, StoredTensor]] = {}
        self.with_experts.update(ranks)
        for place, tensor in ranks.items():
            key = (place.ep, expert_tensor_rank(place.tp, self._sizes))
            if key in used:
                self._copy(used[key][0], used[key][1], tensor)
            else:
                used[key] = (experts.add(name, tensor, *key), tensor)

    def _is_copy(self, name: str, parts: list[StoredTensor]) -> bool:
        """Whether this is another stage's copy of an embedding or of the output layer, and no tensor."""
        if not name.startswith(("embedding.", "output_layer.")) and name != HEAD_COPY:
            return False
        original, why = name, "a copy of the one on an earlier stage"
        tied = name == HEAD_COPY or self._settings.get("untie_embeddings_and_output_weights") is False
        embedding = self._shared.get(_EMBEDDING)
        if name in (HEAD_COPY, _OUTPUT) and tied and embedding and embedding[0].shape == parts[0].shape:
            original, why = _EMBEDDING, "the last stage's copy of the tied embedding"
        known = self._shared.get(original)
        if known is None:
            self._shared[name] = parts
            return False
        for used, other in zip(known, parts, strict=True):
            self._copy(original, used, other)
        self.left_out[name if name != original else f"{name} (again)"] = why
        return True

    def _copy(self, name: str, used: StoredTensor, other: StoredTensor) -> None:
        if used.shape != other.shape or used.dtype is not other.dtype:
            raise InconsistentCheckpoint(
                f"{name}: {used.dtype} of shape {used.shape} in {used.storage.file.path}, and {other.dtype}"
                f" of shape {other.shape} in {other.storage.file.path}, where they should be equal",
                "the files do not belong to one save",
            )
        self._copies.append(_Copies(name, used, other))

    def _put(self, name: str, gather: Gather) -> None:
        if name in self.gathers:
            raise InconsistentCheckpoint(
                f"{name}: is on two pipeline stages, and it is not known to be shared",
                "the files do not belong together",
            )
        self.gathers[name] = gather


def _chunk(pp: int, virtual: int) -> str:
    return f"chunk {virtual} of pipeline rank {pp}"


def _refusing(error: Unjoined) -> Callable[[], Iterable[Piece]]:
    """Pieces of a tensor that cannot be put together: asking for them raises the error."""

    def pieces() -> Iterable[Piece]:
        raise error

    return pieces


def _doubts(folder: Path, sizes: Sizes, count: int, *, known: bool, told: bool) -> Iterator[Note]:
    """What is taken from the folders' names alone, of as many files."""
    if not told:
        text = f"{folder}: no `args` in the files: taking the {sizes.tp} tensor, {sizes.pp} pipeline and"
        text += f" {sizes.ep} expert ranks whose folders are here for all there are, and none for renamed"
        yield Note("warning", text)
    elif count > 1 and not known:
        text = f"{folder}: no file says which rank wrote it (args.rank): that none of the {count} folders was"
        yield Note("warning", f"{text} renamed is taken for granted")
