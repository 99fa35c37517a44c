"""Commands: arguments in, text and exit codes out. What they do is `lazymerge.api`.

    stdout      data: the report, or with --json exactly one JSON object
    stderr      talk: progress, log, errors
    exit code   0; 2 what the user can mend, usage included; 3 a failed verification; 1 a bug;
                130 and 143 where SIGINT and SIGTERM ended it

Nothing heavy is imported before a command runs: `lazymerge --help` has to be instant.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import click

from lazymerge import __version__
from lazymerge.display import logged, printable, progress_shown, report_lines
from lazymerge.errors import LazymergeError

Command = TypeVar("Command", bound=Callable[..., Any])

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --max_ram is --max-ram
}

FOLDER = click.Path(path_type=Path)


def main() -> None:
    """Run the command that sys.argv gives, and end the process."""
    if hasattr(sys.stdout, "reconfigure"):  # a name that the terminal's encoding lacks is no reason to fail
        sys.stdout.reconfigure(errors="backslashreplace")
    cli(prog_name="lazymerge")


def examples(*commands: str) -> str:
    """What stands at the end of a command's help, line for line."""
    return "\n".join(["\b\nExamples:", *(f"  lazymerge {command}" for command in commands)])


class Commands(click.Group):
    """Commands whose usage errors are a JSON object on stdout too, where ``--json`` is given."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the arguments, as click makes it."""
        as_json = "--json" in args  # the parser takes the arguments out of the list
        with _usage_told(as_json):
            context = super().make_context(info_name, args, parent, **extra)
        context.meta[__name__] = as_json
        return context

    def invoke(self, ctx: click.Context) -> Any:
        """Parse what the command itself takes, and run it."""
        with _usage_told(ctx.meta[__name__]):
            return super().invoke(ctx)


@contextmanager
def _usage_told(as_json: bool) -> Iterator[None]:
    """Print a usage error as JSON before click tells it on stderr and exits with code 2."""
    try:
        yield
    except click.UsageError as error:
        if as_json:
            command = error.ctx.command_path if error.ctx else "lazymerge"
            print_json(
                {
                    "error": error.format_message(),
                    "hint": f"{command} --help lists what it takes",
                    "kind": type(error).__name__,
                }
            )
        raise


@click.group(
    cls=Commands,
    context_settings=CONTEXT,
    epilog=examples("merge checkpoints/global_step_100 model/", "merge --help"),
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Sharded training checkpoints into Hugging Face models, with the speed and the memory of cp."""
    if os.environ.get("NO_COLOR"):
        context.color = False


def talk_options(command: Command) -> Command:
    """The options of every command about what it says."""
    for option in (
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            help="Log on stderr; debug tells each step with the memory it took, and lists without end."
            "  [default: warning]",
        ),
        click.option(
            "-q", "--quiet", is_flag=True, help="Print nothing but errors (and what --json asks for)."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the report."),
    ):
        command = option(command)
    return command


@cli.command(
    epilog=examples(
        "merge checkpoints/global_step_100 model/",
        "merge checkpoints/global_step_100 model/ --dry-run",
        "merge checkpoints/global_step_100 model/ --dtype bfloat16 --max-ram 1GB",
        "merge checkpoints/global_step_100 value/ --component critic",
        "merge megatron/iter_0000100 model/ --hf-config Qwen3-30B-A3B/",
        "merge node0/actor node1/actor model/ --json | jq .peak",
    )
)
@click.argument("src", nargs=-1, required=True, type=FOLDER)
@click.argument("dst", type=FOLDER)
@click.option(
    "--max-ram",
    metavar="SIZE",
    help="Resident memory at most, as 16GB (10^9), 512MiB (2^20) or bytes; the result is the same."
    "  [default: 2GB, or half of what is free if that is less]",
)
@click.option("--dtype", metavar="TYPE", help="Cast the weights, for example to bfloat16.  [default: keep]")
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="Size of a weight file at most; a larger tensor has a file of its own.",
)
@click.option(
    "--output-format",
    type=click.Choice(["safetensors", "bin"]),
    default="safetensors",
    show_default=True,
    help="bin is one pytorch_model.bin.",
)
@click.option("--include", metavar="PATTERN", multiple=True, help="Only tensors of such names. Repeatable.")
@click.option("--exclude", metavar="PATTERN", multiple=True, help="No tensors of such names. Repeatable.")
@click.option(
    "--component",
    metavar="[actor|critic|NAME]",
    default="actor",
    show_default=True,
    help="Which model of a run, where SRC is a run or one of its steps.",
)
@click.option(
    "--fsdp-version",
    type=click.Choice(["1", "2"]),
    callback=lambda context, option, value: value and int(value),
    help="What wrote the ranks, where they do not say it.",
)
@click.option(
    "--world-size",
    metavar="N",
    type=click.IntRange(min=1),
    help="How many ranks there were, where SRC holds files of several runs.",
)
@click.option(
    "--hf-config", metavar="DIR", type=FOLDER, help="Config and tokenizer, before those that SRC has."
)
@click.option(
    "--family",
    metavar="NAME|FILE",
    help="Megatron: the table of names; FILE is Python with an object FAMILY.  [default: by config.json]",
)
@click.option(
    "--param-mapping",
    metavar="OLD:NEW|FILE",
    multiple=True,
    help="Megatron: where a tensor goes that no table knows; {} in OLD is any one part of a name, an empty"
    " NEW leaves it out. FILE has one a line. Repeatable.",
)
@click.option(
    "--tie-word-embedding",
    is_flag=True,
    help="Megatron: the output layer is the embedding, whatever config.json and the files say.",
)
@click.option(
    "--is-value-model", is_flag=True, help="Megatron: the output layer is a value head: score.weight."
)
@click.option(
    "--force-shape-match",
    is_flag=True,
    help="Megatron: crop or zero-pad what differs in size from config.json; each tensor is reported.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Megatron: compare names and shapes with the model that transformers builds from config.json.",
)
@click.option(
    "--backfill",
    metavar="DIR",
    type=FOLDER,
    help="Megatron: a folder with the base model, for parts that the checkpoint lacks: a vision tower, MTP.",
)
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run the model code that config.json names, to check names and shapes against it.",
)
@click.option(
    "--max-workers", metavar="N", type=click.IntRange(min=1), help="Threads.  [default: 4, or the cores]"
)
@click.option(
    "--strict/--no-strict",
    default=False,
    show_default=True,
    help="Refuse replicas that differ, or only warn.",
)
@click.option(
    "--check-copies/--no-check-copies",
    default=True,
    show_default=True,
    help="Compare what several ranks hold; reads all of it.",
)
@click.option(
    "--overwrite/--no-overwrite",
    default=False,
    show_default=True,
    help="Replace the model in DST, once the new one is complete.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be written and what it takes; write nothing.")
@talk_options
def merge(
    src: tuple[Path, ...],
    dst: Path,
    as_json: bool,
    quiet: bool,
    log_level: str | None,
    **options: Any,
) -> None:
    """Merge the checkpoint at SRC into a Hugging Face model in the folder DST.

    SRC is a run, a step of it, or the folder of the rank files; several are taken together, as ranks
    that stayed on their nodes. A merge that was interrupted goes on when it is given again.
    """
    level = log_level or ("error" if quiet else "warning")
    with failures_told(as_json, level == "debug"), logged(level):
        from lazymerge import api

        with progress_shown(quiet) as on_progress:
            report = api.merge(src, dst, on_progress=on_progress, **options)
        if as_json:
            print_json(report.to_json())
        elif not quiet:
            for line in report_lines(report, everything=level == "debug"):
                click.echo(line)


# ---------------------------------------------------------------------------------- failures


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a scheduler sends it before it kills."""


@contextmanager
def failures_told(as_json: bool, debug: bool) -> Iterator[None]:
    """End the process with two lines and an exit code if the block fails; a traceback only if `debug`."""
    try:
        with _sigterm_raises():
            yield
    except LazymergeError as error:
        _fail(error, error.problem, error.hint, error.exit_code, as_json)
    except KeyboardInterrupt as stop:
        _stop(stop, as_json)
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise  # click's own
    except Exception as error:
        if debug:
            traceback.print_exc()
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        more = "" if debug else "; --log-level debug shows where"
        hint = (
            f"this is a bug of lazymerge {__version__}: please report it with this line and the command{more}"
        )
        _fail(error, f"internal error: {reason}", hint, 1, as_json)


def _fail(error: Exception, problem: str, hint: str, exit_code: int, as_json: bool) -> NoReturn:
    if as_json:
        print_json({"error": problem, "hint": hint, "kind": type(error).__name__})
    label = "" if problem.startswith("internal error: ") else click.style("error: ", fg="red", bold=True)
    click.echo(label + printable(problem), err=True)
    if hint:
        click.echo(f"hint: {printable(hint)}", err=True)
    sys.exit(exit_code)


def _stop(stop: KeyboardInterrupt, as_json: bool) -> NoReturn:
    hint = "the same command again goes on where this one stopped"
    if as_json:
        print_json({"error": "interrupted", "hint": hint, "kind": type(stop).__name__})
    click.echo(f"interrupted: {hint}", err=True)
    sys.exit(143 if isinstance(stop, Terminated) else 130)


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    click.echo(json.dumps(content, indent=2))


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise `Terminated` in the block, so that it is left as Ctrl-C leaves it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
