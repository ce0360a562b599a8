"""How much each API key has asked for: requests a second, tokens a minute, requests under way. Pure: times go in.

Rates are token buckets: what a key does not use fills its bucket, up to what it may ask for in one second (requests) or
one minute (tokens). How many tokens a request will cost is not known when it comes. So a request is let in while
there is anything left, and what it costs is taken when it is known, even below zero; then the key waits longer.

Example: 600 tokens a minute, 10 a second, all there. A request costs 900, so 300 are owed. For the next 30 s requests
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
    """A key asked for more than it may; ``retry_after_s`` later it may ask again."""

    code = "RATE_LIMIT_EXCEEDED"
    retry_after_s = 1.0


class TokenBucket:
    """Holds at most ``capacity``, is full at first, and gains ``rate`` a second."""

    def __init__(self, rate: float, capacity: float, now_s: float) -> None:
        assert rate > 0
        assert capacity > 0
        self.capacity = capacity
        self._rate = rate
        self._level, self._at_s = capacity, now_s

    def level(self, now_s: float) -> float:
        """What is left; below zero: what is owed."""
        return min(self.capacity, self._level + self._rate * max(0.0, now_s - self._at_s))

    def take(self, amount: float, now_s: float) -> None:
        """Take ``amount``, whether or not it is there."""
        self._level, self._at_s = self.level(now_s) - amount, max(now_s, self._at_s)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until ``amount`` is there, 0 if it is; it must fit."""
        assert amount <= self.capacity
        return max(0.0, (amount - self.level(now_s)) / self._rate)


class KeyAccount:
    """What one key has asked for."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.num_in_flight = 0
        self._name, self.limits = key.name, KeyLimits()
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.follow(key, now_s)

    def follow(self, key: ApiKey, now_s: float) -> None:
        """Take over the limits of ``key`` where the file has changed; buckets are full again then."""
        if key.limits == self.limits:
            return
        self.limits = limits = key.limits
        per_s, per_minute = limits.requests_per_s, limits.tokens_per_minute
        self._requests = TokenBucket(per_s, max(1.0, per_s), now_s) if per_s else None
        self._tokens = TokenBucket(per_minute / _MINUTE_S, max(1.0, per_minute), now_s) if per_minute else None

    def begin(self, now_s: float) -> None:
        """Let one request in; raises RateLimitExceeded, and then it counts for nothing."""
        most = self.limits.max_in_flight
        if most and self.num_in_flight >= most:
            raise self._refusal(f"{most} requests under way", 1.0)
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
        """Note that a request that was let in is over."""
        assert self.num_in_flight > 0
        self.num_in_flight -= 1

    def spend(self, num_tokens: int, now_s: float) -> None:
        """Take tokens that were read or made for this key."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now_s)

    def headers(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """The headers by which OpenAI's clients pace themselves."""
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
        error = RateLimitExceeded(f"key {self._name!r} may have {what}; try again in {wait_s:.1f} s")
        error.retry_after_s = wait_s
        return error


class KeyAccounts:
    """The accounts of all keys, by the client that a key is in the queue."""

    def __init__(self) -> None:
        self._accounts: dict[str, KeyAccount] = {}

    def of(self, key: ApiKey, now_s: float) -> KeyAccount:
        """The account of ``key``, with its limits as they are now."""
        account = self._accounts.get(key.client)
        if account is None:
            account = self._accounts[key.client] = KeyAccount(key, now_s)
        else:
            account.follow(key, now_s)
        return account

    def spend(self, client: str, num_tokens: int, now_s: float) -> None:
        """Take tokens of ``client``; nothing where it has no account, as without a key."""
        account = self._accounts.get(client)
        if account is not None:
            account.spend(num_tokens, now_s)

    def keep(self, table: ApiKeyTable) -> None:
        """Forget the accounts of keys that are gone and have nothing under way."""
        known = {key.client for key in table.keys.values()}
        gone = [name for name, each in self._accounts.items() if name not in known and not each.num_in_flight]
        for name in gone:
            del self._accounts[name]

    def check(self) -> None:
        assert all(account.num_in_flight >= 0 for account in self._accounts.values())
