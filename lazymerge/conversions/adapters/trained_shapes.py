"""Which layers of a model an adapter has LoRA on, and of which rank, from the shapes of its tensors.

    a layer          A [r, in]           B [out, r]             weight [out, in], or [in, out] (Conv1D)
    an embedding     A [r, vocabulary]   B [dim, r]             weight [vocabulary, dim]
    a convolution    A [r, in, *kernel]  B [out, r/groups, 1..] weight [out, in/groups, *kernel]
    a parameter      A [r * e, in]       B [out, r * e]         [e, out, in] or [e, in, out]; [out, in]: e 1

Several parameters of one module are wrapped one around the other. The names do not say which is which, so
that their shapes have to; the checkpoint's order does not, since it changes when such a model runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from lazymerge.boxes import Shape
from lazymerge.conversions.adapters.trained_names import Names, Part
from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint, PlanError, UnsupportedCheckpoint
from lazymerge.gather import Gather

_MOST_PARAMETERS = 6
"""Of a module with LoRA on some of them, in whichever order."""

_PLAIN = ("float16", "bfloat16", "float32", "float64", "float8")
"""Types of weights that have their own shape, and not that of something packed."""


@dataclass(frozen=True, slots=True)
class Target:
    """A layer with LoRA: the module's name in the base model, or that of a parameter.

    `transposed` says whether the weight is [in, out]; None where the shapes do not tell.
    """

    name: str
    rank: int
    parameter: bool = False
    transposed: bool | None = None


class _Pair(NamedTuple):
    """A and B of a layer, their shapes, and whether they are an embedding's."""

    name: str
    a: Shape
    b: Shape
    embedding: bool

    def __str__(self) -> str:
        return f"{self.name}: A {list(self.a)} and B {list(self.b)}"


def targets(
    names: Names, adapter: str, gathers: Mapping[str, Gather], parameters: Sequence[str] = ()
) -> list[Target]:
    """The layers that `adapter` has LoRA on, in the checkpoint's order.

    `parameters` are the target_parameters of a given config. Raises `IncompleteCheckpoint` for an A without a
    B, `InconsistentCheckpoint` for shapes that contradict each other, and `PlanError` where parameters cannot
    be told apart.
    """
    layers: dict[str, dict[str, dict[str, Part]]] = {}
    for part in names.parts:
        if part.adapter == adapter and part.kind.startswith("lora_"):
            layers.setdefault(part.module, {}).setdefault(part.wrapped, {})[part.kind] = part
    if not layers:
        other = next(part for part in names.parts if part.adapter == adapter)
        raise IncompleteCheckpoint(
            f"{other.source}: the adapter {adapter!r} has LoRA on no layer",
            "the state dict was not saved whole; save it again",
        )
    inner = _parameters_of(names, gathers, layers)
    found: list[Target] = []
    for module, wrapped in layers.items():
        innermost_first = sorted(wrapped, key=len, reverse=True)
        pairs = [_pair(wrapped[each], gathers) for each in innermost_first]
        found += _targets(module, pairs, inner[module] if names.base else None, parameters)
    return found


def _parameters_of(
    names: Names, gathers: Mapping[str, Gather], modules: Iterable[str]
) -> dict[str, dict[str, Shape | None]]:
    """The parameters of each module itself, in their order; None for the shape of what is packed."""
    found: dict[str, dict[str, Shape | None]] = {module: {} for module in modules}
    for source, (clean, _) in names.inside.items():
        module, _, parameter = clean.rpartition(".")
        if module in found:
            plain = gathers[source].dtype.name.startswith(_PLAIN)
            found[module][parameter] = gathers[source].shape if plain else None
    return found


def _pair(kinds: Mapping[str, Part], gathers: Mapping[str, Gather]) -> _Pair:
    embedding = "lora_embedding_A" in kinds or "lora_embedding_B" in kinds
    wanted = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    first = next(iter(kinds.values()))
    for kind in wanted:
        if kind not in kinds:
            raise IncompleteCheckpoint(
                f"{first.source}: {first.module} has no {kind} for the adapter {first.adapter!r}",
                "the state dict was not saved whole; save it again",
            )
    if embedding and ("lora_A" in kinds or "lora_B" in kinds):
        raise InconsistentCheckpoint(
            f"{first.source}: {first.module} has LoRA of a layer and of an embedding",
            "no layer has both; save the state dict again",
        )
    source = kinds[wanted[0]].source
    pair = _Pair(source, gathers[source].shape, gathers[kinds[wanted[1]].source].shape, embedding)
    _check_rank(pair)
    return pair


def _check_rank(pair: _Pair) -> None:
    """Refuse A and B that cannot be multiplied."""
    a, b = pair.a, pair.b
    matrices = len(a) == len(b) == 2 and b[1] == a[0]
    convolution = not pair.embedding and len(a) == len(b) > 2 and b[1] and a[0] % b[1] == 0
    if 0 in (*a, *b) or not (matrices or convolution):
        raise InconsistentCheckpoint(
            f"{pair}: expected A [r, in] and B [out, r] of one rank r", "save the state dict again, whole"
        )


def _targets(
    module: str, pairs: Sequence[_Pair], inner: Mapping[str, Shape | None] | None, given: Sequence[str]
) -> list[Target]:
    """What the pairs of one module, innermost first, are for; `inner` is None where there is no base."""
    named = [each for each in inner or () if _ends_with(f"{module}.{each}", given)]
    if inner is None:
        if len(pairs) > 1 or _ends_with(module, [each.rpartition(".")[0] for each in given]):
            raise UnsupportedCheckpoint(
                f"{pairs[0].name}: LoRA on parameters, whose ranks do not show without the base model",
                "save the whole state dict in training",
            )
        return [Target(module, pairs[0].a[0])]
    if len(pairs) == 1 and "weight" in inner and "weight" not in named:
        layer = _as_layer(module, pairs[0], inner["weight"])
        if layer is not None:
            return [layer]
    return _as_parameters(module, pairs, inner, named)


def _as_layer(module: str, pair: _Pair, weight: Shape | None) -> Target | None:
    """The pair as LoRA on the module's weight; None if it does not fit."""
    rank, ins, outs = pair.a[0], pair.a[1], pair.b[0]
    if weight is None:
        return Target(module, rank)
    if pair.embedding:
        return Target(module, rank) if weight == (ins, outs) else None
    if len(weight) != len(pair.a):
        return None
    if len(weight) > 2:
        groups = rank // pair.b[1]
        fits = (weight[0], weight[1] * groups, *weight[2:]) == (outs, *pair.a[1:])
        return Target(module, rank) if fits else None
    if weight == (outs, ins):
        return Target(module, rank, transposed=None if ins == outs else False)
    return Target(module, rank, transposed=True) if weight == (ins, outs) else None


def _as_parameters(
    module: str, pairs: Sequence[_Pair], inner: Mapping[str, Shape | None], named: Sequence[str]
) -> list[Target]:
    """The pairs as LoRA on parameters of the module: those that are named, or the only ones that fit."""
    shaped = {name: shape for name, shape in inner.items() if shape is not None and len(shape) in {2, 3}}
    candidates = list(named or shaped)
    if max(len(candidates), len(pairs)) > _MOST_PARAMETERS:
        raise UnsupportedCheckpoint(
            f"{pairs[0].name}: LoRA on one of {len(candidates)} parameters of {module}",
            "give --lora-config with the adapter_config.json of the training, for its target_parameters",
        )
    fitting: set[frozenset[tuple[str, int]]] = set()
    for chosen in permutations(candidates, len(pairs)):
        ranks = [_rank_on(pair, shaped.get(name)) for pair, name in zip(pairs, chosen, strict=True)]
        fits = [(name, rank) for name, rank in zip(chosen, ranks, strict=True) if rank is not None]
        if len(fits) == len(pairs):
            fitting.add(frozenset(fits))
    if len(fitting) == 1:
        found = dict(fitting.pop())
        return [Target(f"{module}.{name}", found[name], parameter=True) for name in inner if name in found]
    there = ", ".join(f"{name} {list(shape or ())}" for name, shape in inner.items()) or "none"
    if not fitting:
        raise InconsistentCheckpoint(
            f"{'; '.join(map(str, pairs))} fit no tensors of {module} ({there})",
            "save the state dict again, whole, with the base model that LoRA was put on",
        )
    raise PlanError(
        f"{'; '.join(map(str, pairs))} fit several tensors of {module} ({there})",
        "give --lora-config with the adapter_config.json of the training, for its target_parameters",
    )


def _rank_on(pair: _Pair, shape: Shape | None) -> int | None:
    """The rank that the pair has on a parameter of that shape; None if it does not fit."""
    if shape is None or len(pair.a) != 2 or pair.embedding:
        return None
    stacked, ins, outs = pair.a[0], pair.a[1], pair.b[0]
    if len(shape) == 2:
        return stacked if shape == (outs, ins) else None
    experts = shape[0]
    if not experts or stacked % experts or shape[1:] not in {(outs, ins), (ins, outs)}:
        return None
    return stacked // experts


def _ends_with(name: str, endings: Iterable[str]) -> bool:
    return any(f".{name}".endswith(f".{ending}") for ending in endings)
