"""How a command ends that does not end well: two lines on stderr, an exit code, and no traceback."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import click

from lazymerge import __version__
from lazymerge.cli.options import print_json
from lazymerge.display import printable
from lazymerge.errors import LazymergeError


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a scheduler sends it before it kills."""


@contextmanager
def failures_told(as_json: bool, debug: bool) -> Iterator[None]:
    """End the process with two lines and an exit code if the block fails; a traceback only if `debug`."""
    try:
        with _sigterm_raises():
            yield
    except LazymergeError as error:
        _fail(error, error.problem, error.hint, error.exit_code, as_json)
    except KeyboardInterrupt as stop:
        _stop(stop, as_json)
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise  # click's own
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):  # torch's
            _fail_as_bug(error, debug, as_json)
        limit = MemoryError("there is not enough memory: this process may not take as much")
        _fail(
            limit,
            str(limit),
            "merge where there is more, raise the limit (ulimit, cgroup), or give a smaller --max-ram",
            2,
            as_json,
        )
    except OSError as error:
        if debug:
            traceback.print_exc()
        where = error.filename2 or error.filename or "the system"
        hint = "check the path, its permissions and the disk; the same command again goes on from there"
        _fail(error, f"{where}: {error.strerror or error}", hint, 2, as_json)
    except Exception as error:
        _fail_as_bug(error, debug, as_json)


def _fail_as_bug(error: Exception, debug: bool, as_json: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    more = "" if debug else "; --log-level debug shows where"
    hint = f"this is a bug of lazymerge {__version__}: please report it with this line and the command{more}"
    _fail(error, f"internal error: {reason}", hint, 1, as_json)


def _fail(error: Exception, problem: str, hint: str, exit_code: int, as_json: bool) -> NoReturn:
    if as_json:
        _print_json(error, problem, hint)
    label = "" if problem.startswith("internal error: ") else click.style("error: ", fg="red", bold=True)
    click.echo(label + printable(problem), err=True)
    if hint:
        click.echo(f"hint: {printable(hint)}", err=True)
    sys.exit(exit_code)


def _print_json(error: BaseException, problem: str, hint: str) -> None:
    with suppress(OSError):  # which may be what is wrong; stderr says it too
        print_json({"error": problem, "hint": hint, "kind": type(error).__name__})


def _stop(stop: KeyboardInterrupt, as_json: bool) -> NoReturn:
    hint = "the same command again goes on where this one stopped"
    if as_json:
        _print_json(stop, "interrupted", hint)
    click.echo(f"interrupted: {hint}", err=True)
    sys.exit(143 if isinstance(stop, Terminated) else 130)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise `Terminated` in the block, so that it is left as Ctrl-C leaves it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
