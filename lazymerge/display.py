"""What a person sees: progress while a merge runs, its report, its log.

Progress is a bar where stderr is a terminal and otherwise a line now and then, so that the log of a
batch job has no carriage returns. Names come from checkpoints, so that whatever could steer a
terminal is shown as an escape and no markup is read in them.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lazymerge.files.size import format_size

if TYPE_CHECKING:  # each of these takes time that `--help` has not
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from lazymerge.report import MergeReport, OnProgress, Progress

FIRST = 5
"""How much of a list is shown to those who do not ask for all."""

_DOING = {"check": "comparing ", "verify": "comparing ", "upload": "uploading "}
"""What is said of the stages of progress besides writing."""

WRITING = "writing"

_LONGEST = 4_000
"""Characters of a line: names come from checkpoints, and may be as long as one likes."""

SECONDS = 5.0
"""Between two lines of progress."""


def printable(text: str) -> str:
    """The text on one line and of bounded length, with what could steer a terminal written as escapes."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def duration(seconds: float) -> str:
    """Seconds for people: "4 ms", "0.8 s", "12 s", "2:05", "1:02:05"."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# ------------------------------------------------------------------------------------ report


def report_lines(report: MergeReport, *, everything: bool = False) -> Iterator[str]:
    """The report, line by line; lists are cut after a few unless `everything` is wanted."""
    did = "Would merge" if report.dry_run else "Merged"
    what = "a Hugging Face model" if report.format == "huggingface" else f"{report.format}, {report.topology}"
    yield f"{did} {what}, into {printable(str(report.destination))}"
    yield ""
    for label, lines in _sections(report, everything):
        for number, line in enumerate(lines):
            yield f"  {'' if number else label:<9} {line}"
    yield from _remarks(report)
    yield ""
    yield from _ending(report)


def _sections(report: MergeReport, everything: bool) -> Iterator[tuple[str, Iterable[str]]]:
    width = max(len(printable(name)) for name in report.files)
    files = [f"{printable(name):<{width}}  {format_size(nbytes)}" for name, nbytes in report.files.items()]
    left_out = [f"{printable(name)}: {printable(why)}" for name, why in report.left_out.items()]
    yield "files", _first(files, everything)
    yield "tensors", [f"{report.tensors:,}: {_per_dtype(report)}"]
    yield from _foreseen(report) if report.dry_run else _measured(report)
    yield "sidecars", [", ".join(printable(name) for name in report.sidecars) or "none"]
    yield "left out", _first(left_out, everything)
    yield (
        "resumed",
        _first([f"{printable(n)}  finished by an earlier run" for n in report.resumed], everything),
    )


def _measured(report: MergeReport) -> Iterator[tuple[str, Sequence[str]]]:
    written = report.bytes_written - sum(report.files[name] for name in report.resumed)
    rate = format_size(written / max(report.moving, 1e-9))
    took = f"{duration(report.moving)} ({rate}/s), {duration(report.seconds)} in all"
    yield "written", [f"{format_size(written)} in {took}"]
    yield "memory", [f"{format_size(report.peak)} at most, of a budget of {format_size(report.budget)}"]


def _foreseen(report: MergeReport) -> Iterator[tuple[str, Sequence[str]]]:
    yield "read", [format_size(report.bytes_read)]
    free = (
        "" if report.disk_free is None else f" of {format_size(report.disk_free)} that are free on the disk"
    )
    yield "write", [f"{format_size(report.disk)}{free}"]
    yield (
        "memory",
        [f"{format_size(report.predicted_peak)} at most, of a budget of {format_size(report.budget)}"],
    )
    yield "workers", [f"{report.workers}, with blocks of {format_size(report.block)}"]


def _per_dtype(report: MergeReport) -> str:
    return ", ".join(
        f"{n:,} {dtype} ({format_size(nbytes)})" for dtype, (n, nbytes) in report.per_dtype.items()
    )


def _first(lines: Sequence[str], everything: bool) -> Sequence[str]:
    """The first few of the lines, and how many more there are."""
    if everything or len(lines) <= FIRST + 1:
        return lines
    return [*lines[:FIRST], f"and {len(lines) - FIRST:,} more (--log-level debug lists all)"]


def _remarks(report: MergeReport) -> Iterator[str]:
    """Notes, then warnings, since what is last is read."""
    notes = sorted(report.notes, key=lambda note: note.level == "warning")
    missing = report.disk - report.disk_free if report.dry_run and report.disk_free is not None else 0
    if notes or missing > 0:
        yield ""
    for note in notes:
        yield f"{_label(note.level)}{printable(note.text)}"
    if missing > 0:
        short = format_size(missing)
        yield f"{_label('warning')}the disk of {printable(str(report.destination))} is short of {short}"


def _label(level: str) -> str:
    return click.style("warning: ", fg="yellow", bold=True) if level == "warning" else "note: "


def _ending(report: MergeReport) -> Iterator[str]:
    if report.dry_run:
        yield "Nothing was written; run without --dry-run to merge."
    else:
        if report.verified:
            yield "Reread from the disk and compared with the source: equal, byte for byte."
        if report.url:
            yield f"Uploaded: {printable(report.url)}"
        if report.verified or report.url:
            yield ""
        load = "Load it:" if report.checked else "Load it (that it loads was not checked):"
        yield load if report.next_step is None else "Go on from there to a model:"
        yield f"  {printable(report.next_step or report.how_to_load)}"


# ---------------------------------------------------------------------------------- progress


@contextmanager
def progress_shown(quiet: bool) -> Iterator[OnProgress | None]:
    """A callback that shows how far a merge is; None if it is to be quiet."""
    if quiet:
        yield None
    elif sys.stderr.isatty() and (console := _terminal()) is not None:
        with _bar(console) as bar:
            yield _Moved(bar)
    else:
        yield Lines()


def _terminal() -> Console | None:
    """The terminal behind stderr; None if it cannot move its cursor."""
    from rich.console import Console

    console = Console(stderr=True)
    return console if console.is_terminal and not console.is_dumb_terminal else None


def _bar(console: Console) -> Bar:
    from rich import progress
    from rich.table import Column

    columns = (
        progress.BarColumn(10, table_column=Column(no_wrap=True)),
        progress.DownloadColumn(table_column=Column(no_wrap=True)),
        progress.TransferSpeedColumn(table_column=Column(no_wrap=True)),
        progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
        progress.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
    )
    return progress.Progress(*columns, console=console, refresh_per_second=5)


class _Moved:
    """Moves a bar at each event; it is there from the first one on."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar
        self.room = max(30, bar.console.width - 45)  # beside the columns before the description
        self.total = -1
        self.task: TaskID | None = None

    def __call__(self, event: Progress) -> None:
        if event.total != self.total and self.task is not None:
            self.bar.remove_task(self.task)
            self.task = None
        doing = _DOING.get(event.stage, "")
        text = f"RAM {format_size(event.resident)} {doing}{Path(printable(event.file or '')).stem}"[
            : self.room
        ]
        if self.task is None:
            self.total = event.total
            self.task = self.bar.add_task(text, total=event.total or None)
        self.bar.update(self.task, completed=event.done, description=text)


class Lines:
    """Prints a line of progress on stderr every few seconds, and one at the end of what had any before."""

    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.clock = clock
        self.began: tuple[float, int] | None = None
        self.part: tuple[str, int] | None = None  # what is going on, and its total
        self.next = 0.0
        self.shown = False  # of this part

    def __call__(self, event: Progress) -> None:
        now = self.clock()
        part = _DOING.get(event.stage, WRITING), event.total
        if part != self.part:
            self.part, self.shown = part, False
            self.began, self.next = (now, event.done), now + self.seconds
        ended = self.shown and event.done == event.total > 0
        if now >= self.next or ended:
            self.next, self.shown = now + self.seconds, not ended
            click.echo(self.line(event, now), err=True)

    def line(self, event: Progress, now: float) -> str:
        """How far it is: bytes, rate, time left, memory, file."""
        doing = _DOING.get(event.stage, WRITING)
        parts = [f"{doing}copies" if event.stage == "check" else doing.rstrip()]
        if event.total:
            parts.append(
                f"{format_size(event.done)} of {format_size(event.total)}"
                f" ({event.done * 100 // event.total} %)"
            )
        began, before = self.began or (now, event.done)
        if now > began and event.done > before:
            rate = (event.done - before) / (now - began)
            parts.append(f"{format_size(rate)}/s")
            if event.done < event.total:
                parts.append(f"{duration((event.total - event.done) / rate)} left")
        parts += [f"{format_size(event.resident)} resident", printable(event.file or "")]
        return "  ".join(part for part in parts if part)


# --------------------------------------------------------------------------------------- log


@contextmanager
def logged(level: str, quiet: bool) -> Iterator[None]:
    """Show what lazymerge logs in the block on stderr; with the time and the memory if `level` is debug.

    What it waits for is progress, and is shown unless it is to be `quiet`.
    """
    logger, handler = logging.getLogger("lazymerge"), _Handler()
    waits = logging.getLogger("lazymerge.waits")
    handler.setFormatter(_Steps() if level == "debug" else _Plain())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    waits.setLevel(logging.NOTSET if quiet else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        waits.setLevel(logging.NOTSET)


class _Handler(logging.Handler):
    """Prints on what is stderr now, which is above the bar while there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.name.endswith(".waits") else f"{record.levelname.lower()}: "
        return level + printable(record.getMessage())


class _Steps(_Plain):
    def format(self, record: logging.LogRecord) -> str:
        from lazymerge.budget import resident

        at = self.formatTime(record, "%H:%M:%S")
        return f"{at} {resident() / 1e6:6.0f} MB  {super().format(record)}"
