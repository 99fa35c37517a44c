"""Talking to the hub about one repository: what fails in passing is tried again, what fails is explained.

`huggingface_hub` itself tries the sending of files again, and nothing else; it waits for an answer for ever.
Up to its version 1 it talks through httpx, then through httpx2; `huggingface_hub.errors` has the base of its
errors in either case; hf_xet, which sends large files where it is installed, has Python's own. The token is
in no message and in no `repr`, and no URL is shown with its query, which may be a signature.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lazymerge.errors import LazymergeError, OutputError, PlanError

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_TRANSIENT = {408, 429, 500, 502, 503, 504}

log = logging.getLogger("lazymerge")


@dataclass(frozen=True, slots=True)
class Target:
    """Where to upload to: "ORG/NAME", or "NAME" among the user's own.

    `token` is, if None, what HF_TOKEN or `hf auth login` give. `revision` is a branch, made from main if it
    is not there. `create_pr` proposes the files in a pull request. `private` is for a repository that has
    to be made; one that is public is refused then.
    """

    repo_id: str
    private: bool = False
    token: str | None = field(default=None, repr=False)
    revision: str | None = None
    create_pr: bool = False
    commit_message: str = "Upload the model that lazymerge merged"


@contextmanager
def connect(target: Target, waits: Sequence[float], timeout: float) -> Iterator[Hub]:
    """The hub, for the length of the block; its library's own bars and warnings are kept from the screen.

    waits    seconds before the second, third, ... try of a request that failed in passing
    timeout  seconds without a byte after which a request has failed
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined] # they are loaded by name
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    logger = logging.getLogger("huggingface_hub")
    level, bars = logger.level, not are_progress_bars_disabled()
    logger.setLevel(max(level, logging.ERROR))
    if bars:
        disable_progress_bars()
    try:
        yield Hub(target, waits, timeout)
    finally:
        logger.setLevel(level)
        if bars:
            enable_progress_bars()


class Hub:
    """The hub's API about one target.

    Raises `PlanError` where the name cannot be one, or there is no token.
    """

    def __init__(self, target: Target, waits: Sequence[float], timeout: float) -> None:
        from huggingface_hub import HfApi

        _check_name(target)
        self.target = target
        self.waits = waits
        self.timeout = timeout
        self.token = _token(target)
        self.api = HfApi(token=self.token, library_name="lazymerge")

    @property
    def repo_id(self) -> str:
        return self.target.repo_id

    def info(self, revision: str | None = None) -> ModelInfo | None:
        """The repository with its files at a revision; None if it is not there."""
        found: ModelInfo | None = self.ask(
            "looking at it",
            self.api.model_info,
            self.repo_id,
            revision=revision,
            files_metadata=True,
            timeout=self.timeout,  # it has a default of its own, which is none
            optional=True,
        )
        if found is not None and self.target.private and found.private is False:
            raise PlanError(
                f"{self.repo_id}: is public, and --private was given",
                "make it private in its settings, or give another repository",
            )
        return found

    def ask(
        self, doing: str, call: Callable[..., Any], *args: Any, optional: bool = False, **kwargs: Any
    ) -> Any:
        """What `call` returns, tried again while it fails in passing; None for a 404 if that is `optional`.

        Raises `OutputError`, saying what could not be done.
        """
        waits = iter(self.waits)
        while True:
            try:
                return self.once(call, *args, **kwargs)
            except Exception as error:  # what httpx and hf_xet raise differs from version to version
                if optional and status_of(error) == 404:
                    return None
                wait = next(waits, None) if is_transient(error) else None
                if wait is None:
                    raise self.explained(doing, error) from None
                log.debug("%s: %s failed, again in %s s", self.repo_id, doing, wait)
                time.sleep(wait)

    def once(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `call` returns; a connection that is silent for too long counts as lost."""
        from huggingface_hub import get_session

        session = get_session()  # which others in this process use too
        before = session.timeout
        if before.read is None:
            session.timeout = self.timeout
        try:
            return call(*args, **kwargs)
        finally:
            session.timeout = before

    def explained(self, doing: str, error: Exception) -> LazymergeError:
        """What the user is told of a failure."""
        from huggingface_hub.errors import OfflineModeIsEnabled

        status, said = status_of(error), self._said(error)
        if isinstance(error, OfflineModeIsEnabled):
            return OutputError(
                f"{self.repo_id}: cannot be uploaded to, since HF_HUB_OFFLINE is set",
                "unset it, or do not upload",
            )
        if status is None and is_transient(error):
            return OutputError(
                f"{self.api.endpoint}: no answer while {doing} ({said})",
                "check the network and HF_ENDPOINT, then run the same command again",
            )
        if status == 401:
            return OutputError(
                f"{self.repo_id}: the hub refuses the token (401: {said})",
                "log in again with `hf auth login`, or give a valid token in HF_TOKEN or --token",
            )
        if status == 403:
            return OutputError(
                f"{self.repo_id}: the token does not allow {doing} (403: {said})",
                "give a token that may do it, or --create-pr to propose the files",
            )
        return OutputError(
            f"{self.repo_id}: {doing} failed ({status}: {said})"
            if status
            else f"{self.repo_id}: {doing}: {said}",
            "check the name of the repository and HF_ENDPOINT"
            if status == 404
            else "run the same command again; what has been sent is kept",
        )

    def _said(self, error: Exception) -> str:
        """What the server or the system said, in short."""
        cause = _cause(error)
        said = f"{type(cause).__name__}: {cause}"
        if status_of(error):
            said = getattr(cause, "server_message", None) or "no reason given"
        return one_line(re.sub(r"\?\S+", "", str(said)).replace(self.token, "***"))


def _check_name(target: Target) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # loaded by name

    try:
        validate_repo_id(target.repo_id)
    except HFValidationError as error:
        raise PlanError(
            f"{target.repo_id!r} cannot be the name of a repository: {one_line(error)}", "give ORG/NAME"
        ) from None
    if target.revision is not None and not _is_branch(target.revision):
        raise PlanError(
            f"--revision {target.revision!r:.100} cannot be the name of a branch",
            "give one, such as step-100",
        )
    if not target.commit_message.strip():
        raise PlanError("the commit message is empty", "leave --commit-message out, or give it a text")


def _is_branch(name: str) -> bool:
    """Whether git lets a branch be called so (git check-ref-format)."""
    words = name.split("/")
    forbidden = re.search(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{", name) or name in {"@", "HEAD"}
    good = all(
        word and not word.startswith((".", "-")) and not word.endswith((".", ".lock")) for word in words
    )
    return good and not forbidden and name.isprintable()


def _token(target: Target) -> str:
    from huggingface_hub import get_token

    token = target.token or get_token()
    if not token:
        raise PlanError(
            f"there is no token to upload to {target.repo_id} with",
            "log in with `hf auth login`, set HF_TOKEN, or give --token",
        )
    if not (token.isascii() and token.isprintable()) or " " in token:  # an error of httpx would show it
        raise PlanError("the token holds a character that no token has", "copy it again, without spaces")
    return token


def one_line(text: object) -> str:
    """The text in one line that is not long."""
    line = " ".join(str(text).split())
    return line if len(line) <= 200 else f"{line[:200]}..."


def status_of(error: Exception) -> int | None:
    """The HTTP status that the hub answered with; None if it did not answer."""
    status = getattr(getattr(_cause(error), "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def is_transient(error: Exception) -> bool:
    """Whether the same request may well succeed a moment later."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined] # HTTPError is of httpx or httpx2
        HTTPError,
        OfflineModeIsEnabled,
    )

    status, cause = status_of(error), _cause(error)
    if status is not None:
        return status in _TRANSIENT
    lost = isinstance(cause, HTTPError | ConnectionError | TimeoutError)
    return lost and not isinstance(cause, OfflineModeIsEnabled)


def _cause(error: Exception) -> Exception:
    """What happened in a thread of the library, which wraps it."""
    inner = error.__cause__
    return inner if isinstance(error, RuntimeError) and isinstance(inner, Exception) else error
