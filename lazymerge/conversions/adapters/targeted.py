r"""Which modules a config says that its adapter is for, as PEFT finds them when it loads the adapter.

    target_modules       endings of names, from a dot on; or a regular expression for whole names
    layers_to_transform  of modules that endings name: those in these layers alone. A layer's number is the
                         first one that two words are before, or what layers_pattern says
    exclude_modules      as target_modules: modules that are left in spite of it
    target_parameters    endings of parameters' names, whose modules are wrapped

With ensure_weight_tying, PEFT also adapts what is tied to such a module: embeddings and heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lazymerge.conversions.adapters.patterns import Pattern

Names = tuple[str, ...] | Pattern | None
"""Endings of names, or a regular expression for whole ones; None for one that is not followed."""


@dataclass(frozen=True, slots=True)
class Targeted:
    """What a config says of the modules that it is for; `fields` are those of it that say something.

    `modules` are None where PEFT chose them by the model, too.
    """

    modules: Names = None
    excluded: Names = ()
    layers: tuple[int, ...] | None = None
    layers_patterns: tuple[Pattern, ...] = ()
    parameters: tuple[str, ...] = ()
    ties: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)

    def has(self, module: str) -> bool:
        """Whether PEFT would load LoRA of this module; true where what it goes by is not followed."""
        if any(_ends_with(module, target.rpartition(".")[0]) for target in self.parameters):
            return True
        if self.ties and not any(map(str.isdecimal, module.split("."))):
            return True
        return self.names(module) and not (self.excluded is not None and _matches(self.excluded, module))

    def names(self, module: str) -> bool:
        """Whether target_modules names the module, in a layer that is meant."""
        if self.modules is None:
            return True
        if not _matches(self.modules, module):
            return False
        if isinstance(self.modules, Pattern) or module in self.modules or not self.layers:
            return True
        return self._layer(module) in self.layers

    def _layer(self, module: str) -> int | None:
        """The number of the module's layer."""
        words = module.split(".")
        numbers = [at for at, word in enumerate(words[:-1]) if word.isdecimal()]
        if not self.layers_patterns:
            return next((int(words[at]) for at in numbers if at > 1), None)
        fronts = {at: ".".join(words[:at]) for at in numbers if at}
        for pattern in self.layers_patterns:
            found = [at for at, front in fronts.items() if pattern.matches(front)]
            if found:
                return int(words[found[0]])
        return None


def _matches(names: tuple[str, ...] | Pattern, module: str) -> bool:
    if isinstance(names, Pattern):
        return names.matches_whole(module)
    return any(_ends_with(module, name) for name in names)


def _ends_with(name: str, ending: str) -> bool:
    """Whether the name is the ending, or has it behind a dot; every one has an empty ending."""
    return not ending or f".{name}".endswith(f".{ending}")


def idle(patterns: Iterable[Pattern], names: Iterable[str]) -> list[str]:
    """The patterns that fit none of these names of modules and parameters."""
    names = list(names)
    return [str(pattern) for pattern in patterns if not any(map(pattern.matches, names))]
