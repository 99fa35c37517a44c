"""The benches that write: merges against `cp`, loading everything, and plain reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benches import cgroups, roads
from benches.checkpoints import Recipe, make
from benches.measure import Place, Road, Run, alternate, remove


@dataclass(frozen=True, slots=True)
class Row:
    """What one road did with one checkpoint in one place: its runs, and the bytes of all tensors."""

    what: str
    place: str
    road: str
    nbytes: int
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure: where, how often, and whether small (a smoke test).

    `disk` is there whatever the places are: 8 GB twice are too much for memory.
    """

    places: tuple[Place, ...]
    disk: Place
    repeat: int
    quick: bool
    verl: str | None  # a Python that has verl
    tell: Callable[[str], None]

    def scaled(self, recipe: Recipe) -> Recipe:
        """The recipe, or a small one of its kind for a smoke test."""
        if not self.quick:
            return recipe
        layers = max(2, recipe.layers // 10 // 2 * 2)
        return Recipe(
            recipe.name + "-quick",
            layers,
            recipe.ranks if not recipe.tiny else recipe.ranks // 16,
            recipe.dtype,
            recipe.cut,
            recipe.tiny,
            recipe.single // 4,
        )


GB1 = Recipe("bf16-1.0", layers=5)
GB4 = Recipe("bf16-4.4", layers=29)
GB6 = Recipe("bf16-6.1", layers=41)
GB8 = Recipe("bf16-8.0", layers=55)
FP32 = Recipe("fp32-4.3", layers=13, dtype="float32")
ROWS = Recipe("bf16-4.4-shard1", layers=29, cut=1)
SINGLE = Recipe("one-2.1", single=1 << 15)


def merge(settings: Settings) -> list[Row]:
    """4.4 GB of bf16 on 4 ranks, no cast: against `cp -r` and against loading all of it."""
    rows = []
    for place in settings.places:
        recipe = settings.scaled(GB4)
        source = make(recipe, place.folder)
        ways = [roads.cp(source), roads.merge(source)]
        if place.name != "shm":
            ways.insert(1, roads.cp_sync(source))
        rows += measured(settings, place, recipe, source, ways)
        if not place.cold:
            loading = [roads.merge(source), roads.reference(source, recipe.nbytes)]
            if settings.verl:
                loading.append(roads.verl(source, recipe.nbytes, settings.verl))
            rows += measured(settings, place, recipe, source, loading, what="4.4 GB, against loading it")
        remove(place.folder / recipe.name)
    return rows


def memory(settings: Settings) -> list[Row]:
    """Peak memory for checkpoints of 1, 4 and 8 GB and for one tensor of 2 GB , on disk."""
    rows = []
    place = settings.disk
    for recipe in map(settings.scaled, (GB1, GB4, GB8, SINGLE)):
        source = make(recipe, place.folder)
        options = roads.UNCHECKED if recipe.single else ()  # one tensor is no model
        ways = [roads.merge(source, *options)]
        rows += measured(settings, place, recipe, source, ways, options=options)
        remove(place.folder / recipe.name)
    return rows


TIGHT = 512 * 10**6
"""Bytes of the cgroup, page cache included."""

MERGE_TIGHT = "lazymerge merge, in a cgroup of 512 MB"


def tight(settings: Settings) -> list[Row]:
    """6 GB on disk with all memory there is, and in a cgroup of half a gigabyte."""
    place, recipe = settings.disk, settings.scaled(GB6)
    source = make(recipe, place.folder)
    with cgroups.limited(TIGHT) as group:
        if group is None:
            settings.tell("tight: no memory cgroup can be made here")
            return []
        free = roads.merge(source)
        limited = Road(MERGE_TIGHT, lambda target: cgroups.inside(group, free.command(target)))
        rows = measured(settings, place, recipe, source, [free, limited])
    remove(place.folder / recipe.name)
    return rows


def cast(settings: Settings) -> list[Row]:
    """4.3 GB of fp32 cast to bf16, against reading the one and writing the other without work between."""
    rows = []
    for place in settings.places:
        recipe = settings.scaled(FP32)
        source = make(recipe, place.folder)
        out, threads = recipe.nbytes // 2, roads.WORKERS
        ways = [
            roads.merge(source, "--dtype", "bfloat16"),
            roads.plain(source, out),
            roads.plain(source, out, threads=threads),
        ]
        if place.name != "shm":
            ways.append(roads.plain(source, out, threads=threads, sync=True))
        rows += measured(settings, place, recipe, source, ways)
        remove(place.folder / recipe.name)
    return rows


def rows(settings: Settings) -> list[Row]:
    """Every matrix cut along dimension 1 (rows of 1,280 and 3,456 bytes), against the contiguous case."""
    found = []
    for place in settings.places:
        if place.cold:
            continue
        for recipe in map(settings.scaled, (ROWS, GB4)):  # one after the other: both would fill /dev/shm
            source = make(recipe, place.folder)
            found += measured(settings, place, recipe, source, [roads.merge(source), roads.cp(source)])
            remove(place.folder / recipe.name)
    return found


def measured(
    settings: Settings,
    place: Place,
    recipe: Recipe,
    source: Path,
    ways: Sequence[Road],
    *,
    what: str | None = None,
    options: Sequence[str] = (),
) -> list[Row]:
    """Each road's runs with one checkpoint in one place, one after the other and again."""
    what = what or recipe.name
    settings.tell(f"{what} in {place.name}")
    roads.ask(source, *options)
    runs = alternate(ways, place, source, settings.repeat, settings.tell)
    return [Row(what, place.name, road, recipe.nbytes, done) for road, done in runs.items()]
