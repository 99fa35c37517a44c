"""Parameters with all experts that the hub has as a tensor for each, by what transformers says of saving.

    model.layers.0.mlp.experts.gate_up_proj [experts, 2F, H]
        -> model.layers.0.ffn.experts.{0..}.w1.weight: rows 0 to F of one expert, .w3.weight: the other rows

The names are read off the conversion, whatever the hub calls them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from lazymerge.boxes import Shape
from lazymerge.conversions.adapters.names import BaseNames
from lazymerge.gather import Gather

if TYPE_CHECKING:
    from lazymerge.conversions.runtime_names import Conversion

Rows = tuple[tuple[str, ...], int]
"""The hub's tensors of the same rows of every expert, in the experts' order, and how many rows these are."""


class Cuts:
    """Finds what the hub makes of a run-time parameter; without a `conversion`, nothing."""

    def __init__(self, conversion: Conversion | None) -> None:
        self._conversion = conversion

    def of(self, parameter: str, base: Mapping[str, Gather]) -> tuple[Shape, list[Rows]] | None:
        """The shape of the parameter [experts, rows, columns], and the tensors of `base` with its rows.

        None where `base` does not have all of it in rows of single experts.
        """
        if self._conversion is None or not self._conversion.moves:
            return None
        name = self._runtime.find(parameter)
        shape = () if name is None else self._conversion.runtime[name]
        if name is None or len(shape) != 3:
            return None
        experts, rows, columns = shape
        parts: list[Rows] = []
        at = 0
        for start, size in sorted(self._cuts[name]):
            found = self._cuts[name][start, size]
            names = tuple(found.get(expert, "") for expert in range(experts))
            if start != at or any(each not in base or base[each].shape != (size, columns) for each in names):
                return None
            parts.append((names, size))
            at += size
        return (shape, parts) if at == rows and parts else None

    @cached_property
    def _runtime(self) -> BaseNames:
        assert self._conversion is not None
        return BaseNames(self._conversion.runtime)

    @cached_property
    def _cuts(self) -> Mapping[str, Mapping[tuple[int, int], dict[int, str]]]:
        """Run-time name -> (first row, how many) -> expert -> hub name."""
        assert self._conversion is not None
        cuts: dict[str, dict[tuple[int, int], dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
        for hub, expression in self._conversion.moves.items():
            match expression:
                case ["pick", str(name), [1, 2], [[0, int(expert)]]]:
                    cuts[name][0, self._conversion.runtime[name][1]][expert] = hub
                case ["pick", str(name), [[1, int(start), 1, int(size)], 2], [[0, int(expert)]]]:
                    cuts[name][start, size][expert] = hub
        return cuts
