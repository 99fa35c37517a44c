"""LoRA in a trainer's sharded checkpoint: the base under its own names, and the adapters as PEFT saves them.

    trained_names    which tensor is what, by PEFT's names
    trained_shapes   which layers have LoRA, and of which rank
    trained_told     alpha, and what else was recorded beside the tensors
    trained_config   adapter_config.json

Only names are changed: no tensor is read, but for the rows of an embedding that are trained and tied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Checkpoint, Copy, Note
from lazymerge.conversions.adapters.adapter import Adapter
from lazymerge.conversions.adapters.trained_config import Found, make_config
from lazymerge.conversions.adapters.trained_names import Names, Part, told_apart
from lazymerge.conversions.adapters.trained_shapes import targets
from lazymerge.conversions.adapters.trained_told import (
    BASE,
    EXTRACT,
    FOLD,
    ONLY,
    LoraOptions,
    Told,
    recorded_in,
    told,
)
from lazymerge.conversions.tying import HEADS
from lazymerge.errors import InconsistentCheckpoint, PlanError
from lazymerge.fill import alike
from lazymerge.gather import Gather

__all__ = ["BASE", "EXTRACT", "FOLD", "ONLY", "LoraOptions", "Split", "recorded", "split"]

_EMBEDDINGS = ("embed_tokens", "lm_head")
"""Layers of which PEFT saves the base weight too, if they have LoRA: vocabularies are made longer."""


@dataclass(frozen=True, slots=True)
class Split:
    """A checkpoint without LoRA, and its adapters.

    `base` has the names of the model that LoRA was put on. It has no tensors where the checkpoint holds
    adapters alone; then only they can be written. Its `copies` are those of adapters too.
    """

    base: Checkpoint
    adapters: tuple[Adapter, ...]


def split(
    checkpoint: Checkpoint, options: LoraOptions | None = None, config: Mapping[str, Any] | None = None
) -> Split:
    """The base model and the adapters of a checkpoint in which a model was trained with PEFT's LoRA.

    `config` is the model's config.json. Without LoRA the checkpoint is the base, and there are no adapters.
    Raises `PlanError` where alpha is not recorded and not given (nothing is guessed), `UnsupportedCheckpoint`
    for PEFT's other methods, and what the modules named above raise for tensors that do not fit together.
    """
    options = options or LoraOptions()
    if options.mode not in {EXTRACT, ONLY, FOLD, BASE}:
        raise PlanError(f"--lora {options.mode!r}", f"choose {EXTRACT}, {ONLY} or {FOLD}")
    names = told_apart(checkpoint.gathers)
    if names is None:
        _refuse_idle(options)
        return Split(checkpoint, ())
    if options.mode == BASE:
        return _unconfigured(checkpoint, names)
    if options.mode == FOLD and not names.base:
        raise PlanError(
            f"--lora {FOLD}: the checkpoint holds adapters alone, and no base model to fold them into",
            f"write them with --lora {ONLY}, then: lazymerge merge BASE OUT --adapter DIR",
        )
    if options.mode == FOLD and len(names.adapters) > 1:
        raise PlanError(
            f"--lora {FOLD}: the checkpoint holds {len(names.adapters)} adapters"
            f" ({', '.join(names.adapters)}), and which one is meant is not said",
            f"write them with --lora {EXTRACT}, then: lazymerge merge BASE OUT --adapter DIR",
        )
    folders = _folders(checkpoint)
    notes: list[Note] = []
    left_out: dict[str, str] = {}
    adapters = []
    for name in names.adapters:
        known = told(name, names.adapters, folders, options)
        parts = _own_parts(name, names, checkpoint, left_out)
        gathers = {part.key: checkpoint.gathers[part.source] for part in parts}
        found = _found(name, names, parts, known, checkpoint)
        fields, more = make_config(found, names, known, config or {}, options.mode)
        gathers |= _with_base(found, names, known, fields, options.mode, checkpoint)
        notes += more
        adapters.append(Adapter(name, fields, gathers, checkpoint.files))
    if not names.base:
        notes.append(Note("warning", "the checkpoint holds LoRA adapters alone, so no base model is written"))
    return Split(_base(checkpoint, names, options.mode, dict.fromkeys(notes), left_out), tuple(adapters))


def _unconfigured(checkpoint: Checkpoint, names: Names) -> Split:
    """For a comparison: the base, and adapters without configs, for which alpha need not be known."""
    left_out: dict[str, str] = {}
    adapters = []
    for name in names.adapters:
        parts = _own_parts(name, names, checkpoint, left_out)
        gathers = {part.key: checkpoint.gathers[part.source] for part in parts}
        adapters.append(Adapter(name, {}, gathers, checkpoint.files))
    return Split(_base(checkpoint, names, BASE, (), left_out), tuple(adapters))


def _refuse_idle(options: LoraOptions) -> None:
    """Refuse options for LoRA where there is none."""
    given = {
        f"--lora {options.mode}": options.mode in {ONLY, FOLD},
        "--lora-alpha": options.alpha is not None,
        "--lora-config": options.config is not None,
    }
    flags = [flag for flag, is_given in given.items() if is_given]
    if flags:
        raise PlanError(f"{', '.join(flags)}: there is no LoRA in this checkpoint", "leave it out")


def recorded(checkpoint: Checkpoint) -> Path | None:
    """verl's file on LoRA beside a checkpoint that has some; None if there is none."""
    return recorded_in(_folders(checkpoint)) if told_apart(checkpoint.gathers) is not None else None


def _folders(checkpoint: Checkpoint) -> list[Path]:
    """Where verl puts its file: beside the rank files."""
    return list(dict.fromkeys([*(file.path.parent for file in checkpoint.files), *checkpoint.sidecars]))


def _own_parts(adapter: str, names: Names, checkpoint: Checkpoint, left_out: dict[str, str]) -> list[Part]:
    """The adapter's tensors, without the second name of rows that an embedding shares with the head."""
    parts = [part for part in names.parts if part.adapter == adapter]
    rows = [part for part in parts if part.kind == "tokens"]
    for part in rows:
        if f"{part.module}.weight".endswith(HEADS) and len(rows) > 1:
            first = next(other for other in rows if other is not part)
            one, other = checkpoint.gathers[part.source], checkpoint.gathers[first.source]
            if alike(one, other):
                parts.remove(part)
                left_out[part.source] = f"tied to {first.source}, which holds the same values"
    return parts


def _found(adapter: str, names: Names, parts: Sequence[Part], known: Told, checkpoint: Checkpoint) -> Found:
    """What the names and shapes show of an adapter."""
    layers = {part.wrapped: part for part in parts if part.kind in {"lora_B", "lora_embedding_B"}}
    for kind, what in (("lora_B.bias", "a bias"), ("lora_magnitude_vector", "a magnitude vector")):
        there = {part.wrapped for part in parts if part.kind == kind}
        without = next((part for wrapped, part in layers.items() if wrapped not in there), None)
        if there and without:
            raise InconsistentCheckpoint(
                f"{without.source}: has not {what}, which other layers of the adapter {adapter!r} have",
                "the state dict was not saved whole; save it again",
            )
    rows = {part.module: checkpoint.gathers[part.source].shape for part in parts if part.kind == "tokens"}
    tokens = {module: shape[0] if shape else 0 for module, shape in rows.items()}
    _check_tokens(adapter, tokens, known)
    return Found(
        name=adapter,
        targets=targets(names, adapter, checkpoint.gathers, known.config.get("target_parameters") or ()),
        saved=list(dict.fromkeys(part.module for part in parts if part.kind == "modules_to_save")),
        tokens=tokens,
        dora=any(part.kind == "lora_magnitude_vector" for part in parts),
        bias_of_b=any(part.kind == "lora_B.bias" for part in parts),
    )


def _check_tokens(adapter: str, tokens: Mapping[str, int], known: Told) -> None:
    """Refuse trained rows of an embedding where it is not known which rows they are."""
    indices = known.config.get("trainable_token_indices")
    for module, rows in tokens.items():
        if indices is None:
            raise PlanError(
                f"the adapter {adapter!r} has {rows} trained rows of {module}, and not which tokens they are",
                "give --lora-config with the adapter_config.json of the training (trainable_token_indices)",
            )
        lists = indices if isinstance(indices, dict) else {module: indices}
        if rows not in {len(each) for each in lists.values()}:
            raise InconsistentCheckpoint(
                f"{module}: {rows} trained rows, and trainable_token_indices of {known.rank_from}"
                f" names {', '.join(str(len(each)) for each in lists.values())}",
                "give the adapter_config.json of this training",
            )


def _with_base(
    found: Found, names: Names, known: Told, fields: Mapping[str, Any], mode: str, checkpoint: Checkpoint
) -> dict[str, Gather]:
    """Tensors of the base that PEFT puts into an adapter's file: trained biases, embeddings with LoRA."""
    layers = {target.name for target in found.targets if not target.parameter}
    bias = known.config.get("bias", "none")
    wanted = fields["target_modules"]
    saved = mode != FOLD and (isinstance(wanted, str) or any(name in wanted for name in _EMBEDDINGS))
    taken: dict[str, Gather] = {}
    for source, (clean, peft) in names.inside.items():
        module, _, parameter = clean.rpartition(".")
        is_bias = parameter == "bias" and (bias == "all" or (bias == "lora_only" and module in layers))
        is_embedding = saved and module in layers and module.rpartition(".")[2] in _EMBEDDINGS
        if is_bias or is_embedding:
            taken[f"base_model.model.{peft}"] = checkpoint.gathers[source]
    return taken


def _base(
    checkpoint: Checkpoint, names: Names, mode: str, notes: Iterable[Note], left_out: Mapping[str, str]
) -> Checkpoint:
    """The checkpoint's own tensors under the model's names; with the copies of all that is written."""
    renamed = dict(names.base) if mode != ONLY else {}
    for part in names.parts:
        if part.source not in left_out:
            renamed[part.source] = part.key
    copies = checkpoint.copies

    def written() -> Iterator[Copy]:
        return (copy._replace(name=renamed[copy.name]) for copy in copies() if copy.name in renamed)

    base = checkpoint.with_gathers(
        {clean: checkpoint.gathers[source] for source, clean in names.base.items()}, *notes, left_out=left_out
    )
    return replace(base, copies=written)
