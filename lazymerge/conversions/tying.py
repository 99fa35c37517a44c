"""Tied embeddings: one tensor under two names, written the way that a loader expects it.

config says tied, both are there and equal    the output head is left out; the loader ties it
config says tied, both are there and differ   both are written, with a warning
config says tied, only the head is there      it is written under the embedding's name
config does not say tied                      what is there is written
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Mapping
from typing import Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.errors import DamagedFile, PlanError
from lazymerge.fill import equal
from lazymerge.gather import Gather

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
    """The checkpoint with tied tensors as a loader of `config` expects them.

    Reads the two tensors, if both are there and are not the same bytes of a file anyway.
    """
    gathers = checkpoint.gathers
    head = next((name for name in gathers if _ends_with(name, HEADS)), None)
    if head is None or not tied_by_config(config):
        return checkpoint
    embeddings = [name for name in gathers if _ends_with(name, EMBEDDINGS)]
    if not embeddings:
        return _renamed(checkpoint, head, config or {})
    outermost = min(name.count(".") for name in embeddings)  # a loader ties to the model's, not to a part's
    embeddings = [name for name in embeddings if name.count(".") == outermost]
    for name in embeddings:
        if _same(gathers[name], gathers[head]):
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
    flag = _flag(config)
    if flag is not None:
        return flag
    parts = [config.get(key) for key in ("text_config", "llm_config", "language_config", "decoder")]
    if not any(_flag(part) for part in parts if isinstance(part, dict)):
        return False
    try:
        whole = _model_class(config).config_class.from_dict(copy.deepcopy(dict(config)))
    except Exception:
        # No class that transformers has, or a config that it does not take. Hundreds of classes check
        # their fields in their own ways, so what they raise has no common kind but this one. What is
        # found out here is whether a loader ties; where there is none that can say it, none does.
        return False
    return bool(getattr(whole, FLAG, False))


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


def _same(one: Gather, other: Gather) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype and equal(one, other)


def _renamed(checkpoint: Checkpoint, head: str, config: Mapping[str, Any]) -> Checkpoint:
    """The head under the name of the embedding that it is tied to: a loader fills the head from there."""
    target = _embedding_of(head, config)
    gathers = {target if name == head else name: gather for name, gather in checkpoint.gathers.items()}
    note = Note("info", f"{head} is written as {target}, from which the loader ties it", head)
    return checkpoint.with_gathers(gathers, note)


def _embedding_of(head: str, config: Mapping[str, Any]) -> str:
    """The embedding's name, from the class that config.json names (the class is never instantiated)."""
    keys = getattr(_model_class(config), "_tied_weights_keys", None)
    if isinstance(keys, dict) and isinstance(keys.get(head), str):
        return str(keys[head])
    raise PlanError(
        f"{head}: config.json ties it to an embedding that is not here, and {config.get('architectures')}"
        " does not say to which",
        "set tie_word_embeddings to false in the config, or add the embedding",
    )


def _model_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that a config names first; None if there is none of that name."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or not name.isidentifier():
        return None
    return getattr(importlib.import_module("transformers"), name, None)
