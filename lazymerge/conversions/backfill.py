"""Parts of a model that training left out, such as a vision tower or MTP layers, out of the base model.

Only what may be missing is filled: the checkpoint has been compared with the model that config.json names
before, so that a tensor which training should have left is an error and never quietly the base's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.architecture import Architecture, ignored_by, layers_of
from lazymerge.errors import InconsistentCheckpoint, PlanError
from lazymerge.formats.huggingface import INDEX, read_index, read_model

_SHOWN = 3


def backfilled(checkpoint: Checkpoint, architecture: Architecture, base: Path) -> Checkpoint:
    """The checkpoint, checked against `architecture`, with what it has not of the model in the folder `base`.

    Raises `PlanError` where the base has nothing to add, and `InconsistentCheckpoint` where it has a tensor
    in another shape than the model's.
    """
    tensors, files = read_model(base)
    names = lacking(checkpoint, architecture, tensors)
    if not names:
        raise PlanError(
            f"--backfill {base}: the checkpoint has all that is in there and of the model", "leave it away"
        )
    for name in names:
        expected = architecture.shapes.get(name)
        if expected is not None and tensors[name].shape != expected:
            raise InconsistentCheckpoint(
                f"{name} in {base} has shape {tensors[name].shape}, expected {expected} by config.json",
                "give the folder of the model that the training began with",
            )
    text = f"{len(names)} tensors are those of {base}, unchanged: {_listed(names)}"
    filled = checkpoint.with_gathers(
        {**checkpoint.gathers, **{name: tensors[name] for name in names}}, Note("info", text)
    )
    return replace(filled, files=(*checkpoint.files, *files))


def note_lacking(checkpoint: Checkpoint, architecture: Architecture, folders: Collection[Path]) -> Checkpoint:
    """The checkpoint with a warning if the base model's index, where there is one, lists more tensors."""
    for folder in folders:
        if (folder / INDEX).is_file():
            names = lacking(checkpoint, architecture, read_index(folder))
            if not names:
                return checkpoint
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
    ignores = ignored_by(architecture)
    return [
        name
        for name in base
        if name not in present
        and name not in tied
        and not any(layer in trained for layer in layers_of(name)[:1])
        and (name in architecture.shapes or ignores(name))
    ]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
