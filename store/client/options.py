"""The options of a put as callers give them, checked."""

from __future__ import annotations

from functools import lru_cache

from tanghulu.errors import InvalidRequest
from tanghulu.store.client.model import PutOptions
from tanghulu.store.protocol.types import Pin

MAX_REPLICAS = 64
MAX_TTL_S = 49 * 24 * 3600.0  # what 32 bits of milliseconds hold


@lru_cache(maxsize=256)
def put_options(
    replicas: int, pin: str, ttl_s: float | None, prefer_node: str | None, visible: bool, part_bytes: int
) -> PutOptions:
    """The options; raises InvalidRequest that names the bad one."""
    if not 1 <= replicas <= MAX_REPLICAS:
        raise InvalidRequest(f"replicas={replicas} is not within 1..{MAX_REPLICAS}")
    if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
        raise InvalidRequest(f"ttl_s={ttl_s} is not within 0..{MAX_TTL_S:.0f} seconds")
    if part_bytes < 0:
        raise InvalidRequest(f"part_bytes={part_bytes} is negative")
    return PutOptions(replicas, Pin.parse(pin), ttl_s, prefer_node, visible, part_bytes)
