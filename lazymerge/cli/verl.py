"""The command line of verl's merger, which lazymerge's commands take as well.

    python -m verl.model_merger merge --backend fsdp --local_dir STEP/actor --target_dir OUT
    python -m verl.model_merger test --backend fsdp --local_dir STEP/actor --test_hf_dir MODEL

docs/from-verl.md says what differs and why.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from lazymerge.cli.options import FOLDER
from lazymerge.errors import SourceError

Command = TypeVar("Command", bound=Callable[..., Any])

TARGET = Path("tmp")
"""Where verl's merger writes if it is not told."""

_ALWAYS = {
    "use_cpu_initialization": "--use_cpu_initialization: no model is ever built here",
    "low_cpu_mem_usage": "--low_cpu_mem_usage: memory is always bounded here, by --max-ram",
}


def source_options(command: Command) -> Command:
    """Options of verl's two commands that say what is read."""
    for option in (
        click.option(
            "--low-cpu-mem-usage",
            is_flag=True,
            expose_value=False,
            callback=_always,
            help="verl's; always so here.",
        ),
        click.option(
            "--use-cpu-initialization",
            is_flag=True,
            expose_value=False,
            callback=_always,
            help="verl's; always so here.",
        ),
        click.option(
            "--hf-model-path", metavar="DIR|ORG/NAME", type=FOLDER, help="verl's name of --hf-config."
        ),
        click.option("--local-dir", metavar="DIR", type=FOLDER, help="verl's name of SRC."),
        click.option(
            "--backend",
            metavar="[fsdp|megatron|huggingface]",
            help="Take only a checkpoint of this format.  [default: what is there]",
        ),
    ):
        command = option(command)
    return command


def _always(context: click.Context, option: click.Parameter, value: bool) -> None:
    if value and option.name is not None:
        click.echo(f"note: {_ALWAYS[option.name]}", err=True)


def sources(paths: tuple[Path, ...], local_dir: Path | None) -> tuple[Path, ...]:
    """The sources, given as arguments or as --local_dir."""
    if local_dir is not None and paths:
        raise click.UsageError("--local-dir is SRC: give one of them")
    return paths if local_dir is None else (local_dir,)


def places(
    paths: tuple[Path, ...], local_dir: Path | None, target_dir: Path | None
) -> tuple[tuple[Path, ...], Path]:
    """Sources and destination, given as arguments or in verl's way."""
    if local_dir is not None:
        return sources(paths, local_dir), target_dir or TARGET
    if target_dir is not None:
        if not paths:
            raise click.MissingParameter(param_type="argument", param_hint="'SRC...'")
        return paths, target_dir
    if len(paths) < 2:
        missing = "'DST'" if paths else "'SRC...'"
        raise click.MissingParameter(param_type="argument", param_hint=missing)
    return paths[:-1], paths[-1]


def config_folder(hf_config: Path | None, hf_model_path: Path | None) -> Path | None:
    """The folder of config and tokenizer, under either name."""
    if hf_config is not None and hf_model_path is not None and hf_config != hf_model_path:
        raise click.UsageError("--hf-model-path is --hf-config: give one of them")
    return hf_config or (hf_model_path and _downloaded(hf_model_path))


def _downloaded(path: Path) -> Path:
    """The folder, or where the hub's local cache has the model of that name; nothing is downloaded."""
    if path.exists():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path.as_posix(), "config.json")
    except HFValidationError:  # no name of a model, so that it is a folder that is meant
        return path
    if isinstance(found, str):
        return Path(found).parent
    raise SourceError(
        f"--hf-model-path {path}: no such folder, and no model in the local cache of the hub",
        f"nothing is downloaded here: hf download {path} --exclude '*.safetensors'",
    )


def is_idle_rank() -> bool:
    """Whether torchrun has started this process beside another one that does the work; says so if it has.

    verl merges Megatron checkpoints under torchrun, on as many ranks as there are stages; here one is enough.
    """
    rank = os.environ.get("RANK", "0")
    if "TORCHELASTIC_RUN_ID" not in os.environ or rank == "0":
        return False
    click.echo(f"note: rank {rank} has nothing to do: rank 0 does all of it", err=True)
    return True
