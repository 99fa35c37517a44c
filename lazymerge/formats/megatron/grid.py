"""Which ranks the folders of the `torch` layout are, and whether all are there that must be.

    mp_rank_{tensor:02d}[_{pipeline:03d}][_{expert:03d}]/model_optim_rng.pt

The pipeline's number is there if there is more than one stage, the expert's if there is more than one
expert-parallel rank, so that ``mp_rank_00_001`` can be either: the trainer's arguments say which.

Experts are sharded over expert tensor parallelism (ETP) and spread over expert parallelism (EP), both
of which run over the same ranks as tensor and data parallelism: in a stage, rank i is tensor rank
i mod TP, expert tensor rank i mod ETP and expert rank (i div ETP) mod EP. Each (tensor, expert) pair
that occurs among the ranks written has a folder, which may be but a diagonal of all pairs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lazymerge.errors import (
    AmbiguousCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    UnsupportedCheckpoint,
)
from lazymerge.files.local import refuse_no_file

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_([0-9]{2,6})(?:_([0-9]{3,6}))?(?:_([0-9]{3,6}))?")


Numbers = tuple[int, ...]


class Sizes(NamedTuple):
    """How many ranks there are of each kind; `etp` is None where nothing says so."""

    tp: int
    pp: int
    ep: int
    etp: int | None


class Place(NamedTuple):
    """Which rank a folder is."""

    pp: int
    ep: int
    tp: int


def holds_ranks(path: Path) -> bool:
    """Whether the folder holds rank folders of the `torch` layout; looks at names only."""
    try:
        return path.is_dir() and bool(rank_folders(path))
    except OSError:  # a folder that cannot be looked into
        return False


def rank_folders(folder: Path) -> dict[Numbers, Path]:
    """The rank folders that hold a model, by the numbers in their names, in the order of these.

    Raises `AmbiguousCheckpoint` for two of one rank, and `SourceError` for one whose model is no file.
    """
    found: dict[Numbers, Path] = {}
    for path in folder.iterdir():
        match = _FOLDER.fullmatch(path.name)
        if match and os.path.lexists(path / FILE):
            refuse_no_file(path / FILE)
            numbers = tuple(int(number) for number in match.groups() if number is not None)
            if numbers in found:
                raise AmbiguousCheckpoint(
                    f"{folder}: {found[numbers].name} and {path.name} are the same rank",
                    "take the one away that does not belong to the checkpoint",
                )
            found[numbers] = path
    return dict(sorted(found.items()))


def rank_folder_of(path: Path) -> Path | None:
    """The rank folder that a path is, or is a file of; None for any other."""
    path = Path(os.path.abspath(path))  # "." has no name
    folder = path if path.is_dir() else path.parent
    return folder if _FOLDER.fullmatch(folder.name) and os.path.lexists(folder / FILE) else None


def places_of(
    folder: Path, ranks: Collection[Numbers], settings: Mapping[str, Any]
) -> tuple[Sizes, dict[Numbers, Place]]:
    """The sizes of the grid and the place of every folder in it.

    Raises `NotACheckpoint` for no folders, `InconsistentCheckpoint` where names and arguments contradict
    each other, and `AmbiguousCheckpoint` where only the arguments could tell and there are none.
    """
    if not ranks:
        raise NotACheckpoint(
            f"{folder}: holds no mp_rank_*/{FILE}", "give the folder iter_... that holds the mp_rank_ folders"
        )
    sizes = _sizes(folder, ranks, settings)
    places: dict[Numbers, Place] = {}
    for numbers in ranks:
        place = _place(folder, numbers, sizes)
        if place in places.values():
            raise AmbiguousCheckpoint(
                f"{folder}: {_name(numbers)} is the same rank as another folder",
                "take the one away that does not belong to the checkpoint",
            )
        places[numbers] = place
    return sizes, places


def check_complete(folder: Path, places: Collection[Place], sizes: Sizes) -> None:
    """Raise `IncompleteCheckpoint` if a stage lacks a tensor rank or an expert rank, naming it."""
    here = set(places)
    dense = {(place.pp, place.tp) for place in here}
    experts = {(place.pp, place.ep) for place in here}
    for pp in range(sizes.pp):
        for tp in range(sizes.tp):
            if (pp, tp) not in dense:
                raise _missing(folder, len(here), _folder_name(sizes, tp, pp, None))
        for ep in range(sizes.ep):
            if (pp, ep) not in experts:
                raise _missing(folder, len(here), _folder_name(sizes, None, pp, ep))


def expert_tensor_rank(tp: int, sizes: Sizes) -> int:
    """The expert tensor rank of a tensor rank; refuses where their sizes leave it open."""
    if sizes.etp is None:
        if sizes.tp == 1:
            return 0
        raise UnsupportedCheckpoint(
            f"experts saved by {sizes.tp} tensor ranks, and how they are shared among them is not known"
            " (expert_tensor_parallel_size)",
            "save the checkpoint with its `args`, without --moe-extended-tp",
        )
    if sizes.tp % sizes.etp:
        raise UnsupportedCheckpoint(
            f"experts over {sizes.etp} expert tensor ranks with {sizes.tp} tensor ranks:"
            " the folders' names do not tell the former apart",
            "save the checkpoint in the torch_dist format",
        )
    return tp % sizes.etp


def size(settings: Mapping[str, Any], name: str, default: int | None) -> int | None:
    """An argument that is a positive number, or the default; anything else is refused."""
    value = settings.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise InconsistentCheckpoint(
            f"args: {name} is {str(value)[:50]!r}, expected a positive number",
            "the file is damaged or was changed; copy it again",
        )
    return value


def _sizes(folder: Path, ranks: Collection[Numbers], settings: Mapping[str, Any]) -> Sizes:
    tp = size(settings, "tensor_model_parallel_size", None)
    if tp is not None:
        pp = size(settings, "pipeline_model_parallel_size", 1) or 1
        ep = size(settings, "expert_model_parallel_size", 1) or 1
        etp = size(settings, "expert_tensor_parallel_size", tp)
        return Sizes(tp, pp, ep, None if settings.get("moe_extended_tp") else etp)
    for numbers in ranks:
        if len(numbers) == 2 and numbers[1]:
            raise AmbiguousCheckpoint(
                f"{folder / _name(numbers)}: {numbers[1]} is a pipeline or an expert rank,"
                " and no arguments (`args`) in the file say which",
                "rename the folders to mp_rank_TT_PPP_EEE, with 000 for the number that they lack",
            )
    most = [max((*numbers, 0, 0)[at] for numbers in ranks) + 1 for at in range(3)]
    return Sizes(most[0], most[1], most[2], None)


def _place(folder: Path, numbers: Numbers, sizes: Sizes) -> Place:
    tp, pp, ep = numbers[0], 0, 0
    if len(numbers) == 3:
        pp, ep = numbers[1:]
    elif len(numbers) == 2 and sizes.ep > 1:
        ep = numbers[1]
    elif len(numbers) == 2:
        pp = numbers[1]
    expected = 1 + (sizes.pp > 1) + (sizes.ep > 1)
    if len(numbers) < expected or tp >= sizes.tp or pp >= sizes.pp or ep >= sizes.ep:
        raise InconsistentCheckpoint(
            f"{folder / _name(numbers)}: no rank of a model over {sizes.tp} tensor, {sizes.pp} pipeline"
            f" and {sizes.ep} expert ranks, which `args` in it say",
            "the folders do not belong together, or were renamed",
        )
    return Place(pp, ep, tp)


def _name(numbers: Sequence[int]) -> str:
    return f"mp_rank_{numbers[0]:02d}" + "".join(f"_{number:03d}" for number in numbers[1:])


def _folder_name(sizes: Sizes, tp: int | None, pp: int, ep: int | None) -> str:
    """What a folder is called of which one number does not matter."""
    name = "mp_rank_" + ("*" if tp is None else f"{tp:02d}")
    if sizes.pp > 1:
        name += f"_{pp:03d}"
    if sizes.ep > 1:
        name += "_*" if ep is None else f"_{ep:03d}"
    return name


def _missing(folder: Path, here: int, name: str) -> IncompleteCheckpoint:
    return IncompleteCheckpoint(
        f"{folder}: {name} is missing ({here} rank folders with a model are here)",
        "other nodes may hold it: copy all mp_rank_ folders of the step into one folder",
    )
