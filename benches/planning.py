"""Planning: 723 tensors on 128, 256 and 512 ranks, whose files are a few hundred kilobytes each."""

from __future__ import annotations

import sys

from benches.checkpoints import Recipe, make
from benches.measure import Road, alternate, remove
from benches.merging import Row, Settings

LAYERS = 80  # 723 tensors
RANKS = (128, 256, 512)


def planning(settings: Settings) -> list[Row]:
    """A dry run: everything is read and proved that is before the first byte."""
    rows = []
    place = settings.places[0]
    for ranks in RANKS:
        recipe = settings.scaled(Recipe(f"tiny-{ranks}", LAYERS, ranks, tiny=True))
        source = make(recipe, place.folder)
        options = "dry_run=True, check=False, names='runtime'"  # the matrices are too small for their config
        call = f"import lazymerge; lazymerge.merge({str(source)!r}, 'nowhere', {options})"
        road = Road("merge, dry run", lambda _, call=call: [sys.executable, "-c", call])  # type: ignore[misc]
        what = f"{len(recipe.shapes())} tensors, {recipe.ranks} ranks"
        settings.tell(what)
        runs = alternate([road], place, source, settings.repeat, settings.tell)
        rows += [Row(what, place.name, name, recipe.nbytes, done) for name, done in runs.items()]
        remove(place.folder / recipe.name)
    return rows
