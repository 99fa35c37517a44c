"""What folding made of a base, checked against the model that its config.json names now.

A tensor that the base has not may only be one that the model has: a head that was saved whole, and not
something of another model, or another form of what the base has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazymerge.checkpoint import Checkpoint
from lazymerge.conversions.adapters.adapter import Adapter
from lazymerge.conversions.adapters.fold import Folded, fold
from lazymerge.conversions.adapters.vocabulary import LABELLED, ends_with
from lazymerge.conversions.hub import Hub, HubOptions
from lazymerge.conversions.tying import HEADS
from lazymerge.errors import InconsistentCheckpoint, UnsupportedCheckpoint
from lazymerge.files.dtype import DType

if TYPE_CHECKING:
    from lazymerge.conversions.architecture import Architecture
    from lazymerge.conversions.runtime_names import Conversion

Model = tuple["Architecture", "Conversion"]


def fold_into(
    hub: Hub,
    adapters: Sequence[tuple[Adapter, float]],
    config: Mapping[str, Any],
    options: HubOptions,
    code: Path | None,
    dtype: DType | None,
) -> Folded:
    """`hub` with the adapters in it, each with its weight; `config` is its config.json.

    Raises as `fold` and `checked`, and `UnsupportedCheckpoint` where a head that an adapter saved whole makes
    a class of it that is not known.
    """
    model = None
    if hub.architecture is not None:
        model = _model(config, code)
        if model is None:  # the class was found by the tensors
            config = {**config, "architectures": [hub.architecture.class_name]}
            model = _model(config, code)
    known: tuple[Architecture, Conversion | None] | None = model
    if model is not None and options.names == "runtime":
        from lazymerge.conversions.runtime_names import has_runtime_names

        if has_runtime_names(hub.checkpoint, *model):
            known = (replace(model[0], tied=model[1].tied), None)
    folded = fold(hub.checkpoint, adapters, config, model=known, dtype=dtype)
    if model is not None and folded.config_changes:
        changed = {**config, **folded.config_changes}
        model = _model(changed, code)
        if model is None:
            from lazymerge.conversions.architecture import why_unknown

            raise UnsupportedCheckpoint(
                f"the model with the adapter is a {changed['architectures'][0]}: {why_unknown(changed)}",
                "merge it with PEFT's merge_and_unload, or install the transformers that has the class",
            )
    return checked(folded, hub.checkpoint, model, names=options.names, check=options.check)


def _model(config: Mapping[str, Any], code: Path | None) -> Model | None:
    from lazymerge.conversions.runtime_names import architecture_and_conversion

    return architecture_and_conversion(config, code)


def checked(folded: Folded, before: Checkpoint, model: Model | None, *, names: str, check: bool) -> Folded:
    """The result, with notes on what it lacks or has too much, of which `before` has not been told.

    `model` is that of the result's config.json, None if it is not known. `names` are the checkpoint's, "hub"
    or "runtime". With `check`, raises as `architecture.check`; and without it too `InconsistentCheckpoint`
    for a new tensor that the model has not, `UnsupportedCheckpoint` where it ties what has come apart.
    """
    result = folded.checkpoint
    if names == "runtime" and model is not None:
        from lazymerge.conversions.runtime_names import converted

        result = converted(result, *model)
    if model is None:
        strange = [name for name in folded.added if not ends_with(name, (*LABELLED, *HEADS))]
    else:
        strange = [name for name in folded.added if name in result and name not in model[0].shapes]
    if strange:
        raise InconsistentCheckpoint(
            f"{folded.added[strange[0]]}: {strange[0]}, which was saved whole, is in no such form in the base"
            f" {f'or in {model[0].class_name}' if model else ', and no head of a model'}",
            "give the base that the adapter was trained on",
        )
    if model is None:
        return folded
    architecture = model[0]
    for name, other in folded.untied:
        if architecture.tied.get(name) == other:
            raise UnsupportedCheckpoint(
                f"{name} differs from {other} with the adapter, and {architecture.class_name} ties them"
                " whatever config.json says",
                "merge it with PEFT's merge_and_unload, and see whether what it saves loads as it was",
            )
    if not check or (not folded.config_changes and _shapes(folded.checkpoint) == _shapes(before)):
        return folded
    from lazymerge.conversions.architecture import check as compared

    told = compared(replace(result, notes=()), architecture).notes
    new = [note for note in told if note not in folded.checkpoint.notes]
    return replace(folded, checkpoint=folded.checkpoint.with_notes(*new))


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: gather.shape for name, gather in checkpoint.gathers.items()}
