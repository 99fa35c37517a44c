"""One side of a comparison: a base model, and the LoRA adapters that it comes with.

    inside a trainer's checkpoint   under PEFT's names (lazymerge.conversions.adapters.trained_names)
    beside a model, or alone        DIR/lora_adapter/ or DIR itself, as PEFT saves adapters; those of other
                                    names in DIR/lora_adapter/NAME/

An adapter is compared by the names that its tensors have in PEFT's file, with ``lora_adapter/`` in place of
``base_model.model.``, and by its settings, as far as they are known: beside rank files verl keeps r, and
alpha without its fraction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Checkpoint
from lazymerge.comparison import SETTING, Difference
from lazymerge.conversions.adapters.adapter import CONFIG, WEIGHTS, Adapter
from lazymerge.conversions.adapters.names import BaseNames
from lazymerge.conversions.adapters.read import BIN, read_adapter
from lazymerge.conversions.adapters.trained import BASE, LoraOptions, split
from lazymerge.conversions.adapters.trained_names import WRAPPER
from lazymerge.conversions.adapters.trained_told import told
from lazymerge.errors import AmbiguousCheckpoint, PlanError
from lazymerge.gather import Gather
from lazymerge.prepare import ADAPTERS

_SETTINGS = (
    "r",
    "lora_alpha",
    "target_modules",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
)
"""Fields of adapter_config.json that decide what an adapter does, beside its tensors."""

_WHOLE = (".base_layer.", ".original_module.", ".modules_to_save.", ".token_adapter.")
"""What PEFT may put into the name of a base's tensor that it saves with an adapter."""


@dataclass(frozen=True, slots=True)
class Side:
    """A base, under its own names, and adapters: where they are below ``lora_adapter/`` -> adapter.

    The adapters' `config` has what is known of `_SETTINGS`; `rounded` says that alpha has lost its fraction.
    """

    base: Checkpoint
    adapters: Mapping[str, Adapter]
    rounded: bool = False


def taken_apart(checkpoint: Checkpoint) -> Side:
    """The checkpoint without LoRA, and the adapters in it, or else beside it.

    Raises `UnsupportedCheckpoint` for what PEFT has put into it and is not LoRA, and what reading raises.
    """
    parts = split(checkpoint, LoraOptions(BASE))
    folders = list(dict.fromkeys(file.path.parent for file in checkpoint.files)) or checkpoint.sidecars
    if not parts.adapters:
        return Side(parts.base, {at: each for folder in folders for at, each in adapters_in(folder).items()})
    names = tuple(adapter.name for adapter in parts.adapters)
    known = {
        each.folder: replace(each, config=_recorded(each.name, names, [*folders, *checkpoint.sidecars]))
        for each in parts.adapters
    }
    return Side(parts.base, known, rounded=True)


def adapters_in(folder: Path) -> dict[str, Adapter]:
    """The adapters that PEFT has saved in the folder or in its lora_adapter/: place -> adapter.

    Raises `AmbiguousCheckpoint` where there are some in both, and what `read_adapter` raises.
    """
    inner = folder / ADAPTERS
    if _is_adapter(folder) and _is_adapter(inner):
        raise AmbiguousCheckpoint(
            f"{folder}: has an adapter, and its {ADAPTERS} another one", "move one of them away"
        )
    places = {"": folder if _is_adapter(folder) else inner}
    if inner.is_dir():
        places |= {f"{path.name}/": path for path in sorted(inner.iterdir())}
    found = {at: read_adapter(path) for at, path in places.items() if _is_adapter(path)}
    return {
        at: replace(each, config={key: each.config.get(key) for key in _SETTINGS})
        for at, each in found.items()
    }


def _is_adapter(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, WEIGHTS, BIN))


def _recorded(adapter: str, adapters: tuple[str, ...], folders: Sequence[Path]) -> dict[str, Any]:
    """What is recorded beside a trainer's checkpoint; nothing where that is not enough to merge it."""
    try:
        known = told(adapter, adapters, folders, LoraOptions())
    except PlanError:
        return {}
    fields = {"r": known.rank, "lora_alpha": known.alpha}
    return {key: value for key, value in fields.items() if value is not None}


# ------------------------------------------------------------------------------------- comparing


def tensors(side: Side, other: Side) -> dict[str, Gather]:
    """The tensors of the adapters of a side, by the names under which they are compared with another's.

    PEFT saves some of the base's tensors with an adapter (embeddings, biases), or does not: where only the
    other adapter has one, this side's base has what it is compared with.
    """
    names = BaseNames(side.base.gathers)
    found: dict[str, Gather] = {}
    for at, adapter in side.adapters.items():
        gathers = dict(adapter.gathers)
        there = other.adapters[at].gathers if at in other.adapters else {}
        for key in there.keys() - gathers.keys():
            base = names.find(_of_base(key))
            if base is not None:
                gathers[key] = side.base.gathers[base]
        found |= {f"{ADAPTERS}{at}{key.removeprefix(WRAPPER)}": gather for key, gather in gathers.items()}
    return found


def _of_base(key: str) -> str:
    """What a tensor that is saved whole in an adapter's file is called in the base."""
    name = key.removeprefix(WRAPPER)
    for words in _WHOLE:
        name = name.replace(words, ".")
    return name


def differing_settings(one: Side, other: Side) -> list[Difference]:
    """The settings that adapters of both sides have, and that differ."""
    found = []
    for at in sorted(one.adapters.keys() & other.adapters.keys()):
        configs = one.adapters[at].config, other.adapters[at].config
        for key in _SETTINGS:
            if not all(key in config for config in configs):
                continue
            values = [_plain(config[key]) for config in configs]
            if key == "lora_alpha" and (one.rounded or other.rounded):
                values = [int(value) if isinstance(value, float) else value for value in values]
            if values[0] != values[1]:
                name = f"{ADAPTERS}{at}{key}"
                shown = [json.dumps(each)[:200] for each in values]
                found.append(Difference(SETTING, name, shown[0], shown[1]))
    return found


def _plain(value: Any) -> Any:
    """The value with what means the same alike: lists of names in any order, nothing in any form."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = sorted(value)
    return value or None
