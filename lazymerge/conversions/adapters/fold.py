"""Folding: adapters added to their base, in the pass that writes it.

    float32(W) + sum over adapters of weight * scale * (B @ A), rounded once to the type of the result

An adapter's tensor either adds to one of the base or takes its place (a trained bias, a module that was saved
whole), or is a new one (a head). Every one of them has a use, or folding is refused; what the config has to
say otherwise is told.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.adapters.adapter import Adapter
from lazymerge.conversions.adapters.experts import Experts, Slot, assembled
from lazymerge.conversions.adapters.linear import Delta, bias_delta, delta_of, shown
from lazymerge.conversions.adapters.names import BaseNames
from lazymerge.conversions.adapters.orientation import Orientation
from lazymerge.conversions.adapters.parts import Module, Parts, take_apart
from lazymerge.conversions.adapters.promises import (
    check_promises,
    idle_patterns,
    missing_layers,
    other_class,
)
from lazymerge.conversions.adapters.replaced import GIVE_ITS_BASE, Replaced, mixed, quantised
from lazymerge.conversions.adapters.settings import Settings, understand
from lazymerge.conversions.adapters.sums import Sum, added, same
from lazymerge.conversions.adapters.tied import Ties
from lazymerge.conversions.adapters.unchanged import changes_nothing
from lazymerge.conversions.adapters.vocabulary import (
    ends_with,
    head_changes,
    is_language_model,
    vocabulary_changes,
)
from lazymerge.conversions.adapters.whole import in_hub_form
from lazymerge.conversions.dtypes import Wanted, cast
from lazymerge.conversions.tying import HEADS
from lazymerge.errors import InconsistentCheckpoint, PlanError, UnsupportedCheckpoint
from lazymerge.files.dtype import FLOATS, DType
from lazymerge.gather import Gather
from lazymerge.lowrank import Term

if TYPE_CHECKING:
    from lazymerge.conversions.architecture import Architecture
    from lazymerge.conversions.runtime_names import Conversion


@dataclass(frozen=True, slots=True)
class Folded:
    """The base with the adapters in it, and the fields that its config.json has to have instead.

    `added` are tensors that the base has not, each with the adapter that it is of; `untied` are pairs that
    the base ties and the result does not. `unchanged` says that no tensor differs from the base's, whatever
    it was meant to do: the matrices are zero, or the weight is. A note in the checkpoint says so too.
    """

    checkpoint: Checkpoint
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    unchanged: bool = False
    added: Mapping[str, str] = field(default_factory=dict)
    untied: Sequence[tuple[str, str]] = ()


def fold(
    checkpoint: Checkpoint,
    adapters: Sequence[tuple[Adapter, float]],
    config: Mapping[str, Any] | None,
    *,
    model: tuple[Architecture, Conversion | None] | None = None,
    dtype: DType | None = None,
) -> Folded:
    """The checkpoint, under the hub's names, with each adapter times its weight added to it.

    `config` is the base's config.json, `model` what is known of its class: what it ties, and how it calls
    tensors when it runs (None: as the base does). What changes is of `dtype`, where that is given; nothing
    else is cast. Nothing but small tensors is read. Raises `UnsupportedCheckpoint` for kinds that are not
    folded, `InconsistentCheckpoint` for adapters that are not of this base or contradict their config, and
    `PlanError` for weights that mean nothing.
    """
    work = _Work(checkpoint, config or {}, model or (None, None), dtype)
    for adapter, weight in adapters:
        work.add(adapter, weight)
    return work.folded()


class _Work:
    """What has been found to be added to, and put in place of, the tensors of a base."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Mapping[str, Any],
        model: tuple[Architecture | None, Conversion | None],
        dtype: DType | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        architecture, self._conversion = model
        self._wanted = Wanted(dtype, {} if architecture is None else architecture.wide)
        self._base = dict(checkpoint.gathers)
        self._names = BaseNames(self._base, self._conversion, config)
        self._ties = Ties(self._base, config, architecture)
        for name in self._ties.absent:  # found as any other, though another tensor has its values
            self._names.add(name)
        self._experts = Experts(self._base, self._names, config.get("model_type"), self._conversion)
        self._replaced = Replaced(self._base, self._names, self._ties, self._wanted)
        self._sums: dict[str, dict[Slot, Sum]] = defaultdict(lambda: defaultdict(Sum))  # by tensor
        self._keeps_tied = False
        self._changes: dict[str, Any] = {}
        self._notes: list[Note] = []
        self._adapters: list[tuple[Adapter, bool]] = []  # and whether it changes nothing

    def add(self, adapter: Adapter, weight: float) -> None:
        """Take in one adapter."""
        if not math.isfinite(weight):
            raise PlanError(f"{adapter.name}: a weight of {weight}", "give it a number")
        settings, parts = understand(adapter), take_apart(adapter)
        unmatched: list[str] = []
        self._keeps_tied |= settings.keeps_tied
        settings.refuse_nested(parts.whole)
        before, summed = self._replaced.touched, frozenset(self._sums)
        for name, whole in in_hub_form(parts.whole, self._conversion).items():
            if not self._replaced.put(name, whole, settings, weight, summed):
                unmatched.append(whole.name)
        for name, rows in parts.tokens.items():
            if not self._replaced.put_rows(name, rows, settings, weight, summed, before):
                unmatched.append(f"{name}.token_adapter.trainable_tokens_delta")
        own: dict[Slot, Delta] = {}
        for module, found in self._deltas(parts, settings):
            if not found:
                unmatched += module.names
            for slot, delta in found:
                if slot in own:
                    raise InconsistentCheckpoint(
                        f"{adapter.name}: {module.name} and another of its modules both mean {slot.name}",
                        GIVE_ITS_BASE,
                    )
                if slot.name in before:
                    raise mixed(adapter.name, slot.name)
                own[slot] = delta
                self._add_delta(slot, delta, weight, settings)
        if unmatched:
            self._refuse(adapter, unmatched)
        modules = [module.name for module in parts.modules]
        check_promises(adapter.name, modules, settings.targeted)
        self._notes += [
            *other_class(settings, self._config),
            *missing_layers(adapter.name, settings.targeted, modules, self._base),
            *idle_patterns(settings, parts),
        ]
        shapes = {name: whole.gather.shape for name, whole in parts.whole.items()}
        self._changes.update(head_changes(shapes, settings, self._config, self._names.find))
        terms = [replace(delta.term, scale=weight * delta.term.scale) for delta in own.values()]
        scaled = any(delta.magnitude is not None for delta in own.values())
        replaced = sorted(self._replaced.touched - before)
        pairs = self._replaced.pairs(replaced, self._sums)
        self._notes += self._told(adapter, weight, {slot.name for slot in own}, replaced)
        self._adapters.append((adapter, changes_nothing(terms, scaled, pairs)))

    def _told(
        self, adapter: Adapter, weight: float, summed: Collection[str], replaced: Collection[str]
    ) -> Iterator[Note]:
        """What becomes of the adapter, and whether it has been taken in before."""
        count = len({*summed, *replaced})
        text = f"{adapter.name}: folded into {count} tensor{'' if count == 1 else 's'}"
        if weight != 1:
            text += f" with the weight {weight:g}"
        if replaced:
            text += f", of {len(replaced)} of which it holds the values"
        yield Note("info", text)
        files = [file.path.resolve() for file in adapter.files]
        if files and files in [[file.path.resolve() for file in each.files] for each, _ in self._adapters]:
            yield Note("warning", f"{adapter.name}: given twice, and added twice")

    def folded(self) -> Folded:
        """The base with everything in it that was taken in."""
        gathers = {name: self._result(name) for name in {**self._base, **self._replaced.whole}}
        left_out: dict[str, str] = {}
        if is_language_model(self._config) and not is_language_model({**self._config, **self._changes}):
            left_out = self._drop_heads(gathers)
        touched = {*self._replaced.touched, *self._sums}
        untied, changes, notes = self._ties.settle(gathers, touched, self._same, keeps=self._keeps_tied)
        self._changes |= changes
        self._notes += notes
        head = self._names.find("lm_head.weight")  # whatever the hub calls it
        self._changes.update(vocabulary_changes(self._base, gathers, self._config, head))
        unchanged = all(idle for _, idle in self._adapters)
        idle = [adapter.name for adapter, idle in self._adapters if idle]
        if idle:
            text = f"folding {shown(idle)} changes no tensor{': the result is the base' if unchanged else ''}"
            self._notes.append(Note("warning", text))
        files = [file for adapter, _ in self._adapters for file in adapter.files]
        checkpoint = self._checkpoint.with_gathers(gathers, *self._notes, left_out=left_out)
        still = {name: why for name, why in checkpoint.left_out.items() if name not in gathers}
        checkpoint = replace(checkpoint, files=(*checkpoint.files, *files), left_out=still)
        new = {name: adapter for name, (_, adapter) in self._replaced.whole.items() if name not in self._base}
        return Folded(checkpoint, self._changes, unchanged, new, untied)

    # --------------------------------------------------------------------------------- products

    def _deltas(self, parts: Parts, settings: Settings) -> Iterator[tuple[Module, list[tuple[Slot, Delta]]]]:
        """Each module with what it adds and where; nothing for a module that the base has not."""
        orientation = Orientation(settings, self._config)
        wrapped: dict[str, list[Module]] = defaultdict(list)
        plain: list[tuple[Module, str]] = []
        for module in parts.modules:
            target = None if module.inside else self._names.find(f"{module.name}.weight")
            if target is None:
                wrapped[module.name].append(module)
            else:
                plain.append((module, target))
        orientation.learn((module, self._replaced.shape(target)) for module, target in plain)
        for module, target in plain:
            shape = self._replaced.shape(target)
            parameter = f"{module.name}.weight"
            named = any(f".{parameter}".endswith(f".{each}") for each in settings.targeted.parameters)
            # PEFT adds to a parameter as it lies, whatever layer it is of
            layer = len(shape) == 2 and not module.embedding and not named
            transposed = layer and orientation.transposed(module, shape)
            delta = delta_of(
                module, settings, shape, transposed=transposed, name=parameter if named else module.name
            )
            yield module, [(Slot(target), delta), *self._bias(module, settings)]
        for modules in wrapped.values():
            linear = self._experts.of_linear(modules[0], settings) if len(modules) == 1 else None
            if linear is not None:
                yield modules[0], [linear]
                continue
            found = list(self._experts.of_parameters(modules, settings))
            yield from found or [(module, []) for module in modules]

    def _bias(self, module: Module, settings: Settings) -> list[tuple[Slot, Delta]]:
        if module.bias is None:
            return []
        target = self._names.find(f"{module.name}.bias")
        if target is None:
            raise InconsistentCheckpoint(
                f"{settings.name}: lora_bias of {module.name}, which has no bias in the base to add it to",
                GIVE_ITS_BASE,
            )
        return [(Slot(target), bias_delta(module, settings, self._base[target].shape))]

    def _add_delta(self, slot: Slot, delta: Delta, weight: float, settings: Settings) -> None:
        base = self._base[slot.name]
        if base.dtype.name not in FLOATS:
            raise quantised(settings, slot.name, base)
        found = self._sums[slot.name][slot]
        lengths = delta.magnitude is not None or found.magnitude is not None
        if lengths and (found.terms or weight != 1):
            raise UnsupportedCheckpoint(
                f"{settings.name}: {slot.name} is scaled by DoRA, which adds up with no other adapter and has"
                " no weight but 1",
                "fold one adapter into the result of the other, in the order that is meant",
            )
        term = delta.term
        found.terms.append(Term(term.left, term.right, weight * term.scale))
        found.magnitude, found.columns = delta.magnitude, delta.columns

    # ----------------------------------------------------------------------------------- results

    def _result(self, name: str) -> Gather:
        slots = self._sums.get(name, {})
        if not slots:
            return self._replaced.result(name, summed=False)
        rows = name in self._replaced.rows
        base = self._replaced.result(name, summed=True) if rows else self._replaced.value(name)
        kind = self._wanted.of(name, self._base.get(name, base).dtype)
        if Slot(name) in slots:
            matrix = base.view((base.shape[0], base.numel // max(1, base.shape[0])))
            return added(matrix, slots[Slot(name)], name, kind).view(base.shape)
        matrices = {}
        for slot, each in slots.items():
            assert slot.expert is not None
            matrix = base.select(0, slot.expert).narrow(0, slot.start, slot.size)
            matrices[slot] = added(matrix, each, name, kind)
        return assembled(cast(base, kind, name), matrices)

    def _same(self, one: str, other: str) -> bool:
        """Whether the same is done to both tensors."""
        sums = [self._sums.get(name, {}).get(Slot(name), Sum()) for name in (one, other)]
        return self._replaced.same(one, other) and same(*sums)

    def _drop_heads(self, gathers: dict[str, Gather]) -> dict[str, str]:
        """Leave out what is the head of a language model, which the result is no more; with the reason."""
        there = [name for name in gathers if ends_with(name, HEADS)]
        for name in there:
            del gathers[name]
        return {
            name: f"{self._changes['architectures'][0]} has no such head"
            for name in there
            if name in self._checkpoint.gathers
        }

    def _refuse(self, adapter: Adapter, unmatched: list[str]) -> None:
        name = unmatched[0]
        plain = name.removeprefix("base_model.model.").partition(".lora_")[0]
        weight = f"{plain}.weight" if ".lora_" in name else plain
        if self._names.is_relaid(weight):
            raise UnsupportedCheckpoint(
                f"{adapter.name}: {name} is for {weight}, whose elements lie otherwise on the hub",
                "merge it with PEFT's merge_and_unload",
            )
        nearest = self._names.nearest(weight)
        raise InconsistentCheckpoint(
            f"{adapter.name}: {len(unmatched)} of {len(adapter.gathers)} tensors match nothing in the base:"
            f" {shown(unmatched)}; nearest there: {', '.join(nearest)}",
            GIVE_ITS_BASE,
        )
