"""Which tensor of the base a name in an adapter means: adapters carry run-time names, bases the hub's.

The two differ where transformers renames a module when it loads it, which its conversion says, and in what
stands in front: ``model.language_model.`` and ``language_model.model.``, ``transformer.`` and nothing,
``bert.`` of a model with a head and nothing of one without. A name is found if it is there, or if exactly
one name of the base is the same without such words. No other word is one of them: ``audio_tower.layers.0``
is not ``model.layers.0``.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazymerge.conversions.runtime_names import Conversion

_FRONT = frozenset({"model", "language_model", "transformer"})
_RENAMED = ((".block_sparse_moe.", ".mlp."),)
"""Hub name, run-time name (Mixtral), where no conversion is known."""

_MOST_COMPARED = 2000


class BaseNames:
    """The names of a base's tensors, to be found under other spellings.

    `conversion` is of a base that has the hub's names: how its model has them when it runs. `config` is its
    config.json, whose model_type may be the word in front (``bert``).
    """

    def __init__(
        self,
        names: Collection[str],
        conversion: Conversion | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._names = set(names)
        self._front = _FRONT | _own_words(config or {})
        moves = {} if conversion is None else conversion.moves
        self._runtime = {each: hub for hub, each in moves.items() if isinstance(each, str)}
        moved = set() if conversion is None else conversion.runtime.keys() - self._runtime.keys()
        relaid = moved - (self._names - moves.keys())
        self._relaid = {self._plain(each) for each in relaid}
        self._spelt: dict[str, set[str]] = defaultdict(set)
        for name in self._names:
            self._spell(name, name)
        for runtime, hub in self._runtime.items():
            if hub in self._names:
                self._spell(runtime, hub)

    def find(self, name: str, *, relaid: bool = False) -> str | None:
        """The base's name for `name`; None if it has none, or several could be meant.

        One with the elements in another order than the run-time tensor's is found only if `relaid` will do.
        """
        if self._runtime.get(name) in self._names:
            return self._runtime[name]
        if self._plain(name) in self._relaid and not relaid:
            return None
        if name in self._names:
            return name
        found = self._spelt.get(self._plain(name), set())
        return next(iter(found)) if len(found) == 1 else None

    def is_relaid(self, name: str) -> bool:
        """Whether the base has the elements of this run-time tensor in another order, or cut up.

        Of a module's weight, it is so too if the module has such a tensor of another name.
        """
        name = self._plain(name)
        module = name.removesuffix("weight")
        return name in self._relaid or any(each.rpartition(".")[0] + "." == module for each in self._relaid)

    def add(self, name: str) -> None:
        """One more tensor of the base."""
        self._names.add(name)
        self._spell(name, name)

    def nearest(self, name: str) -> list[str]:
        """Names of the base that look most like `name`, at most three."""
        leaf = ".".join(name.split(".")[-2:])
        alike = sorted(each for each in self._names if each.endswith(leaf)) or sorted(self._names)
        return difflib.get_close_matches(name, alike[:_MOST_COMPARED], 3, 0.0)

    def _spell(self, name: str, of: str) -> None:
        self._spelt[self._plain(name)].add(of)

    def _plain(self, name: str) -> str:
        """The name without words in front."""
        for hub, runtime in _RENAMED:
            name = name.replace(hub, runtime)
        words = name.split(".")
        first = next((at for at, word in enumerate(words) if word not in self._front), len(words))
        return ".".join(words[first:])


def _own_words(config: Mapping[str, Any]) -> frozenset[str]:
    """Words in front that a model of one part is known by: ``bert``, and ``roberta`` of xlm-roberta."""
    kind = config.get("model_type")
    parts = [each for each in config.values() if isinstance(each, dict) and "model_type" in each]
    if not isinstance(kind, str) or parts:
        return frozenset()
    return frozenset({kind, *re.split(r"[-_]", kind)}) - {""}
