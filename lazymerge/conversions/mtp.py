"""The layers that predict further tokens (MTP), as the hub has them; transformers does not build them.

    DeepSeek-V3, Kimi K2, GLM-4.5    model.layers.N. and on, behind the N decoder layers: what a decoder layer
                                     has, enorm, hnorm, eh_proj and shared_head.norm; the published files
                                     also copy the embedding and the output layer into each
    Qwen3-Next                       mtp.layers.0. and on: what a decoder layer has; and once, mtp.fc,
                                     mtp.norm and the norms of what goes into mtp.fc

How many there are is num_nextn_predict_layers, which not every config.json has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from lazymerge.conversions.architecture import Architecture, Shape, ignored_by, is_mtp

_COUNT = "num_nextn_predict_layers"
_BEHIND = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite")
_APART = ("qwen3_next",)
_PART = re.compile(r"(^|\.)mtp(\b|_)")
_NUMBER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")


def is_of_mtp(name: str, architecture: Architecture) -> bool:
    """Whether a tensor of the hub is of a layer that predicts, no further one than config.json counts."""
    if is_mtp(name, architecture.config):
        return True
    if not _PART.search(name) or not ignored_by(architecture)(name):
        return False
    count, number = _text(architecture.config).get(_COUNT), _NUMBER.search(name)
    return type(count) is not int or (int(number[1]) if number else 0) < count


def expected_of_mtp(architecture: Architecture, names: Collection[str]) -> tuple[dict[str, Shape], set[str]]:
    """(Name -> shape of what the layers that `names` are of consist of, which of these may be absent).

    Empty for models whose layers of this kind are not known.
    """
    config = architecture.config
    text = {**_text(architecture.defaults), **_text(config)}
    kind, count = text.get("model_type"), text.get(_COUNT)
    sizes = (text.get(name) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    layers, hidden, words = (size if isinstance(size, int) else 0 for size in sizes)
    ours = {name for name in names if is_of_mtp(name, architecture)}
    if not ours or kind not in _BEHIND + _APART or not (layers and hidden and words):
        return {}, set()
    first = layers if kind in _BEHIND else 0
    numbers = {int(found[1]) for name in ours if (found := _NUMBER.search(name))}
    numbers |= set(range(first, first + (count if isinstance(count, int) else 1)))
    vector: Shape = (hidden,)
    joined: Shape = (hidden, 2 * hidden)
    table: Shape = (words, hidden)
    expected: dict[str, Shape] = {}
    copies: dict[str, Shape] = {}
    for number in sorted(numbers):
        front = f"model.layers.{number}." if kind in _BEHIND else f"mtp.layers.{number}."
        tails = {name.removeprefix(front) for name in ours if name.startswith(front)}
        expected |= {front + tail: shape for tail, shape in _like_a_layer(tails, architecture).items()}
        if kind in _BEHIND:
            norms = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
            expected |= {front + norm: vector for norm in norms} | {f"{front}eh_proj.weight": joined}
            copies |= {front + name: table for name in ("embed_tokens.weight", "shared_head.head.weight")}
    if kind in _APART:
        norms = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")
        expected |= {f"mtp.{norm}": vector for norm in norms} | {"mtp.fc.weight": joined}
    return expected | copies, set(copies)


def _like_a_layer(tails: Collection[str], architecture: Architecture) -> Mapping[str, Shape]:
    """Name in the layer -> shape, of the decoder layer that has most of these names; of equals, the last."""
    layers: dict[int, dict[str, Shape]] = {}
    for name, shape in architecture.shapes.items():
        found = _NUMBER.search(name)
        if found:
            layers.setdefault(int(found[1]), {})[name[found.end() :]] = shape
    return max(
        (layers[number] for number in sorted(layers, reverse=True)),
        key=lambda names: len(names.keys() & tails) / len(names.keys() | tails),
        default={},
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config
