"""Whether an adapter's config and its tensors are of one training, as far as the names of modules show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.conversions.adapters.linear import shown
from lazymerge.conversions.adapters.parts import Parts
from lazymerge.conversions.adapters.settings import Settings
from lazymerge.errors import InconsistentCheckpoint
from lazymerge.gather import Gather


def check_promises(settings: Settings, parts: Parts) -> None:
    """Raise `InconsistentCheckpoint` for LoRA of a module that the config does not target.

    PEFT would leave such tensors, so that what it computes is not what they would add. A regular expression
    for the modules is not followed, and PEFT adds what is tied to a target by itself.
    """
    if settings.target_modules is None or settings.target_parameters or settings.keeps_tied:
        return
    strange = [each.name for each in parts.modules if not _is_target(each.name, settings.target_modules)]
    if strange:
        raise InconsistentCheckpoint(
            f"{settings.name}: has LoRA of {shown(strange)}, which target_modules does not name:"
            f" {shown(settings.target_modules)}",
            "config and weights are not of one adapter; copy both again",
        )


def other_class(settings: Settings, config: Mapping[str, Any]) -> Iterator[Note]:
    """A warning of an adapter that was trained as another class than the base's config.json names."""
    names = config.get("architectures")
    own = names[0] if isinstance(names, list) and names else None
    if settings.trained_as is not None and own is not None and own != settings.trained_as:
        text = f"{settings.name}: was trained as {settings.trained_as}, and config.json names {own}"
        yield Note("warning", f"{text}: see whether it is of this base")


def missing_layers(settings: Settings, parts: Parts, base: Mapping[str, Gather]) -> Iterator[Note]:
    """A warning of modules of the base that the config targets, and that the adapter has nothing for.

    Experts are left out, which are no modules of their own when the model runs.
    """
    if settings.target_modules is None or settings.excludes:
        return
    known = {_end(module.name) for module in parts.modules}
    modules = [name.removesuffix(".weight") for name in base if name.endswith(".weight")]
    missing = [
        module
        for module in modules
        if _is_target(module, settings.target_modules)
        and ".experts." not in module
        and _end(module) not in known
        and (settings.layers is None or _layer(module) in settings.layers)
    ]
    if missing and len(missing) < len(modules):
        text = (
            f"{settings.name}: its target_modules name {shown(missing)} too, for which it has nothing: these"
            " stay as they are"
        )
        yield Note("warning", text, missing[0])


def _is_target(module: str, targets: Iterable[str]) -> bool:
    return any(f".{module}".endswith(f".{target}") for target in targets)


def _end(module: str) -> str:
    """The name from its first number on: what differs in front does not count."""
    words = module.split(".")
    first = next((at for at, word in enumerate(words) if word.isdecimal()), len(words) - 1)
    return ".".join(words[first:])


def _layer(module: str) -> int | None:
    """The first number in the name."""
    return next((int(word) for word in module.split(".") if word.isdecimal()), None)
