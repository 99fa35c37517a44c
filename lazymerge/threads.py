"""Several threads that share the work of one iterator; the first error of any of them ends all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Unit = TypeVar("Unit")


class Shared(Generic[Unit]):
    """An iterator that threads take from in turns, until one of them fails: `error` is the first that did."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.error: BaseException | None = None
        self._units = iter(units)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Unit]:
        return self

    def __next__(self) -> Unit:
        with self._lock:
            if self.error is not None:
                raise StopIteration
            return next(self._units)

    def fail(self, error: BaseException) -> None:
        """Give out no more."""
        with self._lock:
            self.error = self.error or error


def share(units: Iterable[Unit], work: Callable[[Iterator[Unit]], None], workers: int) -> None:
    """Call `work` in as many threads, this one among them, with the one iterator that gives each unit once.

    Returns when all have ended; the first error of any of them, of `units`, or an interrupt, is raised then.
    """
    shared = Shared(units)

    def run() -> None:
        try:
            work(shared)
        except BaseException as error:
            shared.fail(error)

    started: list[threading.Thread] = []
    try:
        for thread in [threading.Thread(target=run) for _ in range(workers - 1)]:
            try:
                thread.start()
            except RuntimeError:  # no more threads under the limits on this process: fewer do
                break
            started.append(thread)
        work(shared)
    except BaseException as error:  # an interrupt reaches this thread only
        shared.fail(error)
    for thread in started:
        while thread.is_alive():  # whatever comes: what they write to is closed after this
            try:
                thread.join()
            except BaseException as error:
                shared.fail(error)
    if shared.error is not None:
        raise shared.error
