"""What adapter_config.json says of the arithmetic: every field is understood, or refused with its value.

    scale = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora

`rank_pattern` and `alpha_pattern` give some modules another r or alpha: a key is a regular expression for
the end of the module's name, from a dot on, and the first that matches counts (PEFT's `get_pattern_key`).
What PEFT writes is told from its LoraConfig, version 0.21.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lazymerge.conversions.adapters.adapter import Adapter
from lazymerge.conversions.adapters.patterns import Pattern
from lazymerge.conversions.adapters.targeted import Names, Targeted
from lazymerge.errors import DamagedFile, SourceError, UnsupportedCheckpoint

NO_ARITHMETIC = {
    "base_model_name_or_path",
    "corda_config",  # of an initialisation, which init_lora_weights names
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    "velora_config",  # how gradients are computed
}
"""Fields that say nothing of the arithmetic, or nothing where others have their usual value."""

_UNDERSTOOD = {
    "alpha_pattern",
    "auto_mapping",
    "bias",
    "exclude_modules",
    "fan_in_fan_out",
    "init_lora_weights",
    "layers_to_transform",
    "lora_alpha",
    "lora_bias",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_rslora",
}
_REFUSED = {
    "alora_invocation_tokens": "it acts on some tokens of a text only, and no weights do that",
    "arrow_config": "it routes between adapters at run time",
    "kasa_config": "it also changes the base's weights",
    "layer_replication": "it repeats layers of the base",
    "megatron_config": "it is one of Megatron's parallel layers",
    "monteclora_config": "it samples weights at run time",
    "use_bdlora": "its matrices are block-diagonal",
    "use_qalora": "it is one of a quantised base",
}
_SELECTING = (
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
)
STARTS_UNCHANGED = {"eva", "gaussian", "mica", "orthogonal"}
"""Values of init_lora_weights, besides true and false, that leave the base as it is."""

_LARGEST_RANK = 1 << 20
_LARGEST_NUMBER = 1 << 53
_CONVERT = (
    "save it with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes"
    " a plain LoRA of it"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The fields that decide what an adapter adds; as in adapter_config.json.

    `trained_as` is the class of the model, if it is known.
    """

    name: str
    r: int
    alpha: float
    rslora: bool
    rank_pattern: tuple[tuple[Pattern, int], ...]
    alpha_pattern: tuple[tuple[Pattern, float], ...]
    dora: bool
    fan_in_fan_out: bool
    keeps_tied: bool
    modules_to_save: tuple[str, ...]
    targeted: Targeted
    tokens: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None
    task: str | None
    trained_as: str | None

    def rank(self, module: str) -> int:
        """The rank of a module's matrices."""
        return next((rank for pattern, rank in self.rank_pattern if pattern.matches(module)), self.r)

    def scale(self, module: str) -> float:
        """What the product of a module's matrices is multiplied with."""
        found = (alpha for pattern, alpha in self.alpha_pattern if pattern.matches(module))
        alpha, rank = next(found, self.alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def is_saved_whole(self, module: str) -> bool:
        """Whether modules_to_save names the module, or one that it is a part of: by how the name ends."""
        return bool(self._saved_whole(module))

    def refuse_nested(self, tensors: Iterable[str]) -> None:
        """Raise `UnsupportedCheckpoint` for a tensor of a module that PEFT saved inside of another one.

        What it saved of such a module is not what it had trained, and PEFT cannot load it.
        """
        for name in tensors:
            modules = self._saved_whole(name.rpartition(".")[0])
            if len(modules) > 1:
                raise UnsupportedCheckpoint(
                    f"{self.name}: modules_to_save names {modules[0]} and, inside of it, {modules[1]}, which"
                    " PEFT does not save as they were trained",
                    "save it with modules_to_save that ends no name inside of such a module",
                )

    def _saved_whole(self, module: str) -> list[str]:
        """The modules on the way to this one that modules_to_save names."""
        words = module.split(".")
        paths = [".".join(words[: at + 1]) for at in range(len(words))]
        return [path for path in paths if path.endswith(self.modules_to_save)]


def understand(adapter: Adapter) -> Settings:
    """The adapter's settings.

    Raises `UnsupportedCheckpoint` for a kind that cannot be folded into weights, or is not known, and
    `DamagedFile` for values that are none of their fields.
    """
    config = adapter.config
    read = _Fields(adapter.name, config)
    kind = read.text("peft_type")
    if kind is None or kind.upper() != "LORA":
        raise UnsupportedCheckpoint(
            f"{adapter.name}: an adapter of the kind {_shown(config.get('peft_type'))}, expected LORA",
            "merge it with PEFT's merge_and_unload",
        )
    _refuse_others(adapter.name, config)
    r, alpha = read.number("r"), read.number("lora_alpha")
    if r is None or alpha is None:
        missing = "r" if r is None else "lora_alpha"
        raise DamagedFile(
            f"{adapter.name}: adapter_config.json does not say {missing}, without which there is no scale",
            f"add {missing} as it was in training; it cannot be told from the weights",
        )
    return Settings(
        name=adapter.name,
        r=read.rank("r", r),
        alpha=alpha,
        rslora=read.flag("use_rslora"),
        rank_pattern=tuple((key, read.rank("rank_pattern", n)) for key, n in read.pattern("rank_pattern")),
        alpha_pattern=tuple(read.pattern("alpha_pattern")),
        dora=read.flag("use_dora"),
        fan_in_fan_out=read.flag("fan_in_fan_out"),
        keeps_tied=read.flag("ensure_weight_tying"),
        modules_to_save=read.names("modules_to_save"),
        targeted=targeted_in(adapter.name, config),
        tokens=read.tokens("trainable_token_indices"),
        task=read.text("task_type"),
        trained_as=read.trained_as(),
    )


def targeted_in(name: str, config: Mapping[str, Any]) -> Targeted:
    """The modules that a config is for; `name` is what messages call it. Raises as `understand`."""
    read = _Fields(name, config)
    patterns = read.list_of_patterns("layers_pattern")
    layers = read.layers("layers_to_transform")
    parameters = read.names("target_parameters")
    none_named = config.get("target_modules") is None and parameters
    return Targeted(
        modules=() if none_named else read.modules("target_modules"),
        excluded=read.modules("exclude_modules") if config.get("exclude_modules") else (),
        layers=None if patterns is None else layers,
        layers_patterns=patterns or (),
        parameters=parameters,
        ties=read.flag("ensure_weight_tying"),
        fields={key: config[key] for key in _SELECTING if config.get(key)},
    )


def patterns_in(name: str, config: Mapping[str, Any], key: str) -> list[Pattern]:
    """The patterns of `rank_pattern` or `alpha_pattern`; otherwise as `targeted_in`."""
    return [pattern for pattern, _ in _Fields(name, config).pattern(key)]


def _refuse_others(name: str, config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key in NO_ARITHMETIC | _UNDERSTOOD or value is None or value is False or value in ([], {}):
            continue
        why = _REFUSED.get(key, "this version does not know the field")
        raise UnsupportedCheckpoint(
            f"{name}: {key[:100]} is {_shown(value)}: {why}", "merge it with PEFT, if PEFT can"
        )
    start = config.get("init_lora_weights", True)
    if not (isinstance(start, bool) or (isinstance(start, str) and start in STARTS_UNCHANGED)):
        raise UnsupportedCheckpoint(
            f"{name}: init_lora_weights is {_shown(start)}, which changed the base's weights before training",
            _CONVERT,
        )
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        raise UnsupportedCheckpoint(
            f"{name}: bias is {_shown(config['bias'])}, expected none, all or lora_only", "correct it"
        )


class _Fields:
    """Fields by type; what is of another is refused, and a missing one or null is None or empty."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._name = name
        self._config = config

    def flag(self, key: str) -> bool:
        value = self._config.get(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self._damaged(key, value, "true or false")

    def text(self, key: str) -> str | None:
        value = self._config.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._damaged(key, value, "a text")

    def trained_as(self) -> str | None:
        """The class of the model, which PEFT notes down where there is no task_type to tell it."""
        mapping = self._config.get("auto_mapping")
        name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
        return name if isinstance(name, str) else None

    def number(self, key: str) -> float | None:
        value = self._config.get(key)
        return None if value is None else self._number(key, value)

    def rank(self, key: str, value: float) -> int:
        if value == int(value) and 1 <= value <= _LARGEST_RANK:
            return int(value)
        raise self._damaged(key, value, "a rank of 1 or more")

    def names(self, key: str) -> tuple[str, ...]:
        value = self._config.get(key)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(each, str) and each for each in value):
            return tuple(value)
        raise self._damaged(key, value, "a list of names")

    def modules(self, key: str) -> Names:
        """Names, or a regular expression; None for nothing, and for one that is not followed."""
        value = self._config.get(key)
        if not isinstance(value, str):
            return None if value is None else self.names(key)
        try:
            return None if value.lower() == "all-linear" else Pattern(value)
        except (ValueError, re.error):
            return None

    def list_of_patterns(self, key: str) -> tuple[Pattern, ...] | None:
        """Regular expressions; None where one of them is not followed."""
        value = self._config.get(key)
        texts = (value,) * bool(value) if isinstance(value, str) else self.names(key)
        try:
            return tuple(map(Pattern, texts))
        except (ValueError, re.error):
            return None

    def layers(self, key: str) -> tuple[int, ...] | None:
        value = self._config.get(key)
        if value is None:
            return None
        layers = value if isinstance(value, list) else [value]
        if all(type(each) is int for each in layers):
            return tuple(layers)
        raise self._damaged(key, value, "a layer's number, or a list of such")

    def pattern(self, key: str) -> list[tuple[Pattern, float]]:
        value = self._config.get(key)
        if value is None:
            return []
        if not isinstance(value, dict):
            raise self._damaged(key, value, "names and numbers")
        return [(self._pattern(key, each), self._number(key, number)) for each, number in value.items()]

    def tokens(self, key: str) -> tuple[int, ...] | dict[str, tuple[int, ...]] | None:
        value = self._config.get(key)
        if value is None:
            return None
        if isinstance(value, dict):
            return {module: self._tokens(key, each) for module, each in value.items()}
        return self._tokens(key, value)

    def _tokens(self, key: str, value: Any) -> tuple[int, ...]:
        proper = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
        if proper and len(set(value)) == len(value):
            return tuple(value)
        raise self._damaged(key, value, "a list of different token numbers")

    def _number(self, key: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and abs(value) < _LARGEST_NUMBER:  # which infinity and NaN are not
            return float(value)
        raise self._damaged(key, value, "a number")

    def _pattern(self, key: str, pattern: str) -> Pattern:
        try:
            return Pattern(pattern)
        except (ValueError, re.error) as error:
            raise UnsupportedCheckpoint(
                f"{self._name}: {key} has the pattern {pattern[:200]!r}, which is not matched ({error})",
                "write the names of the modules in full",
            ) from None

    def _damaged(self, key: str, value: Any, expected: str) -> SourceError:
        return DamagedFile(f"{self._name}: {key} is {_shown(value)}, expected {expected}", "correct it")


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:100]
