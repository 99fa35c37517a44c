"""The library: open a checkpoint, convert it, plan, execute, publish."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lazymerge
from lazymerge.budget import Spending, default_budget, spend
from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.conversions.dtypes import cast_to, parse_dtype
from lazymerge.conversions.hub import HubOptions, to_hub
from lazymerge.conversions.naming import select, strip_wrappers
from lazymerge.conversions.tying import tie
from lazymerge.errors import InconsistentCheckpoint, PlanError, SourceError
from lazymerge.execute import write_file
from lazymerge.files.size import format_size, parse_size
from lazymerge.fill import equal
from lazymerge.formats.registry import OpenOptions, open_checkpoint
from lazymerge.gather import of_region
from lazymerge.output import Destination, check_destination, claim
from lazymerge.plan import BIN, SAFETENSORS, Plan, make_plan
from lazymerge.report import MergeReport, Meter, OnProgress, make_report
from lazymerge.sidecars import CONFIG, Sidecars, config_dtype, find_sidecars, with_dtype, with_fields

Pathlike = str | os.PathLike[str]
Sources = Pathlike | Sequence[Pathlike]

log = logging.getLogger("lazymerge")


def open(  # noqa: A001 - `lazymerge.open` is what it does
    src: Sources,
    *,
    component: str = "actor",
    fsdp_version: int | None = None,
    world_size: int | None = None,
    hf_config: Pathlike | None = None,
) -> Checkpoint:
    """The checkpoint at `src` (a path at any level of a run, or several that belong together), unread.

    A mapping of the unwrapped model's names to lazy tensors. Raises `SourceError` in its many kinds.
    """
    if hf_config is not None and not Path(hf_config).is_dir():
        raise SourceError(f"{hf_config}: no such folder", "give --hf-config a folder that holds config.json")
    options = OpenOptions(component, fsdp_version, world_size, Path(hf_config) if hf_config else None)
    try:
        return strip_wrappers(open_checkpoint(_paths(src), options))
    except OSError as error:  # a folder below the one that was given, a file that went away
        raise SourceError(
            f"{error.filename or src}: {error.strerror}", "check the path and its permissions"
        ) from error


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


@dataclass(slots=True)
class _Prepared:
    """A merge that has been worked out and not begun."""

    checkpoint: Checkpoint
    sidecars: Sidecars
    plan: Plan
    dtype: str | None  # what config.json has to say, where that changes
    config_changes: Mapping[str, Any]

    @property
    def config(self) -> dict[str, Any] | None:
        """What the result's config.json says; None if there is none."""
        return None if self.sidecars.config is None else {**self.sidecars.config, **self.config_changes}


def merge(
    src: Sources,
    dst: Pathlike,
    *,
    max_ram: float | str | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    output_format: str = SAFETENSORS,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    component: str = "actor",
    fsdp_version: int | None = None,
    world_size: int | None = None,
    hf_config: Pathlike | None = None,
    family: str | None = None,
    param_mapping: str | Sequence[str] = (),
    tie_word_embedding: bool = False,
    is_value_model: bool = False,
    force_shape_match: bool = False,
    check: bool = True,
    backfill: Pathlike | None = None,
    trust_remote_code: bool = False,
    max_workers: int | None = None,
    strict: bool = False,
    check_copies: bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> MergeReport:
    """Merge the checkpoint at `src` into a Hugging Face model in the folder `dst`.

    max_ram         resident memory of the process at most, as bytes or "16GB"; the result is the same
    dtype           cast floating-point weights ("bfloat16"); default: every tensor keeps its own
    max_shard_size  of a safetensors file; "5GB" is 5 x 10^9 bytes
    output_format   "safetensors", or "bin" for one pytorch_model.bin
    include, exclude  shell patterns over tensor names
    component       "actor" or "critic", where `src` is a run or a step of verl
    hf_config       a folder with config.json and tokenizer, before those that `src` has
    family          of a Megatron checkpoint: a name, or a Python file with a FAMILY; default: by config.json
    param_mapping   OLD:NEW names (or files of them) for Megatron's tensors that no table knows
    tie_word_embedding, is_value_model  what Megatron's output layer is, where the files do not agree
    force_shape_match  crop or zero-pad Megatron's tensors to the config's shapes; each is named in the report
    check           compare names and shapes with the model that transformers builds from config.json
    backfill        the folder of the base model, for parts that a Megatron checkpoint lacks (a vision tower)
    trust_remote_code  run the model code that config.json names, to check against it
    strict          refuse replicas that differ, rather than warn
    check_copies    compare what several ranks hold; reads all of their bytes
    overwrite       replace the model that is in `dst`, once the new one is complete
    dry_run         plan only; nothing is written

    Returns a `MergeReport`. Prints nothing; `on_progress` is called with `Progress` events. Raises
    `LazymergeError`, whose two lines say what is wrong and what to do; a merge that was interrupted
    goes on when it is called again.
    """
    started = time.monotonic()
    sources, folder = _paths(src), Path(dst)
    meter = Meter(on_progress)
    wanted = None if max_ram is None else parse_size(max_ram)
    checkpoint = open(
        sources, component=component, fsdp_version=fsdp_version, world_size=world_size, hf_config=hf_config
    )
    hub = HubOptions(
        family,
        _several(param_mapping),
        tie_word_embedding,
        is_value_model,
        force_shape_match,
        check,
        None if backfill is None else str(backfill),
    )
    options = Options(
        dtype, max_shard_size, output_format, _several(include), _several(exclude), hub, trust_remote_code
    )
    log.debug("opened %r", checkpoint)
    prepared = prepare(checkpoint, options, Path(hf_config) if hf_config else None)
    budget = default_budget() if wanted is None else wanted
    if max_workers is not None and max_workers < 1:
        raise PlanError(f"--max-workers {max_workers}", "give 1 or more")
    spending = spend(budget, max_workers or min(4, os.cpu_count() or 1), prepared.plan.tensors)
    log.debug("planned %s", _described(prepared.plan, spending))
    if dry_run:
        check_destination(folder, sources, overwrite=overwrite)
        return _report(folder, prepared, spending, budget, started, meter, dry_run=True)
    with claim(folder, sources, overwrite=overwrite) as destination:
        job = _job(prepared, options, fsdp_version)
        if check_copies:
            prepared.checkpoint = _compare_copies(prepared.checkpoint, strict, meter)
        destination.begin(job, prepared.checkpoint.files)
        resumed = tuple(sorted(destination.finished))
        _write(prepared, destination, spending, meter)
    log.debug("published %s", folder)
    return _report(folder, prepared, spending, budget, started, meter, resumed=resumed)


def prepare(checkpoint: Checkpoint, options: Options, hf_config: Path | None) -> _Prepared:
    """Convert and plan: everything that can be refused is refused here."""
    if options.output_format not in {SAFETENSORS, BIN}:
        raise PlanError(f"--output-format {options.output_format!r}", f"choose {SAFETENSORS} or {BIN}")
    dtype = None if options.dtype is None else parse_dtype(str(options.dtype))  # a torch.dtype will do
    shard_size = parse_size(options.max_shard_size)
    try:
        sidecars = find_sidecars(checkpoint.sidecars, linked=hf_config)
    except OSError as error:
        raise SourceError(f"{error.filename}: {error.strerror}", "check its permissions") from error
    converted = to_hub(checkpoint, sidecars.config, options.hub, _code(sidecars, options))
    checkpoint = tie(converted.checkpoint, {**(sidecars.config or {}), **converted.config_changes})
    checkpoint = select(checkpoint, options.include, options.exclude)
    named = config_dtype(sidecars.config)
    if dtype is not None:
        checkpoint = cast_to(checkpoint, dtype)
    else:
        checkpoint = _note_dtype(checkpoint, named)
    plan = make_plan(checkpoint.gathers, output_format=options.output_format, max_shard_size=shard_size)
    changed = dtype.name if dtype is not None and dtype.name != named else None
    return _Prepared(checkpoint, sidecars, plan, changed, converted.config_changes)


def _code(sidecars: Sidecars, options: Options) -> Path | None:
    """The folder of the model's own code, if config.json names one and the user trusts it."""
    if not options.trust_remote_code or "auto_map" not in (sidecars.config or {}):
        return None
    return sidecars.files[CONFIG].parent


def _compare_copies(checkpoint: Checkpoint, strict: bool, meter: Meter) -> Checkpoint:
    """Compare what several ranks hold; those that differ become warnings, or an error."""
    notes: dict[str, Note] = {}
    compared = 0
    for copy in checkpoint.copies():
        if copy.name in notes or copy.name not in checkpoint.gathers:
            continue
        meter.tell("check", 0, 0, copy.name)
        compared += 1
        if not equal(of_region(copy.used), of_region(copy.other)):
            text = f"{copy.name} differs between {copy.used.source.name} and {copy.other.source.name}"
            if strict:
                raise InconsistentCheckpoint(text, "merge without --strict to take the first one's values")
            notes[copy.name] = Note("warning", f"{text}; the first one's values are taken", copy.name)
    log.debug("checked %d copies that ranks share, %d tensors differ", compared, len(notes))
    return checkpoint.with_notes(*notes.values())


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


def _job(prepared: _Prepared, options: Options, fsdp_version: int | None) -> dict[str, Any]:
    """Everything that decides the bytes of the result, besides the sources."""
    return {
        "lazymerge": lazymerge.__version__,
        "dtype": None if options.dtype is None else str(options.dtype),
        "fsdp_version": fsdp_version,
        "files": {file.name: file.size for file in prepared.plan.files},
        "hub": options.hub.identity(),
        "config": prepared.sidecars.config,
        "include": list(options.include),
        "exclude": list(options.exclude),
    }


def _write(prepared: _Prepared, destination: Destination, spending: Spending, meter: Meter) -> None:
    """Write what is not finished yet, and publish everything."""
    plan, sidecars = prepared.plan, prepared.sidecars
    todo = [file for file in plan.files if file.name not in destination.finished]
    destination.need(sum(file.size for file in todo) + sidecars.nbytes + len(plan.index or b""))
    total = sum(tensor.nbytes for file in todo for tensor in file.tensors)
    for file in todo:
        log.debug("begun %s: %d tensors, %d bytes", file.name, len(file.tensors), file.size)
        with destination.file(file.name, file.size) as target:
            write_file(
                file,
                target,
                block=spending.block,
                scattered=spending.scattered,
                workers=spending.workers,
                on_bytes=partial(meter.add, "write", total, file.name),
            )
            meter.tell("finish", meter.done, total, file.name)
        log.debug("finished %s", file.name)
    for source in prepared.checkpoint.files:
        source.check_unchanged()
    names = list(sidecars.files)
    for name, path in sidecars.files.items():
        if name == CONFIG and (prepared.dtype or prepared.config_changes):
            raw = with_fields(sidecars.raw(name), prepared.config_changes)
            destination.write(name, with_dtype(raw, prepared.dtype) if prepared.dtype else raw)
        else:
            destination.copy(name, path)
    names += [file.name for file in plan.files]
    if plan.index_name and plan.index is not None:
        destination.write(plan.index_name, plan.index)
        names.append(plan.index_name)
    destination.publish(names)


def _described(plan: Plan, spending: Spending) -> str:
    return (
        f"{len(plan.files)} files, {plan.reads} bytes to read, {plan.size} to write;"
        f" {spending.workers} workers, blocks of {spending.block} bytes,"
        f" {spending.peak} bytes of memory at most"
    )


def _disk_free(folder: Path) -> int:
    """Bytes that are free where the folder is, or will be."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def _report(
    folder: Path,
    prepared: _Prepared,
    spending: Spending,
    budget: int,
    started: float,
    meter: Meter,
    *,
    dry_run: bool = False,
    resumed: tuple[str, ...] = (),
) -> MergeReport:
    return make_report(
        folder,
        prepared.checkpoint,
        prepared.plan,
        prepared.sidecars,
        prepared.config,
        spending,
        budget=budget,
        disk_free=_disk_free(folder),
        dry_run=dry_run,
        seconds=time.monotonic() - started,
        peak=meter.peak(),
        resumed=resumed,
    )


def _several(given: str | Sequence[str]) -> tuple[str, ...]:
    """One or several of an option that can be given more than once."""
    return (given,) if isinstance(given, str) else tuple(given)


def _paths(src: Sources) -> list[Path]:
    paths = [Path(src)] if isinstance(src, str | os.PathLike) else [Path(path) for path in src]
    if not paths:
        raise PlanError("no source was given", "give the folder of a checkpoint")
    return paths
