"""A checkpoint of a model of transformers under the names that `save_pretrained` writes, checked.

What class it is, config.json says in `architectures`, but for what trainers do to it:

    FSDPQwen3MoeForCausalLM             fully_shard renames the class; the prefix goes
    Qwen3MoeForCausalLM, with a score   a critic (lazymerge.conversions.value_head)
    none, AutoModel..., an unknown one  the class of `model_type` that the tensors fit, if it is just one

A config that transformers builds no model of is no reason to stop: it is the trainer that built it. One that
contradicts itself is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.architecture import Architecture, classes, compare, why_unknown
from lazymerge.conversions.architecture import check as compared
from lazymerge.conversions.contradiction import listed
from lazymerge.conversions.model_process import Contradiction
from lazymerge.conversions.quantised import without_quantised
from lazymerge.conversions.runtime_names import (
    Conversion,
    architecture_and_conversion,
    converted,
    has_runtime_names,
    unchanged,
)
from lazymerge.conversions.tied_names import tied_once
from lazymerge.conversions.tying import flags
from lazymerge.conversions.value_head import (
    value_head_fields,
    value_head_note,
    without_class,
    without_output,
)
from lazymerge.errors import InconsistentCheckpoint, LazymergeError

Known = tuple[Architecture, Conversion]

_WRAPPED = "FSDP"


def saved_names(
    checkpoint: Checkpoint, given: Mapping[str, Any] | None, names: str, code: Path | None, *, check: bool
) -> tuple[Checkpoint, dict[str, Any], Architecture | None]:
    """(The checkpoint, fields that its config.json has to have instead, its architecture if that is known).

    `given` is config.json, if there is one. `names` is "hub" or "runtime", which keeps them; `check` compares
    names and shapes with the class. Raises what these raise, and `DamagedFile` as `tying.flags`.
    """
    fields, notes = _unwrapped(given or {})
    config = {**(given or {}), **fields}
    flags(config)  # refused before a class is asked for that might take them otherwise
    value = value_head_fields(checkpoint, config)
    if names == "runtime" and not check:
        told = [value_head_note(config, value)] if value else []
        return checkpoint.with_notes(*notes, *told), {**fields, **value}, None
    try:
        known = architecture_and_conversion({**config, **value}, code)
        if value and known is None:
            known = architecture_and_conversion(config, code)
            if known is not None:
                known = without_output(known[0]), known[1]
                value, note = without_class(config, value)
                notes.append(note)
        if "architectures" in value:
            notes.append(value_head_note(config, value))
        if known is None:
            why = "there is no config.json" if given is None else why_unknown(config)
            known, note = _by_model_type(checkpoint, config, code, why)
            notes.append(note)
    except LazymergeError as error:
        kept = not isinstance(error, Contradiction) and isinstance(error, InconsistentCheckpoint)
        if check and not kept:
            raise
        notes.append(unchanged(error.problem, "warning"))
        return checkpoint.with_notes(*notes), {**fields, **value}, None
    checkpoint = checkpoint.with_notes(*notes)
    if known is None:
        return checkpoint, {**fields, **value}, None
    return _settled(checkpoint, known, names, check=check), {**fields, **value}, known[0]


def _settled(checkpoint: Checkpoint, known: Known, names: str, *, check: bool) -> Checkpoint:
    """The checkpoint under the names that are wanted, compared with its class, and tied as that has it."""
    architecture, conversion = known
    named = converted(checkpoint, architecture, conversion)
    if check:
        named = compared(named, architecture)
    if names == "hub":
        return tied_once(named, architecture.tied, architecture.class_name)
    is_runtime = has_runtime_names(checkpoint, architecture, conversion)
    tied = conversion.tied if is_runtime else architecture.tied
    return tied_once(checkpoint, tied, architecture.class_name)


def _unwrapped(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Note]]:
    """The fields, and what is said of them, of a config whose class has the prefix that fully_shard gives."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return {}, []
    name = names[0].removeprefix(_WRAPPED)
    if name == names[0] or not name:
        return {}, []
    text = f"config.json names {name} in place of {names[0]}, as fully_shard calls it"
    return {"architectures": [name, *names[1:]]}, [Note("info", text)]


def _by_model_type(
    checkpoint: Checkpoint, config: Mapping[str, Any], code: Path | None, why: str
) -> tuple[Known | None, Note]:
    """The one class that may be the model's and that the tensors fit, and what is said of it.

    `why` says why the config's own is not known.
    """
    names = classes(config)
    fitting = []
    for name in names:
        try:
            known = architecture_and_conversion({**config, "architectures": [name]}, code)
            if known is not None and _fits(converted(checkpoint, *known), known[0]):
                fitting.append(known)
        except Contradiction:
            raise
        except LazymergeError:
            pass  # tensors that it cannot be
    if len(fitting) == 1:
        return fitting[0], Note("info", f"{why}: the tensors are those of {fitting[0][0].class_name}")
    if not names:
        return None, unchanged(why, "info")
    fit = "more than one of them fits" if fitting else "the tensors fit none of them"
    return None, unchanged(f"{why}; it may be one of {listed(names)}, and {fit}", "warning")


def _fits(checkpoint: Checkpoint, architecture: Architecture) -> bool:
    found, _ = without_quantised(compare(checkpoint, architecture), checkpoint, architecture)
    return not found.wrong and not found.unknown
