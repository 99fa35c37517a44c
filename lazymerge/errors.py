"""Every error that a user can meet: what is wrong, and what to do.

    LazymergeError
    |-- SourceError          the checkpoint
    |   |-- NotACheckpoint       nothing here that a format recognises
    |   |-- DamagedFile          a file that is not what its own header says
    |   |-- IncompleteCheckpoint ranks, shards or elements that are not there
    |   |-- AmbiguousCheckpoint  more than one answer; the user has to say which
    |   |-- InconsistentCheckpoint parts that contradict each other
    |   `-- UnsupportedCheckpoint  understood, and not mergeable (yet)
    |-- PlanError            the request: flags, patterns, dtypes
    |-- OutputError          the destination
    |-- BudgetError          memory
    `-- VerificationError    the result is not what it has to be (exit code 3)

The first line of ``str(error)`` names the file or tensor with what was found and
what was expected; the second, where there is one, is what to do about it.
"""

from __future__ import annotations


class LazymergeError(Exception):
    """Base of all errors: `problem` and `hint` are one line each, `exit_code` is the CLI's."""

    exit_code = 2

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem, hint)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.problem}\n{self.hint}" if self.hint else self.problem


class SourceError(LazymergeError):
    """The checkpoint cannot be merged as it is."""


class NotACheckpoint(SourceError):
    """No format recognises the path."""


class DamagedFile(SourceError):
    """A file is not what its own header says: truncated, overwritten or hostile."""


class IncompleteCheckpoint(SourceError):
    """Ranks, shards or elements are missing."""


class AmbiguousCheckpoint(SourceError):
    """The input has more than one reading and the user has to choose."""


class InconsistentCheckpoint(SourceError):
    """Parts of the checkpoint contradict each other."""


class UnsupportedCheckpoint(SourceError):
    """The input is understood, and cannot be merged."""


class PlanError(LazymergeError):
    """The request cannot be met: flags, patterns, dtypes, names."""


class OutputError(LazymergeError):
    """The destination cannot take the result."""


class BudgetError(LazymergeError):
    """The memory budget is below what the work needs, which is `least` bytes where that is known."""

    def __init__(self, problem: str, hint: str, least: int = 0) -> None:
        super().__init__(problem, hint)
        self.least = least


class VerificationError(LazymergeError):
    """The result is not what it has to be."""

    exit_code = 3
