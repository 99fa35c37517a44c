"""A trainer's checkpoint as the hub has it: names and layouts of the model that config.json names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.megatron.mapping import parse_mapping
from lazymerge.errors import LazymergeError, PlanError

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
    names: str = "hub"  # or "runtime"

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
            "names": self.names,
            "check": self.check,
            "transformers": _transformers(),
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


_IDLE = {"--tie-word-embedding", "--is-value-model"}
"""Flags that verl's merger takes for every backend, and that do nothing but for Megatron."""


def _transformers() -> str | None:
    """The version of transformers, whose names the result has."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def _hash(family: str | None) -> str | None:
    """Of the file that a family is in, if it is in one."""
    try:
        return None if family is None else hashlib.sha256(Path(family).read_bytes()).hexdigest()
    except (OSError, ValueError):  # a name of a family, or of nothing
        return None


@dataclass(frozen=True, slots=True)
class Hub:
    """The checkpoint under the hub's names, and the fields that its config.json has to have instead.

    `architecture` is what its class says of it; None where that is not known, and then what is tied is not
    settled.
    """

    checkpoint: Checkpoint
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    architecture: Architecture | None = None


def to_hub(
    checkpoint: Checkpoint,
    config: Mapping[str, Any] | None,
    options: HubOptions,
    code: Path | None = None,
) -> Hub:
    """The checkpoint under the hub's names, checked against the model that `config` names.

    Tensors that its class ties are written once. `code` is the folder of the config's remote code, where
    the user trusts it. Raises what the conversion and the check raise.
    """
    if options.names not in {"hub", "runtime"}:
        raise PlanError(f"--names {options.names}", "choose hub or runtime")
    if checkpoint.format != "megatron":
        given = options.named()
        refused = [flag for flag in given if flag not in _IDLE]
        if refused:
            raise PlanError(
                f"{', '.join(refused)}: only for Megatron checkpoints, this is {checkpoint.format}",
                "leave it out",
            )
        if given:
            text = f"{', '.join(given)}: only for Megatron checkpoints, does nothing for {checkpoint.format}"
            checkpoint = checkpoint.with_notes(Note("info", text))
        from lazymerge.conversions.saved_names import saved_names

        return Hub(*saved_names(checkpoint, config, options.names, code, check=options.check))
    from lazymerge.conversions.megatron.convert import convert
    from lazymerge.conversions.megatron.families import load_family
    from lazymerge.conversions.megatron.head import without_class
    from lazymerge.conversions.tied_names import tied_once
    from lazymerge.conversions.value_head import without_output

    architecture = _architecture(config, options, code)  # before the conversion imports torch
    filled = config if config is None or architecture is None else _filled(config, architecture.defaults)
    defaults = _left_to_class(config or {}, filled or {})
    try:
        converted = convert(
            checkpoint,
            filled,
            family=None if options.family is None else load_family(options.family),
            mapping=parse_mapping(options.param_mapping),
            tied=options.tie_word_embedding or None,
            value_model=options.is_value_model or None,
            force_shapes=options.force_shape_match,
        )
    except LazymergeError as error:
        error.hint += _of_class(str(error), defaults)
        raise
    checkpoint, changes = converted.checkpoint, converted.config_changes
    if defaults:
        text = f"config.json leaves sizes to its class, whose defaults are taken: {_as_text(defaults)}"
        unseen = any(field.endswith(".num_heads") for field in defaults)  # of a vision tower: no shape tells
        checkpoint = checkpoint.with_notes(Note("warning" if unseen else "info", text))
    if changes:
        known, architecture = architecture, _architecture({**(config or {}), **changes}, options, code)
        if architecture is None and known is not None and "architectures" in changes:
            changes, note = without_class(changes, known.class_name)
            checkpoint = checkpoint.with_notes(note)
            architecture = without_output(known)
    checkpoint = _checked(checkpoint, architecture, {**(config or {}), **changes}, options)
    if architecture is not None:
        checkpoint = tied_once(checkpoint, architecture.tied, architecture.class_name)
    return Hub(checkpoint, changes, architecture)


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
    *("num_experts", "n_routed_experts", "num_local_experts"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"),
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


def _left_to_class(config: Mapping[str, Any], filled: Mapping[str, Any]) -> dict[str, Any]:
    """What `_filled` added: field -> value, fields of parts under the part's name."""
    added: dict[str, Any] = {}
    for name, value in filled.items():
        was = config.get(name)
        if isinstance(was, dict) and isinstance(value, dict):
            added |= {f"{name}.{field}": each for field, each in _left_to_class(was, value).items()}
        elif value is not was and value != was:  # a NaN differs from itself
            added[name] = value
    return added


def _of_class(message: str, defaults: Mapping[str, Any]) -> str:
    """A clause for an error: which of the fields that it names are not config.json's own; "" for none."""
    named = {
        field: value
        for field, value in defaults.items()
        if re.search(rf"\b{re.escape(field.rpartition('.')[2])}\b", message)
    }
    return f"; by default of its class, config.json has {_as_text(named)}" if named else ""


def _as_text(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value!r:.40}" for name, value in fields.items())


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
            "leave it out, or install the transformers that has it",
        )
    if options.backfill is not None and (architecture is None or not options.check):
        raise PlanError(
            f"--backfill {options.backfill}: only the check of names and shapes knows what may be missing",
            "leave out --no-check, or install the transformers that has the class of this config.json",
        )
    if architecture is not None and options.force_shape_match:
        from lazymerge.conversions.shapes import force_shapes

        checkpoint = force_shapes(checkpoint, architecture)
    if architecture is None or not options.check:
        why = why_unknown(config) if options.check else "--no-check"
        text = f"names and shapes are not checked: {why}"
        return checkpoint.with_notes(Note("warning" if options.check else "info", text))
    if options.backfill is not None:
        return backfilled(checkpoint, architecture, Path(options.backfill))
    return note_lacking(check(checkpoint, architecture), architecture, checkpoint.sidecars)
