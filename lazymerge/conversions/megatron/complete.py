"""Whether all layers, experts and blocks of the vision tower are there: as many as config.json says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lazymerge.conversions.megatron.family import Config, positive
from lazymerge.conversions.megatron.table import Match
from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint


class _Numbered(NamedTuple):
    """What a placeholder numbers, how many there should be (None: not known) and which field says so."""

    what: str
    expected: int | None
    field: str


def check_blocks(matches: Mapping[str, Match], config: Config) -> None:
    """Decoder layers, and MTP layers and vision blocks if there are any, are numbered 0 to n - 1.

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
            _check(numbers, numbered[placeholder], "")


def lacking_of_layers(matches: Iterable[Match]) -> str | None:
    """What to say of a layer that has only a part of what another one has; None if there is none.

    Layers of different kinds (dense and experts, attention and delta net) have each something of their own.
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
                lost = sorted(more - names)[0].replace("{L}", str(layer))
                return f"{lost} is not in the checkpoint, though layer {other} has its own"
    return None


def check_experts(matches: Mapping[str, Match], config: Config) -> None:
    """Every layer that has experts has all, for each of their tensors, numbered 0 to n - 1."""
    groups: dict[tuple[int, int, tuple[tuple[str, int], ...]], dict[int, str]] = {}
    for name, match in matches.items():
        numbers = dict(match.numbers)
        expert = numbers.pop("E", None)
        if expert is not None:
            key = (match.rule.index, match.position, tuple(numbers.items()))
            groups.setdefault(key, {})[expert] = name
    if not groups:
        return
    if config.experts is None:
        first = next(iter(next(iter(groups.values())).values()))
        raise InconsistentCheckpoint(
            f"{first}: an expert, but config.json has no num_experts, n_routed_experts or num_local_experts",
            "config.json is that of a dense model; give the right one by --hf-config",
        )
    numbered = _Numbered("experts", config.experts, "the number of experts")
    for experts in groups.values():
        _check(experts, numbered, f"{next(iter(experts.values()))}: ")


def _mtp_layers(config: Config) -> int | None:
    """How many MTP layers the config has; None where it does not say."""
    value = config.hf.get("num_nextn_predict_layers")
    return 0 if value == 0 else positive(config.hf, "num_nextn_predict_layers")


def _check(present: Iterable[int], numbered: _Numbered, where: str) -> None:
    numbers = set(present)
    count = len(numbers) if numbered.expected is None else numbered.expected
    surplus = sorted(number for number in numbers if number >= count)
    missing = [number for number in range(min(count, len(numbers) + 5)) if number not in numbers]
    if not surplus and not missing:
        return
    said = "no gap" if numbered.expected is None else f"{count} by {numbered.field} of config.json"
    found = f"{where}{len(numbers)} {numbered.what}, expected {said}"
    if surplus and (not missing or numbered.expected is not None):
        raise InconsistentCheckpoint(
            f"{found}; number {surplus[0]} is too many",
            f"check {numbered.field} in config.json (--hf-config DIR gives another)",
        )
    raise IncompleteCheckpoint(
        f"{found}; missing {', '.join(map(str, missing[:5]))}{', ...' if len(missing) > 5 else ''}",
        "files of the checkpoint are missing, or config.json is another model's",
    )
