"""A family's rules, compiled: which rule a name belongs to is found with one look-up.

A name's key is the name with its numbers taken out ("decoder.layers.{}.mlp.experts.local_experts.{}..."),
so that the rules that can fit are few, however many layers and experts there are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lazymerge.conversions.megatron.family import Layout, Rule

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_PLACEHOLDER = re.compile(r"\{([A-Z])\}")


@dataclass(frozen=True, slots=True)
class CompiledRule:
    """A rule for weights or for biases, with its place in the table.

    `kept` are the placeholders that the Hugging Face names have, in their order; `collected` is the one
    that only the Megatron names have ("" where there is none).
    """

    index: int
    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout | None
    dropped: str
    kept: tuple[str, ...]
    collected: str


@dataclass(frozen=True, slots=True)
class Match:
    """A name that fits a rule: which of its Megatron names it is, and the numbers in it."""

    rule: CompiledRule
    position: int
    numbers: Mapping[str, int]

    def filled(self, template: str, layers: int) -> str:
        """A name of the rule with this match's numbers put in; `layers` are the decoder's."""
        if "{M}" in template:
            return template.format(M=layers + self.numbers["K"], **self.numbers)
        return template.format_map(self.numbers)


class Table:
    """The rules of a family, by the names of Megatron."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._by_key: dict[str, list[tuple[CompiledRule, int, tuple[str, ...]]]] = {}
        for index, rule in enumerate(_expanded(rules)):
            compiled = _compiled(index, rule)
            for position, name in enumerate(compiled.megatron):
                key, slots = _key_of_template(name)
                self._by_key.setdefault(key, []).append((compiled, position, slots))

    def find(self, name: str) -> Match | None:
        """The first rule that the name fits; None if it fits none."""
        key, numbers = _key_of(name)
        for rule, position, slots in self._by_key.get(key, ()):
            bound = _bound(slots, numbers)
            if bound is not None:
                return Match(rule, position, bound)
        return None

    def nearest(self, name: str, count: int = 3) -> list[str]:
        """Known names that look like this one, its numbers put in."""
        key, numbers = _key_of(name)
        known: dict[str, str] = {}
        for other, entries in self._by_key.items():
            slots = entries[0][2]
            fill = iter([*numbers, *["0"] * len(slots)])
            filled = [next(fill) if slot.startswith("{") else slot for slot in slots]
            known[other] = other.replace("{}", "%s") % tuple(filled)
        return [known[other] for other in difflib.get_close_matches(key, known, count, cutoff=0.4)]


def _expanded(rules: tuple[Rule, ...]) -> Iterator[Rule]:
    """The rules with ``{p}`` written out."""
    for rule in rules:
        names = (*as_tuple(rule.megatron), *as_tuple(rule.hf))
        if not any("{p}" in name for name in names):
            yield rule
            continue
        for kind in ("weight", "bias"):
            yield Rule(
                tuple(name.replace("{p}", kind) for name in as_tuple(rule.megatron)),
                tuple(name.replace("{p}", kind) for name in as_tuple(rule.hf)),
                rule.layout,
                rule.dropped,
            )


def as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """A rule's names, one or several."""
    return (names,) if isinstance(names, str) else names


def _compiled(index: int, rule: Rule) -> CompiledRule:
    megatron, hf = as_tuple(rule.megatron), as_tuple(rule.hf)
    strange = [name for name in (*megatron, *hf) if set("{}") & set(_PLACEHOLDER.sub("", name))]
    if strange:
        raise ValueError(f"{strange[0]}: a placeholder is one letter in braces, or {{p}}")
    if not hf and not rule.dropped:
        raise ValueError(f"the rule of {megatron} has no name for the result, and no reason in `dropped`")
    ours = _placeholders(megatron)
    theirs = ["K" if name == "M" else name for name in _placeholders(hf)]
    kept = tuple(name for name in ours if name in theirs or rule.dropped)
    collected = [name for name in ours if name not in kept]
    if len(collected) > 1 or any(name not in ours for name in theirs):
        raise ValueError(f"the rule {megatron} -> {hf}: its placeholders do not go together")
    return CompiledRule(index, megatron, hf, rule.layout, rule.dropped, kept, "".join(collected))


def _placeholders(names: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(found for name in names for found in _PLACEHOLDER.findall(name)))


def _key_of(name: str) -> tuple[str, list[str]]:
    """The name with its numbers taken out, and the numbers."""
    parts = name.split(".")
    numbers = []
    for at, part in enumerate(parts):
        if part[:1].isdigit() and _NUMBER.fullmatch(part):
            numbers.append(part)
            parts[at] = "{}"
    return ".".join(parts), numbers


def _key_of_template(name: str) -> tuple[str, tuple[str, ...]]:
    """The same of a rule's name; in place of numbers its placeholders, or numbers that it asks for."""
    parts = name.split(".")
    is_slot = [bool(_NUMBER.fullmatch(part) or _PLACEHOLDER.fullmatch(part)) for part in parts]
    slots = tuple(part for part, slot in zip(parts, is_slot, strict=True) if slot)
    return ".".join("{}" if slot else part for part, slot in zip(parts, is_slot, strict=True)), slots


def _bound(slots: tuple[str, ...], numbers: list[str]) -> dict[str, int] | None:
    """The numbers by placeholder; None if the rule asks for other ones."""
    bound: dict[str, int] = {}
    for slot, number in zip(slots, numbers, strict=True):
        if slot.startswith("{"):
            if bound.setdefault(slot[1:-1], int(number)) != int(number):
                return None
        elif slot != number:
            return None
    return bound
