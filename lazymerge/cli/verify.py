"""The command `verify`, which is also called `test`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lazymerge.cli import verl
from lazymerge.cli.failures import failures_told
from lazymerge.cli.options import FOLDER, Grouped, examples, print_json, reading_options, talk_options
from lazymerge.display import duration, logged, printable, progress_shown
from lazymerge.errors import VerificationError
from lazymerge.files.size import format_size

if TYPE_CHECKING:  # numpy and all that reads checkpoints, which `--help` has no time for
    from lazymerge.checkpoint import Note
    from lazymerge.comparison import Comparison, Difference
    from lazymerge.verification import VerifyReport

MANIFEST = "lazymerge-manifest.json"  # lazymerge.output has it too, and imports what takes time
_SHOWN = 60
"""Characters of a name in the table; the middle of a longer one is left out."""


@click.command(
    cls=Grouped,
    short_help="Compare two checkpoints, or check a result's files.",
    epilog=examples(
        "verify model/",
        "verify checkpoints/global_step_100 --against Qwen2.5-7B/ --max-mismatches 5",
        "verify model/ --against other/ --exact",
        "verify checkpoints/global_step_100 --against model-bf16/ --accept-rounding",
        "verify model/ --against other/ --forward --json | jq .forward.largest",
    ),
)
@click.argument("src", metavar="A", required=False, type=FOLDER)
@click.option(
    "--against",
    "--test-hf-dir",
    "against",
    metavar="B",
    type=FOLDER,
    help="What A should be equal to. --test-hf-dir is verl's name of it.",
)
@click.option(
    "--atol",
    metavar="X",
    type=float,
    help="Values a of A and b of B are equal where |a - b| <= atol + rtol |b|.  [default: 1e-6]",
)
@click.option("--rtol", metavar="X", type=float, help="See --atol.  [default: 0]")
@click.option("--exact", is_flag=True, help="Equal is what has the same bytes; 0.0 and -0.0 have not.")
@click.option(
    "--accept-rounding",
    is_flag=True,
    help="Compare different dtypes too, and accept what rounding to the coarser one explains.",
)
@click.option(
    "--max-mismatches",
    metavar="N",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Differences of each kind to list; all are counted.",
)
@click.option("--base-only", is_flag=True, help="Leave LoRA out of the comparison, on whichever side it is.")
@click.option(
    "--forward", is_flag=True, help="Also run both folders in transformers, in fp32, and compare the logits."
)
@reading_options
@verl.source_options
@talk_options
def verify(
    src: Path | None,
    local_dir: Path | None,
    hf_config: Path | None,
    hf_model_path: Path | None,
    against: Path | None,
    as_json: bool,
    quiet: bool,
    log_level: str | None,
    **options: Any,
) -> None:
    """Compare the checkpoint A with B, or check the files of a result A.

    A and B are anything that can be merged, and Hugging Face models; nothing is written. Without --against,
    the files of A are checked against each other, and every byte of them against the manifest that a merge
    with --verify has left. The exit code is 0 if all is equal, and 3 if not.
    """
    (one,) = verl.sources(() if src is None else (src,), local_dir) or (None,)
    if one is None:
        raise click.MissingParameter(param_type="argument", param_hint="'A'")
    if local_dir is not None and against is None:
        raise click.MissingParameter(param_type="option", param_hint="'--test-hf-dir'")
    if verl.is_idle_rank():
        return
    level = log_level or ("error" if quiet else "warning")
    with failures_told(as_json, level == "debug"), logged(level, quiet):
        from lazymerge.verification import verify as run

        options["hf_config"] = verl.config_folder(hf_config, hf_model_path)
        with progress_shown(quiet) as on_progress:
            report = run(one, against, on_progress=on_progress, **options)
        if as_json:
            print_json(report.to_json())
        elif not quiet:
            for line in lines(report):
                click.echo(line)
    if not report.same:
        sys.exit(VerificationError.exit_code)


def lines(report: VerifyReport) -> Iterator[str]:
    """The report for a person, line by line; the last one is the answer."""
    for problem in (*report.structure, *(report.manifest.problems if report.manifest else ())):
        yield printable(str(problem))
    if report.comparison is not None:
        yield from _comparison(report.comparison)
    if report.forward is not None:
        found = report.forward
        largest = "cannot be compared" if found.largest is None else f"differ by {found.largest:.3g} at most"
        if any(found.missing):
            yield "Logits are not compared: transformers would draw missing weights at random"
        else:
            positions = f"{found.agreeing} of {found.positions} positions"
            yield f"Logits {largest}; {positions} have the same largest one"
        for side, missing in zip(("A", "B"), found.missing, strict=True):
            if missing:
                yield f"  {side} lacks {len(missing)} weights, such as {printable(missing[0])}"
    if report.left_out:
        first, why = next(iter(report.left_out.items()))
        count = len(report.left_out)
        more = f", and {count - 1:,} more" if count > 1 else ""
        yield f"note: not compared: {printable(first)} ({printable(why)}){more}"
    label = click.style("warning: ", fg="yellow", bold=True)
    for side, note in _notes(report):
        yield f"{label}{side}{printable(note.text)}"
    if report.other is None and report.manifest is None:
        yield f"{label}there is no {MANIFEST} to check the files' bytes against; merge --verify writes one"
    yield _answer(report)


def _notes(report: VerifyReport) -> Iterator[tuple[str, Note]]:
    """The warnings, with what they are about in front."""
    for side, notes in zip(("A: ", "B: "), report.notes, strict=True):
        for note in notes:
            yield "" if report.other is None else side, note


def _comparison(comparison: Comparison) -> Iterator[str]:
    for kind, title in (
        ("missing", "Missing in A"),
        ("extra", "Only in A"),
        ("shape", "Of other shapes"),
        ("dtype", "Of other dtypes"),
        ("values", "Of other values"),
        ("setting", "Of other settings"),
    ):
        count = comparison.counts[kind]
        if not count:
            continue
        listed = [difference for difference in comparison.differences if difference.kind == kind]
        what = "setting" if kind == "setting" else "tensor"
        yield f"{title}: {count:,} {what}{'s' if count != 1 else ''}"
        yield from _table(kind, listed)
        if count > len(listed):
            yield f"  and {count - len(listed):,} more (--max-mismatches lists more)"
        yield ""
    for label, both in (("NaN", comparison.nan), ("infinity", comparison.inf)):
        if any(both):
            yield f"{label}: {both[0]:,} elements in A, {both[1]:,} in B"
            for each in comparison.nonfinite:
                here = each.nan if label == "NaN" else each.inf
                if any(here):
                    yield f"  {_short(each.name)}  {here[0]:,}  {here[1]:,}"
    if comparison.hint:
        yield f"hint: {comparison.hint}"


def _table(kind: str, listed: list[Difference]) -> Iterator[str]:
    """Rows of equal columns, with a heading where they need one."""
    rows = [_row(kind, difference) for difference in listed]
    if kind == "values" and rows:
        rows.insert(0, ("tensor", "largest difference", "mismatches", "first at", "A", "B"))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    for row in rows:
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(kind: str, difference: Difference) -> tuple[str, ...]:
    name = _short(difference.name)
    if kind != "values":
        there = [each for each in (difference.one, difference.other) if each is not None]
        return name, " in A, ".join(there) + (" in B" if len(there) == 2 else "")
    share = f"{difference.mismatches:,} of {difference.elements:,}"
    return name, f"{difference.largest:.3g}", share, str(list(difference.first or ())), *difference.shown()


def _short(name: str) -> str:
    name = printable(name)
    half = _SHOWN // 2 - 1
    return name if len(name) <= _SHOWN else f"{name[:half]}..{name[-half:]}"


def _answer(report: VerifyReport) -> str:
    ended = f"{duration(report.seconds)} in all, {format_size(report.peak)} of memory"
    took = f"in {duration(report.reading)}, {ended}"
    comparison, manifest = report.comparison, report.manifest
    if comparison is not None:
        differing = comparison.differing
        all_of_them = comparison.tensors + differing - comparison.counts["values"]
        said = (
            f"{differing:,} of {all_of_them:,} tensors differ"
            if differing
            else f"equal: {comparison.tensors:,} tensors, {comparison.identical:,} of them byte for byte"
        )
        if not differing and not report.same:
            lossy = next((f"{side}{printable(note.text)}" for side, note in _notes(report) if note.lossy), "")
            other = "logits" if comparison.same else "settings"
            said = f"not equal: {lossy}" if lossy else f"the weights are equal, the {other} are not"
            if not lossy and report.forward is not None and any(report.forward.missing):
                said = "the weights are equal, and the model has more"
        return f"{said} ({format_size(comparison.nbytes)} compared {took})"
    problems = len(report.structure) + (len(manifest.problems) if manifest else 0)
    if problems:
        return f"{problems:,} problem{'s' if problems != 1 else ''} found ({ended})"
    if manifest is None:
        return f"the files fit each other; their bytes were not checked ({ended})"
    return (
        f"unchanged: {manifest.files:,} files, {manifest.tensors:,} tensors"
        f" ({format_size(manifest.nbytes)} read {took})"
    )
