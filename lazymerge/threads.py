"""Several threads that share the work of one iterator; the first error of any of them ends all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Unit = TypeVar("Unit")


class Shared(Generic[Unit]):
    """An iterator that threads take from in turns, until it is stopped."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = iter(units)
        self._lock = threading.Lock()
        self._stopped = False

    def __iter__(self) -> Iterator[Unit]:
        return self

    def __next__(self) -> Unit:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._units)

    def stop(self) -> None:
        """Give out no more."""
        self._stopped = True


def share(units: Iterable[Unit], work: Callable[[Iterator[Unit]], None], workers: int) -> None:
    """Call `work` in as many threads, each with the one iterator that gives every unit to one of them.

    Returns when all have ended; an error of one of them, or an interrupt, is raised then.
    """
    shared = Shared(units)

    def run() -> None:
        try:
            work(shared)
        except BaseException:
            shared.stop()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            for future in [pool.submit(run) for _ in range(workers)]:
                future.result()
        except BaseException:  # an interrupt reaches this thread only
            shared.stop()
            raise
