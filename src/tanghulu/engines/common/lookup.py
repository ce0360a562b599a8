"""When the store is asked, and when it is left alone.

An engine's scheduler asks again at every attempt to place a waiting request, and must never wait for a store that is
away: answers are kept for a moment, and failures in a row open a breaker that rests, twice as long each time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from tanghulu.errors import ChunkNotFound, InvalidRequest, StoreFull, TanghuluError
from tanghulu.runtime.clock import Clock

_log = logging.getLogger(__name__)

#: How long an answer stands in for asking again: chunks come and go meanwhile, and a load finds that out.
ANSWER_S = 1.0
FIRST_REST_S = 1.0
MAX_REST_S = 30.0


class Breaker:
    """Closed: all may call. Open after ``max_failures`` in a row: nobody for a while, then one that tries.

    Example with 3 failures at 0 s, and a store that comes back at 5 s: rests until 1 s, fails, until 3 s, fails, until
    7 s, succeeds; at 7 s all may call again.
    """

    def __init__(self, max_failures: int) -> None:
        assert max_failures > 0
        self._max_failures = max_failures
        self._num_failures = 0
        self._rest_s = FIRST_REST_S
        self._until_s = 0.0
        self._trying = False

    @property
    def is_open(self) -> bool:
        return self._num_failures >= self._max_failures

    def allows(self, now_s: float) -> bool:
        """Whether to call now; what comes of it must be told by ``succeeded`` or ``failed``."""
        if not self.is_open:
            return True
        if now_s < self._until_s or self._trying:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        """A call was answered."""
        self._num_failures, self._rest_s, self._trying = 0, FIRST_REST_S, False

    def failed(self, now_s: float) -> None:
        """A call was not answered in time, or not at all. Calls that began before the breaker opened change nothing."""
        if self.is_open and not self._trying:
            return
        self._trying = False
        self._num_failures += 1
        if self.is_open:
            self._until_s = now_s + self._rest_s
            self._rest_s = min(2 * self._rest_s, MAX_REST_S)

    def check(self) -> None:
        assert FIRST_REST_S <= self._rest_s <= MAX_REST_S
        assert self.is_open or not self._trying


class SharedBreaker:
    """A breaker of several threads, by the clock: what errors say of the store is decided here."""

    def __init__(self, max_failures: int, clock: Clock) -> None:
        self._breaker, self._clock, self._lock = Breaker(max_failures), clock, threading.Lock()

    def allows(self) -> bool:
        """As ``Breaker.allows``: then the errors of the call must come to ``judge``."""
        with self._lock:
            return self._breaker.allows(self._clock.now_s())

    @property
    def is_open(self) -> bool:
        return self._breaker.is_open

    def failed(self) -> None:
        """The call broke off."""
        with self._lock:
            self._breaker.failed(self._clock.now_s())

    def judge(self, errors: Iterable[TanghuluError]) -> None:
        """A call ended with ``errors``: a chunk that is gone or too large, and a full store, are answers, too."""
        silent = [error for error in errors if not isinstance(error, ChunkNotFound | StoreFull | InvalidRequest)]
        with self._lock:
            was_open = self._breaker.is_open
            if silent:
                self._breaker.failed(self._clock.now_s())
            else:
                self._breaker.succeeded()
            opened = self._breaker.is_open and not was_open
        if opened:
            _log.warning("tanghulu: the store is left alone for a moment: %s", silent[0])


@dataclass(frozen=True, slots=True)
class _Answer:
    num_stored: int
    num_keys: int
    until_s: float


class Answers:
    """What the store said last of each waiting request: how many of its leading blocks are there."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, request_id: str, num_keys: int, now_s: float) -> int | None:
        """The answer to a question about ``num_keys`` blocks, if it is fresh."""
        answer = self._answers.get(request_id)
        fresh = answer is not None and answer.num_keys == num_keys and now_s < answer.until_s
        return answer.num_stored if answer is not None and fresh else None

    def put(self, request_id: str, num_keys: int, num_stored: int, now_s: float) -> None:
        """Keep an answer."""
        self._answers[request_id] = _Answer(num_stored, num_keys, now_s + ANSWER_S)

    def forget(self, request_id: str) -> None:
        """The request loads, computes or is gone."""
        self._answers.pop(request_id, None)
