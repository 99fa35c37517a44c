"""Tied tensors, by what the model's class says: written once, as `save_pretrained` does.

    equal                      the one that is saved is written, and the loader ties the others to it
    different                  all are written, with a warning
    the saved one not there    another is written under its name

That goes for the head of a language model and its embedding, for encoders and decoders, for detection heads.
Where the class is not known, lazymerge.conversions.tying goes by config.json and by what such names end with.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.architecture import tied_together
from lazymerge.fill import alike


def tied_once(checkpoint: Checkpoint, tied: Mapping[str, str], class_name: str) -> Checkpoint:
    """The checkpoint with what `tied` says (name -> the one that it is tied to) as a loader expects it.

    Reads tensors that are tied, if they are not the same bytes of a file anyway.
    """
    gathers = checkpoint.gathers
    left_out: dict[str, str] = {}
    names: dict[str, str] = {}
    notes: list[Note] = []
    for saved, *others in tied_together(tied):
        present = [name for name in (saved, *others) if name in gathers]
        if not present:
            continue
        kept, *rest = present
        differing = [name for name in rest if not alike(gathers[name], gathers[kept])]
        left_out |= {
            name: f"tied to {kept if differing else saved}, which holds the same values"
            for name in rest
            if name not in differing
        }
        for name in differing:
            text = f"{class_name} ties {name} to {kept}, but their values differ: both are written"
            notes.append(Note("warning", text, name))
        if kept != saved and not differing:
            names[kept] = saved
            text = f"{kept} is written as {saved}, from which the loader ties it"
            notes.append(Note("info", text, kept))
    if not left_out and not notes:
        return checkpoint
    written = {name: gather for name, gather in gathers.items() if name not in left_out}
    checkpoint = checkpoint.with_gathers(written, *notes, left_out=left_out)
    return checkpoint.renamed({name: names.get(name, name) for name in written}) if names else checkpoint


def tied_in(model: Any, names: Container[str]) -> dict[str, str]:
    """What a model of transformers ties of these tensors: run-time name -> the one that it is tied to."""
    ties = getattr(model, "all_tied_weights_keys", {})  # some models of a part never set it
    return {one: other for one, other in ties.items() if one != other and one in names and other in names}
