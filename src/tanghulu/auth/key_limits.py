"""Usage of each API key: requests a second, tokens a minute, requests in flight. Pure: times are arguments.

Rates are token buckets: unused allowance fills a key's bucket, up to its limit for one second (requests) or one minute
(tokens). A request's cost in tokens is unknown on arrival. So a request is admitted while anything is left, and its
cost is deducted once known, even below zero; the key then waits longer.

Example: 600 tokens a minute, 10 a second, bucket full. A request costs 900, leaving -300. For the next 30 s requests
are refused, with Retry-After as the seconds until something is left; a minute after that the bucket is full.
"""

from __future__ import annotations

import math
from typing import Final

from tanghulu.auth.api_keys import ApiKey, ApiKeyTable, KeyLimits
from tanghulu.errors import Overloaded

#: The headers of ``KeyAccount.headers``.
RATE_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{which}" for which in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
_MINUTE_S: Final = 60.0


class RateLimitExceeded(Overloaded):
    """A key exceeded its limit; it may try again after ``retry_after_s``."""

    code = "RATE_LIMIT_EXCEEDED"
    retry_after_s = 1.0


class TokenBucket:
    """A bucket of at most ``capacity``, initially full, refilled at ``rate`` a second."""

    def __init__(self, rate: float, capacity: float, now_s: float) -> None:
        assert rate > 0
        assert capacity > 0
        self.capacity = capacity
        self._rate = rate
        self._level, self._at_s = capacity, now_s

    def level(self, now_s: float) -> float:
        """Return the remaining amount; negative if overdrawn."""
        return min(self.capacity, self._level + self._rate * max(0.0, now_s - self._at_s))

    def take(self, amount: float, now_s: float) -> None:
        """Deduct ``amount``, even if the bucket goes below zero."""
        self._level, self._at_s = self.level(now_s) - amount, max(now_s, self._at_s)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until ``amount`` is available, 0 if it is; it must fit."""
        assert amount <= self.capacity
        return max(0.0, (amount - self.level(now_s)) / self._rate)


class KeyAccount:
    """The usage of one key."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.num_in_flight = 0
        self._name, self.limits = key.name, KeyLimits()
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.follow(key, now_s)

    def follow(self, key: ApiKey, now_s: float) -> None:
        """Adopt the limits of ``key`` if the file has changed; the buckets are then full again."""
        if key.limits == self.limits:
            return
        self.limits = limits = key.limits
        per_s, per_minute = limits.requests_per_s, limits.tokens_per_minute
        self._requests = TokenBucket(per_s, max(1.0, per_s), now_s) if per_s else None
        self._tokens = TokenBucket(per_minute / _MINUTE_S, max(1.0, per_minute), now_s) if per_minute else None

    def begin(self, now_s: float) -> None:
        """Admit one request; raises RateLimitExceeded, and then it does not count."""
        most = self.limits.max_in_flight
        if most and self.num_in_flight >= most:
            raise self._refusal(f"{most} requests in flight", 1.0)
        for bucket, limit in (
            (self._requests, f"{self.limits.requests_per_s:g} requests a second"),
            (self._tokens, f"{self.limits.tokens_per_minute:g} tokens a minute"),
        ):
            wait_s = 0.0 if bucket is None else bucket.wait_s(1.0, now_s)
            if wait_s:
                raise self._refusal(limit, wait_s)
        if self._requests is not None:
            self._requests.take(1.0, now_s)
        self.num_in_flight += 1

    def end(self) -> None:
        """Note that an admitted request has ended."""
        assert self.num_in_flight > 0
        self.num_in_flight -= 1

    def spend(self, num_tokens: int, now_s: float) -> None:
        """Deduct tokens read or generated for this key."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now_s)

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """Return the headers by which OpenAI's clients pace themselves."""
        shown: list[tuple[bytes, bytes]] = []
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                left, full_s = max(0, math.floor(bucket.level(now_s))), bucket.wait_s(bucket.capacity, now_s)
                shown += [
                    (b"x-ratelimit-limit-" + name, b"%d" % bucket.capacity),
                    (b"x-ratelimit-remaining-" + name, b"%d" % left),
                    (b"x-ratelimit-reset-" + name, f"{full_s:.3f}s".encode()),
                ]
        return shown

    def _refusal(self, what: str, wait_s: float) -> RateLimitExceeded:
        error = RateLimitExceeded(f"key {self._name!r} is limited to {what}; retry in {wait_s:.1f} s")
        error.retry_after_s = wait_s
        return error


class KeyAccounts:
    """The accounts of all keys, by the key's client name in the queue."""

    def __init__(self) -> None:
        self._accounts: dict[str, KeyAccount] = {}

    def of(self, key: ApiKey, now_s: float) -> KeyAccount:
        """Return the account of ``key``, with its current limits."""
        account = self._accounts.get(key.client)
        if account is None:
            account = self._accounts[key.client] = KeyAccount(key, now_s)
        else:
            account.follow(key, now_s)
        return account

    def spend(self, client: str, num_tokens: int, now_s: float) -> None:
        """Deduct tokens of ``client``; no effect if it has no account, as without a key."""
        account = self._accounts.get(client)
        if account is not None:
            account.spend(num_tokens, now_s)

    def keep(self, table: ApiKeyTable) -> None:
        """Drop the accounts of removed keys that have nothing in flight."""
        known = {key.client for key in table.keys.values()}
        gone = [name for name, each in self._accounts.items() if name not in known and not each.num_in_flight]
        for name in gone:
            del self._accounts[name]

    def check(self) -> None:
        assert all(account.num_in_flight >= 0 for account in self._accounts.values())
