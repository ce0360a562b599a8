"""The eviction policies by name, as used by ``--eviction``."""

from __future__ import annotations

from collections.abc import Callable

from tanghulu.errors import InvalidRequest
from tanghulu.eviction.base import Policy
from tanghulu.eviction.reuse import Reuse
from tanghulu.eviction.s3fifo import S3Fifo
from tanghulu.eviction.simple import Fifo, Lfu, Lru, Sieve

POLICIES: dict[str, Callable[[], Policy]] = {policy.name: policy for policy in (Lru, Fifo, Sieve, S3Fifo, Lfu, Reuse)}


def make_policy(name: str) -> Policy:
    """Return a new policy called ``name``; raises InvalidRequest listing the known ones."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise InvalidRequest(f"eviction policy {name!r} is unknown; known: {', '.join(POLICIES)}") from None
