"""Folding: adapters added to their base, in the pass that writes it.

    float32(W) + sum over adapters of weight * scale * (B @ A), rounded once to the type of W

An adapter's tensor either adds to one of the base or takes its place (a trained bias, a module that was saved
whole), or is a new one (a head). Every one of them has a use, or folding is refused; what the config has to
say otherwise is told.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.adapters.adapter import Adapter
from lazymerge.conversions.adapters.experts import Experts, Slot, assembled
from lazymerge.conversions.adapters.linear import Delta, Orientation, bias_delta, delta_of, shown
from lazymerge.conversions.adapters.names import BaseNames
from lazymerge.conversions.adapters.parts import Module, Parts, Whole, take_apart
from lazymerge.conversions.adapters.settings import Settings, understand
from lazymerge.conversions.adapters.unchanged import changes_nothing
from lazymerge.conversions.adapters.vocabulary import (
    embedding_of,
    ends_with,
    head_changes,
    is_language_model,
    may_grow,
    tied_head,
    untied,
    vocabulary_changes,
)
from lazymerge.conversions.dtypes import cast
from lazymerge.conversions.tying import HEADS
from lazymerge.errors import InconsistentCheckpoint, PlanError, UnsupportedCheckpoint
from lazymerge.fill import equal
from lazymerge.gather import Gather, cat
from lazymerge.lowrank import FLOATS, Term, add_products

_GIVE_ITS_BASE = "give the base that the adapter was trained on"


@dataclass(frozen=True, slots=True)
class Folded:
    """The base with the adapters in it, and the fields that its config.json has to have instead.

    `unchanged` says that no tensor differs from the base's, whatever it was meant to do: the matrices are
    zero, or the weight is. A note in the checkpoint says so too.
    """

    checkpoint: Checkpoint
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    unchanged: bool = False


def fold(
    checkpoint: Checkpoint, adapters: Sequence[tuple[Adapter, float]], config: Mapping[str, Any] | None
) -> Folded:
    """The checkpoint, under the hub's names, with each adapter times its weight added to it.

    `config` is the base's config.json. Nothing but small tensors is read. Raises `UnsupportedCheckpoint` for
    kinds that are not folded, `InconsistentCheckpoint` for adapters that are not of this base or contradict
    their config, and `PlanError` for weights that mean nothing.
    """
    work = _Work(checkpoint, config or {})
    for adapter, weight in adapters:
        work.add(adapter, weight)
    return work.folded()


@dataclass(slots=True)
class _Sum:
    """What is added to one matrix, in the order of the adapters."""

    terms: list[Term] = field(default_factory=list)
    magnitude: Gather | None = None
    columns: bool = False


class _Work:
    """What has been found to be added to, and put in place of, the tensors of a base."""

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._base = dict(checkpoint.gathers)
        self._names = BaseNames(self._base)
        self._embedding = embedding_of(self._base)
        self._head = tied_head(self._base, config) if is_language_model(config) else None
        self._head_is_there = self._head in self._base
        if self._head is not None and self._embedding is not None and not self._head_is_there:
            self._base[self._head] = self._base[self._embedding]
            self._names.add(self._head)
        self._experts = Experts(self._base, self._names, config.get("model_type"))
        self._sums: dict[str, dict[Slot, _Sum]] = defaultdict(lambda: defaultdict(_Sum))  # by tensor
        self._whole: dict[str, tuple[Gather, str]] = {}  # and the adapter that it is of
        self._rows: dict[str, tuple[Gather, tuple[int, ...]]] = {}
        self._keeps_tied = False
        self._changes: dict[str, Any] = {}
        self._notes: list[Note] = []
        self._adapters: list[Adapter] = []

    def add(self, adapter: Adapter, weight: float) -> None:
        """Take in one adapter."""
        if not math.isfinite(weight):
            raise PlanError(f"{adapter.name}: a weight of {weight}", "give it a number")
        settings, parts = understand(adapter), take_apart(adapter)
        unmatched: list[str] = []
        self._keeps_tied |= settings.keeps_tied
        for name, whole in parts.whole.items():
            if not self._put(name, whole, settings, weight):
                unmatched.append(whole.name)
        for name, rows in parts.tokens.items():
            if not self._put_rows(name, rows, settings, weight):
                unmatched.append(f"{name}.token_adapter.trainable_tokens_delta")
        own: set[Slot] = set()
        for module, found in self._deltas(parts, settings):
            if not found:
                unmatched += module.names
            for slot, delta in found:
                if slot in own:
                    raise InconsistentCheckpoint(
                        f"{adapter.name}: {module.name} and another of its modules both mean {slot.name}",
                        _GIVE_ITS_BASE,
                    )
                own.add(slot)
                self._add_delta(slot, delta, weight, settings)
        if unmatched:
            self._refuse(adapter, unmatched)
        shapes = {name: whole.gather.shape for name, whole in parts.whole.items()}
        self._changes.update(head_changes(shapes, settings, self._config))
        self._adapters.append(adapter)

    def folded(self) -> Folded:
        """The base with everything in it that was taken in."""
        gathers = {name: self._result(name) for name in self._base}
        gathers.update({name: gather for name, (gather, _) in self._whole.items() if name not in gathers})
        left_out: dict[str, str] = {}
        if is_language_model(self._config) and not is_language_model({**self._config, **self._changes}):
            left_out = self._drop_heads(gathers)
        elif self._head is not None and self._embedding is not None:
            self._settle_head(self._head, self._embedding, gathers)
        self._changes.update(vocabulary_changes(self._base, gathers, self._config))
        sums = [each for slots in self._sums.values() for each in slots.values()]
        unchanged = changes_nothing(
            [term for each in sums for term in each.terms],
            any(each.magnitude is not None for each in sums),
            [(self._base.get(name), gathers.get(name)) for name in [*self._whole, *self._rows]],
        )
        if unchanged:
            text = (
                f"folding {shown([adapter.name for adapter in self._adapters])} changes no tensor: the result"
                " is the base"
            )
            self._notes.append(Note("warning", text))
        files = [file for adapter in self._adapters for file in adapter.files]
        checkpoint = self._checkpoint.with_gathers(gathers, *self._notes, left_out=left_out)
        checkpoint = replace(checkpoint, files=(*checkpoint.files, *files))
        return Folded(checkpoint, self._changes, unchanged)

    # ------------------------------------------------------------------- whole tensors, and rows

    def _put(self, name: str, whole: Whole, settings: Settings, weight: float) -> bool:
        """Put a whole tensor in the base's place; False if the base has none, and it is no new module."""
        target = self._names.find(name)
        if target is None:
            if not settings.is_saved_whole(name.rpartition(".")[0]):
                return False
            self._refuse_shared(name, settings, weight)
            self._whole[name] = whole.gather, settings.name
            return True
        base = self._base[target]
        gather = whole.gather
        if gather.shape != base.shape and (
            gather.shape[1:] != base.shape[1:] or len(gather.shape) < 1 or not may_grow(target, settings)
        ):
            raise InconsistentCheckpoint(
                f"{settings.name}: {whole.name} has shape {gather.shape}, the base's {target} {base.shape}",
                _GIVE_ITS_BASE,
            )
        if gather.dtype is not base.dtype:
            if base.dtype.name not in FLOATS:
                raise _quantised(settings, target, base)
            gather = cast(gather, base.dtype, target)
        if gather.shape == base.shape and equal(gather, base):
            return True  # a layer that was saved and not trained
        self._refuse_shared(target, settings, weight)
        self._whole[target] = gather, settings.name
        return True

    def _refuse_shared(self, target: str, settings: Settings, weight: float) -> None:
        """Refuse what would be a mixture of tensors that were trained whole."""
        if weight != 1:
            raise PlanError(
                f"{settings.name}: a weight of {weight:g} for {target}, which was saved whole and takes the"
                " base's place",
                "give it the weight 1",
            )
        if target in self._whole or target in self._rows:
            raise PlanError(
                f"{settings.name}: {target} was saved whole by another adapter too",
                "fold one of the two only",
            )

    def _put_rows(self, module: str, rows: Gather, settings: Settings, weight: float) -> bool:
        target = self._names.find(f"{module}.weight")
        if target is None:
            return False
        tokens = settings.tokens
        if isinstance(tokens, Mapping):
            tokens = next((each for key, each in tokens.items() if f".{module}".endswith(f".{key}")), None)
        shape = self._base[target].shape
        count = self._whole[target][0].shape[0] if target in self._whole else shape[0]
        if tokens is None or rows.shape != (len(tokens), *shape[1:]) or any(each >= count for each in tokens):
            raise InconsistentCheckpoint(
                f"{settings.name}: rows of shape {rows.shape} for the {len(tokens or ())} tokens of"
                f" trainable_token_indices in {target} {shape}",
                _GIVE_ITS_BASE,
            )
        for name in self._tied_with(target):
            if name not in self._whole:
                self._refuse_shared(name, settings, weight)
            self._rows[name] = cast(rows, self._base[name].dtype, name), tokens
        return True

    def _tied_with(self, target: str) -> list[str]:
        """The tensor, and the one that it is tied to: PEFT trains the rows of both as one."""
        pair = [self._embedding, self._head] if self._head is not None else []
        return [name for name in pair if name is not None] if target in pair else [target]

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
        orientation.learn((module, self._shape(target)) for module, target in plain)
        for module, target in plain:
            shape = self._shape(target)
            transposed = (
                orientation.transposed(module, shape) if len(shape) == 2 and not module.embedding else False
            )
            parameter = f"{module.name}.weight"
            named = any(f".{parameter}".endswith(f".{each}") for each in settings.target_parameters)
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
                _GIVE_ITS_BASE,
            )
        return [(Slot(target), bias_delta(module, settings, self._base[target].shape))]

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that products are added to: perhaps one that takes the base's place."""
        return self._whole[name][0].shape if name in self._whole else self._base[name].shape

    def _add_delta(self, slot: Slot, delta: Delta, weight: float, settings: Settings) -> None:
        base = self._base[slot.name]
        if base.dtype.name not in FLOATS:
            raise _quantised(settings, slot.name, base)
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
        base = self._whole[name][0] if name in self._whole else self._base[name]
        if name in self._rows:
            base = _with_rows(base, *self._rows[name])
        slots = self._sums.get(name, {})
        if not slots:
            return base
        if Slot(name) in slots:
            matrix = base.view((base.shape[0], base.numel // max(1, base.shape[0])))
            return _added(matrix, slots[Slot(name)], name).view(base.shape)
        matrices = {}
        for slot, each in slots.items():
            assert slot.expert is not None
            matrix = base.select(0, slot.expert).narrow(0, slot.start, slot.size)
            matrices[slot] = _added(matrix, each, name)
        return assembled(base, matrices)

    def _settle_head(self, head: str, embedding: str, gathers: dict[str, Gather]) -> None:
        """Keep a head that is tied to the embedding so, or say that it is so no more."""
        touched = {name for name in (head, embedding) if self._touches(name)}
        as_one = self._same(head, embedding) or (self._keeps_tied and head not in touched)
        if touched and not as_one:
            self._changes.update(untied(self._config))
            text = (
                f"{head} and {embedding} are tied in the base, the adapter is for"
                f" {' and '.join(sorted(touched))}: both are written, and tied no more"
            )
            self._notes.append(Note("warning", text, head))
        elif not self._head_is_there:
            del gathers[head]
        elif touched:
            gathers[head] = gathers[embedding]

    def _touches(self, name: str) -> bool:
        return name in self._whole or name in self._rows or name in self._sums

    def _same(self, one: str, other: str) -> bool:
        """Whether the same is done to both tensors."""
        if (one in self._rows) != (other in self._rows) or (one in self._whole) != (other in self._whole):
            return False
        if one in self._whole and not _equal(self._whole[one][0], self._whole[other][0]):
            return False
        sums = [self._sums.get(name, {}).get(Slot(name), _Sum()) for name in (one, other)]
        terms = [each.terms for each in sums]
        return (
            len(terms[0]) == len(terms[1])
            and all(each.magnitude is None for each in sums)
            and all(
                first.scale == second.scale and all(map(_equal, first.operands, second.operands))
                for first, second in zip(*terms, strict=True)
            )
        )

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
        nearest = self._names.nearest(f"{plain}.weight" if ".lora_" in name else plain)
        raise InconsistentCheckpoint(
            f"{adapter.name}: {len(unmatched)} of {len(adapter.gathers)} tensors match nothing in the base:"
            f" {shown(unmatched)}; nearest there: {', '.join(nearest)}",
            _GIVE_ITS_BASE,
        )


def _equal(one: Gather, other: Gather) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype and equal(one, other)


def _added(matrix: Gather, sums: _Sum, name: str) -> Gather:
    return add_products(matrix, sums.terms, name, sums.magnitude, columns=sums.columns)


def _with_rows(base: Gather, rows: Gather, tokens: tuple[int, ...]) -> Gather:
    """The base with other rows for these tokens."""
    parts, at = [], 0
    for token, index in sorted((token, index) for index, token in enumerate(tokens)):
        parts += [base.narrow(0, at, token - at), rows.narrow(0, index, 1)]
        at = token + 1
    return cat([*parts, base.narrow(0, at, base.shape[0] - at)], 0)


def _quantised(settings: Settings, name: str, base: Gather) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{settings.name}: {name} of the base is of {base.dtype}, to which nothing can be added",
        "give the base that is not quantised",
    )
