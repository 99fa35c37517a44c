"""Commands: arguments in, text and exit codes out. What they do is `lazymerge.api`.

    stdout      data: the report, or with --json exactly one JSON object
    stderr      talk: progress, log, errors
    exit code   0; 2 what the user can mend, usage included; 3 a failed verification; 4 adapters that
                changed nothing; 1 a bug; 130 and 143 where SIGINT and SIGTERM ended it

Nothing heavy is imported before a command runs: `lazymerge --help` has to be instant.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from lazymerge import __version__
from lazymerge.cli.hub import upload
from lazymerge.cli.merge import merge
from lazymerge.cli.options import examples, print_json
from lazymerge.cli.verify import verify

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),  # --max_ram is --max-ram
}


def main() -> None:
    """Run the command that sys.argv gives, and end the process."""
    _fill_closed_streams()
    if hasattr(sys.stdout, "reconfigure"):  # a name that the terminal's encoding lacks is no reason to fail
        sys.stdout.reconfigure(errors="backslashreplace")
    cli(prog_name="lazymerge")


def _fill_closed_streams() -> None:
    """Open what a daemon has closed: a file of weights would be descriptor 2, which any library writes to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


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


cli.add_command(merge)
cli.add_command(upload)
cli.add_command(verify)
test = copy.copy(verify)
test.short_help = "verl's name of verify."
cli.add_command(test, "test")
