"""A verified result to the hub, whole: what its manifest lists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lazymerge.hub.access import check_access
from lazymerge.hub.connection import Target
from lazymerge.hub.upload import upload, verified_sizes
from lazymerge.report import OnProgress


def accessible(
    repo_id: str,
    private: bool = False,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
) -> Target:
    """The target of an upload that the hub will take, as it was asked; raises as `check_access`."""
    target = Target(repo_id, private, token, revision, create_pr)
    if commit_message is not None:
        target = replace(target, commit_message=commit_message)
    return check_access(target)


def send(folder: Path, target: Target, on_progress: OnProgress | None = None) -> str:
    """Upload the files that the folder's manifest lists; the URL of what was made. Raises as `upload`."""
    return upload(folder, list(verified_sizes(folder)), target, on_progress)
