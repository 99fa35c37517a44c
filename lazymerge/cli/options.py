"""What all commands share: the options about what they say, and the form of their help and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

FOLDER = click.Path(path_type=Path)


def examples(*commands: str) -> str:
    """What stands at the end of a command's help, line for line."""
    return "\n".join(["\b\nExamples:", *(f"  lazymerge {command}" for command in commands)])


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


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    click.echo(json.dumps(content, indent=2))
