"""Whether the config.json that is used and others that lie with the checkpoint mean one model.

verl saves the config of the model that it trained beside its tensors. One that the user gives instead must
not contradict it in what decides the order of rows and leaves no trace in shapes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazymerge.conversions.megatron.layouts import DELTA, HEADS
from lazymerge.errors import DamagedFile, InconsistentCheckpoint
from lazymerge.files.json_text import read_object
from lazymerge.files.local import LocalFile, refuse_no_file

_CONFIG = "config.json"
_MAX_CONFIG = 1 << 20  # bytes; usual are 2 thousand, with names of labels 100 thousand
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave")
_TEXT = (*HEADS, *DELTA, *_LATENT)
_VISION = ("num_heads", "num_attention_heads")


def check_beside(folders: Sequence[Path], config: Mapping[str, Any]) -> None:
    """Raise `InconsistentCheckpoint` where a config.json of these folders contradicts `config`.

    `config` is that of the first folder which has one, with the defaults of its class. What one of two does
    not state is not compared. Raises `DamagedFile` for another one that is no JSON object.
    """
    paths = [folder / _CONFIG for folder in folders if os.path.lexists(folder / _CONFIG)]
    said = dict(_deciding(config))
    for path in paths[1:]:
        for field, value in _deciding(_read(path)):
            if said.get(field, value) != value:
                raise InconsistentCheckpoint(
                    f"{field} is {said[field]} in {paths[0]}, and {value} in {path}, which lies with the"
                    " checkpoint: they mean other orders of rows",
                    "leave out --hf-config to take the checkpoint's own, or move that away if it is wrong",
                )


def _read(path: Path) -> dict[str, Any]:
    refuse_no_file(path)
    try:
        return read_object(LocalFile(path), _MAX_CONFIG)
    except ValueError as error:
        raise DamagedFile(
            f"{path}: cannot be compared with the config.json that was given ({error})", "move it away"
        ) from None


def _deciding(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The numbers and flags that decide an order of rows, by their names in config.json."""
    text, vision = config.get("text_config"), config.get("vision_config")
    parts: list[tuple[str, Mapping[str, Any], tuple[str, ...]]] = [
        ("", text if isinstance(text, dict) else config, _TEXT)
    ]
    if isinstance(vision, dict):
        parts.append(("vision_config.", vision, _VISION))
    for prefix, part, fields in parts:
        for field in fields:
            latent = part.get("kv_lora_rank") is not None and field in HEADS[1:]  # which has no groups
            if isinstance(part.get(field), int) and not latent:
                yield prefix + field, part[field]
