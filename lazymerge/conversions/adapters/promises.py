"""Whether an adapter's config and its tensors are of one training, as far as the names of modules show it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.conversions.adapters.linear import shown
from lazymerge.conversions.adapters.parts import Parts
from lazymerge.conversions.adapters.settings import Settings
from lazymerge.conversions.adapters.targeted import Targeted, idle
from lazymerge.errors import InconsistentCheckpoint


def check_promises(name: str, modules: Iterable[str], targeted: Targeted) -> None:
    """Raise `InconsistentCheckpoint` for LoRA of a module that the config `name` does not target.

    PEFT would leave such tensors, so that what it computes is not what they would add.
    """
    strange = [module for module in modules if not targeted.has(module)]
    if strange:
        raise InconsistentCheckpoint(
            f"{name}: has LoRA of {shown(strange)}, which its config does not target:"
            f" {', '.join(f'{key} is {json.dumps(value)[:100]}' for key, value in targeted.fields.items())}",
            "config and weights are not of one adapter; give those of one training",
        )


def idle_patterns(settings: Settings, parts: Parts) -> Iterator[Note]:
    """A warning of ranks and alphas that the config has for no module of the adapter."""
    modules = [module.name for module in parts.modules]
    leaves = {each.rpartition(".")[2] for each in settings.targeted.parameters}
    names = [*modules, *(f"{module}.{leaf}" for module in modules for leaf in leaves)]
    for key, patterns in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern)):
        yield from told_idle(settings.name, key, idle((pattern for pattern, _ in patterns), names))


def told_idle(name: str, key: str, patterns: list[str]) -> Iterator[Note]:
    """A warning of patterns in a field of the config `name` that none of its modules fits."""
    if patterns:
        text = f"{name}: {key} has {shown(patterns)}, and nothing of that name has LoRA"
        yield Note("warning", f"{text}: see whether the config is of this adapter")


def other_class(settings: Settings, config: Mapping[str, Any]) -> Iterator[Note]:
    """A warning of an adapter that was trained as another class than the base's config.json names."""
    names = config.get("architectures")
    own = names[0] if isinstance(names, list) and names else None
    if settings.trained_as is not None and own is not None and own != settings.trained_as:
        text = f"{settings.name}: was trained as {settings.trained_as}, and config.json names {own}"
        yield Note("warning", f"{text}: see whether it is of this base")


def missing_layers(
    name: str, targeted: Targeted, with_lora: Iterable[str], weights: Iterable[str]
) -> Iterator[Note]:
    """A warning of modules that the config `name` targets, and that the adapter has nothing for.

    `weights` are the names of the base's tensors. Experts are left out, which are no modules of their own
    when the model runs.
    """
    if not isinstance(targeted.modules, tuple) or targeted.excluded != () or targeted.layers_patterns:
        return
    known = {_end(module) for module in with_lora}
    modules = [each.removesuffix(".weight") for each in weights if each.endswith(".weight")]
    missing = [
        module
        for module in modules
        if _end(module) not in known and ".experts." not in module and targeted.names(module)
    ]
    if missing and len(missing) < len(modules):
        text = f"{name}: its target_modules name {shown(missing)} too, for which it has nothing: these"
        yield Note("warning", f"{text} stay as they are", missing[0])


def _end(module: str) -> str:
    """The name from its first number on: what differs in front does not count."""
    words = module.split(".")
    first = next((at for at, word in enumerate(words) if word.isdecimal()), len(words) - 1)
    return ".".join(words[first:])
