"""Whether all layers, experts and blocks of the vision tower are there: as many as config.json says."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from lazymerge.conversions.megatron.family import Config, positive
from lazymerge.conversions.megatron.table import Match
from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint


class _Numbered(NamedTuple):
    """What a placeholder numbers, how many there should be (None: not known) and which field says so."""

    what: str
    expected: int | None
    field: str


def check_blocks(matches: Mapping[str, Match], config: Config, by_hand: Mapping[str, Match]) -> None:
    """Decoder layers, and MTP layers and vision blocks if there are any, are numbered 0 to n - 1.

    `by_hand` are the rules of tensors that a mapping has named: they are not missing, and never too many.
    Raises `IncompleteCheckpoint` for missing ones and `InconsistentCheckpoint` for surplus ones.
    """
    present: dict[str, set[int]] = {"L": set()}
    for match in matches.values():
        for placeholder, number in match.numbers.items():
            if placeholder != "E":
                present.setdefault(placeholder, set()).add(number)
    merged = config.vision.get("deepstack_visual_indexes")
    numbered = {
        "L": _Numbered("decoder layers", config.layers, "num_hidden_layers"),
        "N": _Numbered("vision blocks", positive(config.vision, "depth"), "vision_config.depth"),
        "D": _Numbered(
            "deepstack mergers",
            len(merged) if isinstance(merged, list) else None,
            "vision_config.deepstack_visual_indexes",
        ),
    }
    if "K" in present:
        numbered["K"] = _Numbered("MTP layers", _mtp_layers(config), "num_nextn_predict_layers")
    for placeholder, numbers in present.items():
        if placeholder in numbered:
            mapped = {
                match.numbers[placeholder] for match in by_hand.values() if placeholder in match.numbers
            }
            _check(numbers, numbered[placeholder], "", mapped)


def lacking_of_layers(matches: Iterable[Match], made: Container[str]) -> str | None:
    """What to say of a layer that has only a part of what another one has; None if there is none.

    `made` are the names that were written, by a rule of that layer alone or a mapping too. Layers of
    different kinds (dense and experts, attention and delta net) have each something of their own.
    """
    layers: dict[int, set[str]] = {}
    for match in matches:
        if "L" in match.numbers:
            layers.setdefault(match.numbers["L"], set()).update(match.rule.hf)
    kinds: dict[frozenset[str], int] = {}
    for layer, has in layers.items():
        kinds.setdefault(frozenset(has), layer)
    for names, layer in kinds.items():
        for more, other in kinds.items():
            if names < more:
                others = (
                    name.replace("{L}", str(layer)).replace("{E}", "0") for name in sorted(more - names)
                )
                lost = next((name for name in others if name not in made), None)
                if lost is not None:
                    return f"{lost} is not in the checkpoint, though layer {other} has its own"
    return None


def check_experts(matches: Mapping[str, Match], config: Config, by_hand: Mapping[str, Match]) -> None:
    """Every layer that has experts has all, for each of their tensors, numbered 0 to n - 1.

    `by_hand` as `check_blocks` has it; but what is put together out of all experts needs all of them.
    """
    groups = _expert_groups(matches)
    mapped = _expert_groups({name: each for name, each in by_hand.items() if not each.rule.collected})
    if not groups:
        return
    if config.experts is None:
        first = next(iter(next(iter(groups.values())).values()))
        raise InconsistentCheckpoint(
            f"{first}: an expert, but config.json has no num_experts, n_routed_experts or num_local_experts",
            "config.json is that of a dense model; give the right one by --hf-config",
        )
    numbered = _Numbered("experts", config.experts, "the number of experts")
    for key, experts in groups.items():
        _check(experts, numbered, f"{next(iter(experts.values()))}: ", mapped.get(key, ()))


def _expert_groups(matches: Mapping[str, Match]) -> dict[tuple[Any, ...], dict[int, str]]:
    """The experts' names by number, of each tensor of each layer."""
    groups: dict[tuple[Any, ...], dict[int, str]] = {}
    for name, match in matches.items():
        numbers = dict(match.numbers)
        expert = numbers.pop("E", None)
        if expert is not None:
            key = (match.rule.index, match.position, tuple(numbers.items()))
            groups.setdefault(key, {})[expert] = name
    return groups


def _mtp_layers(config: Config) -> int | None:
    """How many MTP layers the config has; None where it does not say."""
    value = config.hf.get("num_nextn_predict_layers")
    return 0 if value == 0 else positive(config.hf, "num_nextn_predict_layers")


def _check(present: Iterable[int], numbered: _Numbered, where: str, by_hand: Iterable[int]) -> None:
    numbers = {*present, *(each for each in by_hand if numbered.expected is None or each < numbered.expected)}
    count = len(numbers) if numbered.expected is None else numbered.expected
    surplus = sorted(number for number in numbers if number >= count)
    missing = [number for number in range(min(count, len(numbers) + 5)) if number not in numbers]
    if not surplus and not missing:
        return
    said = "no gap" if numbered.expected is None else f"{count} by {numbered.field} of config.json"
    found = f"{where}{len(numbers)} {numbered.what}, expected {said}"
    if surplus and (not missing or numbered.expected is not None):
        gap = f", and number {missing[0]} is missing" if missing else ""
        raise InconsistentCheckpoint(
            f"{found}; number {surplus[0]} is too many{gap}",
            f"check {numbered.field} in config.json (--hf-config DIR gives another)",
        )
    raise IncompleteCheckpoint(
        f"{found}; missing {', '.join(map(str, missing[:5]))}{', ...' if len(missing) > 5 else ''}",
        "files of the checkpoint are missing, or config.json is another model's",
    )
