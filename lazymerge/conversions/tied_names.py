"""Tied tensors of any kind, by what the model itself says: written once, as `save_pretrained` does.

lazymerge.conversions.tying knows the head and the embedding of language models from config.json alone. Here
the model that transformers built says what is tied: encoders and decoders, detection heads, a head whose
class ties it though config.json does not say so.
"""

from __future__ import annotations

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.architecture import Architecture
from lazymerge.fill import equal


def untied(checkpoint: Checkpoint, architecture: Architecture) -> Checkpoint:
    """The checkpoint without the tensors that a loader ties to equal ones; those that differ are written.

    Reads both, if they are not the same bytes of a file anyway.
    """
    gathers = checkpoint.gathers
    left_out: dict[str, str] = {}
    notes = []
    for name, other in architecture.tied.items():
        if name not in gathers or other not in gathers or other in left_out:
            continue
        one, kept = gathers[name], gathers[other]
        if one.shape == kept.shape and one.dtype is kept.dtype and equal(one, kept):
            left_out[name] = f"tied to {other}, which holds the same values"
        elif "tie_word_embeddings" not in architecture.config:  # else lazymerge.conversions.tying says so
            text = (
                f"{architecture.class_name} ties {name} to {other}, but their values differ: both are written"
            )
            notes.append(Note("warning", text, name))
    if not left_out and not notes:
        return checkpoint
    written = {name: gather for name, gather in gathers.items() if name not in left_out}
    return checkpoint.with_gathers(written, *notes, left_out=left_out)
