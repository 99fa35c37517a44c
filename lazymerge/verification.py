"""The library's `verify`: a checkpoint against another, or a result against its own manifest.

Both sides may be anything that lazymerge opens. Unless they have the same names and shapes already, both are
brought to the hub's names in the way of a merge, so that what is compared is what a merge would write.
LoRA is taken out of both before, and compared too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lazymerge import api
from lazymerge.budget import SLACK, resident, too_small
from lazymerge.checkpoint import Checkpoint, Note
from lazymerge.compare import compare
from lazymerge.comparison import CompareOptions, Comparison
from lazymerge.conversions.hub import HubOptions
from lazymerge.copies import check_copies
from lazymerge.errors import (
    LazymergeError,
    NotACheckpoint,
    PlanError,
    SourceError,
    UnsupportedCheckpoint,
)
from lazymerge.files.given import given_path
from lazymerge.files.size import parse_size
from lazymerge.formats.registry import recognised
from lazymerge.forward import ForwardReport, compare_logits
from lazymerge.gather import Gather
from lazymerge.manifest import BLOCK, ManifestReport, OnBytes, check_manifest, has_manifest
from lazymerge.prepare import ADAPTERS, Options, convert
from lazymerge.report import Meter, OnProgress
from lazymerge.sides import Side, adapters_in, differing_settings, taken_apart, tensors
from lazymerge.structure import Problem, check_structure, left_alone

STAGE = "verify"
"""What progress events of this module are called."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verifying has found; parts that were not asked for are None.

    `structure` is what is wrong with the files of a folder that was verified alone. `seconds` is a time,
    `peak` the most resident memory of the process in bytes. `left_out` is what of the sources was not
    compared -> why. `notes` are the warnings about the first and about the other; a lossy one says that what
    was compared is not all that the checkpoint holds, so that nothing is the same.
    """

    one: str
    other: str | None
    structure: tuple[Problem, ...]
    manifest: ManifestReport | None
    comparison: Comparison | None
    forward: ForwardReport | None
    left_out: Mapping[str, str]
    notes: tuple[tuple[Note, ...], tuple[Note, ...]]
    seconds: float
    peak: int
    reading: float = 0.0  # seconds in which the values were read and compared

    @property
    def same(self) -> bool:
        """Whether all that was looked at is as it has to be."""
        if self.structure or any(note.lossy for notes in self.notes for note in notes):
            return False
        return all(part is None or part.same for part in (self.manifest, self.comparison, self.forward))

    def to_json(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        return {
            "same": self.same,
            "one": self.one,
            "other": self.other,
            "structure": [str(problem) for problem in self.structure],
            "manifest": None if self.manifest is None else self.manifest.to_json(),
            "comparison": None if self.comparison is None else self.comparison.to_json(),
            "forward": None if self.forward is None else self.forward.to_json(),
            "left_out": dict(self.left_out),
            "notes": {
                side: [asdict(note) for note in notes]
                for side, notes in zip(("one", "other"), self.notes, strict=True)
            },
            "seconds": self.seconds,
            "reading": self.reading,
            "peak": self.peak,
        }


def verify(
    src: api.Pathlike,
    against: api.Pathlike | None = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    exact: bool = False,
    accept_rounding: bool = False,
    max_mismatches: int = 20,
    base_only: bool = False,
    forward: bool = False,
    component: str = "actor",
    fsdp_version: int | None = None,
    world_size: int | None = None,
    hf_config: api.Pathlike | None = None,
    backend: str | None = None,
    family: str | None = None,
    param_mapping: str | Sequence[str] = (),
    tie_word_embedding: bool = False,
    is_value_model: bool = False,
    trust_remote_code: bool = False,
    max_ram: float | str | None = None,
    max_workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Compare the checkpoint at `src` with the one at `against`, neither of which is merged for that.

    Without `against`, `src` is a model folder, whose files are checked against each other, and against its
    manifest if a merge with verification has left one: every byte.

    atol, rtol       values are equal where ``|a - b| <= atol + rtol * |b|``; default 1e-6 and 0 where
                     the element types are equal, and different types are a difference
    exact            equal is what has the same bytes
    accept_rounding  different types are compared, with what rounding to the coarser one explains
    max_mismatches   how many differences of each kind are listed; all are counted
    base_only        LoRA is not compared, on whichever side it is
    forward          also run both folders in transformers and compare their logits

    The others are as in `merge`; without `against` only `max_ram` and `max_workers` mean something. Returns a
    `VerifyReport`, whose `same` is the answer; raises `LazymergeError` where there is no answer.
    """
    started = time.monotonic()
    workers = _workers(max_workers)
    meter = Meter(on_progress)
    options = CompareOptions(atol, rtol, exact, accept_rounding, max_mismatches)
    budget = None if max_ram is None else parse_size(max_ram)
    structure: tuple[Problem, ...] = ()
    manifest = comparison = logits = None
    left_out: dict[str, str] = {}
    notes: tuple[tuple[Note, ...], tuple[Note, ...]] = (), ()
    if against is None:
        _refuse_idle(
            {
                "--atol": atol is not None,
                "--rtol": rtol is not None,
                "--exact": exact,
                "--accept-rounding": accept_rounding,
                "--max-mismatches": max_mismatches != CompareOptions().max_mismatches,
                "--base-only": base_only,
                "--forward": forward,
                "--component": component != "actor",
                "--fsdp-version": fsdp_version is not None,
                "--world-size": world_size is not None,
                "--hf-config": hf_config is not None,
                "--backend": backend is not None,
                "--family": family is not None,
                "--param-mapping": bool(param_mapping),
                "--tie-word-embedding": tie_word_embedding,
                "--is-value-model": is_value_model,
                "--trust-remote-code": trust_remote_code,
            }
        )
        folder = _folder(src)
        if has_manifest(folder):
            reading = _readers(workers, budget)
            with meter.timed():
                manifest = check_manifest(folder, workers=reading, on_bytes=_told(meter))
        structure = _structure(folder, sealed=manifest is not None)
        notes = left_alone(folder), ()
    else:
        settings = {
            "component": component,
            "fsdp_version": fsdp_version,
            "world_size": world_size,
            "hf_config": hf_config,
        }
        opened = _opened(src, {**settings, "backend": backend}), _opened(against, settings)
        one, other = sides = _taken_apart(*opened)
        mapping = (param_mapping,) if isinstance(param_mapping, str) else tuple(param_mapping)
        hub = HubOptions(family, mapping, tie_word_embedding, is_value_model, check=False)
        bases = _alike(sides, hub, trust_remote_code, Path(hf_config) if hf_config else None)
        left_out = {**bases[0].left_out, **bases[1].left_out}
        bases = (
            _with_copies(bases[0], one, base_only, meter),
            _with_copies(bases[1], other, base_only, meter),
        )
        notes = bases[0].warnings, bases[1].warnings
        if base_only:
            places = {f"{ADAPTERS}{at}" for side in sides for at in side.adapters}
            left_out |= dict.fromkeys(sorted(places), "--base-only")
        else:
            bases = _with(bases[0], tensors(one, other)), _with(bases[1], tensors(other, one))
        if not bases[0].gathers and not bases[1].gathers:
            what, hint = ("tensor", "give checkpoints that hold some")
            if base_only:
                what, hint = "base model", "verify without --base-only"
            raise PlanError(f"{src} and {against}: nothing to compare: neither has a {what}", hint)
        known = () if base_only else differing_settings(one, other)
        with meter.timed():
            comparison = compare(
                *bases, options, max_ram=budget, workers=workers, known=known, on_bytes=_told(meter)
            )
        if not base_only and bool(one.adapters) != bool(other.adapters):
            hint = "only one side has LoRA; --base-only compares the bases alone"
            comparison = replace(comparison, hint="; ".join(filter(None, (comparison.hint, hint))))
        read = [file for side in sides for adapter in side.adapters.values() for file in adapter.files]
        for file in {*opened[0].files, *opened[1].files, *read}:
            file.check_unchanged()
        if forward:
            logits = compare_logits(Path(src), Path(against), trust_remote_code=trust_remote_code)
    return VerifyReport(
        os.fspath(src),
        None if against is None else os.fspath(against),
        structure,
        manifest,
        comparison,
        logits,
        left_out,
        notes,
        time.monotonic() - started,
        meter.peak(),
        meter.moving,
    )


def _opened(src: api.Pathlike, settings: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint at a path, unread; one without tensors if there is nothing but adapters of PEFT's."""
    try:
        return api.open(src, **settings)
    except NotACheckpoint:
        folder = Path(src)
        if not adapters_in(folder):
            raise
        return Checkpoint({}, "peft", sidecars=(folder,))


def _taken_apart(one: Checkpoint, other: Checkpoint) -> tuple[Side, Side]:
    """Bases and adapters; whole, if both have one form with something of PEFT's in it that is not LoRA."""
    try:
        return taken_apart(one), taken_apart(other)
    except UnsupportedCheckpoint:
        if _shapes(one) != _shapes(other):
            raise
        return Side(one, {}), Side(other, {})


def _alike(
    sides: tuple[Side, Side], hub: HubOptions, trust_remote_code: bool, linked: Path | None
) -> tuple[Checkpoint, Checkpoint]:
    """The bases as they are, if both have one form, whichever it is; else under hub names."""
    one, other = (side.base for side in sides)
    if _shapes(one) == _shapes(other):
        return one, other
    # what one of them lacks, such as config.json of bare rank files, the other may have
    both = one.with_sidecars(*other.sidecars), other.with_sidecars(*one.sidecars)
    return (
        _converted(both[0], hub, trust_remote_code, linked),
        _converted(both[1], hub, trust_remote_code, linked),
    )


def _converted(
    checkpoint: Checkpoint, hub: HubOptions, trust_remote_code: bool, linked: Path | None
) -> Checkpoint:
    """The checkpoint under hub names; options that are Megatron's are for a side that is."""
    if not checkpoint.gathers:
        return checkpoint
    if checkpoint.format != "megatron":
        hub = HubOptions(check=False)
    return convert(checkpoint, Options(hub=hub, trust_remote_code=trust_remote_code), linked).checkpoint


def _with_copies(base: Checkpoint, side: Side, base_only: bool, meter: Meter) -> Checkpoint:
    """The base, after what its ranks share of it, and of the adapters, was compared: it has notes on that."""
    names = set(base.gathers)
    if not base_only:
        names |= {name for adapter in side.adapters.values() for name in adapter.gathers}
    return check_copies(base, names, False, meter)


def _with(checkpoint: Checkpoint, more: Mapping[str, Gather]) -> Checkpoint:
    return checkpoint.with_gathers({**checkpoint.gathers, **more})


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: gather.shape for name, gather in checkpoint.gathers.items()}


def _told(meter: Meter) -> OnBytes:
    return lambda count, total, name: meter.add(STAGE, total, name, count)


def _workers(wanted: int | None) -> int:
    if wanted is not None and wanted < 1:
        raise PlanError(f"--max-workers {wanted}", "give 1 or more")
    return wanted or min(4, os.cpu_count() or 1)


def _refuse_idle(flags: Mapping[str, bool]) -> None:
    """Refuse options, of which it is said whether they are given, that are about another checkpoint."""
    given = ", ".join(flag for flag, is_given in flags.items() if is_given)
    if given:
        raise PlanError(f"{given}: nothing to compare with", "give the other checkpoint with --against")


def _structure(folder: Path, *, sealed: bool) -> tuple[Problem, ...]:
    """What is wrong with the weight files; a folder with a manifest may hold none, or what is no model."""
    try:
        return check_structure(folder)
    except LazymergeError as error:
        if sealed:  # the manifest says what should be there
            return ()
        trained = recognised(folder) if isinstance(error, NotACheckpoint) else None
        if trained not in (None, "huggingface"):
            raise PlanError(
                f"{folder}: a training checkpoint ({trained}), and no model that was merged",
                "give what it should be equal to, with --against",
            ) from error
        raise


def _readers(workers: int, max_ram: int | None) -> int:
    """As many of the workers as fit the budget; `BudgetError` if none does."""
    if max_ram is None:
        return workers
    base = resident() + SLACK
    if base + BLOCK > max_ram:
        told = f"{base // 10**6} MB of them are the interpreter"
        raise too_small(max_ram, "reading the files", base + BLOCK, told)
    return min(workers, (max_ram - base) // BLOCK)


def _folder(src: api.Pathlike) -> Path:
    folder = given_path(src, "the result")
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "no such folder"
        raise SourceError(f"{folder}: {what}", "give the folder of a result, or --against another checkpoint")
    return folder
