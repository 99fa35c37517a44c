"""From an opened checkpoint to a plan: convert, select, cast. What can be refused is refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.dtypes import cast_to, parse_dtype
from lazymerge.conversions.hub import HubOptions, to_hub
from lazymerge.conversions.naming import select
from lazymerge.conversions.tying import tie
from lazymerge.errors import PlanError, SourceError
from lazymerge.files.dtype import DType
from lazymerge.files.size import format_size, parse_size
from lazymerge.formats.staged import STAGE, Staged
from lazymerge.plan import BIN, SAFETENSORS, Plan, make_plan
from lazymerge.sidecars import CONFIG, Sidecars, config_dtype, find_sidecars, with_dtype, with_fields

MERGE, CONVERT = "merge", "convert"
"""The stages: tensors put together under the trainer's names; names and layouts of the hub."""

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

    def identity(self) -> dict[str, Any]:
        """What decides the bytes of the result, but for which tensors are wanted."""
        return {
            "dtype": None if self.dtype is None else str(self.dtype),
            "output_format": self.output_format,
            "hub": self.hub.identity(),
            "convert": CONVERT in self.stages,
        }


@dataclass(frozen=True, slots=True)
class Converted:
    """A checkpoint as it will be written, all of it.

    `config_changes` are fields that its config.json has to have instead of what the sidecars' one says.
    """

    checkpoint: Checkpoint
    sidecars: Sidecars
    config_changes: Mapping[str, Any] = field(default_factory=dict)

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
    files of the plan that earlier increments have written: name -> where it is.
    """

    checkpoint: Checkpoint
    plan: Plan
    config: Mapping[str, Any] | None
    beside: Mapping[str, bytes | Path]
    kept: Mapping[str, Held] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        small = (len(x) if isinstance(x, bytes) else x.stat().st_size for x in self.beside.values())
        return self.plan.size + sum(small)


def prepare(checkpoint: Checkpoint, options: Options, hf_config: Path | None) -> Prepared:
    """Convert and plan: everything that can be refused is refused here."""
    if options.output_format not in {SAFETENSORS, BIN}:
        raise PlanError(f"--output-format {options.output_format!r}", f"choose {SAFETENSORS} or {BIN}")
    dtype = None if options.dtype is None else parse_dtype(str(options.dtype))  # a torch.dtype will do
    shard_size = parse_size(options.max_shard_size)
    converted = convert(checkpoint, options, hf_config)
    checkpoint = select(converted.checkpoint, options.include, options.exclude)
    named = config_dtype(converted.sidecars.config)
    if dtype is not None:
        checkpoint = cast_to(checkpoint, dtype)
    else:
        checkpoint = _note_dtype(checkpoint, named)
    checkpoint = checkpoint.with_notes(*converted.sidecars.notes)
    plan = make_plan(checkpoint.gathers, output_format=options.output_format, max_shard_size=shard_size)
    return Prepared(checkpoint, plan, converted.config, _beside(converted, options, dtype))


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
        if options.hub.named():
            raise PlanError(
                f"{', '.join(options.hub.named())}: nothing is converted with --stage {MERGE}",
                f"give it with --stage {CONVERT}",
            )
        return Converted(checkpoint, sidecars)
    hub = to_hub(checkpoint, sidecars.config, options.hub, _code(sidecars, options))
    config = {**(sidecars.config or {}), **hub.config_changes}
    return Converted(tie(hub.checkpoint, config), sidecars, hub.config_changes)


def _beside(converted: Converted, options: Options, dtype: DType | None) -> dict[str, bytes | Path]:
    """The small files of the result: sidecars, config.json with what is true of the result, the stage."""
    sidecars, changes = converted.sidecars, converted.config_changes
    files: dict[str, bytes | Path] = dict(sidecars.files)
    if CONFIG in files:
        if changes:
            files[CONFIG] = with_fields(sidecars.raw(CONFIG), changes)
        if dtype is not None and dtype.name != config_dtype(sidecars.config):
            raw = files[CONFIG]
            files[CONFIG] = with_dtype(raw if isinstance(raw, bytes) else sidecars.raw(CONFIG), dtype.name)
    if CONVERT in options.stages:
        return files
    files = {_SIDECARS_OF_STAGE + name: content for name, content in files.items()}
    staged = Staged(converted.checkpoint.format, converted.checkpoint.settings)
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
        f"the files hold float32 and config.json says {named}; the dtype is kept."
        f" --dtype {named} would write {format_size(checkpoint.nbytes - wide // 2)}"
        f" in place of {format_size(checkpoint.nbytes)}"
    )
    return checkpoint.with_notes(Note("info", text))
