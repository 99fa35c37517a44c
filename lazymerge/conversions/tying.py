"""Tied embeddings of a model whose class is not known: by config.json, and by what their names end with.

config says tied, both are there and equal    the output head is left out; the loader ties it
config says tied, both are there and differ   both are written, with a warning
config says tied, only the head is there      refused: nobody says what the embedding is called; written
                                              with a warning where another tensor may be it, by its shape
config does not say tied                      what is there is written

Where the class is known, it says what is tied (lazymerge.conversions.tied_names).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.architecture import expected
from lazymerge.errors import DamagedFile, LazymergeError, PlanError
from lazymerge.fill import alike

FLAG = "tie_word_embeddings"
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "shared.weight",
)


def tie(checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> Checkpoint:
    """The checkpoint with tied tensors as a loader of `config` expects them, whatever its class.

    Reads the two tensors, if both are there and are not the same bytes of a file anyway. Raises `PlanError`
    for a head without its embedding, and `DamagedFile` as `tied_by_config`.
    """
    gathers = checkpoint.gathers
    head = next((name for name in gathers if _ends_with(name, HEADS)), None)
    if head is None or not any(flags(config or {})[:1]):
        return checkpoint
    embeddings = [name for name in gathers if _ends_with(name, EMBEDDINGS)]
    if not embeddings:
        if any(g.shape == gathers[head].shape for name, g in gathers.items() if name != head):
            text = f"config.json ties {head} to an embedding whose name is not known: all is written as it is"
            return checkpoint.with_notes(Note("warning", text, head))
        raise PlanError(
            f"{head}: config.json ties it to an embedding that is not here, and it is not known to which:"
            f" architectures is {(config or {}).get('architectures')!r:.100}",
            "set tie_word_embeddings to false in the config, or add the embedding",
        )
    outermost = min(name.count(".") for name in embeddings)  # a loader ties to the model's, not to a part's
    embeddings = [name for name in embeddings if name.count(".") == outermost]
    for name in embeddings:
        if alike(gathers[name], gathers[head]):
            kept = {other: gather for other, gather in gathers.items() if other != head}
            return checkpoint.with_gathers(
                kept, left_out={head: f"tied to {name}, which holds the same values"}
            )
    text = f"config.json ties {head} to {embeddings[0]}, but their values differ: both are written"
    return checkpoint.with_gathers(gathers, Note("warning", text, head))


def tied_by_config(config: Mapping[str, Any] | None) -> bool:
    """Whether a loader of this config ties the head: what its ``tie_word_embeddings`` says.

    Where only the config of a part says that it is tied, the model's class decides: some hand the flag
    on to the whole (LLaVA), others do not (Qwen3-VL), and would initialise a head that is left out.
    Raises `DamagedFile` for a flag that is neither true nor false: only a missing one (or null, which
    early versions of transformers wrote) says nothing.
    """
    config = config or {}
    whole, *parts = flags(config)
    if whole is not None or not any(parts):
        return bool(whole)
    try:
        known = expected(config)
    except LazymergeError:  # a class that does not take this config: no loader ties by it
        return False
    return known is not None and any(_ends_with(name, HEADS) for name in known.tied)


def flags(config: Mapping[str, Any]) -> list[bool | None]:
    """What the config says of ties, and each of its parts; `DamagedFile` for what is no flag."""
    parts = [config.get(key) for key in ("text_config", "llm_config", "language_config", "decoder")]
    return [_flag(config), *(_flag(part) for part in parts if isinstance(part, dict))]


def _flag(config: Mapping[str, Any]) -> bool | None:
    """What the config itself says; None if it says nothing, by a missing flag or null."""
    flag = config.get(FLAG)
    if flag is None or isinstance(flag, bool):
        return flag
    raise DamagedFile(
        f"config.json: {FLAG} is {json.dumps(flag)[:40]}, expected true or false",
        "transformers refuses such a config, or ignores the value: correct it, or give --hf-config DIR",
    )


def _ends_with(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)
