"""The usage of each tenant at a node, and its quota. Pure; a node without tenants has none.

A tenant's bytes are those of all ranges taken for it: chunks, reservations, and dropped chunks still being read. They
never exceed its quota; a put that would exceed it evicts the tenant's own chunks first.

Each node enforces its part of a quota for all nodes together: it may hold the remainder left by the others, as last
reported by the master, or an equal share if that is more, so that a tenant whose puts move to another node finds room
there. The excess is evicted at the next ``NodeState.trim_tenants``, on the nodes that hold more than their part. So it
is exceeded by no more than the puts of about a second, and for no longer.

Example: 90 bytes on three nodes, A holds 90. B receives that 90 are elsewhere and may hold 30 nevertheless; it takes
20. A receives these 20, may hold 70, and evicts 20.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from msgspec import structs

from tanghulu.auth.tenants import Tenant, tenant_of
from tanghulu.errors import InvalidRequest, QuotaExceeded
from tanghulu.eviction.base import Policy
from tanghulu.eviction.fair import Fair
from tanghulu.eviction.policies import make_policy
from tanghulu.store.node.state.chunk import Chunk
from tanghulu.store.protocol.messages import TenantFigures
from tanghulu.store.protocol.types import NewChunk, Pin
from tanghulu.types import ChunkKey, format_size


class TenantUsage:
    """``tenants`` returns all known ones, as currently listed in the tokens file."""

    def __init__(self, tenants: Callable[[], Mapping[str, Tenant]], capacity_bytes: int) -> None:
        self._tenants = tenants
        self._capacity_bytes = capacity_bytes
        self._usage: dict[str, TenantFigures] = {}
        self._hard_pinned: dict[str, int] = {}
        self._elsewhere: Mapping[str, int] = {}
        self._num_nodes = 1

    def _of(self, tenant: str) -> TenantFigures:
        usage = self._usage.get(tenant)
        if usage is None:
            usage = self._usage[tenant] = TenantFigures(tenant)
        return usage

    def quota_of(self, tenant: str) -> int:
        """Return the most that the tenant may hold here; 0: no bound."""
        known = self._tenants().get(tenant)
        return 0 if known is None else known.quota_bytes

    def limit_of(self, tenant: str) -> int:
        """Return the bytes that both quotas let the tenant hold here now; 0: no bound."""
        known = self._tenants().get(tenant)
        if known is None or not known.cluster_quota_bytes:
            return self.quota_of(tenant)
        total = known.cluster_quota_bytes
        part = max(total - self._elsewhere.get(tenant, 0), total // self._num_nodes, 1)
        return min(known.quota_bytes or part, part)

    def bounded(self) -> list[tuple[str, int]]:
        """Return the tenants with a quota for all nodes together, and the bytes that they hold here."""
        return [
            (name, self._usage[name].used_bytes if name in self._usage else 0)
            for name, tenant in self._tenants().items()
            if tenant.cluster_quota_bytes
        ]

    def update_elsewhere(self, elsewhere: Mapping[str, int], num_nodes: int) -> None:
        """Take the bytes of tenants on the other nodes, and the number of nodes."""
        self._elsewhere, self._num_nodes = elsewhere, max(num_nodes, 1)

    def overdrawn(self) -> list[tuple[str, int]]:
        """Return the tenants over their limit here, with their excess."""
        excess = [(name, held - self.limit_of(name)) for name, held in self.bounded()]
        return [(name, num_bytes) for name, num_bytes in excess if num_bytes > 0]

    def weight_of(self, tenant: str) -> float:
        """Return the tenant's share: its quota, or else an equal part of the memory."""
        return self.quota_of(tenant) or self._capacity_bytes / max(len(self._tenants()), 1)

    def share_of(self, tenant: str, total_bytes: int) -> int:
        """Return the tenant's part of ``total_bytes``, which known tenants divide by their weights; 0 if unknown."""
        known = self._tenants()
        if tenant not in known:
            return 0
        return int(total_bytes * self.weight_of(tenant) / sum(map(self.weight_of, known)))

    def hard_pinned_bytes(self, tenant: str) -> int:
        """Return the bytes that the tenant has pinned hard here."""
        return self._hard_pinned.get(tenant, 0)

    # --- what happens

    def entered(self, chunk: Chunk) -> None:
        """Record that a range was taken for ``chunk``."""
        usage = self._of(tenant_of(chunk.key))
        usage.used_bytes += chunk.size_bytes
        usage.num_chunks += 1
        if chunk.pin is Pin.HARD:
            self._hard_pinned[usage.tenant] = self.hard_pinned_bytes(usage.tenant) + chunk.size_bytes

    def left(self, chunk: Chunk) -> None:
        """Record that the range is free."""
        usage = self._usage[tenant_of(chunk.key)]
        usage.used_bytes -= chunk.size_bytes
        usage.num_chunks -= 1
        if chunk.pin is Pin.HARD:
            self._hard_pinned[usage.tenant] -= chunk.size_bytes

    def looked_up(self, key: ChunkKey, found: Chunk | None) -> None:
        """Record that a reader looked for ``key``, and whether it found a chunk."""
        tenant = tenant_of(key)
        if tenant and tenant not in self._tenants() and tenant not in self._usage:
            return  # an operator tries names
        usage = self._of(tenant)
        if found is None:
            usage.misses += 1
        else:
            usage.hits += 1
            usage.hit_bytes += found.size_bytes

    def evicted(self, tenant: str, size_bytes: int) -> None:
        """Record that one of the tenant's chunks was evicted."""
        usage = self._of(tenant)
        usage.evictions += 1
        usage.evicted_bytes += size_bytes

    # --- what follows

    def no_room(self, tenant: str) -> QuotaExceeded:
        """Return the error of a put of ``tenant`` for which none of the tenant's own chunks can be evicted."""
        return QuotaExceeded(
            f"tenant {tenant!r} may hold {format_size(self.limit_of(tenant))} on this node now, and what it holds "
            "is leased, being written or hard-pinned; try again"
        )

    def excess_bytes(self, new: NewChunk) -> int:
        """Return the bytes that the tenant has to give up for ``new``; raises InvalidRequest if it can never fit."""
        tenant = tenant_of(new.key)
        known, limit = self._tenants().get(tenant), self.limit_of(tenant)
        if known is None or not limit:
            return 0
        for quota, where in ((known.quota_bytes, "on one node"), (known.cluster_quota_bytes, "on all nodes")):
            if quota and new.size_bytes > quota:
                raise InvalidRequest(
                    f"a value of {format_size(new.size_bytes)} is more than tenant {tenant!r} may hold {where}, "
                    f"{format_size(quota)}"
                )
        return max(self._of(tenant).used_bytes + new.size_bytes - limit, 0)

    def usage(self) -> list[TenantFigures]:
        """Return every known tenant, and all others with chunks or activity, by name. Safe from any thread."""
        known = self._tenants()
        names = {*known, *(name for name, usage in list(self._usage.items()) if not usage.idle)}
        return [_with_quotas(self._usage.get(name) or TenantFigures(name), known.get(name)) for name in sorted(names)]

    def check(self, ranges: Iterable[Chunk]) -> None:
        """Assert that ``ranges``, all taken ones, add up to the counted bytes."""
        sums: dict[str, list[int]] = {}
        for each in ranges:
            total = sums.setdefault(tenant_of(each.key), [0, 0, 0])
            total[0] += each.size_bytes
            total[1] += 1
            total[2] += each.size_bytes if each.pin is Pin.HARD else 0
        for name, usage in self._usage.items():
            held = sums.pop(name, [0, 0, 0])
            counted = [usage.used_bytes, usage.num_chunks, self.hard_pinned_bytes(name)]
            assert counted == held, f"tenant {name!r} holds {held}, not {usage}"
        assert not sums, f"tenants {sorted(sums)} are not counted"

    def __repr__(self) -> str:
        return f"TenantUsage({len(self._usage)} tenants)"


def _with_quotas(usage: TenantFigures, tenant: Tenant | None) -> TenantFigures:
    here, everywhere = (0, 0) if tenant is None else (tenant.quota_bytes, tenant.cluster_quota_bytes)
    return structs.replace(usage, quota_bytes=here, cluster_quota_bytes=everywhere)


@dataclass(frozen=True, slots=True)
class Policies:
    """Factories of eviction policies by name: that of the memory, and that of the tier below it."""

    memory: Callable[[str], Policy] = make_policy
    tier: Callable[[str], Policy] = make_policy

    @classmethod
    def fair(cls, tenants: TenantUsage) -> Policies:
        """Return policies that are fair between ``tenants``, which count evictions from memory."""
        return cls(
            lambda name: Fair(lambda: make_policy(name), tenants.weight_of, tenants.evicted),
            lambda name: Fair(lambda: make_policy(name), tenants.weight_of),
        )
