"""Calls of the store in threads, each with a number for collecting its outcome, and a signal at its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Tasks(Generic[T]):
    """Tasks of one kind. However a task ends, its outcome is set and ``signal`` is called, exactly once.

    ``failed`` is the outcome of work that raised, or could not begin: after `close`, without a thread, or because the
    bytes of unfinished tasks would exceed ``max_bytes``, a single task aside. It never runs after its end: the engine
    gives its memory to others.
    """

    def __init__(self, name: str, threads: int, signal: Callable[[], None], max_bytes: int = 0) -> None:
        self._pool = ThreadPoolExecutor(threads, f"tanghulu-{name}")
        self._name, self._signal = name, signal
        self._lock, self._next = threading.Condition(), 0
        self._outcomes: dict[int, T] = {}
        self._waiting: dict[int, tuple[T, int]] = {}  # outcome if it never begins, and bytes
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
            if not sheds:
                self._waiting[number] = failed, num_bytes
        if sheds:
            self._end(number, failed)
            return number
        try:
            self._pool.submit(self._run, number, work)
        except RuntimeError as error:  # closed, or no further thread: then the pool keeps the work for another one
            _log.warning("tanghulu: a %s task could not begin and counts as failed: %s", self._name, error)
            self._give_up(number)
        return number

    def drain(self) -> None:
        """Fail tasks that have not begun, and return when the others have ended, at their deadlines at the latest."""
        self._give_up()
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
        if not wait:
            self._give_up()
        self._pool.shutdown(wait=wait)

    def _run(self, number: int, work: Callable[[], T]) -> None:
        with self._lock:
            if number not in self._waiting:
                return
            outcome, num_bytes = self._waiting.pop(number)
        try:
            outcome = work()
        except BaseException:  # noqa: BLE001 - logged; whatever it is, the engine waits for the task's end
            _log.exception("tanghulu: a %s task raised an error and counts as failed", self._name)
        self._end(number, outcome, num_bytes)

    def _give_up(self, number: int | None = None) -> None:
        """Fail a task that has not begun, or all of them; they never do."""
        with self._lock:
            numbers = list(self._waiting) if number is None else [number]
            given_up = [(each, *self._waiting.pop(each)) for each in numbers if each in self._waiting]
        for each in given_up:
            self._end(*each)

    def _end(self, number: int, outcome: T, num_bytes: int = 0) -> None:
        with self._lock:
            self._outcomes[number] = outcome
            self._num_open -= 1
            self._open_bytes -= num_bytes
            self._lock.notify_all()
        self._signal()

    def check(self) -> None:
        assert self._num_open >= 0
        assert self._open_bytes >= 0
        assert all(0 < number <= self._next for number in self._outcomes)
        assert len(self._waiting) <= self._num_open
