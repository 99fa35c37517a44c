"""What it costs to start: the command's help, and a merge of next to nothing."""

from __future__ import annotations

import sys

from benches import roads
from benches.checkpoints import Recipe, make
from benches.measure import Road, alternate, remove
from benches.merging import Row, Settings

HELP = "lazymerge --help"
BARE = "python -c pass"


def starting(settings: Settings) -> list[Row]:
    """`lazymerge --help`, and a merge of a few kilobytes, beside the interpreter alone."""
    place = settings.places[0]
    recipe = Recipe("tiny-2", 1, 2, tiny=True)
    source = make(recipe, place.folder)
    ways = [
        Road(BARE, lambda _: [sys.executable, "-c", "pass"]),
        Road("import lazymerge", lambda _: [sys.executable, "-c", "import lazymerge"]),
        roads.merge(source, *roads.UNCHECKED),
    ]
    if roads.HAS_COMMAND:
        ways.append(Road(HELP, lambda _: roads.lazymerge("--help")))
    settings.tell("starting")
    runs = alternate(ways, place, source, 2 * settings.repeat, settings.tell, prepare=False)
    remove(place.folder / recipe.name)
    return [Row("starting", place.name, name, recipe.nbytes, done) for name, done in runs.items()]
