"""Puts that a node refuses outright, and eviction ahead of demand. Pure."""

from __future__ import annotations

from tanghulu.auth.tenants import tenant_of
from tanghulu.errors import InvalidRequest, NodeUnavailable, StoreFull
from tanghulu.store.node.state.tenant_usage import TenantUsage
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import ChunkKey, format_size

#: Part of a node's capacity that hard pins may hold at most.
MAX_HARD_PINNED_FRACTION = 0.25


def refuse_impossible(new: NewChunk, max_value_bytes: int) -> None:
    """Raise InvalidRequest for a value that is never accepted."""
    if new.size_bytes <= 0:
        raise InvalidRequest(f"value of {new.key!r} is empty; a chunk has at least one byte")
    if new.size_bytes > max_value_bytes:
        raise InvalidRequest(
            f"value of {new.key!r} has {format_size(new.size_bytes)}; this node takes at most "
            f"{format_size(max_value_bytes)}"
        )


class HardPins:
    """Limits of hard pins: all tenants together a part of the capacity, each of them its share of that part.

    Hard pins are never evicted, so a tenant's unused share is not lent to another. Without ``tenants``, and for keys
    without a tenant (an operator's), only the bound of all counts.
    """

    def __init__(self, capacity_bytes: int, tenants: TenantUsage | None) -> None:
        self._limit_bytes = int(capacity_bytes * MAX_HARD_PINNED_FRACTION)
        self._tenants = tenants

    def refusal(self, key: ChunkKey, size_bytes: int, hard_pinned_bytes: int) -> StoreFull | None:
        """Return the error of a put of ``key`` that would pin too much, with ``hard_pinned_bytes`` pinned in all."""
        tenant = tenant_of(key)
        if self._tenants is not None and tenant:
            held, share = self._tenants.hard_pinned_bytes(tenant), self._tenants.share_of(tenant, self._limit_bytes)
            if held + size_bytes > share:
                return StoreFull(
                    f"hard pins of tenant {tenant!r} hold {format_size(held)} of at most {format_size(share)} on this "
                    f"node, its share of {format_size(self._limit_bytes)}; remove some, or use pin='soft'"
                )
        if hard_pinned_bytes + size_bytes > self._limit_bytes:
            most = format_size(self._limit_bytes)
            if tenant:  # which may not sum up others' bytes
                return StoreFull(f"hard pins of all tenants take the {most} that they may on this node; use pin='soft'")
            return StoreFull(
                f"hard pins hold {format_size(hard_pinned_bytes)} of at most {most} on this "
                "node; remove some, or use pin='soft'"
            )
        return None


def no_room(new: NewChunk, capacity_bytes: int) -> StoreFull:
    """Return the error of a put whose deadline passed while it waited for room."""
    return StoreFull(
        f"no room for {format_size(new.size_bytes)}: what is left of {format_size(capacity_bytes)} is leased, being "
        "written or hard-pinned; try again, or give the node more memory"
    )


class Watermarks:
    """Evicting before a put needs the room: above ``high``, down to ``low`` (fractions of the capacity); 1.0 disables.

    So that a burst of puts finds room, and so that chunks are demoted to the SSD at the disk's pace and not in the step
    of a put that needs their room. Example: capacity 100, high 0.9, low 0.8: at 90 used nothing happens; at 91 there
    are 11 to evict; at 85, on the way down, 5; at 80 it ends, and up to 90 nothing happens again.
    """

    def __init__(self, capacity_bytes: int, high: float, low: float) -> None:
        assert 0 < low <= high <= 1, f"watermarks {low} and {high}"
        self._high_bytes = int(capacity_bytes * high)
        self._low_bytes = int(capacity_bytes * low)
        self._evicting = False

    def wanted(self, used_bytes: int, budget_bytes: int) -> int:
        """Return the bytes to evict now, at most ``budget_bytes``."""
        if used_bytes > self._high_bytes:
            self._evicting = True
        elif used_bytes <= self._low_bytes:
            self._evicting = False
        return max(min(used_bytes - self._low_bytes, budget_bytes), 0) if self._evicting else 0

    def check(self) -> None:
        """Assert the order of the marks."""
        assert 0 < self._low_bytes <= self._high_bytes


def refuse_while(draining: bool) -> None:
    """Raise NodeUnavailable, so that the chunk is put to another node, if this one is ``draining``."""
    if draining:
        raise NodeUnavailable("this node is draining and accepts no new chunks; put to another node")
