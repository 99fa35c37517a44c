"""Which single value of config.json would make its model fit a checkpoint, found by trying.

A field is changed once to see which of the wrong sizes depend on it; from how far they moved follows
the value that would give the sizes that were found, and the model is built with it to see that it does.
Sizes are mostly linear in a field, and some in its inverse (heads that share a hidden size).
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from lazymerge.conversions.architecture import Architecture, Differences, Shape, differences

Build = Callable[[Mapping[str, Any]], "Architecture | None"]
Path = tuple[str, ...]

SECONDS = 15
"""Of processor time for all trials; what was found by then is told."""

_LIKELY = (
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_hidden_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "hidden_size",
    "tie_word_embeddings",
    "attention_bias",
    "num_labels",
)
_SIZE = re.compile("head|dim|size|rank|layer|expert|depth|hidden")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LARGEST = 1 << 32
_MOST_CANDIDATES = 12


def explain(
    architecture: Architecture, settings: Mapping[str, Any], found: Mapping[str, Shape], build: Build
) -> list[list[dict[str, Any]]]:
    """The values that would fit: ``{"field", "is", "fits"}``, alternatives in a list of their own.

    `settings` is the config with the defaults of its class, `found` the checkpoint's shapes. The first
    list explains the most; another is there for tensors which the first leaves wrong.
    """
    before = differences(found, architecture)
    wrong = before.wrong
    deadline = time.process_time() + SECONDS
    trials: list[tuple[frozenset[str], dict[str, Any]]] = []
    explained: frozenset[str] = frozenset()
    for path, value in _fields({**architecture.config, **settings}):
        if time.process_time() > deadline:
            break
        if explained == wrong and path[-1] not in _LIKELY and not _SIZE.search(path[-1]):
            continue
        for candidate in _candidates(architecture, path, value, found, build):
            built = build(_changed(architecture.config, path, candidate))
            after = before if built is None else differences(found, built)
            if built is None or not after.wrong < wrong or not _outside(after) <= _outside(before):
                continue
            if _has_others(found, architecture, built):
                mended = wrong - after.wrong
                explained |= mended
                trials.append((mended, {"field": ".".join(path), "is": value, "fits": candidate}))
                break
    return _cover(trials)


def _outside(found: Differences) -> set[str]:
    """Tensors that no part of the model takes: to move more there would mend nothing."""
    return {*found.unknown, *found.ignored}


def _has_others(found: Mapping[str, Shape], architecture: Architecture, built: Architecture) -> bool:
    """Whether, of what a lower count drops, the checkpoint has those that stay, such as other layers.

    It has none where names differ altogether; then a lower count only asks for less.
    """
    kinds = {_NUMBER.sub("N", name) for name in architecture.shapes.keys() - built.shapes.keys()}
    others = [name for name in built.shapes if _NUMBER.sub("N", name) in kinds]
    return not others or any(name in found for name in others)


def _cover(trials: list[tuple[frozenset[str], dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The trials that mend most first, those that mend the same together, without those that add nothing."""
    groups: dict[frozenset[str], list[dict[str, Any]]] = {}
    for mended, trial in trials:
        groups.setdefault(mended, []).append(trial)
    chosen = []
    done: frozenset[str] = frozenset()
    for mended in sorted(groups, key=len, reverse=True):
        if not mended <= done:
            done |= mended
            chosen.append(groups[mended])
    return chosen


def _fields(settings: Mapping[str, Any], front: Path = ()) -> list[tuple[Path, int]]:
    """Whole numbers and flags, the likely ones first; no token's number, which is no size."""
    fields: list[tuple[Path, int]] = []
    for key, value in settings.items():
        if isinstance(value, dict) and not key.endswith(("2label", "2id")):
            fields += _fields(value, (*front, key))
        elif isinstance(value, int) and not re.search(r"(_id|_index)$", key):
            fields.append(((*front, key), value))
    order = {name: at for at, name in enumerate(_LIKELY)}
    return sorted(fields, key=lambda field: order.get(field[0][-1], len(order)))


def _candidates(
    architecture: Architecture, path: Path, value: int, found: Mapping[str, Shape], build: Build
) -> list[int]:
    """Values of a field that might give what was found; none if nothing that is wrong depends on it.

    Flags apart they are at least 1: a model without layers or heads lacks nothing, and is none.
    """
    if isinstance(value, bool):
        return [not value]
    for other in (2 * value or 1, value // 2, value + 1):
        moved = build(_changed(architecture.config, path, other)) if other != value else None
        if moved is not None:
            solved = _solved(architecture, moved, value, other, found)
            whole = dict.fromkeys(int(each) for each in solved if each.denominator == 1)
            return [each for each in whole if 1 <= each < _LARGEST and each != value][:_MOST_CANDIDATES]
    return []


def _solved(
    architecture: Architecture, moved: Architecture, value: int, other: int, found: Mapping[str, Shape]
) -> Iterator[Fraction]:
    """What the field would have to be, by each of the sizes that moved with it."""
    for name in differences(found, architecture).misshapen:
        sizes = (found[name], architecture.shapes[name], moved.shapes.get(name, ()))
        if len({len(shape) for shape in sizes}) > 1:
            continue
        for is_, was, now in zip(*sizes, strict=True):
            if now != was and is_ != was:
                yield value + Fraction((is_ - was) * (other - value), now - was)
                if is_:
                    yield Fraction(value * was, is_)
    if architecture.shapes.keys() != moved.shapes.keys():
        yield from map(Fraction, [*sorted(_counts(found)), value - 1, value + 1])


def _counts(names: Mapping[str, Shape]) -> set[int]:
    """One more than the largest number at each place of the names: how many layers there are, and experts."""
    largest: dict[str, int] = {}
    for name in names:
        for match in re.finditer(r"\.(\d{1,9})(?=\.)", name):
            place = re.sub(r"\.\d+(?=\.|$)", ".N", name[: match.end()])
            largest[place] = max(largest.get(place, 0), int(match[1]))
    return {number + 1 for number in largest.values()}


def _changed(config: Mapping[str, Any], path: Path, value: int) -> dict[str, Any]:
    """The config with another value, and without the lists that had an entry for each of the old one."""
    changed = copy.deepcopy(dict(config))
    inner = changed
    for key in path[:-1]:
        if not isinstance(inner.get(key), dict):
            inner[key] = {}
        inner = inner[key]
    old = inner.get(path[-1])
    for key, entries in list(inner.items()):
        if isinstance(entries, list) and key != "architectures" and len(entries) == old and old > 1:
            del inner[key]
    inner[path[-1]] = value
    return changed
