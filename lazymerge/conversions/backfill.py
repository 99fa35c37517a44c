"""Parts of a model that training left out, such as a vision tower or MTP layers, out of the base model.

Only what may be missing is filled: the checkpoint is compared with the model that config.json names before,
so that a tensor which training should have left is an error and never quietly the base's. A part that is
filled has to be whole, in the base's own form: nothing is dequantised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.architecture import Architecture, check, compare, layers_of
from lazymerge.conversions.contradiction import listed
from lazymerge.conversions.mtp import expected_of_mtp, is_of_mtp
from lazymerge.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    PlanError,
    UnsupportedCheckpoint,
)
from lazymerge.formats.huggingface import INDEX, read_index, read_model
from lazymerge.gather import Gather

_SHOWN = 3
_SCALES = ("_scale", "_scale_inv")
"""What the scales of a quantised tensor are called, behind its own name."""


def backfilled(checkpoint: Checkpoint, architecture: Architecture, base: Path) -> Checkpoint:
    """The checkpoint with what it has not of the model in the folder `base`; both checked as `check` does.

    Raises `PlanError` where the base has nothing to add, `UnsupportedCheckpoint` where it is quantised,
    `IncompleteCheckpoint` where it has only some of a part, and `InconsistentCheckpoint` where it has a
    tensor in another shape than the model's.
    """
    check(checkpoint, architecture)  # what was trained is whole, before anything is added
    tensors, files = read_model(base)
    names = lacking(checkpoint, architecture, tensors)
    if not names:
        raise PlanError(
            f"--backfill {base}: the checkpoint has all that is in there and of the model", "leave it out"
        )
    _refuse_quantised(tensors, names, base)
    text = f"{len(names)} tensors are those of {base}, unchanged: {_listed(names)}"
    notes = [Note("info", text), *_other_dtype(checkpoint, {name: tensors[name] for name in names}, base)]
    filled = checkpoint.with_gathers(
        {**checkpoint.gathers, **{name: tensors[name] for name in names}}, *notes
    )
    _refuse_faults(filled, architecture, names, base)
    return replace(check(filled, architecture), files=(*checkpoint.files, *files))


def _refuse_quantised(tensors: Mapping[str, Gather], names: Collection[str], base: Path) -> None:
    """Refuse tensors of one byte or less an element, and those that others are the scales of."""
    for name in names:
        scales = [name + suffix for suffix in _SCALES if name + suffix in tensors]
        dtype = tensors[name].dtype
        if scales or (dtype.itemsize == 1 and dtype.name != "bool"):
            what = f"has {scales[0]} beside it" if scales else f"is {dtype}"
            raise UnsupportedCheckpoint(
                f"{name} in {base} {what}: quantised, and the checkpoint is not",
                "dequantise the base first and give that folder, or leave out --backfill",
            )


def _other_dtype(checkpoint: Checkpoint, added: Mapping[str, Gather], base: Path) -> Iterator[Note]:
    """A warning where most of what is added has another dtype than most of the checkpoint."""
    ours, theirs = _main_dtype(checkpoint.gathers), _main_dtype(added)
    if ours != theirs:
        text = f"what is copied from {base} is {theirs}, the checkpoint {ours}: --dtype makes them one"
        yield Note("warning", text, next(iter(added)))


def _main_dtype(tensors: Mapping[str, Gather]) -> str:
    """The dtype of most bytes; "" without any."""
    sizes: Counter[str] = Counter()
    for gather in tensors.values():
        sizes[gather.dtype.name] += gather.nbytes
    return max(sizes, key=lambda name: sizes[name], default="")


def _refuse_faults(filled: Checkpoint, architecture: Architecture, names: Sequence[str], base: Path) -> None:
    """Refuse a part that the base has only some of, or in other shapes; the checkpoint itself is in order."""
    found = compare(filled, architecture)
    misshapen = dict(found.misshapen)
    missing = list(found.missing)
    expected, may_be_absent = expected_of_mtp(architecture, names)
    for name, shape in expected.items():
        if name in filled.gathers:
            if filled.gathers[name].shape != shape:
                misshapen[name] = filled.gathers[name].shape, shape
        elif name not in may_be_absent:
            missing.append(name)
    if missing:
        raise IncompleteCheckpoint(
            f"{base}: lacks {listed(missing)}, though it has others of the same parts, such as {names[0]}",
            "give the whole folder of the model that the training began with",
        )
    for name, (is_, want) in misshapen.items():
        raise InconsistentCheckpoint(
            f"{name} in {base} has shape {is_}, expected {want} by config.json",
            "give the folder of the model that the training began with",
        )


def note_lacking(checkpoint: Checkpoint, architecture: Architecture, folders: Collection[Path]) -> Checkpoint:
    """The checkpoint with a warning if the base model's index, where there is one, lists more tensors."""
    for folder in folders:
        if (folder / INDEX).is_file():
            names = lacking(checkpoint, architecture, read_index(folder))
            if not names:  # perhaps the result of a merge, beside the source's config
                continue
            text = (
                f"{len(names)} tensors that {folder / INDEX} lists are not in the checkpoint, so not in the"
                f" result: {_listed(names)}; --backfill {folder} copies them"
            )
            return checkpoint.with_notes(Note("warning", text))
    return checkpoint


def lacking(checkpoint: Checkpoint, architecture: Architecture, base: Mapping[str, object]) -> list[str]:
    """The names of `base` that are of the model, and of no part of it that the checkpoint has.

    A layer of which the checkpoint has anything was trained: the base's copies of shared tensors, which
    MTP layers come with, are not its.
    """
    present = checkpoint.gathers
    tied = {
        name for pair in architecture.tied.items() if any(one in present for one in pair) for name in pair
    }
    trained = {layer for name in present for layer in layers_of(name)[:1]}
    return [
        name
        for name in base
        if name not in present
        and name not in tied
        and not any(layer in trained for layer in layers_of(name)[:1])
        and (name in architecture.shapes or is_of_mtp(name, architecture))
    ]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
