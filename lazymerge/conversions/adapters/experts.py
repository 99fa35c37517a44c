"""Experts: LoRA of a linear layer of each, or of parameters that hold all of them, on either kind of base.

    per expert      <module>.<expert>.gate_proj.weight [F, H], up_proj [F, H], down_proj [H, F]
    in one tensor   <module>.gate_up_proj [experts, 2F, H]: gate, then up; down_proj [experts, H, F]

PEFT adapts parameters with E experts (`target_parameters`) by one pair of matrices, A [E * r, in] and
B [out, r * E]: rows of A go by expert first, columns of B by rank first. A module with several of them has
a wrapper for each, which shapes tell apart. Which dimension of the parameter is `in` also shows by its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

from lazymerge.boxes import Shape
from lazymerge.conversions.adapters.cuts import Cuts
from lazymerge.conversions.adapters.linear import Delta, check_rank, delta_of
from lazymerge.conversions.adapters.names import BaseNames
from lazymerge.conversions.adapters.parts import Module
from lazymerge.conversions.adapters.settings import Settings
from lazymerge.errors import InconsistentCheckpoint, UnsupportedCheckpoint
from lazymerge.gather import Gather, cat
from lazymerge.lowrank import Term

if TYPE_CHECKING:
    from lazymerge.conversions.runtime_names import Conversion

_TRANSPOSED_TYPES = {"aria", "aria_text", "gpt_oss", "openai_privacy_filter"}
"""Model types whose parameters PEFT takes to be [experts, in, out]."""

_FUSED = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
    "up_proj": (("up_proj",),),
}
"""Of a parameter with all experts, the layers that each expert has on the hub, in their order."""

_EXPERT = re.compile(r"(.+)\.(\d+)\.([^.]+)")


class Slot(NamedTuple):
    """A matrix of the base: a tensor, or `size` rows from `start` on of one expert's in it."""

    name: str
    expert: int | None = None
    start: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter with all experts, [experts, rows, columns], and where its rows are in the base.

    `parts` are (slots by expert, rows) in the order of the rows.
    """

    name: str
    shape: Shape
    parts: tuple[tuple[tuple[Slot, ...], int], ...]


class Experts:
    """Finds what adapters of experts add to; `gathers` are the base's, `conversion` as `BaseNames` has it."""

    def __init__(
        self,
        gathers: Mapping[str, Gather],
        names: BaseNames,
        model_type: object,
        conversion: Conversion | None = None,
    ) -> None:
        self._gathers = gathers
        self._names = names
        self._transposed = model_type in _TRANSPOSED_TYPES
        self._cuts = Cuts(conversion)

    def of_linear(self, module: Module, settings: Settings) -> tuple[Slot, Delta] | None:
        """What the LoRA of one expert's layer adds to a tensor with all experts, if the base has that.

        Raises `UnsupportedCheckpoint` where that lies [experts, in, out], or nothing shows that it does not.
        """
        match = _EXPERT.fullmatch(module.name)
        if match is None:
            return None
        container, expert, leaf = match[1], int(match[2]), match[3]
        for fused, spelt in _FUSED.items():
            for leaves in spelt:
                name = self._names.find(f"{container}.{fused}", relaid=True) if leaf in leaves else None
                shape = () if name is None else self._gathers[name].shape
                if name is None or len(shape) != 3 or expert >= shape[0] or shape[1] % len(leaves):
                    continue
                self._refuse_turned(module, container, name, len(leaves), settings)
                rows = shape[1] // len(leaves)
                slot = Slot(name, expert, leaves.index(leaf) * rows, rows)
                return slot, delta_of(module, settings, (rows, shape[2]), transposed=False)
        return None

    def _refuse_turned(
        self, module: Module, container: str, name: str, leaves: int, settings: Settings
    ) -> None:
        """Refuse to add a layer's product to a tensor [experts, in, out] of `leaves` layers.

        Of a square one, the container's other tensor shows how it lies: its layers map what the module maps
        to back.
        """
        a, b = module.product
        ins, outs = a.shape[1], b.shape[0]
        shape = self._gathers[name].shape
        lies = {True} if self._transposed else _lies(shape, ins, outs, leaves)
        for fused, spelt in _FUSED.items():
            other = self._names.find(f"{container}.{fused}", relaid=True)
            if other is not None and other != name and len(lies) > 1:
                lies = _lies(self._gathers[other].shape, outs, ins, len(spelt[0])) or lies
        if True in lies:
            how = "may lie" if False in lies else "lies"
            raise UnsupportedCheckpoint(
                f"{settings.name}: {module.name} is a layer of one expert, and {name} of the base {how}"
                " [experts, in, out]",
                "merge it with PEFT, or train parameters (target_parameters)",
            )

    def of_parameters(
        self, modules: list[Module], settings: Settings
    ) -> Iterator[tuple[Module, list[tuple[Slot, Delta]]]]:
        """What the LoRA of a module's parameters (one wrapper each) adds; nothing where it has none.

        Raises `UnsupportedCheckpoint` where shapes do not tell which parameter a wrapper adapts.
        """
        container = modules[0].name
        parameters = [
            found for leaf in self._targeted(container, settings) for found in self._find(container, leaf)
        ]
        fitting = [
            chosen
            for chosen in permutations(parameters, len(modules))
            if all(_fits(*pair) for pair in zip(modules, chosen, strict=True))
        ]
        if not parameters:
            return
        if len(fitting) != 1:
            shapes = [f"{each.name} {each.shape}" for each in parameters]
            a, b = modules[0].product
            text = f"{settings.name}: {container} has lora_A of shape {a.shape} and lora_B of shape {b.shape}"
            text += (
                f", which go with {'several' if fitting else 'none'} of its parameters: {', '.join(shapes)}"
            )
            if fitting:
                raise UnsupportedCheckpoint(text, "merge it with the PEFT that it was trained with")
            raise InconsistentCheckpoint(text, "give the base that the adapter was trained on")
        pairs = list(zip(modules, fitting[0], strict=True))
        seen = {
            module.product[0].shape[1] == parameter.shape[1]
            for module, parameter in pairs
            if parameter.shape[1] != parameter.shape[2]
        }
        for module, parameter in pairs:
            turned = self._is_turned(module, parameter, seen, settings)
            yield module, list(self._deltas(module, parameter, settings, turned=turned))

    def _targeted(self, container: str, settings: Settings) -> list[str]:
        """The parameters of the module that target_parameters names."""
        leaves = {target.rpartition(".")[2] for target in settings.targeted.parameters}
        ends = tuple(f".{target}" for target in settings.targeted.parameters)
        return sorted(leaf for leaf in leaves if f".{container}.{leaf}".endswith(ends))

    def _find(self, container: str, leaf: str) -> Iterator[_Parameter]:
        cut = self._cuts.of(f"{container}.{leaf}", self._gathers)
        if cut is not None:
            shape, rows = cut
            slots = tuple((tuple(map(Slot, names)), size) for names, size in rows)
            yield _Parameter(f"{container}.{leaf}", shape, slots)
            return
        name = self._names.find(f"{container}.{leaf}", relaid=True)
        if name is not None:
            shape = self._gathers[name].shape
            if len(shape) == 3:
                halves = len(_FUSED.get(leaf, ((leaf,),))[0])
                halves = 1 if self._transposed or shape[1] % halves else halves
                yield _Parameter(f"{container}.{leaf}", shape, tuple(_halves(name, shape, halves)))
            return
        for leaves in _FUSED.get(leaf, ()):
            found = [self._each(container, each) for each in leaves]
            if all(found):
                shapes = [self._gathers[slots[0].name].shape for slots in found]
                sizes = {len(slots) for slots in found} | {shape[1:] for shape in shapes}
                if len(sizes) == 2 and len(shapes[0]) == 2:
                    heights = [shape[0] for shape in shapes]
                    yield _Parameter(
                        f"{container}.{leaf}",
                        (len(found[0]), sum(heights), shapes[0][1]),
                        tuple(zip(found, heights, strict=True)),
                    )

    def _each(self, container: str, leaf: str) -> tuple[Slot, ...]:
        """The weights of a layer of all experts, if the base has one for each."""
        slots: list[Slot] = []
        while (name := self._names.find(f"{container}.{len(slots)}.{leaf}.weight")) is not None:
            slots.append(Slot(name))
        return tuple(slots)

    def _deltas(
        self, module: Module, parameter: _Parameter, settings: Settings, *, turned: bool
    ) -> Iterator[tuple[Slot, Delta]]:
        experts = parameter.shape[0]
        rank = check_rank(module, settings, parameter.name, experts)
        a, b = module.product
        if module.magnitude is not None or module.bias is not None or settings.dora:
            raise UnsupportedCheckpoint(
                f"{settings.name}: DoRA or a bias of {parameter.name}, which PEFT has not for parameters",
                "merge it with PEFT's merge_and_unload",
            )
        scale = settings.scale(parameter.name)
        a = a.view((experts, rank, a.shape[1]))
        for expert in range(experts):
            left = b.narrow(1, expert, rank, experts)
            right = a.select(0, expert)
            if turned:
                left, right = right.permute([1, 0]), left.permute([1, 0])
            start = 0
            for slots, size in parameter.parts:
                yield slots[expert], Delta(Term(left.narrow(0, start, size), right, scale))
                start += size

    def _is_turned(self, module: Module, parameter: _Parameter, seen: set[bool], settings: Settings) -> bool:
        """Whether PEFT took the parameter to lie [experts, in, out], as it did all of them before 0.19.

        Where it is square, others of the module, for which that is `seen`, have to show it.
        """
        _, rows, columns = parameter.shape
        if rows != columns:
            return module.product[0].shape[1] == rows
        if self._transposed or len(seen) == 1:
            return self._transposed or seen == {True}
        raise UnsupportedCheckpoint(
            f"{settings.name}: {parameter.name} is square, and versions of PEFT differ in which side is in",
            "merge it with the PEFT that it was trained with",
        )


def _lies(shape: Shape, ins: int, outs: int, leaves: int) -> set[bool]:
    """Whether so many layers in one tensor of that shape may lie [experts, in, out], by their sizes."""
    ways = {False: (leaves * outs, ins), True: (ins, leaves * outs)}
    return {turned for turned, way in ways.items() if shape[1:] == way}


def _fits(module: Module, parameter: _Parameter) -> bool:
    a, b = module.product
    if len(a.shape) != 2 or len(b.shape) != 2:
        return False
    return (a.shape[1], b.shape[0]) in {parameter.shape[1:], parameter.shape[:0:-1]}


def _halves(name: str, shape: Shape, count: int) -> Iterator[tuple[tuple[Slot, ...], int]]:
    rows = shape[1] // count
    for half in range(count):
        yield tuple(Slot(name, expert, half * rows, rows) for expert in range(shape[0])), rows


def assembled(base: Gather, matrices: Mapping[Slot, Gather]) -> Gather:
    """The base's tensor with these of its experts' matrices in place of its own."""
    experts = []
    for expert in range(base.shape[0]):
        own = base.select(0, expert)
        parts, at = [], 0
        for slot in sorted(each for each in matrices if each.expert == expert):
            parts += [own.narrow(0, at, slot.start - at), matrices[slot]]
            at = slot.start + slot.size
        parts.append(own.narrow(0, at, own.shape[0] - at))
        experts.append(cat(parts, 0).unsqueeze(0))
    return cat(experts, 0)
