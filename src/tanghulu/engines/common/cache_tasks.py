"""Calls of the store in threads, each with a number for collecting its outcome, and a signal at its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Tasks(Generic[T]):
    """Tasks of one kind. However a task ends, its outcome is set and ``signal`` is called, exactly once.

    ``failed`` is the outcome of work that raised, or could not begin: after `close`, or because the bytes of unfinished
    tasks would exceed ``max_bytes``, a single task aside.
    """

    def __init__(self, name: str, threads: int, signal: Callable[[], None], max_bytes: int = 0) -> None:
        self._pool = ThreadPoolExecutor(threads, f"tanghulu-{name}")
        self._name, self._signal = name, signal
        self._lock, self._next = threading.Condition(), 0
        self._outcomes: dict[int, T] = {}
        self._futures: dict[int, Future[T]] = {}
        self._num_open, self._open_bytes, self._max_bytes = 0, 0, max_bytes
        self.num_shed = 0

    @property
    def num_open(self) -> int:
        """Number of unfinished tasks."""
        return self._num_open

    def begin(self, work: Callable[[], T], failed: T, num_bytes: int = 0) -> int:
        """Run ``work``, which moves ``num_bytes``, in a thread; returns the number of the task."""
        with self._lock:
            self._next += 1
            number = self._next
            self._num_open += 1
            sheds = self._open_bytes > 0 and self._open_bytes + num_bytes > self._max_bytes
            self.num_shed += sheds
            num_bytes = 0 if sheds else num_bytes
            self._open_bytes += num_bytes
        if sheds:
            self._end(number, failed)
            return number
        try:
            future = self._pool.submit(work)
        except RuntimeError:  # closed
            self._end(number, failed, num_bytes)
            return number
        with self._lock:
            self._futures[number] = future
        future.add_done_callback(lambda done: self._done(number, done, failed, num_bytes))
        return number

    def drain(self) -> None:
        """Fail tasks that have not begun, and return when the others have ended, at their deadlines at the latest."""
        with self._lock:
            futures = list(self._futures.values())
        for future in futures:
            future.cancel()
        with self._lock:
            self._lock.wait_for(lambda: self._num_open == 0)

    def take(self, number: int) -> T | None:
        """Return the outcome of a task, once; None if it has not ended."""
        with self._lock:
            return self._outcomes.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """Return the outcomes of all ended tasks that were not taken yet."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, {}
            return outcomes

    def close(self, *, wait: bool = True) -> None:
        """Accept no more tasks; returns when all have ended, at their deadlines at the latest.

        Without ``wait`` it returns at once, and those that have not begun fail.
        """
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _done(self, number: int, work: Future[T], failed: T, num_bytes: int) -> None:
        if work.cancelled():
            self._end(number, failed, num_bytes)
            return
        error = work.exception()
        if error is not None:
            _log.error("tanghulu: a %s task raised an error and counts as failed", self._name, exc_info=error)
        self._end(number, failed if error is not None else work.result(), num_bytes)

    def _end(self, number: int, outcome: T, num_bytes: int = 0) -> None:
        with self._lock:
            self._outcomes[number] = outcome
            self._futures.pop(number, None)
            self._num_open -= 1
            self._open_bytes -= num_bytes
            self._lock.notify_all()
        self._signal()

    def check(self) -> None:
        assert self._num_open >= 0
        assert self._open_bytes >= 0
        assert all(0 < number <= self._next for number in self._outcomes)
        assert len(self._futures) <= self._num_open
