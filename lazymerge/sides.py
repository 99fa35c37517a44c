"""One side of a comparison: a base model, and the LoRA adapters that it comes with.

    inside a trainer's checkpoint   under PEFT's names (lazymerge.conversions.adapters.trained_names)
    beside a model, or alone        DIR/lora_adapter/ or DIR itself, as PEFT saves adapters; those of other
                                    names in DIR/lora_adapter/NAME/

An adapter is compared by the names that its tensors have in PEFT's file, with ``lora_adapter/`` in place of
``base_model.model.``, and by its settings: all fields of adapter_config.json but those that change
nothing of what the adapter does, with PEFT's defaults. Beside rank files verl keeps only r, and alpha without
its fraction.
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
from lazymerge.conversions.adapters.settings import NO_ARITHMETIC, STARTS_UNCHANGED
from lazymerge.conversions.adapters.trained import BASE, LoraOptions, split
from lazymerge.conversions.adapters.trained_names import WRAPPER
from lazymerge.conversions.adapters.trained_told import told
from lazymerge.errors import AmbiguousCheckpoint, PlanError
from lazymerge.gather import Gather
from lazymerge.prepare import ADAPTERS

_IDLE = NO_ARITHMETIC - {"ensure_weight_tying", "layers_pattern", "qalora_group_size"} | {"auto_mapping"}
"""Fields of adapter_config.json that change nothing of what an adapter does; any other one may."""

_DEFAULTS = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none", "qalora_group_size": 16}
"""What PEFT takes for a field that is not there, unless that is false or empty (LoraConfig, 0.21)."""

_WHOLE = (".base_layer.", ".original_module.", ".modules_to_save.", ".token_adapter.")
"""What PEFT may put into the name of a base's tensor that it saves with an adapter."""


@dataclass(frozen=True, slots=True)
class Side:
    """A base, under its own names, and adapters: where they are below ``lora_adapter/`` -> adapter.

    `partial` says that the adapters' `config` has only what a trainer recorded, alpha without its fraction.
    """

    base: Checkpoint
    adapters: Mapping[str, Adapter]
    partial: bool = False


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
    return Side(parts.base, known, partial=True)


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
    return {at: read_adapter(path) for at, path in places.items() if _is_adapter(path)}


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
    """The settings that are known of adapters that both sides have, and that differ."""
    found = []
    for at in sorted(one.adapters.keys() & other.adapters.keys()):
        configs = one.adapters[at].config, other.adapters[at].config
        keys = (configs[0].keys() | configs[1].keys()) - _IDLE
        for side, config in zip((one, other), configs, strict=True):
            if side.partial:
                keys &= config.keys()
        for key in sorted(keys):
            values = [_meant(config, key) for config in configs]
            if key == "lora_alpha" and (one.partial or other.partial):
                values = [int(value) if isinstance(value, float) else value for value in values]
            if values[0] != values[1]:
                name = f"{ADAPTERS}{at}{key}"
                shown = [json.dumps(each)[:200] for each in values]
                found.append(Difference(SETTING, name, shown[0], shown[1]))
    return found


def _meant(config: Mapping[str, Any], key: str) -> Any:
    """What a field means, with what means the same alike: names in any order, nothing in any form."""
    value = config.get(key)
    if value is None:
        value = _DEFAULTS.get(key)
    if key == "init_lora_weights" and (
        value is True or (isinstance(value, str) and value in STARTS_UNCHANGED)
    ):
        return None
    if key == "layers_to_transform" and type(value) is int:
        return [value]
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = sorted(value)
    return None if value is False or value in ("", [], {}) else value
