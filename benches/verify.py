"""What verifying costs: a model against its copy, beside `cmp` on the same bytes, and against its ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benches import roads
from benches.checkpoints import make
from benches.measure import Road, alternate, remove
from benches.merging import GB4, Row, Settings

CMP = "cmp"
VERIFY = "lazymerge verify, of its copy"
VERIFY_RANKS = "lazymerge verify, of its rank files"
VERIFY_ALONE = "lazymerge verify, of its manifest"


def verifying(settings: Settings) -> list[Row]:
    """4.4 GB of bf16 against 4.4 GB: all of it is read, and nothing is written."""
    rows = []
    for place in settings.places:
        recipe = settings.scaled(GB4)
        ranks = make(recipe, place.folder)
        model, copy = place.folder / "model", place.folder / "copy"
        for command in (
            roads.lazymerge("merge", str(ranks), str(model), "--max-shard-size", "100GB"),
            ["cp", "-r", str(model), str(copy)],
        ):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        _seal(model)
        settings.tell("verify")
        ways = [
            Road(
                CMP,
                lambda _, model=model, copy=copy: [
                    "cmp",
                    *(str(x / "model.safetensors") for x in (model, copy)),
                ],
            ),
            Road(VERIFY, lambda _, model=model, copy=copy: _verify(copy, "--against", model)),
            Road(VERIFY_RANKS, lambda _, model=model, ranks=ranks: _verify(ranks, "--against", model)),
            Road(VERIFY_ALONE, lambda _, model=model: _verify(model)),
        ]
        runs = alternate(ways, place, place.folder, settings.repeat, settings.tell)
        rows += [Row("verify", place.name, name, recipe.nbytes, done) for name, done in runs.items()]
        for folder in (model, copy, place.folder / recipe.name):
            remove(folder)
    return rows


def _verify(one: Path, *more: object) -> list[str]:
    return roads.lazymerge("verify", str(one), *(str(each) for each in more))


def _seal(model: Path) -> None:
    """Leave a manifest, as a merge with verification does."""
    from lazymerge.manifest import make_manifest, write_manifest

    write_manifest(model, make_manifest(model))
