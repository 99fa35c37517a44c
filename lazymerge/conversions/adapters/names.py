"""Which tensor of the base a name in an adapter means: adapters carry run-time names, bases the hub's.

The two differ in what stands in front (``model.language_model.`` and ``language_model.model.``,
``transformer.`` and nothing) and where transformers renames a module when it loads it. A name is found if it
is there, or if exactly one name of the base is the same without such words.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Collection, Iterator

_FRONT = {"model", "language_model", "transformer"}
_RENAMED = ((".block_sparse_moe.", ".mlp."),)
"""Hub name, run-time name (Mixtral)."""

_MOST_COMPARED = 2000


class BaseNames:
    """The names of a base's tensors, to be found under other spellings."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = set(names)
        self._spelt: dict[str, set[str]] = defaultdict(set)
        for name in self._names:
            for spelling in _spellings(name):
                self._spelt[spelling].add(name)

    def find(self, name: str) -> str | None:
        """The base's name for `name`; None if it has none, or several could be meant."""
        if name in self._names:
            return name
        for spelling in _spellings(name):
            found = self._spelt.get(spelling, set())
            if len(found) == 1:
                return next(iter(found))
        return None

    def add(self, name: str) -> None:
        """One more tensor of the base."""
        self._names.add(name)
        for spelling in _spellings(name):
            self._spelt[spelling].add(name)

    def nearest(self, name: str) -> list[str]:
        """Names of the base that look most like `name`, at most three."""
        leaf = ".".join(name.split(".")[-2:])
        alike = sorted(each for each in self._names if each.endswith(leaf)) or sorted(self._names)
        return difflib.get_close_matches(name, alike[:_MOST_COMPARED], 3, 0.0)


def _spellings(name: str) -> Iterator[str]:
    """The name without words in front, and without its first word (``bert.``), the likelier first."""
    for hub, runtime in _RENAMED:
        name = name.replace(hub, runtime)
    words = name.split(".")
    first = next((at for at, word in enumerate(words) if word not in _FRONT), len(words))
    yield ".".join(words[first:])
    if first == 0 and len(words) > 2:
        yield ".".join(words[1:])
