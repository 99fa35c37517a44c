"""Tensors cropped or zero-padded to the sizes that config.json asks for: only where the user forces it.

A dimension that is too long loses its end, one that is too short gets zeros at its end. Nothing is
computed and nothing is held: the zeros are one element, repeated without copies. A tensor that is several
projections in one, such as ``gate_up_proj``, is not forced: only its last part has its end there.
"""

from __future__ import annotations

import torch

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.architecture import Architecture, Shape, compare
from lazymerge.conversions.contradiction import is_fused
from lazymerge.elements import in_memory, torch_dtype
from lazymerge.errors import InconsistentCheckpoint
from lazymerge.gather import Gather, cat


def force_shapes(checkpoint: Checkpoint, architecture: Architecture) -> Checkpoint:
    """The checkpoint with every tensor in the architecture's shape, and a warning for each that had another.

    Raises `InconsistentCheckpoint` where the number of dimensions differs, which is no matter of size, and
    for a tensor that is several projections in one, such as ``gate_up_proj``: another size would mix them.
    """
    misshapen = compare(checkpoint, architecture).misshapen
    gathers = dict(checkpoint.gathers)
    notes = []
    for name, (found, expected) in misshapen.items():
        if len(found) != len(expected):
            raise InconsistentCheckpoint(
                f"{name} has {len(found)} dimensions, {list(found)}, and the {architecture.class_name} of"
                f" config.json {len(expected)}, {list(expected)}",
                "--force-shape-match changes sizes only: see whether config.json is this checkpoint's own",
            )
        if is_fused(name):
            raise InconsistentCheckpoint(
                f"{name} is {list(found)}, {list(expected)} by config.json, and it is several projections in"
                " one: cropped or padded at its end, they would mix",
                "mend config.json: --force-shape-match does not change such a tensor",
            )
        gathers[name] = _forced(gathers[name], expected)
        done = [
            word
            for word, is_done in (
                ("cropped", any(a > b for a, b in zip(found, expected, strict=True))),
                ("padded with zeros", any(a < b for a, b in zip(found, expected, strict=True))),
            )
            if is_done
        ]
        text = f"{name} is {' and '.join(done)} from {list(found)} to {list(expected)}"
        notes.append(Note("warning", text, name))
    if notes:
        text = (
            f"{len(notes)} tensors are not the checkpoint's: --force-shape-match changed their sizes, and"
            " the model may not compute what was trained"
        )
        notes.insert(0, Note("warning", text))
    return checkpoint.with_gathers(gathers, *notes)


def _forced(gather: Gather, shape: Shape) -> Gather:
    for dim, size in enumerate(shape):
        if gather.shape[dim] > size:
            gather = gather.narrow(dim, 0, size)
    for dim, size in enumerate(shape):
        lacking = size - gather.shape[dim]
        if lacking:
            zero = in_memory(torch.zeros((1,) * len(shape), dtype=torch_dtype(gather.dtype)))
            padding = (*gather.shape[:dim], lacking, *gather.shape[dim + 1 :])
            gather = cat([gather, zero.expand(padding)], dim)
    return gather
