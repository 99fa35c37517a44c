"""A verified result to the hub, whole: what its manifest lists."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from lazymerge.errors import PlanError
from lazymerge.hub.access import check_access
from lazymerge.hub.connection import Target
from lazymerge.hub.upload import upload, verified_sizes
from lazymerge.report import OnProgress


def accessible(
    names: Collection[str],
    repo_id: str,
    private: bool = False,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
) -> Target:
    """The target of an upload of files of these names, which the hub will take; raises as `check_access`."""
    target = Target(repo_id, private, token, revision, create_pr)
    if commit_message is not None:
        target = replace(target, commit_message=commit_message)
    return check_access(target, names)


def refuse_idle(token: str | None, revision: str | None, create_pr: bool, commit_message: str | None) -> None:
    """Raise `PlanError` for options of an upload where none is asked for."""
    flags = {
        "--token": token is not None,
        "--revision": revision is not None,
        "--create-pr": create_pr,
        "--commit-message": commit_message is not None,
    }
    given = ", ".join(flag for flag, is_given in flags.items() if is_given)
    if given:
        raise PlanError(f"{given}: nothing is uploaded", "give --push-to-hub ORG/NAME, or leave it out")


def verified_names(folder: Path) -> list[str]:
    """The files that the folder's manifest lists; raises as `upload` where it was not verified."""
    return list(verified_sizes(folder))


def send(folder: Path, target: Target, on_progress: OnProgress | None = None) -> str:
    """Upload the files that the folder's manifest lists; the URL of what was made. Raises as `upload`."""
    return upload(folder, verified_names(folder), target, on_progress)
