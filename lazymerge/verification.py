"""The library's `verify`: a checkpoint against another, or a result against its own manifest.

Both sides may be anything that lazymerge opens. Unless they have the same names and shapes already, both are
brought to the hub's names in the way of a merge, so that what is compared is what a merge would write.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazymerge import api
from lazymerge.checkpoint import Checkpoint
from lazymerge.compare import compare
from lazymerge.comparison import CompareOptions, Comparison
from lazymerge.conversions.adapters.trained import BASE, LoraOptions
from lazymerge.conversions.hub import HubOptions
from lazymerge.errors import PlanError, SourceError
from lazymerge.files.size import parse_size
from lazymerge.forward import ForwardReport, compare_logits
from lazymerge.manifest import ManifestReport, OnBytes, check_manifest, has_manifest
from lazymerge.prepare import Options, convert
from lazymerge.report import Meter, OnProgress
from lazymerge.structure import Problem, check_structure

STAGE = "verify"
"""What progress events of this module are called."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verifying has found; parts that were not asked for are None.

    `structure` is what is wrong with the files of a folder that was verified alone. `seconds` is a time,
    `peak` the most resident memory of the process in bytes. `left_out` is what of the sources was not
    compared -> why.
    """

    one: str
    other: str | None
    structure: tuple[Problem, ...]
    manifest: ManifestReport | None
    comparison: Comparison | None
    forward: ForwardReport | None
    left_out: Mapping[str, str]
    seconds: float
    peak: int

    @property
    def same(self) -> bool:
        """Whether all that was looked at is as it has to be."""
        parts = (self.manifest, self.comparison, self.forward)
        return not self.structure and all(part is None or part.same for part in parts)

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
            "seconds": self.seconds,
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
    forward          also run both folders in transformers and compare their logits

    The others are as in `merge`. Returns a `VerifyReport`, whose `same` is the answer; raises
    `LazymergeError` where there is no answer.
    """
    started = time.monotonic()
    workers = _workers(max_workers)
    meter = Meter(on_progress)
    options = CompareOptions(atol, rtol, exact, accept_rounding, max_mismatches)
    budget = None if max_ram is None else parse_size(max_ram)
    structure: tuple[Problem, ...] = ()
    manifest = comparison = logits = None
    left_out: dict[str, str] = {}
    if against is None:
        if forward or exact or accept_rounding or atol is not None or rtol is not None:
            raise PlanError("nothing to compare with", "give the other checkpoint with --against")
        folder = _folder(src)
        structure = check_structure(folder)
        if has_manifest(folder):
            manifest = check_manifest(folder, workers=workers, on_bytes=_told(meter))
    else:
        settings = {
            "component": component,
            "fsdp_version": fsdp_version,
            "world_size": world_size,
            "hf_config": hf_config,
        }
        first = api.open(src, backend=backend, **settings)  # type: ignore[arg-type]
        sides = first, api.open(against, **settings)  # type: ignore[arg-type]
        one, other = sides
        if _shapes(one) != _shapes(other):  # else both have one form, whichever it is
            hub = HubOptions(
                family,
                (param_mapping,) if isinstance(param_mapping, str) else tuple(param_mapping),
                tie_word_embedding,
                is_value_model,
                check=False,
            )
            linked = Path(hf_config) if hf_config else None
            # what one of them lacks, such as config.json of bare rank files, the other may have
            both = [this.with_sidecars(*that.sidecars) for this, that in (sides, sides[::-1])]
            one, other = (_converted(side, hub, trust_remote_code, linked) for side in both)
        left_out = {**one.left_out, **other.left_out}
        comparison = compare(one, other, options, max_ram=budget, workers=workers, on_bytes=_told(meter))
        for file in (*sides[0].files, *sides[1].files):
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
        time.monotonic() - started,
        meter.peak(),
    )


def _converted(
    checkpoint: Checkpoint, hub: HubOptions, trust_remote_code: bool, linked: Path | None
) -> Checkpoint:
    """The checkpoint under hub names; options that are Megatron's are for a side that is."""
    if checkpoint.format != "megatron":
        hub = HubOptions(check=False)
    options = Options(hub=hub, trust_remote_code=trust_remote_code, lora=LoraOptions(BASE))
    return convert(checkpoint, options, linked).checkpoint


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: gather.shape for name, gather in checkpoint.gathers.items()}


def _told(meter: Meter) -> OnBytes:
    return lambda count, total, name: meter.add(STAGE, total, name, count)


def _workers(wanted: int | None) -> int:
    if wanted is not None and wanted < 1:
        raise PlanError(f"--max-workers {wanted}", "give 1 or more")
    return wanted or min(4, os.cpu_count() or 1)


def _folder(src: api.Pathlike) -> Path:
    folder = Path(src)
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "no such folder"
        raise SourceError(f"{folder}: {what}", "give the folder of a result, or --against another checkpoint")
    return folder
