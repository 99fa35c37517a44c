"""Whether the weight of a layer lies [out, in] or, as Conv1D has it, [in, out].

Shapes tell it; of a square weight they do not, and what kind of model it is a layer of does. A model of
several parts (encoder and decoder) has a model_type for each, under a name with which the part's modules
begin. PEFT's fan_in_fan_out is one for the whole adapter, whatever its layers are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lazymerge.boxes import Shape
from lazymerge.conversions.adapters.parts import Module
from lazymerge.conversions.adapters.settings import Settings
from lazymerge.errors import UnsupportedCheckpoint

_CONV1D_TYPES = {"clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"}
_CONV1D_MODULES = {"c_attn", "c_fc", "c_proj", "q_attn"}
"""Model types of transformers with Conv1D layers, and how these are called there."""

_FRONT = 3
"""Words of a module's name among which the name of a part is."""


class Orientation:
    """Whether the weights of modules lie [in, out]; `config` is the base's config.json."""

    def __init__(self, settings: Settings, config: Mapping[str, Any]) -> None:
        self._settings = settings
        self._type = config.get("model_type")
        self._parts = dict(_parts(config))
        self._mixed = self._type not in _CONV1D_TYPES and any(map(_has_conv1d, self._parts.values()))
        self._seen: set[bool] = set()

    def learn(self, pairs: Iterable[tuple[Module, Shape]]) -> None:
        """Take note of how weights lie that are not square."""
        for module, shape in pairs:
            a, b = module.product
            if not module.embedding and len(shape) == 2 and shape[0] != shape[1]:
                self._seen.add(shape == (a.shape[-1], b.shape[0]))

    def transposed(self, module: Module, shape: Shape) -> bool:
        """Whether this module's weight, of this shape, lies [in, out].

        Raises `UnsupportedCheckpoint` where nothing shows it.
        """
        a, b = module.product
        is_conv1d = self._is_conv1d(module)
        if shape[0] != shape[1]:
            return is_conv1d is not False and shape == (a.shape[1], b.shape[0])
        if is_conv1d is None:
            raise UnsupportedCheckpoint(
                f"{self._settings.name}: nothing shows whether the square weight of {module.name} lies"
                f" [in, out]; fan_in_fan_out is {str(self._settings.fan_in_fan_out).lower()}",
                "merge it with PEFT's merge_and_unload",
            )
        return is_conv1d

    def _is_conv1d(self, module: Module) -> bool | None:
        """Whether the module is a Conv1D; None where nothing but its shape would show it."""
        called_so = module.name.rpartition(".")[2] in _CONV1D_MODULES
        if self._type in _CONV1D_TYPES:
            return called_so
        if self._mixed:
            part = next((self._parts[word] for word in _front(module.name) if word in self._parts), None)
            if part is None or part.get("model_type") not in _CONV1D_TYPES:
                return None if part is None or _has_conv1d(part) else False
            return called_so
        if not self._settings.fan_in_fan_out:
            return False
        return True if self._seen == {True} else None


def _front(name: str) -> list[str]:
    """The name's first words: also how the config of a part would be called without "_config"."""
    words = name.split(".")[:_FRONT]
    return [each for word in words for each in (word, word.removesuffix("_model").removesuffix("_tower"))]


def _parts(config: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The configs of a model's parts, by the words that their modules begin with."""
    for key, part in config.items():
        if isinstance(part, dict) and "model_type" in part:
            yield key.removesuffix("_config"), part


def _has_conv1d(config: Mapping[str, Any]) -> bool:
    """Whether a part of this config has Conv1D layers, or one of its own parts."""
    return config.get("model_type") in _CONV1D_TYPES or any(_has_conv1d(part) for _, part in _parts(config))
