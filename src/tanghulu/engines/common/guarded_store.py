"""The store for an engine's cache: each call ends within its deadline, and whatever the store does is a miss.

Calls block; they belong in threads, of which several may call. A store that does not answer is left alone for a while
(``SharedBreaker``), so that only the first call waits.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from tanghulu.engines.common.lookup import SharedBreaker
from tanghulu.errors import TanghuluError
from tanghulu.runtime.clock import Clock, SystemClock

_log = logging.getLogger(__name__)

#: Questions that fail in a row before the store is left alone; of transfers one is enough, it took a whole deadline.
MAX_FAILED_QUESTIONS = 3
MAX_FAILED_TRANSFERS = 1


class CacheClient(Protocol):
    """The part of ``KvClient`` that is used."""

    def exists_many(self, keys: Sequence[str], *, deadline_s: float | None = None) -> list[bool]: ...

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[Any], *, deadline_s: float | None = None
    ) -> Sequence[int | TanghuluError]: ...

    def put_many(self, items: Any, *, deadline_s: float | None = None) -> Sequence[Any]: ...

    def remove_many(self, keys: Sequence[str], *, deadline_s: float | None = None) -> Sequence[Any]: ...

    def remove_matching(self, pattern: str, *, deadline_s: float | None = None) -> int: ...

    def close(self) -> None: ...


class GuardedStore:
    """A client of the store that never raises what the store does. ``counts`` tells what came of the calls, by name."""

    def __init__(
        self, client: CacheClient, load_deadline_s: float, save_deadline_s: float, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        self._client, self._load_s, self._save_s = client, load_deadline_s, save_deadline_s
        self._questions = SharedBreaker(MAX_FAILED_QUESTIONS, clock)
        self._transfers = SharedBreaker(MAX_FAILED_TRANSFERS, clock)
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    @property
    def is_open(self) -> bool:
        """Whether transfers are tried now: the store answered the last one."""
        return not self._transfers.is_open

    def has(self, keys: Sequence[str], deadline_s: float | None = None) -> list[bool]:
        """Which keys are there; none, if nobody says so in time."""
        if not keys or not self._questions.allows():
            return [False] * len(keys)
        try:
            found = self._client.exists_many(keys, deadline_s=min(self._load_s, deadline_s or self._load_s))
        except TanghuluError as error:
            self._questions.judge([error])
            self._count(lookups_failed=1)
            return [False] * len(keys)
        self._questions.judge([])
        self._count(lookups=1, keys_found=sum(found), keys_missing=len(keys) - sum(found))
        return found

    def read(self, keys: Sequence[str], buffers: Sequence[Any], sizes: Sequence[int]) -> list[bool]:
        """Fill each buffer (or list of buffers) with its key's value; whether it has its whole size now.

        A value of another size, which no load could ever use, is removed, so that the next save stores the right one.
        """
        if not keys or not self._transfers.allows():
            return [False] * len(keys)
        try:
            outcomes = self._client.get_many_into(keys, buffers, deadline_s=self._load_s)
        except TanghuluError as error:
            self._transfers.judge([error])
            self._count(loads_failed=1)
            return [False] * len(keys)
        self._transfers.judge([each for each in outcomes if isinstance(each, TanghuluError)])
        good = [each == size for each, size in zip(outcomes, sizes, strict=True)]
        self._count(keys_loaded=sum(good), keys_not_loaded=len(good) - sum(good))
        self.remove(
            [key for key, each, fits in zip(keys, outcomes, good, strict=True) if type(each) is int and not fits]
        )
        return good

    def write(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        """Put each value (or list of buffers); whether its key is there now, put by this call or before."""
        if not keys or not self._transfers.allows():
            return [False] * len(keys)
        try:
            statuses = self._client.put_many(list(zip(keys, values, strict=True)), deadline_s=self._save_s)
        except TanghuluError as error:
            self._transfers.judge([error])
            self._count(saves_failed=1)
            return [False] * len(keys)
        self._transfers.judge([status.error for status in statuses if status.error is not None])
        good = [bool(status) for status in statuses]
        self._count(keys_saved=sum(good), keys_not_saved=len(good) - sum(good))
        return good

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Which keys were there and are gone now."""
        if not keys:
            return []
        try:
            return [removed is True for removed in self._client.remove_many(keys, deadline_s=self._save_s)]
        except TanghuluError as error:
            self._transfers.judge([error])
            return [False] * len(keys)

    def remove_below(self, prefix: str) -> bool:
        """Remove every key that begins with ``prefix``; whether all of it was done."""
        try:
            self._client.remove_matching("^" + re.escape(prefix), deadline_s=self._save_s)
        except TanghuluError as error:
            self._transfers.judge([error])
            return False
        return True

    def close(self) -> None:
        """Close the client; calls under way end with misses."""
        self._client.close()

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self.counts.update(amounts)
