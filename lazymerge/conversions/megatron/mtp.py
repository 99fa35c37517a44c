"""Whether layers of multi-token prediction (MTP) are whole: transformers' classes, which the result is
compared with, do not have them.

mtp.layers.K.enorm, hnorm, final_layernorm    norms of H elements, H the hidden size
mtp.layers.K.eh_proj.weight                   H x 2H: of both normed inputs, one behind the other
mtp.layers.K.transformer_layer.<...>          a layer of the kind of the decoder's last one
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from lazymerge.boxes import Shape
from lazymerge.conversions.megatron.family import Config
from lazymerge.conversions.megatron.table import Table
from lazymerge.errors import IncompleteCheckpoint, InconsistentCheckpoint, PlanError
from lazymerge.gather import Gather

_LAYER = re.compile(r"(mtp\.layers\.[0-9]+\.)")
_PARTS = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
_OF_LAYER = re.compile(r"\{[LMK]\}\.")  # what the hub's name of a layer's tensor has before it
_COPY_AGAIN = (
    "files of the checkpoint are missing, or it was saved without them; take another step of the run"
)


def check_mtp(
    sources: Mapping[str, Gather],
    used: Iterable[str],
    made: Mapping[str, Gather],
    table: Table,
    config: Config,
    left_out: Collection[str],
) -> None:
    """Raise `IncompleteCheckpoint` for a part of an MTP layer that is not there, `InconsistentCheckpoint` for
    one of another shape, `PlanError` where a mapping leaves out a part alone.

    `sources` are all tensors by canonical name, `used` those that the table puts somewhere (a mapping may say
    something else of others), `made` what became of them by the hub's name, `left_out` what a mapping
    leaves out.
    """
    prefixes = dict.fromkeys(match[1] for name in used if (match := _LAYER.match(name)) is not None)
    if not prefixes:
        return
    last = f"decoder.layers.{config.layers - 1}."
    expected = _of_layer(last, sources, table, config)
    for prefix in prefixes:
        _refuse_rest(prefix, used, left_out, table)
        _check_parts(prefix, sources, config)
        inner = f"{prefix}transformer_layer."
        found = _of_layer(inner, sources, table, config)
        for part, (model, full) in expected.items():
            if part not in found:
                raise IncompleteCheckpoint(
                    f"{inner}{model.removeprefix(last)}: not in the checkpoint, though the decoder's last"
                    f" layer has its own ({model})",
                    _COPY_AGAIN,
                )
            name, own = found[part]
            if own in made and full in made and made[own].shape != made[full].shape:
                raise InconsistentCheckpoint(
                    f"{name}: becomes {own} of shape {made[own].shape}, expected {made[full].shape} as"
                    f" {full} has",
                    "the files do not belong together, or were changed; copy the checkpoint again",
                )


def _refuse_rest(prefix: str, used: Iterable[str], left_out: Collection[str], table: Table) -> None:
    """Refuse a layer of which a mapping leaves out what the table would use, and keeps the rest."""
    known = (table.find(name) for name in left_out if name.startswith(prefix))
    if any(match is not None and not match.rule.dropped for match in known):
        rest = [name for name in used if name.startswith(prefix)]
        raise PlanError(
            f"{prefix[:-1]}: --param-mapping leaves out a part of this MTP layer, not {rest[0]}"
            f" ({len(rest)} tensors are left)",
            "leave out all of the layer, with a --param-mapping NAME: for each number of parts of a name",
        )


def _of_layer(
    prefix: str, sources: Iterable[str], table: Table, config: Config
) -> dict[str, tuple[str, str]]:
    """What a layer's tensors become: the hub's name within the layer -> (Megatron's name, the hub's)."""
    parts: dict[str, tuple[str, str]] = {}
    for name in sources:
        match = table.find(name) if name.startswith(prefix) else None
        for template in match.rule.hf if match is not None else ():
            assert match is not None
            part = match.filled(_OF_LAYER.split(template, maxsplit=1)[-1], config.layers)
            parts[part] = (name, match.filled(template, config.layers))
    return parts


def _check_parts(prefix: str, sources: Mapping[str, Gather], config: Config) -> None:
    """The projection and the norms of one MTP layer, beside its transformer layer."""
    hidden = config.count("hidden_size")
    for part in _PARTS:
        gather = sources.get(prefix + part)
        if gather is None:
            raise IncompleteCheckpoint(
                f"{prefix}{part}: not in the checkpoint, which has others of this MTP layer", _COPY_AGAIN
            )
        shape: Shape = (hidden, 2 * hidden) if part == "eh_proj.weight" else (hidden,)
        if gather.shape != shape:
            raise InconsistentCheckpoint(
                f"{prefix}{part}: of shape {gather.shape}, expected {shape} by hidden_size in config.json",
                "the files do not belong together, or config.json is another model's",
            )
