"""The experts of one pipeline chunk, under one name each, whatever module holds them.

    experts.local_experts.I.linear_fc1.weight    a module for each expert of the rank
    experts.linear_fc1.weightI                   Transformer Engine's grouped linear layer
    experts.linear_fc1.weight                    the same as one tensor, expert x out x in
    experts.weight1, experts.weight2             the old GroupedMLP, below

A rank's expert I is expert (EP rank) x (experts of a rank) + I of the model. Experts are sharded over
the expert tensor ranks, by the rules of a dense layer. GroupedMLP computes x @ W, so its matrices are
transposed, those of a rank's E experts in one:

    weight1   hidden x (E * rows of fc1)     as E x hidden x rows
    weight2   (E * columns of fc2) x hidden  as E x columns x hidden

With ``moe_mlp_glu_interleave_size`` the grouped layers' fc1 has blocks of gate and up in turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint, UnsupportedCheckpoint
from lazymerge.files.torch_file import StoredTensor
from lazymerge.formats.megatron.grid import Sizes, size
from lazymerge.formats.megatron.joining import check_alike, join_fc1, without_interleave
from lazymerge.formats.megatron.settings import is_gated
from lazymerge.formats.stacks import Allowance
from lazymerge.gather import Gather, cat, of_region

MAX_EXPERTS = 1 << 16  # of a layer; a hostile file can say any number
_DAMAGED = "the files do not belong together, or the arguments in them were changed"

_SEQUENTIAL = re.compile(r"(.*\.experts)\.local_experts\.(0|[1-9][0-9]{0,5})\.(linear_fc[12])\.(weight|bias)")
_GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12])\.(weight|bias)(0|[1-9][0-9]{0,5})?")
_OLD_GROUPED = re.compile(r"(.*\.experts)\.weight([12])")


class Kind(NamedTuple):
    """Which tensor of every expert of a layer: ``<layer>.experts``, ``linear_fc1``, ``weight``."""

    experts: str
    linear: str
    leaf: str

    def name(self, expert: int) -> str:
        """The name of one expert's."""
        return f"{self.experts}.local_experts.{expert}.{self.linear}.{self.leaf}"


class Experts:
    """Collects the experts' tensors of all ranks of a chunk, and joins them.

    `add` takes what is an expert's, by the rank that holds it, each (expert, expert tensor) rank once.
    `stacks` is what may come out of tensors of several experts, in all chunks together.
    """

    def __init__(self, settings: Mapping[str, Any], sizes: Sizes, stacks: Allowance) -> None:
        self._stacks = stacks
        self._settings = settings
        self._sizes = sizes
        block = size(settings, "moe_mlp_glu_interleave_size", None)
        self._block = None if is_gated(settings) is False else block
        # by kind: (expert rank, its expert's number) -> the parts of the expert tensor ranks
        self._parts: dict[Kind, dict[tuple[int, int], dict[int, Gather]]] = {}

    @staticmethod
    def kind(name: str) -> Kind | None:
        """What a tensor is of the experts; None if it is none of theirs."""
        if match := _SEQUENTIAL.fullmatch(name):
            return Kind(match[1], match[3], match[4])
        if match := _GROUPED.fullmatch(name):
            return Kind(match[1], match[2], match[3])
        if match := _OLD_GROUPED.fullmatch(name):
            return Kind(match[1], f"linear_fc{match[2]}", "weight")
        return None

    def add(self, name: str, tensor: StoredTensor, ep: int, etp: int) -> str:
        """Take in a tensor of the experts; returns the canonical name of (the first of) them."""
        kind = self.kind(name)
        assert kind is not None, name
        first = None
        for local, part in self._single(name, kind, tensor):
            ranks = self._parts.setdefault(kind, {}).setdefault((ep, local), {})
            if etp in ranks:
                raise InconsistentCheckpoint(
                    f"{name}: expert {local} is there twice, under two names", _DAMAGED
                )
            ranks[etp] = part
            first = local if first is None else first
        return kind.name(first or 0)

    def joined(self) -> Iterator[tuple[str, Gather]]:
        """The tensors of all experts by canonical name, in the order of their numbers.

        Raises `IncompleteCheckpoint` for an expert, or a part of one, that is not there.
        """
        counts: dict[str, int] = {}
        for kind, experts in self._parts.items():
            count = self._count(kind, experts)
            if counts.setdefault(kind.experts, count) != count:
                raise IncompleteCheckpoint(
                    f"{kind.experts}: {counts[kind.experts]} experts, but {count} {kind.linear}.{kind.leaf}",
                    _DAMAGED,
                )
            for (ep, local), ranks in sorted(experts.items()):
                name = kind.name(ep * count + local)
                parts = [ranks[etp] for etp in sorted(ranks)]
                if len(parts) != (self._sizes.etp or 1):
                    raise IncompleteCheckpoint(
                        f"{name}: {len(parts)} of its {self._sizes.etp} expert tensor ranks are here",
                        "copy all mp_rank_ folders of the step into one folder",
                    )
                yield name, self._join(kind, name, parts, experts)

    def _single(self, name: str, kind: Kind, tensor: StoredTensor) -> Iterator[tuple[int, Gather]]:
        """The single experts in a tensor, with their numbers on the rank and fc1 as [gate; up]."""
        whole = of_region(tensor.region())
        if match := _SEQUENTIAL.fullmatch(name):
            yield int(match[2]), whole
            return
        match = _GROUPED.fullmatch(name)
        if match and match[4] is not None:
            yield int(match[4]), self._plain(name, kind, whole)
            return
        stacked = self._stacked(name, kind, whole) if match is None else whole
        if len(stacked.shape) != (3 if kind.leaf == "weight" else 2):
            raise UnsupportedCheckpoint(
                f"{name}: of shape {stacked.shape}, expected one of experts x the shape of one",
                "save the checkpoint in the torch_dist format",
            )
        if stacked.shape[0] > MAX_EXPERTS:
            raise UnsupportedCheckpoint(f"{name}: {stacked.shape[0]} experts in a layer", _DAMAGED)
        said = expert_count(self._settings)
        if said is not None and stacked.shape[0] != -(-said // self._sizes.ep):
            raise InconsistentCheckpoint(
                f"{name}: of shape {whole.shape}, which is not that of {said} experts (num_experts) over"
                f" {self._sizes.ep} expert ranks",
                _DAMAGED,
            )
        if stacked.nbytes > tensor.storage.nbytes:
            raise InconsistentCheckpoint(
                f"{name}: of shape {whole.shape}, {stacked.nbytes} bytes, and only {tensor.storage.nbytes} of"
                " them in the file, repeated",
                _DAMAGED,
            )
        self._stacks.take(name, stacked.shape[0])
        for local in range(stacked.shape[0]):
            yield local, self._plain(name, kind, stacked.select(0, local))

    def _stacked(self, name: str, kind: Kind, whole: Gather) -> Gather:
        """GroupedMLP's matrix as experts x out x in."""
        experts = expert_count(self._settings)
        count = (experts or 0) // self._sizes.ep  # of a rank
        split = 1 if kind.linear == "linear_fc1" else 0
        if experts is None:
            raise UnsupportedCheckpoint(
                f"{name}: of shape {whole.shape}, all experts of a rank in one, and how many is not recorded"
                " (num_experts)",
                "save the checkpoint with its `args`, or in the torch_dist format",
            )
        if not count or len(whole.shape) != 2 or whole.shape[split] % count:
            raise InconsistentCheckpoint(
                f"{name}: of shape {whole.shape}, which is not that of {experts} experts (num_experts) over"
                f" {self._sizes.ep} expert ranks",
                _DAMAGED,
            )
        each = whole.shape[split] // count
        if split:
            return whole.view((count, whole.shape[0], each)).permute((0, 2, 1))
        return whole.view((count, each, whole.shape[1])).permute((0, 2, 1))

    def _plain(self, name: str, kind: Kind, part: Gather) -> Gather:
        if self._block is None or kind.linear != "linear_fc1":
            return part
        return without_interleave(name, part, self._block)

    def _count(self, kind: Kind, experts: Mapping[tuple[int, int], object]) -> int:
        """How many experts every rank has; refuses gaps and ranks that have fewer."""
        ranks = self._sizes.ep
        said = expert_count(self._settings)
        count = max(local for _, local in experts) + 1 if said is None else -(-said // ranks)
        expected = ((ep, local) for ep in range(ranks) for local in range(count))
        missing = next((place for place in expected if place not in experts), None)
        if missing is not None:
            raise IncompleteCheckpoint(
                f"{kind.name(missing[0] * count + missing[1])}: is not here (expert {missing[1]} of expert"
                f" rank {missing[0]}), though {len(experts)} of {ranks * count} are",
                "copy all mp_rank_ folders of the step into one folder",
            )
        if len(experts) != (said or ranks * count):
            raise InconsistentCheckpoint(
                f"{kind.experts}: {len(experts)} experts in the files, expected {said} (num_experts)",
                _DAMAGED,
            )
        return count

    def _join(
        self,
        kind: Kind,
        name: str,
        parts: list[Gather],
        experts: Mapping[tuple[int, int], Mapping[int, Gather]],
    ) -> Gather:
        check_alike(name, parts)
        check_alike(name, [parts[0], *next(iter(experts.values())).values()])
        if len(parts) == 1 or (kind.linear == "linear_fc2" and kind.leaf == "bias"):
            return parts[0]
        if kind.linear == "linear_fc2":
            return cat(parts, 1)
        others = self._parts.get(Kind(kind.experts, "linear_fc2", "weight"), {})
        fc2 = next((part.shape for ranks in others.values() for part in ranks.values()), None)
        return join_fc1(name, parts, fc2, self._settings)


def expert_count(settings: Mapping[str, Any]) -> int | None:
    """num_experts; None if it is not recorded. Models before mcore have it as a list of one number."""
    value = settings.get("num_experts")
    if isinstance(value, list | tuple) and len(value) == 1:
        return size({"num_experts": value[0]}, "num_experts", None)
    return size(settings, "num_experts", None)
