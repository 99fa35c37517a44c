"""From an opened checkpoint to a plan: convert, select, cast. What can be refused is refused here."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.adapters.adapter import CONFIG as CONFIG_OF_ADAPTER
from lazymerge.conversions.adapters.adapter import WEIGHTS, Adapter
from lazymerge.conversions.adapters.trained import (
    BASE,
    EXTRACT,
    FOLD,
    ONLY,
    LoraOptions,
    Split,
    recorded,
    split,
)
from lazymerge.conversions.dtypes import cast_to, parse_dtype
from lazymerge.conversions.hub import HubOptions, to_hub
from lazymerge.conversions.naming import select
from lazymerge.conversions.quantised import refuse_cast
from lazymerge.conversions.tying import tie
from lazymerge.errors import OutputError, PlanError, SourceError
from lazymerge.files.dtype import DType
from lazymerge.files.given import given_path
from lazymerge.files.size import format_size, parse_size
from lazymerge.formats.staged import STAGE, Staged
from lazymerge.gather import Gather
from lazymerge.plan import BIN, SAFETENSORS, Plan, make_plan, safetensors_file
from lazymerge.sidecars import CONFIG, Sidecars, config_dtype, find_sidecars, with_dtype, with_fields

MERGE, CONVERT = "merge", "convert"
"""The stages: tensors put together under the trainer's names; names and layouts of the hub."""

ADAPTERS = "lora_adapter/"
"""Where adapters go beside their base, as verl puts them."""

_SIDECARS_OF_STAGE = "huggingface/"
"""Where sidecars go beside tensors under the trainer's names, lest a loader takes the folder for a model."""


@dataclass(frozen=True, slots=True)
class Options:
    """What decides the bytes of the result; arguments of `merge`."""

    dtype: str | None = None
    max_shard_size: int | str = "5GB"
    output_format: str = SAFETENSORS
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    hub: HubOptions = field(default_factory=HubOptions)
    trust_remote_code: bool = False
    stages: Sequence[str] = (MERGE, CONVERT)
    lora: LoraOptions = field(default_factory=LoraOptions)
    adapters: Sequence[str] = ()

    @property
    def cast(self) -> DType | None:
        """The type to cast to; `PlanError` for what is none."""
        return None if self.dtype is None else parse_dtype(str(self.dtype))  # a torch.dtype will do

    def identity(self) -> dict[str, Any]:
        """What decides the bytes of the result, but for which tensors are wanted."""
        return {
            "dtype": None if self.dtype is None else str(self.dtype),
            "output_format": self.output_format,
            "hub": self.hub.identity(),
            "convert": CONVERT in self.stages,
            "lora": self.lora.mode,
        }


@dataclass(frozen=True, slots=True)
class Converted:
    """A checkpoint as it will be written, all of it.

    `config_changes` are fields that its config.json has to have instead of what the sidecars' one says.
    `wide` has the names of what stays in float32, as `Architecture` has them. `adapters` are written beside
    it, `folded` are in it, with their weights; `unchanged` says that these changed nothing. `checked` says
    that names and shapes were compared with the model's class.
    """

    checkpoint: Checkpoint
    sidecars: Sidecars
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    wide: Mapping[str, Sequence[str]] = field(default_factory=dict)
    adapters: Sequence[Adapter] = ()
    folded: Sequence[tuple[Adapter, float]] = ()
    unchanged: bool = False
    checked: bool = False

    @property
    def config(self) -> dict[str, Any] | None:
        """What the result's config.json says; None if there is none."""
        return None if self.sidecars.config is None else {**self.sidecars.config, **self.config_changes}


@dataclass(frozen=True, slots=True)
class Held:
    """A weight file of an earlier increment: where it is now, its identity, its tensors -> bytes."""

    name: str
    path: Path
    identity: Any
    tensors: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A merge that has been worked out and not begun.

    `beside` are the small files that go with the weights: name -> content, or the file to copy. `kept` are
    files of the plan that earlier increments have written: name -> where it is. `adapters` are the tensors of
    adapters' files, by file; `told` is what decides the result and is in no file of the checkpoint.
    `sidecars` are the source's files that are read for `beside`; `folded` are names of tensors of the
    checkpoint's own adapter, where that is folded in.
    """

    checkpoint: Checkpoint
    plan: Plan
    config: Mapping[str, Any] | None
    beside: Mapping[str, bytes | Path]
    adapters: Mapping[str, Mapping[str, Gather]] = field(default_factory=dict)
    told: Sequence[Any] = ()
    unchanged: bool = False
    checked: bool = False
    kept: Mapping[str, Held] = field(default_factory=dict)
    sidecars: Sequence[Path] = ()
    folded: Collection[str] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        small = (len(x) if isinstance(x, bytes) else x.stat().st_size for x in self.beside.values())
        return self.plan.size + sum(small)


def prepare(checkpoint: Checkpoint, options: Options, hf_config: Path | None) -> Prepared:
    """Convert and plan: everything that can be refused is refused here."""
    if options.output_format not in {SAFETENSORS, BIN}:
        raise PlanError(f"--output-format {options.output_format!r}", f"choose {SAFETENSORS} or {BIN}")
    dtype = options.cast
    shard_size = parse_size(options.max_shard_size)
    converted = convert(checkpoint, options, hf_config)
    front = "" if options.lora.mode == ONLY else ADAPTERS
    places = {f"{front}{each.folder}": each for each in converted.adapters}
    beside = {f"{at}{name}": gather for at, each in places.items() for name, gather in each.gathers.items()}
    whole = replace(converted.checkpoint, gathers={**converted.checkpoint.gathers, **beside})
    checkpoint = select(whole, options.include, options.exclude)
    named = config_dtype(converted.sidecars.config)
    if dtype is not None:
        refuse_cast(checkpoint, converted.config)
        checkpoint = cast_to(checkpoint, dtype, converted.wide)
    else:
        checkpoint = _note_dtype(checkpoint, named)
    checkpoint = checkpoint.with_notes(*converted.sidecars.notes)
    files = {
        f"{at}{WEIGHTS}": {
            name: checkpoint.gathers[at + name] for name in each.gathers if at + name in checkpoint
        }
        for at, each in places.items()
    }
    files = {name: gathers for name, gathers in files.items() if gathers}
    places = {at: each for at, each in places.items() if f"{at}{WEIGHTS}" in files}  # not left out
    if places and converted.folded:
        text = (
            f"{next(iter(places))} was trained on a base without {converted.folded[0][0].name}, which is"
            f" folded into the one that is written; --lora {FOLD} puts both in"
        )
        checkpoint = checkpoint.with_notes(Note("warning", text))
    model = checkpoint.with_gathers({n: g for n, g in checkpoint.gathers.items() if n not in beside})
    plan = Plan((), None, None)
    if model.gathers or not files:
        plan = make_plan(model.gathers, output_format=options.output_format, max_shard_size=shard_size)
    plan = replace(plan, files=(*plan.files, *(safetensors_file(name, each) for name, each in files.items())))
    small = _sidecars(converted, options, dtype) if converted.checkpoint.gathers else {}
    small |= {f"{at}{CONFIG_OF_ADAPTER}": each.config_json() for at, each in places.items()}
    told = [[each.config, 1] for each in converted.adapters]
    told += [[each.config, weight] for each, weight in converted.folded]
    return Prepared(
        model,
        plan,
        converted.config,
        small,
        files,
        told,
        converted.unchanged,
        converted.checked,
        sidecars=tuple(converted.sidecars.files.values()),
        folded={name for each, _ in converted.folded for name in each.gathers if options.lora.mode == FOLD},
    )


def refuse_adapter_in(folder: Path, prepared: Prepared) -> None:
    """Refuse a whole model beside an adapter of something else, which loaders would put on it."""
    if not prepared.checkpoint.gathers:
        return
    if (folder / CONFIG_OF_ADAPTER).exists():
        raise OutputError(
            f"{folder}: holds {CONFIG_OF_ADAPTER}, and transformers would put that adapter on the result",
            "give another folder for the result, or remove the adapter's files",
        )


def convert(checkpoint: Checkpoint, options: Options, hf_config: Path | None) -> Converted:
    """The checkpoint under the hub's names, tied as its config says; as it is, if the stage ends before."""
    for stage in options.stages:
        if stage not in {MERGE, CONVERT}:
            raise PlanError(f"--stage {stage!r}", f"choose {MERGE} or {CONVERT}; both are the default")
    try:
        sidecars = find_sidecars(checkpoint.sidecars, linked=hf_config)
    except OSError as error:
        raise SourceError(f"{error.filename}: {error.strerror}", "check its permissions") from error
    if CONVERT not in options.stages:
        _refuse_conversions(options)
        return Converted(checkpoint, sidecars)
    adapters = [_adapter(each) for each in options.adapters]
    try:
        parts = split(checkpoint, options.lora, sidecars.config)
    except PlanError:  # alpha is not known, and is not needed where the adapter is left out
        bare = _bare(checkpoint, options)
        if bare is None:
            raise
        parts = bare
    if options.lora.mode == ONLY or (parts.adapters and not parts.base.gathers):
        if adapters:
            raise PlanError("--adapter: no base is written that it could be folded into", "leave it out")
        unwanted = dict.fromkeys(parts.base.gathers, f"--lora {ONLY}")
        return Converted(parts.base.with_gathers({}, left_out=unwanted), sidecars, adapters=parts.adapters)
    own = of_training(sidecars, hf_config, checkpoint.sidecars)
    hub = to_hub(parts.base, own, options.hub, _code(sidecars, options))
    config, changes = {**(sidecars.config or {}), **hub.config_changes}, dict(hub.config_changes)
    checkpoint, unchanged = hub.checkpoint, False
    if options.lora.mode == FOLD:
        adapters = [*((each, 1.0) for each in parts.adapters), *adapters]
    if adapters:
        from lazymerge.conversions.adapters.result import fold_into

        folded = fold_into(hub, adapters, config, options.hub, _code(sidecars, options), options.cast)
        checkpoint, unchanged = folded.checkpoint, folded.unchanged
        config, changes = {**config, **folded.config_changes}, {**changes, **folded.config_changes}
    beside = parts.adapters if options.lora.mode == EXTRACT else ()
    if hub.architecture is None:
        checkpoint = tie(checkpoint, config)
    wide = {} if hub.architecture is None else hub.architecture.wide
    checked = options.hub.check and hub.architecture is not None
    return Converted(checkpoint, sidecars, changes, wide, beside, adapters, unchanged, checked)


def of_training(
    sidecars: Sidecars, hf_config: Path | None, folders: Sequence[Path]
) -> Mapping[str, Any] | None:
    """What config.json says of the training: a base model's does not tell which transformers ran there."""
    if sidecars.config is None or hf_config is None or sidecars.files[CONFIG].parent != hf_config:
        return sidecars.config
    if any(each.resolve() == hf_config.resolve() for each in folders[1:]):  # the first is that one
        return sidecars.config
    return {key: value for key, value in sidecars.config.items() if key != "transformers_version"}


def _bare(checkpoint: Checkpoint, options: Options) -> Split | None:
    """The checkpoint split as for its base alone, where --exclude names all of the adapters beside it.

    None where it does not. A whole name that a pattern fits is left out whatever other names there are.
    """
    if options.lora != LoraOptions() or not options.exclude:
        return None
    parts = split(checkpoint, replace(options.lora, mode=BASE))
    beside = [f"{ADAPTERS}{each.folder}{name}" for each in parts.adapters for name in each.gathers]
    left_out = all(any(fnmatchcase(name, each) for each in options.exclude) for name in beside)
    return parts if beside and left_out else None


def _refuse_conversions(options: Options) -> None:
    """Refuse options of the stage that is not wanted."""
    lora = options.lora != LoraOptions()
    given = [*options.hub.named(), *["--lora"] * lora, *["--adapter"] * bool(options.adapters)]
    if given:
        raise PlanError(
            f"{', '.join(given)}: nothing is converted with --stage {MERGE}",
            f"give it with --stage {CONVERT}",
        )


def _adapter(given: str) -> tuple[Adapter, float]:
    """The adapter and its weight, given as DIR or DIR=WEIGHT."""
    from lazymerge.conversions.adapters.read import read_adapter

    folder, equals, weight = given.rpartition("=")
    if not equals or os.path.exists(given):
        return read_adapter(given_path(given, "--adapter")), 1.0
    try:
        number = float(weight.replace("_", "?"))  # Python's 1_0 is a slip for 1.0
    except ValueError:
        if os.path.exists(folder):
            raise PlanError(
                f"--adapter {given}: {weight!r} is no weight, expected a number",
                f"give it as in --adapter {folder}=0.5",
            ) from None
        folder, number = given, 1.0  # an equals sign of the folder's name
    return read_adapter(given_path(folder, "--adapter")), number


def _sidecars(converted: Converted, options: Options, dtype: DType | None) -> dict[str, bytes | Path]:
    """The small files of the model: sidecars, config.json with what is true of the result, the stage."""
    sidecars, changes = converted.sidecars, converted.config_changes
    files: dict[str, bytes | Path] = {**sidecars.files, **sidecars.contents}
    if CONFIG in sidecars.contents:
        config = with_fields(sidecars.contents[CONFIG], changes)
        if dtype is not None and dtype.name != config_dtype(sidecars.config):
            config = with_dtype(config, dtype.name)
        files[CONFIG] = config
    if CONVERT in options.stages:
        return files
    files = {_SIDECARS_OF_STAGE + name: content for name, content in files.items()}
    staged = Staged(converted.checkpoint.format, converted.checkpoint.settings)
    told = recorded(converted.checkpoint)  # what the next stage has to know of LoRA
    if told is not None:
        files[told.name] = told
    return {**files, STAGE: staged.to_json()}


def _code(sidecars: Sidecars, options: Options) -> Path | None:
    """The folder of the model's own code, if config.json names one and the user trusts it."""
    if not options.trust_remote_code or "auto_map" not in (sidecars.config or {}):
        return None
    return sidecars.files[CONFIG].parent


def _note_dtype(checkpoint: Checkpoint, named: str | None) -> Checkpoint:
    """Say so where the files hold fp32 and the config names a half type."""
    wide = sum(g.nbytes for g in checkpoint.gathers.values() if g.dtype.name == "float32")
    if named not in {"bfloat16", "float16"} or wide * 2 <= checkpoint.nbytes:
        return checkpoint
    text = (
        f"the files hold float32 and config.json says {named}; the dtype is kept, and a plain from_pretrained"
        f" loads it as {named}. --dtype {named} would write {format_size(checkpoint.nbytes - wide // 2)}"
        f" in place of {format_size(checkpoint.nbytes)}"
    )
    return checkpoint.with_notes(Note("info", text))
