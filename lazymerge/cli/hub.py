"""``lazymerge upload``, and the options about the hub that ``merge`` has too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lazymerge.cli.failures import failures_told
from lazymerge.cli.options import FOLDER, Command, Grouped, examples, print_json, talk_options
from lazymerge.display import logged, printable, progress_shown


def hub_options(command: Command) -> Command:
    """How an upload is done."""
    for option in (
        click.option("--commit-message", metavar="TEXT", help="Of the upload's commit."),
        click.option("--create-pr", is_flag=True, help="Upload as a pull request."),
        click.option("--revision", metavar="BRANCH", help="Upload to this branch.  [default: main]"),
        click.option("--token", metavar="TOKEN", help="[default: HF_TOKEN, or who is logged in]"),
        click.option("--private", is_flag=True, help="Make the repository private, if it has to be made."),
    ):
        command = option(command)
    return command


@click.command(
    cls=Grouped,
    short_help="Upload a verified result to the Hugging Face Hub.",
    epilog=examples("upload model/ my-org/my-model --private"),
)
@click.argument("folder", type=FOLDER)
@click.argument("repository", metavar="ORG/NAME")
@hub_options
@talk_options
def upload(
    folder: Path, repository: str, as_json: bool, quiet: bool, log_level: str | None, **options: Any
) -> None:
    """Upload the result in FOLDER to the Hugging Face Hub, or what of it is not there yet.

    Only files that `merge --verify` has listed in its manifest are sent, weights first, and become visible
    at once.
    """
    level = log_level or ("error" if quiet else "warning")
    with failures_told(as_json, level == "debug"), logged(level, quiet):
        from lazymerge import api

        with progress_shown(quiet) as on_progress:
            url = api.upload(folder, repository, on_progress=on_progress, **options)
        if as_json:
            print_json({"url": url})
        elif not quiet:
            click.echo(f"Uploaded: {printable(url)}")
