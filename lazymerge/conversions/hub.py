"""A trainer's checkpoint as the hub has it: names and layouts of the model that config.json names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.megatron.mapping import parse_mapping
from lazymerge.errors import PlanError

if TYPE_CHECKING:  # what a merge of FSDP does not need is not imported for it
    from lazymerge.conversions.architecture import Architecture


@dataclass(frozen=True, slots=True)
class HubOptions:
    """What a user can say about a conversion; arguments of `lazymerge.merge`."""

    family: str | None = None
    param_mapping: tuple[str, ...] = ()
    tie_word_embedding: bool = False
    is_value_model: bool = False
    force_shape_match: bool = False
    check: bool = True
    backfill: str | None = None

    def identity(self) -> dict[str, Any]:
        """What decides the bytes of the result: the contents of the files that are named, not their paths."""
        return {
            "family": self.family,
            "family_file": _hash(self.family),
            "param_mapping": parse_mapping(self.param_mapping),
            "tie_word_embedding": self.tie_word_embedding,
            "is_value_model": self.is_value_model,
            "force_shape_match": self.force_shape_match,
            "backfill": self.backfill,
        }

    def named(self) -> list[str]:
        """The flags that only a conversion can follow, of those that were given."""
        flags = {
            "--family": self.family is not None,
            "--param-mapping": self.param_mapping,
            "--tie-word-embedding": self.tie_word_embedding,
            "--is-value-model": self.is_value_model,
            "--force-shape-match": self.force_shape_match,
            "--backfill": self.backfill is not None,
        }
        return [flag for flag, given in flags.items() if given]


def _hash(family: str | None) -> str | None:
    """Of the file that a family is in, if it is in one."""
    try:
        return None if family is None else hashlib.sha256(Path(family).read_bytes()).hexdigest()
    except (OSError, ValueError):  # a name of a family, or of nothing
        return None


@dataclass(frozen=True, slots=True)
class Hub:
    """The checkpoint under the hub's names, and the fields that its config.json has to have instead."""

    checkpoint: Checkpoint
    config_changes: Mapping[str, Any] = field(default_factory=dict)


def to_hub(
    checkpoint: Checkpoint,
    config: Mapping[str, Any] | None,
    options: HubOptions,
    code: Path | None = None,
) -> Hub:
    """The checkpoint under the hub's names, checked against the model that `config` names.

    A checkpoint of FSDP has such names already and stays as it is. `code` is the folder of the config's
    remote code, where the user trusts it. Raises what the conversion and the check raise.
    """
    if checkpoint.format != "megatron":
        if options.named():
            raise PlanError(
                f"{', '.join(options.named())}: only for Megatron checkpoints, this is {checkpoint.format}",
                "leave it away",
            )
        return Hub(checkpoint)
    from lazymerge.conversions.megatron.convert import convert
    from lazymerge.conversions.megatron.families import load_family

    architecture = _architecture(config, options, code)  # before the conversion imports torch
    converted = convert(
        checkpoint,
        config if config is None or architecture is None else _filled(config, architecture.defaults),
        family=None if options.family is None else load_family(options.family),
        mapping=parse_mapping(options.param_mapping),
        tied=options.tie_word_embedding or None,
        value_model=options.is_value_model or None,
        force_shapes=options.force_shape_match,
    )
    changed = {**(config or {}), **converted.config_changes}
    if converted.config_changes:
        architecture = _architecture(changed, options, code)
    return Hub(_checked(converted.checkpoint, architecture, changed, options), converted.config_changes)


def _architecture(
    config: Mapping[str, Any] | None, options: HubOptions, code: Path | None
) -> Architecture | None:
    from lazymerge.conversions.architecture import expected

    wanted = options.check or options.force_shape_match
    return expected(config, code=code) if wanted and config is not None else None


_FILLED = (
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_heads",
    "depth",
)
"""Sizes that a layout needs and that some configs leave to their class (Gemma 3)."""


def _filled(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The config with those sizes that it has not, as its class has them; of its parts too."""
    filled = dict(config)
    for name, value in defaults.items():
        if name in _FILLED and value is not None and filled.get(name) is None:
            filled[name] = value
        elif isinstance(value, dict) and isinstance(filled.get(name), dict):
            filled[name] = _filled(filled[name], value)
    return filled


def _checked(
    checkpoint: Checkpoint,
    architecture: Architecture | None,
    config: Mapping[str, Any],
    options: HubOptions,
) -> Checkpoint:
    from lazymerge.conversions.architecture import check, why_unknown
    from lazymerge.conversions.backfill import backfilled, note_lacking

    if architecture is None and options.force_shape_match:
        raise PlanError(
            f"--force-shape-match: there are no shapes to match: {why_unknown(config)}",
            "leave it away, or install the transformers that has it",
        )
    if options.backfill is not None and (architecture is None or not options.check):
        raise PlanError(
            f"--backfill {options.backfill}: only the check of names and shapes knows what may be missing",
            "leave --no-check away, or install the transformers that has the class of this config.json",
        )
    if architecture is None:
        text = f"names and shapes are not checked: {why_unknown(config)}"
        return checkpoint.with_notes(Note("warning", text)) if options.check else checkpoint
    if options.force_shape_match:
        from lazymerge.conversions.shapes import force_shapes

        checkpoint = force_shapes(checkpoint, architecture)
    if not options.check:
        return checkpoint
    checkpoint = check(checkpoint, architecture)
    if options.backfill is not None:
        return backfilled(checkpoint, architecture, Path(options.backfill))
    return note_lacking(checkpoint, architecture, checkpoint.sidecars)
