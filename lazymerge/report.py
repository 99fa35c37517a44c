"""What a merge did, for people and machines."""

from __future__ import annotations

import json
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lazymerge.budget import Spending, high_water, resident
from lazymerge.checkpoint import Note
from lazymerge.conversions.adapters.adapter import WEIGHTS as ADAPTER
from lazymerge.files.dtype import FLOATS
from lazymerge.formats.staged import STAGE
from lazymerge.prepare import CONVERT, Prepared
from lazymerge.sidecars import CONFIG, config_dtype


@dataclass(frozen=True, slots=True)
class Progress:
    """An event of a merge under way: `done` of `total` bytes are written, into `file` just now.

    `resident` is the memory of the process in bytes.
    """

    stage: str  # "check", "write", "finish", "verify", "upload"
    done: int
    total: int
    resident: int
    file: str | None = None


_MEASURED = 0.02
"""Seconds between two looks at the memory."""

OnProgress = Callable[[Progress], None]


@dataclass
class Meter:
    """Counts bytes, time and memory, and tells the caller; safe to use from several threads.

    `moving` are the seconds in which bytes were moved, out of all that it took.
    """

    on_progress: OnProgress | None
    done: int = 0
    moving: float = 0.0
    _peak: int = 0
    _measured: float = 0.0
    _resident: int = 0
    _highest_before: int = field(default_factory=lambda: high_water())
    _lock: Any = field(default_factory=threading.Lock)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block as one in which bytes are moved."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.moving += time.monotonic() - began

    def add(self, stage: str, total: int, file: str, count: int) -> None:
        """Count `count` more bytes and tell."""
        with self._lock:
            self.done += count
            self.tell(stage, self.done, total, file)

    def tell(self, stage: str, done: int, total: int, file: str | None) -> None:
        """Tell where the merge is; with the memory of a moment ago, since asking costs as much as a copy."""
        now = time.monotonic()
        if now >= self._measured + _MEASURED:
            self._measured, self._resident = now, resident()
            self._peak = max(self._peak, self._resident)
        if self.on_progress is not None:
            self.on_progress(Progress(stage, done, total, self._resident, file))

    def peak(self) -> int:
        """The most resident memory since this began, in bytes, as far as it can be known.

        The system keeps the highest mark of the whole process: it is the merge's if it has risen since.
        """
        highest = high_water()
        return highest if highest > self._highest_before else max(self._peak, resident())


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What was written (or, of a dry run, would be).

    Sizes are in bytes, times in seconds: `moving` is the part of `seconds` in which the files were written.
    `checked` says that names and shapes were compared with what `how_to_load` loads. `per_dtype` is
    dtype -> (tensors, bytes). `left_out` is what of the source is not in the result -> why. `resumed` are
    files that an earlier run had finished.
    `disk` is what the result takes, sidecars included, and `disk_free` what its file system has left (None:
    it does not say).
    `budget` bounds `peak`, the resident memory of the process.
    """

    destination: Path
    format: str
    topology: str
    dry_run: bool
    files: Mapping[str, int]  # weight files and index -> bytes
    sidecars: tuple[str, ...]
    tensors: int
    per_dtype: Mapping[str, tuple[int, int]]
    bytes_read: int
    bytes_written: int
    disk: int
    disk_free: int | None
    workers: int
    block: int
    budget: int
    predicted_peak: int
    peak: int
    seconds: float
    notes: tuple[Note, ...]
    left_out: Mapping[str, str]
    resumed: tuple[str, ...]
    how_to_load: str
    unchanged: bool = False  # by the adapters that were folded in
    verified: bool = False
    url: str | None = None  # where it was uploaded to
    moving: float = 0.0
    checked: bool = True
    next_step: str | None = None  # the command that makes a model of what one stage has left

    @property
    def warnings(self) -> tuple[Note, ...]:
        """The notes that the user should not miss."""
        return tuple(note for note in self.notes if note.level == "warning")

    def to_json(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        return {**asdict(self), "destination": str(self.destination)}


def make_report(
    destination: Path,
    prepared: Prepared,
    spending: Spending,
    budget: int,
    started: float,
    meter: Meter,
    *,
    dry_run: bool = False,
    resumed: tuple[str, ...] = (),
) -> MergeReport:
    """The report of a merge that ended well, or of a dry run; `started` is when, by the monotonic clock."""
    checkpoint, plan = prepared.checkpoint, prepared.plan
    files = {file.name: file.size for file in plan.files}
    if plan.index_name:
        files[plan.index_name] = len(plan.index or b"")
    return MergeReport(
        destination=destination,
        format=checkpoint.format,
        topology=str(checkpoint.topology),
        dry_run=dry_run,
        files=files,
        sidecars=tuple(prepared.beside),
        tensors=sum(1 for _ in plan.tensors),
        per_dtype=plan.per_dtype(),
        bytes_read=plan.reads,
        bytes_written=plan.size,
        disk=prepared.size,
        disk_free=_disk_free(destination),
        workers=spending.workers,
        block=spending.block,
        budget=budget,
        predicted_peak=spending.peak,
        peak=meter.peak(),
        seconds=time.monotonic() - started,
        moving=meter.moving,
        notes=checkpoint.notes,
        left_out=checkpoint.left_out,
        resumed=resumed,
        unchanged=prepared.unchanged,
        how_to_load=_how_to_load(destination, prepared),
        checked=prepared.checked or not _is_model(prepared),
        next_step=f"lazymerge merge {shlex.quote(str(destination))} MODEL --stage {CONVERT}"
        if STAGE in prepared.beside
        else None,
    )


def _disk_free(folder: Path) -> int | None:
    """Bytes that are free where the folder is, or will be; None where the file system does not say."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        return shutil.disk_usage(there).free
    except OSError:
        return None


def _how_to_load(destination: Path, prepared: Prepared) -> str:
    """A line of Python that loads the result, or its first file where it is no whole model."""
    plan, config = prepared.plan, prepared.config
    if plan.files and all(file.name.endswith(ADAPTER) for file in plan.files):
        return f"peft.PeftModel.from_pretrained(base, {str((destination / plan.files[0].name).parent)!r})"
    if config is None or not _is_model(prepared):
        file = plan.files[0].name
        if file.endswith(".bin"):
            return f"torch.load({str(destination / file)!r}, weights_only=True, mmap=True)"
        return f"safetensors.torch.load_file({str(destination / file)!r})"
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else "AutoModelForCausalLM"
    code = ", trust_remote_code=True" if "auto_map" in config else ""
    kind = "AutoModelForCausalLM" if code else str(name)
    return f"transformers.{kind}.from_pretrained({str(destination)!r}, dtype={_dtype(prepared)!r}{code})"


def _is_model(prepared: Prepared) -> bool:
    """Whether the result is a whole model with a config.json, which `from_pretrained` takes."""
    if prepared.config is None or STAGE in prepared.beside or not prepared.checkpoint.gathers:
        return False
    why = prepared.checkpoint.left_out.values()
    return not any("--include" in each or "--exclude" in each for each in why)


def _dtype(prepared: Prepared) -> str:
    """The dtype that loads the weights as they are; "auto" is what config.json says, if it says one."""
    written = prepared.beside.get(CONFIG)
    named = config_dtype(json.loads(written) if isinstance(written, bytes) else prepared.config)
    most = next((dtype for dtype in prepared.plan.per_dtype() if dtype in FLOATS), None)
    return "auto" if most is None or named in (None, most) else most
