"""``lazymerge merge``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from lazymerge.cli import verl
from lazymerge.cli.failures import failures_told
from lazymerge.cli.hub import hub_options
from lazymerge.cli.options import (
    FOLDER,
    NAME_OR_PATH,
    Grouped,
    examples,
    print_json,
    reading_options,
    talk_options,
)
from lazymerge.display import logged, progress_shown, report_lines

UNCHANGED = 4
"""The exit code of a merge whose adapters changed nothing."""


@click.command(
    cls=Grouped,
    short_help="Merge a checkpoint into a Hugging Face model.",
    epilog=examples(
        "merge checkpoints/global_step_100 model/",
        "merge checkpoints/global_step_100 model/ --dry-run",
        "merge checkpoints/global_step_100 model/ --dtype bfloat16 --max-ram 1GB",
        "merge checkpoints/global_step_100 value/ --component critic",
        "merge megatron/iter_0000100 model/ --hf-config Qwen3-30B-A3B/",
        "merge Qwen3-8B/ model/ --adapter my-lora/ --verify",
        "merge node0/actor node1/actor model/ --json | jq .peak",
    ),
)
@click.argument("paths", metavar="SRC... DST", nargs=-1, type=FOLDER)
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
    "--force-shape-match",
    is_flag=True,
    help="Crop or zero-pad what differs in size from config.json; each tensor is reported.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Compare names and shapes with the model that transformers builds from config.json.",
)
@click.option(
    "--backfill",
    metavar="DIR",
    type=FOLDER,
    help="A folder with the base model, for parts that the checkpoint lacks: a vision tower, MTP.",
)
@click.option(
    "--lora",
    type=click.Choice(["extract", "only", "fold"]),
    default="extract",
    show_default=True,
    help="LoRA in the checkpoint: put it in lora_adapter/ beside the base, write it alone, or fold it in.",
)
@click.option(
    "--lora-alpha", metavar="N", type=float, help="Alpha that LoRA was trained with; there is no default."
)
@click.option(
    "--lora-config",
    metavar="FILE|DIR",
    type=FOLDER,
    help="adapter_config.json of the training.  [default: verl's lora_train_meta.json]",
)
@click.option(
    "--adapter",
    metavar="DIR[=WEIGHT]",
    type=NAME_OR_PATH,
    multiple=True,
    help="Fold this PEFT adapter into the model, times a weight. Repeatable.",
)
@click.option(
    "--names",
    type=click.Choice(["hub", "runtime"]),
    default="hub",
    show_default=True,
    help="Names and layouts: as save_pretrained writes them, or as transformers 5 has them in memory.",
)
@click.option(
    "--stage",
    type=click.Choice(["merge", "convert"]),
    multiple=True,
    default=("merge", "convert"),
    help="merge alone writes the tensors under the trainer's own names, for convert to go on from."
    "  [default: both, in one pass]",
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
    default=None,
    help="Replace the model in DST, once the new one is complete.  [default: no; yes with --target-dir]",
)
@click.option(
    "--verify/--no-verify",
    default=False,
    show_default=True,
    help="Reread the result, compare every byte with the source, and leave a manifest for `verify`.",
)
@hub_options
@click.option("--dry-run", is_flag=True, help="Show what would be written and what it takes; write nothing.")
@click.option(
    "--push-to-hub",
    "--hf-upload-path",
    "push_to_hub",
    metavar="ORG/NAME",
    help="Upload the result, after --verify; whether that can be done is asked before the merge.",
)
@click.option("--target-dir", metavar="DIR", type=FOLDER, help="verl's name of DST.")
@reading_options
@verl.source_options
@talk_options
def merge(
    paths: tuple[Path, ...],
    local_dir: Path | None,
    target_dir: Path | None,
    hf_config: Path | None,
    hf_model_path: Path | None,
    overwrite: bool | None,
    as_json: bool,
    quiet: bool,
    log_level: str | None,
    **options: Any,
) -> None:
    """Merge the checkpoint at SRC into a Hugging Face model in the folder DST.

    SRC is a run, a step of it, or the folder of the rank files; several are taken together, as ranks
    that stayed on their nodes. A merge that was interrupted goes on when it is given again.
    """
    src, dst = verl.places(paths, local_dir, target_dir)
    options["overwrite"] = local_dir is not None or target_dir is not None if overwrite is None else overwrite
    if verl.is_idle_rank():
        return
    level = log_level or ("error" if quiet else "warning")
    with failures_told(as_json, level == "debug"), logged(level, quiet):
        from lazymerge import api

        options["hf_config"] = verl.config_folder(hf_config, hf_model_path)
        with progress_shown(quiet) as on_progress:
            report = api.merge(src, dst, on_progress=on_progress, **options)
        if as_json:
            print_json(report.to_json())
        elif not quiet:
            for line in report_lines(report, everything=level == "debug"):
                click.echo(line)
    if report.unchanged:
        sys.exit(UNCHANGED)
