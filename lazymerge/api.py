"""The library: open a checkpoint, convert it, plan, execute, publish."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lazymerge
from lazymerge.budget import Spending, available, default_budget, resident, spend
from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.claim import check_destination, claim, place_for
from lazymerge.conversions.adapters.trained import EXTRACT, LoraOptions
from lazymerge.conversions.hub import HubOptions
from lazymerge.conversions.naming import strip_wrappers
from lazymerge.copies import compare_copies
from lazymerge.errors import BudgetError, OutputError, PlanError, SourceError, VerificationError
from lazymerge.execute import write_file
from lazymerge.files.given import given_path, given_paths, optional_path
from lazymerge.files.size import parse_size
from lazymerge.formats.registry import OpenOptions, open_checkpoint
from lazymerge.hub.connection import Target
from lazymerge.hub.send import accessible, refuse_idle, send, verified_names
from lazymerge.increments import grown, held, record_of
from lazymerge.output import Destination, sources_of
from lazymerge.plan import SAFETENSORS, Plan
from lazymerge.prepare import CONVERT, MERGE, Options, Prepared, prepare, refuse_adapter_in
from lazymerge.report import MergeReport, Meter, OnProgress, make_report

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
    backend: str | None = None,
) -> Checkpoint:
    """The checkpoint at `src` (a path at any level of a run, or several that belong together), unread.

    A mapping of the unwrapped model's names to lazy tensors. Raises `SourceError` in its many kinds.
    """
    config = optional_path(hf_config, "--hf-config")
    if config is not None and not config.is_dir():
        what = "a file, not a folder" if config.is_file() else "no such folder"
        raise SourceError(f"{config}: {what}", "give --hf-config the folder that holds config.json")
    options = OpenOptions(component, fsdp_version, world_size, config, backend)
    try:
        return strip_wrappers(open_checkpoint(given_paths(src), options))
    except OSError as error:  # a folder below the one that was given, a file that went away
        raise SourceError(
            f"{error.filename or src}: {error.strerror}", "check the path and its permissions"
        ) from error


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
    backend: str | None = None,
    family: str | None = None,
    param_mapping: str | Sequence[str] = (),
    tie_word_embedding: bool = False,
    is_value_model: bool = False,
    force_shape_match: bool = False,
    check: bool = True,
    backfill: Pathlike | None = None,
    trust_remote_code: bool = False,
    stage: str | Sequence[str] = (MERGE, CONVERT),
    names: str = "hub",
    lora: str = EXTRACT,
    lora_alpha: float | None = None,
    lora_config: Pathlike | None = None,
    adapter: str | Sequence[str] = (),
    max_workers: int | None = None,
    strict: bool = False,
    check_copies: bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
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
    backend         "fsdp", "megatron", "huggingface": take nothing else; default: what is there
    family          of a Megatron checkpoint: a name, or a Python file with a FAMILY; default: by config.json
    param_mapping   OLD:NEW names (or files of them) for Megatron's tensors that no table knows
    tie_word_embedding, is_value_model  what Megatron's output layer is, where the files do not agree
    force_shape_match  crop or zero-pad Megatron's tensors to the config's shapes; each is named in the report
    check           compare names and shapes with the model that transformers builds from config.json
    backfill        the folder of the base model, for parts that a Megatron checkpoint lacks (a vision tower)
    trust_remote_code  run the model code that config.json names, to check against it
    stage           "merge" alone keeps the trainer's names and layouts; "convert" goes on from there
    names           "hub": as save_pretrained writes them; "runtime": as transformers 5 has them in memory
    lora            of LoRA in the checkpoint: "extract" it beside the base, "only" it, or "fold" it in
    lora_alpha, lora_config  what LoRA was trained with, where verl's lora_train_meta.json does not say it
    adapter         folders of PEFT adapters to fold in, each as "DIR" or "DIR=WEIGHT"
    strict          refuse replicas that differ, rather than warn
    check_copies    compare what several ranks hold; reads all of their bytes
    overwrite       replace the model that is in `dst`, once the new one is complete
    dry_run         plan only; nothing is written
    verify          reread the result from disk, compare it bitwise with the source, and leave a manifest
    push_to_hub     upload the result, verified, to this repository: "ORG/NAME"; asked for before the merge
    private, token, revision, create_pr, commit_message  how, as `upload` has them

    Returns a `MergeReport`. Prints nothing; `on_progress` is called with `Progress` events. Raises
    `LazymergeError`, whose two lines say what is wrong and what to do; a merge that was interrupted
    goes on when it is called again.
    """
    started = time.monotonic()
    stages = _several(stage) or (MERGE, CONVERT)
    if push_to_hub is None:
        refuse_idle(token, revision, create_pr, commit_message)
    elif CONVERT not in stages:
        raise PlanError(
            f"--push-to-hub: what --stage {MERGE} leaves is no model that can be loaded",
            f"push what --stage {CONVERT} makes of it",
        )
    sources, folder = given_paths(src), given_path(dst, "the folder of the result")
    meter = Meter(on_progress)
    wanted = None if max_ram is None else parse_size(max_ram)
    checkpoint = open(
        sources,
        component=component,
        fsdp_version=fsdp_version,
        world_size=world_size,
        hf_config=hf_config,
        backend=backend,
    )
    hub = HubOptions(
        family,
        _several(param_mapping),
        tie_word_embedding,
        is_value_model,
        force_shape_match,
        check,
        _text(optional_path(backfill, "--backfill")),
        names,
    )
    options = Options(
        dtype,
        max_shard_size,
        output_format,
        _several(include),
        _several(exclude),
        hub,
        trust_remote_code,
        stages,
        LoraOptions(lora, lora_alpha, _text(optional_path(lora_config, "--lora-config"))),
        tuple(map(str, _several(adapter))),
    )
    log.debug("opened %r", checkpoint)
    linked = None if hf_config is None else Path(hf_config)
    prepared = prepare(checkpoint, options, linked)
    is_part = bool(options.include or options.exclude)
    identity = {"lazymerge": lazymerge.__version__, **options.identity(), "fsdp_version": fsdp_version}
    identity |= {"config": prepared.config, "adapters": prepared.told}
    refuse_adapter_in(folder, prepared)
    place = place_for(
        folder,
        sources,
        prepared.checkpoint,
        prepared.beside,
        linked,
        prepared.sidecars,
        whole=CONVERT in stages and bool(prepared.checkpoint.gathers),
    )
    kept = held(folder, identity, sources_of(prepared.checkpoint.files), overwrite=overwrite)
    if kept:
        prepared = grown(prepared, kept, parse_size(max_shard_size))
    budget = default_budget() if wanted is None else wanted
    if max_workers is not None and max_workers < 1:
        raise PlanError(f"--max-workers {max_workers}", "give 1 or more")
    workers = max_workers or min(4, os.cpu_count() or 1)
    spending = _spend(prepared, budget, workers, compares=verify or push_to_hub is not None)
    log.debug("planned %s", _described(prepared.plan, spending))
    target = None
    if push_to_hub is not None:
        uploaded = [*prepared.beside, *_names(prepared.plan)]
        target = accessible(uploaded, push_to_hub, private, token, revision, create_pr, commit_message)
    elif private:
        note = Note("info", "--private: does nothing without --push-to-hub")
        prepared = replace(prepared, checkpoint=prepared.checkpoint.with_notes(note))
    if dry_run:
        check_destination(place, overwrite=overwrite)
        return make_report(folder, prepared, spending, budget, started, meter, dry_run=True)
    with claim(place, overwrite=overwrite) as destination:
        if check_copies:
            prepared = compare_copies(prepared, strict, meter)
        resumed = _begin(destination, prepared, options, identity, grows=bool(kept))
        if not destination.ended:
            with meter.timed():
                _write(prepared, destination, spending, meter, identity if is_part else None)
        log.debug("published %s", folder)
        if verify or target is not None:
            written = prepared.checkpoint
            if kept:  # which this merge has not planned
                whole = prepare(checkpoint, replace(options, include=(), exclude=()), linked).checkpoint
                written = _held_of(whole, prepared)
            _verify(written, prepared, destination, budget, spending.workers, meter)
        url = None if target is None else _send(folder, target, on_progress)
        if not is_part:
            destination.end()
        prepared = replace(prepared, checkpoint=prepared.checkpoint.with_notes(*destination.notes))
    report = make_report(folder, prepared, spending, budget, started, meter, resumed=resumed)
    return replace(report, verified=verify or target is not None, url=url)


def upload(
    folder: Pathlike,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    on_progress: OnProgress | None = None,
) -> str:
    """Upload the result in `folder`, which was merged with `verify`, to the Hugging Face Hub.

    private         make the repository private, if it has to be made
    token           default: HF_TOKEN, or who is logged in
    revision        a branch; it is made if it is not there
    create_pr       propose the files in a pull request

    Only files that the manifest lists are sent, and none that the hub has already. Returns the URL of the
    commit. Raises `LazymergeError` where the hub cannot be reached or says no, or the result is not verified.
    """
    place = given_path(folder, "the folder to upload")
    names = verified_names(place)
    target = accessible(names, repo_id, private, token, revision, create_pr, commit_message)
    return send(place, target, on_progress)


def _send(folder: Path, target: Target, on_progress: OnProgress | None) -> str:
    """As `send`, of a merge that is done, which an error says."""
    try:
        return send(folder, target, on_progress)
    except OutputError as error:
        error.hint += f"; the merge is done: `lazymerge upload {folder} {target.repo_id}` goes on from there"
        raise


def _spend(prepared: Prepared, budget: int, workers: int, *, compares: bool) -> Spending:
    """As `spend`, of a merge that also compares the result with what it was made of.

    No more is spent than the machine and the limits on this process leave, where that is enough. The error
    names what is enough for both.
    """
    errors = []
    try:
        spending = spend(min(budget, resident() + available()), workers, prepared.plan.tensors)
    except BudgetError:
        try:
            spending = spend(budget, workers, prepared.plan.tensors)
        except BudgetError as error:
            errors.append(error)
    try:
        if compares:
            from lazymerge.compare import check_budget  # which a plain merge does not need

            check_budget(prepared.checkpoint.gathers, budget)
    except BudgetError as error:
        errors.append(error)
    if errors:
        raise max(errors, key=lambda error: error.least)
    return spending


def _held_of(checkpoint: Checkpoint, prepared: Prepared) -> Checkpoint:
    """What the folder holds of the checkpoint after the merge: what earlier ones wrote, and its own."""
    there = {name for each in prepared.kept.values() for name in each.tensors}
    there.update(prepared.checkpoint.gathers)
    return checkpoint.with_gathers({name: g for name, g in checkpoint.gathers.items() if name in there})


def _verify(
    checkpoint: Checkpoint,
    prepared: Prepared,
    destination: Destination,
    budget: int,
    workers: int,
    meter: Meter,
) -> None:
    """Compare the result on the disk with what it was made of; leave a manifest.

    Where it fails the merge is ended, so that no other goes on from it.
    """
    from lazymerge.reread import verify_result

    meter.done = 0
    try:
        verify_result(
            checkpoint,
            destination.folder,
            [*prepared.beside, *_names(prepared.plan)],
            prepared.adapters,
            max_ram=min(budget, resident() + available()),
            workers=workers,
            on_bytes=lambda count, total, name: meter.add("verify", total, name, count),
        )
    except VerificationError:
        destination.end()
        raise


def _begin(
    destination: Destination,
    prepared: Prepared,
    options: Options,
    identity: Mapping[str, Any],
    *,
    grows: bool,
) -> tuple[str, ...]:
    """Begin the job, or go on with it; the files that an earlier run has finished, sorted."""
    job = {
        **identity,
        "include": list(options.include),
        "exclude": list(options.exclude),
        "files": {file.name: file.size for file in prepared.plan.files},
        "kept": sorted(prepared.kept),
        "max_shard_size": parse_size(options.max_shard_size),
    }
    destination.begin(job, prepared.checkpoint.files, grows=grows)
    if not destination.ended:
        for name, each in prepared.kept.items():
            destination.keep(name, each.path, each.identity)
    return tuple(sorted(destination.finished))


def _write(
    prepared: Prepared,
    destination: Destination,
    spending: Spending,
    meter: Meter,
    part_of: Mapping[str, Any] | None,
) -> None:
    """Write what is not finished yet, and publish everything; as a part of the job `part_of`, if given."""
    plan = prepared.plan
    todo = [file for file in plan.files if file.name not in destination.finished]
    destination.need(sum(file.size for file in todo) + prepared.size - sum(file.size for file in plan.files))
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
    for name, content in prepared.beside.items():
        if isinstance(content, bytes):
            destination.write(name, content)
        else:
            destination.copy(name, content)
    names = list(prepared.beside)
    if plan.index_name and plan.index is not None:
        destination.write(plan.index_name, plan.index)
    names += _names(plan)
    part = None
    if part_of is not None:
        sources = sources_of(prepared.checkpoint.files)
        part = partial(record_of, part_of, sources, destination.folder, names)
    destination.publish(names, renamed=[each.name for each in prepared.kept.values()], part=part)


def _names(plan: Plan) -> list[str]:
    """The files of a plan, the index last."""
    return [*(file.name for file in plan.files), *([plan.index_name] if plan.index_name else [])]


def _described(plan: Plan, spending: Spending) -> str:
    return (
        f"{len(plan.files)} files, {plan.reads} bytes to read, {plan.size} to write;"
        f" {spending.workers} workers, blocks of {spending.block} bytes,"
        f" {spending.peak} bytes of memory at most"
    )


def _several(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """None, one or several of an option that can be given more than once."""
    return (given,) if isinstance(given, str) else tuple(given or ())


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
