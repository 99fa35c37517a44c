"""Whether an upload will be let in: asked before a merge, which takes longer than the answer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lazymerge.errors import OutputError, PlanError
from lazymerge.hub.connection import Hub, Target, connect
from lazymerge.output import WEIGHTS

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_ADAPTER = re.compile(r"(.*/)?adapter_(config\.json|model[\w.-]*\.(safetensors|bin)(\.index\.json)?)")


def check_access(
    target: Target,
    names: Collection[str] | None = None,
    *,
    waits: Sequence[float] = (1.0, 2.0),
    timeout: float = 30.0,
) -> Target:
    """Ask the hub whether the upload can be done; nothing is made or changed there.

    names    what the uploaded files are called, if that is known
    waits    seconds before the second, third, ... try of a request that failed in passing
    timeout  seconds without a byte after which a request has failed

    Returns the target with the full name of the repository. Raises `PlanError` for a request that cannot
    be met, `OutputError` where the hub cannot be reached or will not take the files.
    """
    with connect(target, waits, timeout) as hub:
        user = _user(hub)
        if "/" not in target.repo_id:
            hub.target = replace(target, repo_id=f"{user.name}/{target.repo_id}")
        _check_rights(hub, user)
        if names is not None:  # a branch that has to be made holds what main does
            refuse_strays(hub, hub.info(hub.target.revision or "main") or hub.info(), names)
        return hub.target


def prepare(hub: Hub) -> None:
    """Make the repository and the branch, if they are not there."""
    if hub.info() is None:
        private = hub.target.private or None  # None: as the organisation has it
        hub.ask("creating it", hub.api.create_repo, hub.repo_id, private=private, exist_ok=True)
    revision = hub.target.revision
    if revision is not None and hub.info(revision) is None:
        _refuse_request(hub.target)
        hub.ask("creating the branch", hub.api.create_branch, hub.repo_id, branch=revision, exist_ok=True)


def refuse_strays(hub: Hub, info: ModelInfo | None, names: Collection[str]) -> None:
    """Raise `OutputError` if weights are there that a loader may take and no file of `names` replaces."""
    loaded = (name for name in held_files(info) if WEIGHTS.fullmatch(name) or _ADAPTER.fullmatch(name))
    strays = sorted(name for name in loaded if name not in names)
    if strays:
        raise OutputError(
            f"{hub.repo_id}: holds weights of another model, which may be loaded: {', '.join(strays[:5])}",
            "delete them there, or give another repository or --revision BRANCH",
        )


def held_files(info: ModelInfo | None) -> dict[str, Any]:
    """Name -> what is told of each file that is there."""
    siblings = info.siblings if info is not None else None
    return {sibling.rfilename: sibling for sibling in siblings or ()}


@dataclass(frozen=True, slots=True)
class _User:
    """Whose token it is, what the token may do ("read", "write", "fineGrained"), roles in organisations."""

    name: str
    role: str | None
    organisations: Mapping[str, str | None]


def _user(hub: Hub) -> _User:
    answer = hub.ask("asking whose token it is", hub.api.whoami)
    try:
        token = (answer.get("auth") or {}).get("accessToken") or {}
        organisations = {str(org["name"]): org.get("roleInOrg") for org in answer.get("orgs") or ()}
        return _User(str(answer["name"]), token.get("role"), organisations)
    except (AttributeError, KeyError, TypeError):
        raise OutputError(
            f"{hub.api.endpoint}: does not say whose token it is, as a hub does", "check HF_ENDPOINT"
        ) from None


def _check_rights(hub: Hub, user: _User) -> None:
    """Raise if the user may not make the repository, or not write to it as the target says."""
    if user.role == "read":
        raise OutputError(
            f"{hub.repo_id}: the token of {user.name} may only read", "give a token that may write"
        )
    info = hub.info()
    if user.role != "fineGrained" and (info is None or not hub.target.create_pr):
        _check_owner(hub.repo_id, user)  # what a fine-grained token may do is not told
    if info is None:
        if hub.target.revision != "main":
            _refuse_request(hub.target)
        return
    if not hub.target.create_pr and "write" in inspect.signature(hub.api.auth_check).parameters:
        # Newer than 1.0. With an older library, or a server that does not know it, the upload will tell.
        hub.ask("writing to it", hub.api.auth_check, hub.repo_id, write=True, optional=True)
    _check_branch(hub)


def _check_owner(repo_id: str, user: _User) -> None:
    """Raise if the repository is, or would be, neither the user's own nor of an organisation that lets in."""
    allowed = [user.name, *(name for name, role in user.organisations.items() if role != "read")]
    if repo_id.partition("/")[0].lower() not in {name.lower() for name in allowed}:
        raise OutputError(
            f"{repo_id}: the token may only write to repositories of {', '.join(allowed)}",
            "check the name, give a token that may write there, or --create-pr to propose the files",
        )


def _check_branch(hub: Hub) -> None:
    revision = hub.target.revision
    if revision is None or revision.startswith("refs/pr/"):
        return
    if hub.info(revision) is None:
        _refuse_request(hub.target)
        return
    refs = hub.ask("looking at its branches", hub.api.list_repo_refs, hub.repo_id, optional=True)
    if refs is not None and revision not in {ref.name for ref in refs.branches}:
        raise PlanError(
            f"{hub.repo_id}: --revision {revision} is a tag or a commit", "give the name of a branch"
        )


def _refuse_request(target: Target) -> None:
    """Raise if a branch that is not there is to get a pull request; any other is made."""
    if target.create_pr and target.revision is not None:
        raise PlanError(
            f"{target.repo_id}: has no branch {target.revision}, and --create-pr needs one",
            "leave --revision out, or give a branch that is there",
        )
