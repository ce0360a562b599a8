"""The store as the cache of an engine: every call ends within its deadline, and every failure is a miss.

Serves our workers, vLLM's connector and tier, LMCache and SGLang. Calls block, and threads may share a store. A store
that does not answer is not called for a while (`Breaker`), so that only the first call waits for it. Values whose size
differs from their buffers' are misses, too: ``KvClient`` removes them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from tanghulu.errors import (
    ChunkNotFound,
    DeadlineExceeded,
    DirectoryIncomplete,
    InvalidRequest,
    MasterUnavailable,
    StoreFull,
    TanghuluError,
)
from tanghulu.runtime.clock import Clock, SystemClock
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.client import Client

_log = logging.getLogger(__name__)

LOAD_DEADLINE_S: Final = 5.0
SAVE_DEADLINE_S: Final = 10.0
#: Consecutive failed lookups before the store is left alone; for transfers one is enough, it took a whole deadline.
MAX_FAILED_LOOKUPS: Final = 3
MAX_FAILED_TRANSFERS: Final = 1
FIRST_REST_S: Final = 1.0
MAX_REST_S: Final = 30.0
#: Transfers are cut into calls of this many keys, so that no answer is larger than a node sends at once.
KEYS_PER_CALL: Final = 256

#: Errors of one key that show the store to be answering.
_ANSWERS = (ChunkNotFound, StoreFull, InvalidRequest)
#: Errors of one key that every other key would meet, too, after the same wait.
_STORE_AWAY = (MasterUnavailable, DirectoryIncomplete, DeadlineExceeded)


class Breaker:
    """Closed: all may call. Open after ``max_failures`` in a row: no calls for a while, then a single trial.

    Example with 3 failures at 0 s, and a store that recovers at 5 s: rests until 1 s, fails, until 3 s, fails, until 7
    s, succeeds; at 7 s all may call again. Thread-safe.
    """

    def __init__(self, max_failures: int, clock: Clock) -> None:
        assert max_failures > 0
        self._max_failures, self._clock, self._lock = max_failures, clock, threading.Lock()
        self._num_failures = 0
        self._rest_s = FIRST_REST_S
        self._until_s = 0.0
        self._trying = False

    @property
    def is_open(self) -> bool:
        return self._num_failures >= self._max_failures

    @property
    def would_allow(self) -> bool:
        """Whether `allows` would return True now."""
        return not self.is_open or (self._clock.now_s() >= self._until_s and not self._trying)

    def allows(self) -> bool:
        """Return whether to call now; then `succeeded` or `failed` must follow."""
        with self._lock:
            allowed = self.would_allow
            self._trying = self._trying or (allowed and self.is_open)
            return allowed

    def succeeded(self) -> None:
        """Record that a call was answered."""
        with self._lock:
            self._num_failures, self._rest_s, self._trying = 0, FIRST_REST_S, False

    def failed(self) -> bool:
        """Record that a call was not answered, or not in time; return whether that has opened the breaker.

        Calls begun before the breaker opened change nothing.
        """
        with self._lock:
            was_open = self.is_open
            if was_open and not self._trying:
                return False
            self._trying = False
            self._num_failures += 1
            if self.is_open:
                self._until_s = self._clock.now_s() + self._rest_s
                self._rest_s = min(2 * self._rest_s, MAX_REST_S)
            return self.is_open and not was_open

    def check(self) -> None:
        assert FIRST_REST_S <= self._rest_s <= MAX_REST_S
        assert self.is_open or not self._trying


class BlockStore:
    """A client of the store that raises none of the store's errors; ``counts`` has the outcomes of calls, by name."""

    def __init__(
        self,
        client: Client,
        load_deadline_s: float = LOAD_DEADLINE_S,
        save_deadline_s: float = SAVE_DEADLINE_S,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._client, self._load_s, self._save_s = client, load_deadline_s, save_deadline_s
        self._lookups = Breaker(MAX_FAILED_LOOKUPS, self._clock)
        self._transfers = Breaker(MAX_FAILED_TRANSFERS, self._clock)
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    @property
    def is_healthy(self) -> bool:
        """Whether the store answered the last transfer."""
        return not self._transfers.is_open

    @property
    def is_available(self) -> bool:
        """Whether a transfer would be attempted now."""
        return self._transfers.would_allow

    def load_until_s(self) -> float:
        """Return ``until_s`` of a load ordered now, which may wait for its turn."""
        return self._clock.now_s() + self._load_s

    def has(self, keys: Sequence[str], deadline_s: float | None = None) -> list[bool]:
        """Return for each key whether it exists; all False if the store does not answer in time."""
        return [each is True for each in self.look_up(keys, deadline_s)]

    def look_up(self, keys: Sequence[str], deadline_s: float | None = None) -> Sequence[bool | TanghuluError]:
        """Return for each key whether it exists, or the error that leaves this unknown."""
        within_s = min(self._load_s, deadline_s or self._load_s)
        found = self._call(self._lookups, "lookups", keys, lambda: self._client.exists_many(keys, deadline_s=within_s))
        self._count(keys_found=sum(each is True for each in found), keys_missing=sum(each is False for each in found))
        return found

    def num_leading(self, keys: Sequence[str], deadline_s: float) -> int | None:
        """Return the number of leading keys that exist; None if the store does not answer in time."""
        if not keys:
            return 0
        match = self._client.match_prefix
        outcomes = self._call(self._lookups, "lookups", keys, lambda: [match(keys, deadline_s=deadline_s)])
        return outcomes[0] if isinstance(outcomes[0], int) else None

    def load(
        self, keys: Sequence[str], buffers: Sequence[Any], until_s: float | None = None, **options: Any
    ) -> list[TanghuluError | None]:
        """Fill each buffer (or list of buffers) with its key's value; return an error for each incomplete one.

        ChunkNotFound means that nothing has arrived. ``until_s`` bounds all calls, by the clock; each has its own
        deadline besides, and the ``options``.
        """
        outcomes = self.read(keys, buffers, until_s, **options)
        return [each if isinstance(each, TanghuluError) else None for each in outcomes]

    def read(
        self, keys: Sequence[str], buffers: Sequence[Any], until_s: float | None = None, **options: Any
    ) -> list[int | TanghuluError]:
        """Fill each buffer as ``load`` does; return the size of each value, or an error."""
        outcomes: list[int | TanghuluError] = []
        for at in range(0, len(keys), KEYS_PER_CALL):
            some, into = keys[at : at + KEYS_PER_CALL], buffers[at : at + KEYS_PER_CALL]
            within_s = self._load_s if until_s is None else min(self._load_s, until_s - self._clock.now_s())
            outcomes += self._read(some, into, within_s, options)
        self._count_loads(outcomes)
        return outcomes

    def _read(
        self, keys: Sequence[str], buffers: Sequence[Any], within_s: float, options: dict[str, Any]
    ) -> Sequence[int | TanghuluError]:
        if within_s <= 0:
            return _not_tried(keys)
        get = self._client.get_many_into
        return self._call(self._transfers, "loads", keys, lambda: get(keys, buffers, deadline_s=within_s, **options))

    def fetch(self, keys: Sequence[str]) -> list[Chunk | TanghuluError]:
        """Return the chunk of each key, which the caller closes, or an error."""
        outcomes: list[Chunk | TanghuluError] = []
        for at in range(0, len(keys), KEYS_PER_CALL):
            get = partial(self._client.get_many, keys[at : at + KEYS_PER_CALL], deadline_s=self._load_s)
            outcomes += self._call(self._transfers, "loads", keys[at : at + KEYS_PER_CALL], get)
        self._count_loads(outcomes)
        return outcomes

    def _count_loads(self, outcomes: Sequence[object]) -> None:
        num_failed = sum(isinstance(each, TanghuluError) for each in outcomes)
        self._count(keys_loaded=len(outcomes) - num_failed, keys_not_loaded=num_failed)

    def save(self, keys: Sequence[str], values: Sequence[Any], **options: Any) -> list[bool]:
        """Put each value (or list of buffers); return whether its key now exists, put by this call or earlier."""
        return [each is None for each in self.write(keys, values, **options)]

    def write(self, keys: Sequence[str], values: Sequence[Any], **options: Any) -> list[TanghuluError | None]:
        """Put each value as ``save`` does; return None for each stored one, or an error."""
        errors: list[TanghuluError | None] = []
        for at in range(0, len(keys), KEYS_PER_CALL):
            errors += self._write(keys[at : at + KEYS_PER_CALL], values[at : at + KEYS_PER_CALL], options)
        num_stored = errors.count(None)
        self._count(keys_saved=num_stored, keys_not_saved=len(errors) - num_stored)
        return errors

    def _write(
        self, keys: Sequence[str], values: Sequence[Any], options: dict[str, Any]
    ) -> Sequence[TanghuluError | None]:
        def put() -> list[TanghuluError | None]:
            items = list(zip(keys, values, strict=True))
            return [each.error for each in self._client.put_many(items, deadline_s=self._save_s, **options)]

        return self._call(self._transfers, "saves", keys, put)

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Remove the keys; return for each whether it existed and is now removed."""
        return [each is True for each in self.discard(keys)]

    def discard(self, keys: Sequence[str]) -> Sequence[bool | TanghuluError]:
        """Remove the keys; return for each whether it existed, or an error."""
        remove = self._client.remove_many
        return self._call(self._transfers, "removals", keys, lambda: remove(keys, deadline_s=self._save_s))

    def remove_below(self, prefix: str) -> bool:
        """Remove every key that begins with ``prefix``; return whether all were removed."""
        remove, pattern = self._client.remove_matching, "^" + re.escape(prefix)
        outcomes = self._call(self._transfers, "removals", [prefix], lambda: [remove(pattern, deadline_s=self._save_s)])
        return not isinstance(outcomes[0], TanghuluError)

    def close(self) -> None:
        """Close the client; calls in progress end as misses."""
        self._client.close()

    def _call(
        self, breaker: Breaker, kind: str, keys: Sequence[Any], call: Callable[[], Sequence[Any]]
    ) -> Sequence[Any]:
        """Make ``call``, if the breaker allows it; return its outcomes, or an error for each key if it failed."""
        if not keys or not breaker.allows():
            return _not_tried(keys)
        try:
            outcomes = call()
        except TanghuluError as error:
            self._count(**{f"{kind}_failed": 1})
            outcomes = [error] * len(keys)
        except BaseException:  # an interrupt or a bug: otherwise the breaker would wait for the outcome; re-raised
            breaker.failed()
            raise
        else:
            self._count(**{kind: 1})
        reason = _reason_to_rest(outcomes)
        if reason is None:
            breaker.succeeded()
        elif breaker.failed():
            _log.warning("tanghulu: the store does not answer (%s); skipping it for a moment", reason)
        return outcomes

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self.counts.update(amounts)


def _not_tried(keys: Sequence[Any]) -> list[Any]:
    """Return an error for each key."""
    error = ChunkNotFound("the store was skipped: it did not answer a moment ago, or no time is left")
    return [error] * len(keys)


def _reason_to_rest(outcomes: Sequence[Any]) -> TanghuluError | None:
    """Return the error that shows the store unresponsive; None if the trouble is limited to one node or one value.

    Example: of three blocks the first is on a dead node, the others arrive: the store has answered.
    """
    failed = [each for each in outcomes if isinstance(each, TanghuluError) and not isinstance(each, _ANSWERS)]
    away = [each for each in failed if isinstance(each, _STORE_AWAY)]
    if away or (failed and len(failed) == len(outcomes)):
        return (away or failed)[0]
    return None
