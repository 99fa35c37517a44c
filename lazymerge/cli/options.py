"""What all commands share: the options about what they say, and the form of their help and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


class PathType(click.Path):
    """A path. An empty one, which an unset variable of the shell leaves, would be the current folder."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """The path; a usage error if it is empty."""
        if not os.fspath(value):
            self.fail("the path is empty (a variable that is not set?)", param, ctx)
        return super().convert(value, param, ctx)


FOLDER = PathType(path_type=Path)
NAME_OR_PATH = PathType(path_type=str)
"""What may be a path, and is told apart later."""


_HEADINGS = {
    "Source": (
        *("local_dir", "backend", "component", "fsdp_version", "world_size"),
        *("hf_config", "hf_model_path", "trust_remote_code"),
    ),
    "Result": (
        *("target_dir", "dtype", "include", "exclude", "max_shard_size", "output_format", "names", "stage"),
        *("overwrite", "dry_run"),
    ),
    "Comparison": ("against", "atol", "rtol", "exact", "accept_rounding", "max_mismatches", "forward"),
    "Checks": ("check", "check_copies", "strict", "verify"),
    "LoRA": ("lora", "lora_alpha", "lora_config", "adapter", "base_only"),
    "Megatron": (
        *("family", "param_mapping", "tie_word_embedding", "is_value_model", "force_shape_match", "backfill"),
    ),
    "Hub": ("push_to_hub", "commit_message", "create_pr", "revision", "token", "private"),
    "Resources": ("max_ram", "max_workers", "use_cpu_initialization", "low_cpu_mem_usage"),
    "Output": ("as_json", "quiet", "log_level"),
}
"""Under which heading of a command's help its options are listed."""


class Grouped(click.Command):
    """A command whose help lists its options under headings; the last has what is under no other."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help."""
        given = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        options = {option.name: option.get_help_record(ctx) for option in given}
        rest = [name for name in options if not any(name in names for names in _HEADINGS.values())]
        for heading, names in {**_HEADINGS, "Options": rest}.items():
            rows = [row for name in names if (row := options.get(name)) is not None]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows, col_max=30)


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


def reading_options(command: Command) -> Command:
    """The options of every command that opens checkpoints: what is read, and with how much memory."""
    for option in (
        click.option(
            "--max-workers",
            metavar="N",
            type=click.IntRange(min=1),
            help="Threads, 64 at most.  [default: 4, or the cores]",
        ),
        click.option(
            "--max-ram",
            metavar="SIZE",
            help="Resident memory at most, as 16GB (10^9), 512MiB (2^20) or bytes; the result is the same."
            "  [default: 2GB, or half of what is free if that is less]",
        ),
        click.option(
            "--trust-remote-code",
            is_flag=True,
            help="Run the model code that config.json names, to know its names and shapes.",
        ),
        click.option(
            "--is-value-model", is_flag=True, help="The output layer is a value head: score.weight."
        ),
        click.option(
            "--tie-word-embedding",
            is_flag=True,
            help="The output layer is the embedding, whatever config.json and the files say.",
        ),
        click.option(
            "--param-mapping",
            metavar="OLD:NEW|FILE",
            type=NAME_OR_PATH,
            multiple=True,
            help="Where a tensor goes that no table knows; {} in OLD is any one part of a name, an"
            " empty NEW leaves it out. FILE has one a line. Repeatable.",
        ),
        click.option(
            "--family",
            metavar="NAME|FILE",
            type=NAME_OR_PATH,
            help="The table of names; FILE is Python with an object FAMILY.  [default: by config.json]",
        ),
        click.option(
            "--hf-config",
            metavar="DIR",
            type=FOLDER,
            help="Config and tokenizer, before those beside the weights.",
        ),
        click.option(
            "--world-size",
            metavar="N",
            type=click.IntRange(min=1),
            help="How many ranks there were, where a folder holds files of several runs.",
        ),
        click.option(
            "--fsdp-version",
            type=click.Choice(["1", "2"]),
            callback=lambda context, option, value: value and int(value),
            help="What wrote the ranks, where they do not say it.",
        ),
        click.option(
            "--component",
            metavar="[actor|critic|NAME]",
            default="actor",
            show_default=True,
            help="Which model of a run, where a run or one of its steps is given.",
        ),
    ):
        command = option(command)
    return command


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    click.echo(json.dumps(content, indent=2))
