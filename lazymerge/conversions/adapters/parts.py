"""An adapter's tensors, sorted by the module that they belong to and by what they are there.

    <module>.lora_A[.<adapter>].weight          <module>.lora_B[.<adapter>].weight, .bias
    <module>.lora_embedding_A[.<adapter>]       <module>.lora_embedding_B[.<adapter>]
    <module>.lora_magnitude_vector[.<adapter>][.weight]
    <module>.token_adapter.trainable_tokens_delta[.<adapter>]
    <module>.weight, .bias, ...                 whole; perhaps with base_layer, modules_to_save or
                                                token_adapter.base_layer before the last part. PEFT saves
                                                resized embeddings under several of these names, beside what
                                                they were before training (original_module)

before them ``base_model.model.`` or a part of it. PEFT wraps a module whose parameters it adapts (experts in
one tensor) once for each of them, which shows as ``<module>.base_layer.lora_A``: one level further inside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from lazymerge.conversions.adapters.adapter import Adapter
from lazymerge.errors import (
    DamagedFile,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from lazymerge.files.dtype import FLOATS
from lazymerge.fill import alike
from lazymerge.gather import Gather

_LORA = re.compile(
    r"(?P<module>.+?)(?P<inner>(\.base_layer)*)\."
    r"((?P<kind>lora_A|lora_B)(\.(?P<of>[^.]+))?\.(?P<leaf>weight|bias)"
    r"|(?P<other>lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.(?!weight$)(?P<of_other>[^.]+))?(\.weight)?"
    r"|token_adapter\.(?P<tokens>trainable_tokens_delta)(\.[^.]+)?)"
)
_WRAPPED = re.compile(
    r"\.(token_adapter\.base_layer|token_adapter|base_layer|modules_to_save(\.default)?|original_module)(?=\.)"
)
_PREFIXES = ("base_model.model.", "base_model.")


@dataclass(slots=True)
class Module:
    """What an adapter holds for one module: `inside` counts the wrappers around it.

    `a` and `b` are lora_A and lora_B, or those of an embedding; `names` are the tensors' own, in which
    PEFT's name of the adapter may be too.
    """

    name: str
    inside: int = 0
    embedding: bool = False
    a: Gather | None = None
    b: Gather | None = None
    bias: Gather | None = None
    magnitude: Gather | None = None
    names: list[str] = field(default_factory=list)
    adapter: str | None = None

    @property
    def product(self) -> tuple[Gather, Gather]:
        """lora_A and lora_B."""
        assert self.a is not None and self.b is not None
        return self.a, self.b


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that was saved whole, and its own name."""

    gather: Gather
    name: str


@dataclass(slots=True)
class Parts:
    """An adapter's modules, the rows of embeddings by module, and whole tensors by name."""

    modules: list[Module] = field(default_factory=list)
    tokens: dict[str, Gather] = field(default_factory=dict)
    whole: dict[str, Whole] = field(default_factory=dict)


def take_apart(adapter: Adapter) -> Parts:
    """The adapter's tensors in order.

    Raises `UnsupportedCheckpoint` for a tensor of another kind of adapter, `DamagedFile` for two of one
    meaning, `IncompleteCheckpoint` for half of a product, and `InconsistentCheckpoint` for halves of none.
    """
    parts = Parts()
    modules: dict[tuple[str, int], Module] = {}
    for name, gather in adapter.gathers.items():
        plain = _unprefixed(name)
        match = _LORA.fullmatch(plain)
        if match is not None and gather.dtype.name not in FLOATS:
            raise UnsupportedCheckpoint(
                f"{adapter.name}: {name} is of {gather.dtype}, expected floating-point numbers",
                "save the adapter unquantised",
            )
        if match is None:
            _add_whole(parts, adapter, name, plain, gather)
        elif match["tokens"]:
            _set_once(parts.tokens, match["module"], gather, adapter, name)
        else:
            key = match["module"], match["inner"].count("base_layer")
            module = modules.setdefault(key, Module(*key))
            _add(module, adapter, name, match, gather)
    for whole in parts.whole.values():
        if ".original_module." in whole.name:
            raise IncompleteCheckpoint(
                f"{adapter.name}: {whole.name} is there without what was trained", "copy the adapter again"
            )
    for module in modules.values():
        if module.a is None or module.b is None:
            missing = "lora_A" if module.a is None else "lora_B"
            raise IncompleteCheckpoint(
                f"{adapter.name}: {module.names[0]} is there without {missing}", "copy the adapter again"
            )
        if any(len(each.shape) < 2 or not each.numel for each in module.product):
            raise misshapen(module, adapter.name)
    parts.modules = list(modules.values())
    return parts


def _unprefixed(name: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def _add(module: Module, adapter: Adapter, name: str, match: re.Match[str], gather: Gather) -> None:
    kind = match["kind"] or match["other"]
    embedding = kind.startswith("lora_embedding")
    if kind == "lora_magnitude_vector":
        place = "magnitude"
    elif match["leaf"] == "bias":
        place = "bias"
    else:
        place = kind[-1].lower()
    mixed = place in {"a", "b"} and embedding != module.embedding and (module.a or module.b)
    if getattr(module, place) is not None or mixed or (match["leaf"] == "bias" and kind == "lora_A"):
        raise _double(adapter, name)
    own = match["of"] or match["of_other"]
    if module.names and own != module.adapter:
        raise InconsistentCheckpoint(
            f"{adapter.name}: {name} and {module.names[0]} are of two adapters",
            "keep the tensors of one adapter, as PEFT saves them",
        )
    module.adapter = own
    module.embedding = module.embedding or embedding
    setattr(module, place, gather)
    module.names.append(name)


def _add_whole(parts: Parts, adapter: Adapter, name: str, plain: str, gather: Gather) -> None:
    if re.search(
        r"(^|\.)(lora_(A|B|E|embedding|magnitude|diag)|hada_|ia3_l|oft_|vera_lambda|lokr_|ranknum)", plain
    ):
        raise UnsupportedCheckpoint(
            f"{adapter.name}: {name} belongs to a kind of adapter that is not folded",
            "merge it with PEFT's merge_and_unload",
        )
    clean = _WRAPPED.sub("", plain)
    before = parts.whole.get(clean)
    if before is None or ".original_module." in before.name:
        parts.whole[clean] = Whole(gather, name)
    elif ".original_module." not in plain and not alike(before.gather, gather):
        raise _double(adapter, name)


def _set_once(found: dict[str, Any], key: str, value: Any, adapter: Adapter, name: str) -> None:
    if key in found:
        raise _double(adapter, name)
    found[key] = value


def misshapen(module: Module, adapter: str) -> InconsistentCheckpoint:
    """The error for matrices that make no product."""
    a, b = module.product
    return InconsistentCheckpoint(
        f"{adapter}: {module.name} has lora_A of shape {a.shape} and lora_B of shape {b.shape}, which make no"
        " product",
        "an adapter that is sharded in training has to be put together before it is saved; save it again",
    )


def _double(adapter: Adapter, name: str) -> DamagedFile:
    return DamagedFile(
        f"{adapter.name}: {name} is there twice, under another name with other values",
        "keep the tensors of one adapter",
    )
