"""Tensors that an adapter saved whole, as the base on the hub has them: renamed, cut up, or joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lazymerge.conversions.adapters.names import BaseNames
from lazymerge.conversions.adapters.parts import Whole

if TYPE_CHECKING:
    from lazymerge.conversions.runtime_names import Conversion


def in_hub_form(whole: Mapping[str, Whole], conversion: Conversion | None) -> dict[str, Whole]:
    """What was saved whole, by the hub's names; what the conversion says nothing of stays as it is.

    One that is joined with others on the hub stays too, if they are not there: nothing is made of a half.
    """
    if conversion is None or not whole:
        return dict(whole)
    from lazymerge.conversions.expressions import from_plain, names_in

    runtime = BaseNames(conversion.runtime)
    spelt = {found: name for name in whole if (found := runtime.find(name)) is not None}
    spelt = {
        found: name
        for found, name in spelt.items()
        if whole[name].gather.shape == conversion.runtime[found] or found not in conversion.moves
    }
    result: dict[str, Whole] = {}
    used: set[str] = set()
    for hub, expression in conversion.moves.items():
        names = set(names_in(expression))
        if names <= spelt.keys():
            gathers = {name: whole[spelt[name]].gather for name in names}
            first = whole[spelt[min(names)]]
            result[hub] = replace(first, gather=from_plain(expression, gathers))
            used |= {spelt[name] for name in names}
    return result | {name: each for name, each in whole.items() if name not in used}
