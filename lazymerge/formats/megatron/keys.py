"""The names in Megatron's distributed checkpoints, and the canonical names that they stand for.

    decoder.layers.<rest>                      a stack: the first axis is the layer
    decoder.layers.7.<rest>                    one layer
    <...>.mlp.experts.experts.<rest>           a stack: the next axis is the expert
    <...>.mlp.experts.experts.3.<rest>         one expert
    <...>.mlp.experts.linear_fc1.weight3       the same, under the name of TE's grouped linear
    <...>.linear_fc1.weight_w, .weight_v       gate and up apart
    mtp.layers.0.mtp_model_layer.<rest>        as mtp.layers.0.transformer_layer.<rest>

Wrappers put `module.`, `model.` or `language_model.` in front. Whether a name is that of a stack is
decided for each name: one checkpoint may have both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lazymerge.formats.megatron.names import without_wrappers
from lazymerge.formats.stacks import Index

HALVES = ("_w", "_v")
"""What the names of gate and up end in where a gated linear_fc1 is stored in two."""

_LAYERS = re.compile(r"(?<![^.])layers\.(?P<number>[0-9]+\.)?")
_EXPERTS = re.compile(r"(?<=\.experts\.)experts\.(?P<number>[0-9]+\.)?")
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)([0-9]+)(_[wv])?")

_NO_WEIGHTS = re.compile(
    r"(optimizer|chained_[0-9]+|opt_param_scheduler|lr_scheduler|rng_state|rerun_state_machine_state"
    r"|rerun_state_machine|common_state|args|iteration|checkpoint_version|content_metadata"
    r"|num_floating_point_operations_so_far)(?=[./]|$)"
)
_EXTRA_STATE = re.compile(r"\._extra_state(?=[./]|$)")


@dataclass(frozen=True, slots=True)
class Key:
    """A name as it is stored: the parts of the canonical name, between which the index is set."""

    parts: tuple[str, ...]

    @property
    def axes(self) -> int:
        """Leading axes of the tensor that are layers or experts."""
        return len(self.parts) - 1

    def name(self, index: Index) -> str:
        """The canonical name of the tensor at this index of the stack; () where it is none."""
        numbers = [str(at) for at in index]
        return "".join(part for pair in zip(self.parts, [*numbers, ""], strict=True) for part in pair)


def parse(key: str) -> Key:
    """The canonical name, or names, that a stored name stands for."""
    key = without_wrappers(key)
    key = _GROUPED.sub(r".experts.local_experts.\3.\1.\2\4", key)
    parts: list[str] = []
    for pattern, words in ((_LAYERS, "layers."), (_EXPERTS, "local_experts.")):
        match = pattern.search(key)
        if match is not None:
            head = key[: match.start()] + words
            key = key[match.end() :]
            if match["number"] is None:
                parts.append(head)
                key = f".{key}"
            else:
                key = head + match["number"] + key
    return Key((*parts, key))


def kind_left_out(key: str) -> str | None:
    """What a stored name is of, if it is of no weight: "optimizer", "rng_state", "_extra_state", ..."""
    match = _NO_WEIGHTS.match(key)
    if match is not None:
        return "optimizer" if match[1].startswith("chained_") else match[1]
    return "_extra_state" if _EXTRA_STATE.search(key) else None
