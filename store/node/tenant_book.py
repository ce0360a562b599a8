"""What each tenant holds and does at a node, and what its quota says to a put. Pure; a node without tenants has none.

A tenant's bytes are those of all ranges that are taken for it: chunks, reservations, and what was dropped and is still
being read. They never exceed its quota; a put that would exceed it evicts the tenant's own chunks first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tanghulu.errors import InvalidRequest, QuotaExceeded
from tanghulu.store.node.eviction.base import Policy
from tanghulu.store.node.eviction.fair import Fair
from tanghulu.store.node.eviction.policies import make_policy
from tanghulu.store.words import NewChunk
from tanghulu.tenants import Tenant, tenant_of
from tanghulu.types import ChunkKey, format_size

if TYPE_CHECKING:
    from tanghulu.store.node.node_state import NodeState


@dataclass(slots=True)
class TenantUsage:
    """One tenant at one node; ``quota_bytes`` 0: no bound. The last three count since the start."""

    tenant: str
    quota_bytes: int = 0
    used_bytes: int = 0
    num_chunks: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to tell of it."""
        return not (self.num_chunks or self.hits or self.misses or self.evictions)


class Ranged(Protocol):
    """What a range is taken for."""

    @property
    def key(self) -> ChunkKey:
        """Names it."""
        ...

    @property
    def size_bytes(self) -> int:
        """Its length."""
        ...


class TenantBook:
    """``tenants`` gives all that are known, as the tokens file has them now."""

    def __init__(self, tenants: Callable[[], Mapping[str, Tenant]], capacity_bytes: int) -> None:
        self._tenants = tenants
        self._capacity_bytes = capacity_bytes
        self._usage: dict[str, TenantUsage] = {}

    def _of(self, tenant: str) -> TenantUsage:
        usage = self._usage.get(tenant)
        if usage is None:
            usage = self._usage[tenant] = TenantUsage(tenant)
        return usage

    def quota_of(self, tenant: str) -> int:
        """The most that the tenant may hold here; 0: no bound."""
        known = self._tenants().get(tenant)
        return 0 if known is None else known.quota_bytes

    def weight_of(self, tenant: str) -> float:
        """Its share: its quota, or else as much as anybody's if all shared the memory equally."""
        return self.quota_of(tenant) or self._capacity_bytes / max(len(self._tenants()), 1)

    # --- what happens

    def entered(self, chunk: Ranged) -> None:
        """A range was taken for ``chunk``."""
        usage = self._of(tenant_of(chunk.key))
        usage.used_bytes += chunk.size_bytes
        usage.num_chunks += 1

    def left(self, chunk: Ranged) -> None:
        """The range is free."""
        usage = self._usage[tenant_of(chunk.key)]
        usage.used_bytes -= chunk.size_bytes
        usage.num_chunks -= 1

    def asked(self, key: ChunkKey, *, found: bool) -> None:
        """A reader looked for ``key``."""
        tenant = tenant_of(key)
        if tenant and tenant not in self._tenants() and tenant not in self._usage:
            return  # an operator tries names
        usage = self._of(tenant)
        if found:
            usage.hits += 1
        else:
            usage.misses += 1

    def evicted(self, tenant: str) -> None:
        """One of the tenant's chunks was evicted."""
        self._of(tenant).evictions += 1

    # --- what follows

    def excess_bytes(self, new: NewChunk) -> int:
        """How much of its own the tenant has to give up for ``new``; raises InvalidRequest if that is no use."""
        tenant = tenant_of(new.key)
        quota = self.quota_of(tenant)
        if not quota:
            return 0
        if new.size_bytes > quota:
            raise InvalidRequest(
                f"a value of {format_size(new.size_bytes)} is more than tenant {tenant!r} may hold on one node, "
                f"{format_size(quota)}"
            )
        return max(self._of(tenant).used_bytes + new.size_bytes - quota, 0)

    def usage(self) -> list[TenantUsage]:
        """Every known tenant, and everybody else who holds or did something, by name. Safe from any thread."""
        names = {*self._tenants(), *(name for name, usage in list(self._usage.items()) if not usage.idle)}
        empty = {name: TenantUsage(name) for name in names}
        return [replace(self._usage.get(name, empty[name]), quota_bytes=self.quota_of(name)) for name in sorted(names)]

    def check(self, ranges: Iterable[Ranged]) -> None:
        """Assert that ``ranges``, all that are taken, add up to what the book says."""
        sums: dict[str, list[int]] = {}
        for each in ranges:
            total = sums.setdefault(tenant_of(each.key), [0, 0])
            total[0] += each.size_bytes
            total[1] += 1
        for name, usage in self._usage.items():
            held = sums.pop(name, [0, 0])
            assert [usage.used_bytes, usage.num_chunks] == held, f"tenant {name!r} holds {held}, not {usage}"
        assert not sums, f"tenants {sorted(sums)} are in no book"

    def __repr__(self) -> str:
        return f"TenantBook({len(self._usage)} tenants)"


@dataclass(frozen=True, slots=True)
class Policies:
    """How eviction policies are made by name: that of the memory, and that of the tier below it."""

    memory: Callable[[str], Policy] = make_policy
    tier: Callable[[str], Policy] = make_policy

    @classmethod
    def fair(cls, book: TenantBook) -> Policies:
        """Policies that are fair between the tenants of ``book``, which hears of evictions from memory."""
        return cls(
            lambda name: Fair(lambda: make_policy(name), book.weight_of, book.evicted),
            lambda name: Fair(lambda: make_policy(name), book.weight_of),
        )


def take_range(state: NodeState, new: NewChunk, *, sparing: bool) -> int | None:
    """A range for ``new`` within its tenant's quota; None if leases leave no room.

    Raises InvalidRequest for a value above the quota, QuotaExceeded if what the tenant holds cannot be evicted now.
    """
    book = state.table.book
    if book is not None and (excess := book.excess_bytes(new)):
        tenant = tenant_of(new.key)
        chosen = []
        for chunk in state.room.victims_of(tenant):
            chosen.append(chunk)
            excess -= chunk.size_bytes
            if excess <= 0:
                break
        if excess > 0:
            raise QuotaExceeded(
                f"tenant {tenant!r} may hold {format_size(book.quota_of(tenant))} on this node, and what it holds is "
                "leased, being written or hard-pinned; try again"
            )
        for chunk in chosen:
            state.evict(chunk)
    return state.room.take(new.size_bytes, state.evict, sparing=sparing)
