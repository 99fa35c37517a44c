"""The names that PEFT gives to the parts of a model with LoRA, in the state dict of its trainer.

    base_model.model.<module>.base_layer.weight                      the layer that LoRA was put on
    base_model.model.<module>.lora_A.<adapter>.weight                and lora_B, which may have a bias
    base_model.model.<module>.lora_embedding_A.<adapter>             and lora_embedding_B
    base_model.model.<module>.lora_magnitude_vector.<adapter>.weight DoRA; without .weight before PEFT 0.10
    base_model.model.<module>.original_module.weight                 a layer that is trained as a whole,
    base_model.model.<module>.modules_to_save.<adapter>.weight       and its trained copy
    base_model.model.<module>.token_adapter.base_layer.weight        an embedding, of which some rows
    base_model.model.<module>.token_adapter.trainable_tokens_delta.<adapter>  are trained

LoRA on a parameter that is no layer's weight (fused experts) wraps the module of the parameter, once for
each: ``experts.base_layer.base_layer.down_proj``, ``experts.base_layer.lora_A``, ``experts.lora_A``. Where
PEFT was injected into a model rather than put around it, ``base_model.model.`` is missing. Before PEFT 0.6
there was no ``base_layer``.

What only looks like it is left alone: a module has LoRA if there is an adapter's name behind ``lora_A`` and
a base layer beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lazymerge.errors import InconsistentCheckpoint, UnsupportedCheckpoint

WRAPPER = "base_model.model."
"""What PEFT puts before all names of the model, and before those in an adapter's file."""

_LORA = (
    re.compile(r"(?P<module>.+)\.(?P<kind>lora_[AB])\.(?P<adapter>[^.]+)\.(?P<leaf>weight|bias)"),
    re.compile(r"(?P<module>.+)\.(?P<kind>lora_embedding_[AB])\.(?P<adapter>[^.]+)(?P<leaf>)"),
    re.compile(r"(?P<module>.+)\.(?P<kind>lora_magnitude_vector)\.(?P<adapter>[^.]+)(?P<leaf>)(\.weight)?"),
)
_SAVED = re.compile(r"(?P<module>.+?)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<leaf>.+)")
_TOKENS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta\.(?P<adapter>[^.]+)")

_ORIGINAL = ".original_module."
_WRAPPERS = re.compile(r"\.(base_layer|original_module|token_adapter)(?=\.|$)")

_OTHERS = re.compile(
    r"\.((adamss|beft|boft|bone|c3a|deft|delora|fourierft|frod|glora|gralora|hada|hira|hra|ia3|lily|ln_tuning"
    r"|lokr|miss|oft|osf|peanut|poly|psoft|pvera|randlora|road|shadow|shira|supertuning|tinylora"
    r"|trainable_tokens|unilora|vblora|vera|waveft|lora)_|ranknum\.|(?P<alone>adaption_(prompt|gate)(\.|$)))"
)
"""How parts of PEFT's other methods begin, beside a base layer; of LoRA's variants (AdaLoRA, KaSA) too."""

_LONGEST_NAME = 200
"""Bytes of an adapter's name, which becomes that of a folder."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of an adapter: `source` is the trainer's name for it, `key` that of an adapter's file.

    `kind` is "lora_A" and so on ("lora_B.bias" is the bias of one), "modules_to_save" or "tokens".
    `wrapped` is its module with the ``base_layer`` of wrappers in it, `module` without, as the model has it.
    """

    source: str
    adapter: str
    kind: str
    wrapped: str
    module: str
    key: str


@dataclass(frozen=True, slots=True)
class Names:
    """A trainer's names, told apart.

    base    trainer's name -> the name without PEFT; empty if adapters are all there is
    inside  those of `base` that PEFT has around it: trainer's name -> (the model's, PEFT's without wrapper)
    parts   the tensors of adapters, in the checkpoint's order
    """

    base: Mapping[str, str]
    inside: Mapping[str, tuple[str, str]]
    parts: tuple[Part, ...]

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters' names, in the checkpoint's order."""
        return tuple(dict.fromkeys(part.adapter for part in self.parts))


def told_apart(names: Iterable[str]) -> Names | None:
    """The names of a checkpoint, told apart; None if there is no LoRA in it.

    Raises `UnsupportedCheckpoint` for what is PEFT's and not LoRA, and `InconsistentCheckpoint` where two
    names become one.
    """
    names = list(names)
    seen = _Seen(names)
    _refuse_others(names, seen)
    if not seen.layers:
        return None
    root = _root(next(iter(seen.layers)))
    base: dict[str, str] = {}
    inside: dict[str, tuple[str, str]] = {}
    parts: list[Part] = []
    for name in names:
        if name in seen.parts:
            parts.append(_part(name, seen.parts[name], seen, root))
            continue
        front, rest = _without_root(name, root)
        clean = _clean(name, seen, len(name) - len(rest))
        base[name] = front + clean
        if name.startswith(root):
            inside[name] = (clean, rest)
    _refuse_doubles(base, parts)
    return Names(base, inside, tuple(parts))


class _Seen:
    """Which modules PEFT has wrapped, by the trainer's names, and which tensors are an adapter's.

    `alone` says that there is nothing but adapters; else a part counts only beside what it was put on.
    """

    def __init__(self, names: list[str]) -> None:
        matches = {name: match for name in names if (match := _match(name))}
        lora = {name: match for name, match in matches.items() if match.re in _LORA}
        self.alone = bool(lora) and len(matches) == len(names)
        self.wrapped = {
            name[: found.start()]
            for name in names
            if ".base_layer." in name
            for found in re.finditer(r"\.base_layer(?=\.)", name)
        }
        originals = {name.partition(_ORIGINAL)[0] for name in names if _ORIGINAL in name}
        weighted = set(names)
        self.layers = dict.fromkeys(
            match["module"]
            for match in lora.values()
            if self.alone or match["module"] in self.wrapped or f"{match['module']}.weight" in weighted
        )
        self.saved: set[str] = set()
        self.tokens: set[str] = set()
        self.parts: dict[str, re.Match[str]] = {}
        for name, match in matches.items():
            module = match["module"]
            if match.re is _SAVED and (self.alone or module in originals):
                self.saved.add(module)
            elif match.re is _TOKENS and (self.alone or f"{module}.token_adapter" in self.wrapped):
                self.tokens.add(module)
            elif name not in lora or module not in self.layers:
                continue
            self.parts[name] = match

    def is_wrapper(self, parent: str, component: str) -> bool:
        """Whether PEFT put this component behind `parent`, to make room for its own tensors."""
        if component == "base_layer":
            module, dot, last = parent.rpartition(".")
            return parent in self.layers or (dot + last == ".token_adapter" and module in self.tokens)
        return parent in (self.saved if component == "original_module" else self.tokens)


def _match(name: str) -> re.Match[str] | None:
    """The parts of a name that is like one of an adapter's tensors."""
    if ".modules_to_save." in name:
        return _SAVED.fullmatch(name)
    if ".trainable_tokens_delta." in name:
        return _TOKENS.fullmatch(name)
    if ".lora_" in name:
        return next((match for pattern in _LORA if (match := pattern.fullmatch(name))), None)
    return None


def _root(layer: str) -> str:
    """What is before the model's own names, by the name of a layer: nothing, or all up to PEFT's wrapper."""
    at = f".{layer}".find(f".{WRAPPER}")
    return "" if at < 0 else layer[: at + len(WRAPPER)]


def _without_root(name: str, root: str) -> tuple[str, str]:
    """What was around PEFT, which stays, and the rest of the name."""
    if not name.startswith(root):
        return "", name
    return root.removesuffix(WRAPPER), name[len(root) :]


def _part(name: str, match: re.Match[str], seen: _Seen, root: str) -> Part:
    if match.re is _SAVED:
        ending, kind = match["leaf"], "modules_to_save"
    elif match.re is _TOKENS:
        ending, kind = "token_adapter.trainable_tokens_delta", "tokens"
    else:
        ending = f"{match['kind']}.{match['leaf']}".rstrip(".")
        kind = "lora_B.bias" if match["leaf"] == "bias" else match["kind"]
    if not name.startswith(root):
        raise UnsupportedCheckpoint(
            f"{name}: LoRA outside of {root}, where the other layers with LoRA are",
            "save the state dict of one of the models",
        )
    adapter, wrapped = match["adapter"], match["module"]
    if re.search(r"[/\\\x00-\x1f]", adapter) or len(adapter.encode(errors="replace")) > _LONGEST_NAME:
        raise UnsupportedCheckpoint(
            f"{name}: an adapter called {adapter!r}, which is no name for a folder", "rename the adapter"
        )
    rest = wrapped[len(root) :]
    return Part(name, adapter, kind, rest, _clean(wrapped, seen, len(root)), f"{WRAPPER}{rest}.{ending}")


def _clean(name: str, seen: _Seen, start: int) -> str:
    """The name from `start` on as the model has it, without what PEFT put between module and tensors."""
    kept, at = "", start
    for found in _WRAPPERS.finditer(name):
        if seen.is_wrapper(name[: found.start()], found[1]):
            kept, at = kept + name[at : found.start()], found.end()
    return kept + name[at:]


def _refuse_others(names: list[str], seen: _Seen) -> None:
    """Refuse the tensors of PEFT's methods other than LoRA, which would be dropped or misnamed."""
    around = any(name.startswith(WRAPPER) for name in names)
    for name in names:
        if name in seen.parts:
            if not seen.layers:  # trained as a whole, by what is not LoRA
                raise _unsupported(name)
            continue
        if around and name.startswith("prompt_encoder."):
            raise _unsupported(name)
        for found in _OTHERS.finditer(name):
            if found["alone"] or name[: found.start()] in seen.wrapped:
                raise _unsupported(name)


def _unsupported(name: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{name}: a part of another of PEFT's methods than LoRA, which alone is done",
        "merge it with PEFT itself",
    )


def _refuse_doubles(base: Mapping[str, str], parts: Iterable[Part]) -> None:
    owners: dict[tuple[str, str], str] = {}
    named = [("", clean, name) for name, clean in base.items()]
    for adapter, name, source in [*named, *((part.adapter, part.key, part.source) for part in parts)]:
        other = owners.setdefault((adapter, name), source)
        if other != source:
            raise InconsistentCheckpoint(
                f"{other} and {source} are both {name} without PEFT's names",
                "save the state dict again with one of them renamed or left out",
            )
