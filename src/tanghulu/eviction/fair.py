"""Fair eviction between tenants: each has its own order, and the tenant furthest above its share is evicted first.

A tenant's share is its weight (its quota, if it has one). The next victim is always the first in the order of the
tenant with the most bytes for its weight: weighted max-min fairness, as in fair queueing, over memory instead of time.
So a tenant that floods the store evicts its own chunks, and one that stays within its share keeps its chunks.

Example: acme (weight 60) holds 50 bytes as a1 20, a2 30, initech (weight 40) holds 50 as i1 10, i2 40. Ratios .83 and
1.25: i1 goes first, which leaves initech at 40/40 = 1.0, still more than acme: i2, then a1, a2.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from tanghulu.auth.tenants import tenant_of
from tanghulu.eviction.base import Policy
from tanghulu.parted_dict import PartedDict
from tanghulu.types import ChunkKey


class Fair(Policy):
    """An eviction order made of one ``make_inner`` policy for each tenant; see the module.

    ``weight_of`` returns a tenant's share, above 0; shares are only compared with each other. ``on_evicted`` receives
    the tenant whose chunk was evicted, and its size.
    """

    def __init__(
        self,
        make_inner: Callable[[], Policy],
        weight_of: Callable[[str], float],
        on_evicted: Callable[[str, int], None] = lambda tenant, size_bytes: None,
    ) -> None:
        self._make_inner = make_inner
        self._weight_of = weight_of
        self._on_evicted = on_evicted
        self.name = make_inner().name
        self._orders: dict[str, Policy] = {}
        self._bytes: dict[str, int] = {}
        self._sizes = PartedDict[ChunkKey, int]()
        self._notified: set[str] = set()  # tenants whose order has begun the current batch

    @property
    def num_ghosts(self) -> int:
        """Number of ghosts of all tenants; each order bounds its own."""
        return sum(order.num_ghosts for order in self._orders.values())

    def begin_batch(self) -> None:
        """Begin a batch in every tenant's order."""
        self._notified.clear()

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        """Add ``key`` to its tenant's order."""
        tenant = tenant_of(key)
        self._order(tenant).add(key, size_bytes)
        self._sizes[key] = size_bytes
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size_bytes

    def touch(self, key: ChunkKey) -> bool:
        """Note in the tenant's order that the chunk was read."""
        return key in self._sizes and self._order(tenant_of(key)).touch(key)

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """Drop ``key``."""
        size_bytes = self._sizes[key]
        del self._sizes[key]
        tenant = tenant_of(key)
        self._orders[tenant].remove(key, evicted=evicted)
        self._bytes[tenant] -= size_bytes
        if evicted:
            self._on_evicted(tenant, size_bytes)

    def victims(self) -> Iterator[ChunkKey]:
        """Yield all keys in eviction order; a tenant's share shrinks as its keys are yielded."""
        weights = {tenant: self._weight_of(tenant) for tenant in self._orders}
        left = dict(self._bytes)
        heap = [
            (-left[tenant] / weights[tenant], tenant, order.victims())
            for tenant, order in self._orders.items()
            if len(order)
        ]
        heapq.heapify(heap)
        while heap:
            _, tenant, order = heap[0]
            key = next(order, None)
            if key is None:
                heapq.heappop(heap)
                continue
            left[tenant] -= self._sizes[key]
            heapq.heapreplace(heap, (-left[tenant] / weights[tenant], tenant, order))
            yield key

    def victims_of(self, tenant: str) -> Iterator[ChunkKey]:
        """Yield the keys of one tenant in eviction order."""
        order = self._orders.get(tenant)
        return iter(()) if order is None else order.victims()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._sizes

    def _order(self, tenant: str) -> Policy:
        order = self._orders.get(tenant)
        if order is None:
            order = self._orders[tenant] = self._make_inner()
        if tenant not in self._notified:
            self._notified.add(tenant)
            order.begin_batch()
        return order

    def check(self) -> None:
        """Assert that every key is in its tenant's order and the bytes add up."""
        sums: dict[str, int] = {}
        for key, size_bytes in self._sizes.items():
            tenant = tenant_of(key)
            assert key in self._orders[tenant], f"{key!r} is in no order"
            sums[tenant] = sums.get(tenant, 0) + size_bytes
        for tenant, order in self._orders.items():
            order.check()
            assert self._bytes.get(tenant, 0) == sums.get(tenant, 0), f"tenant {tenant!r} holds another sum"
        assert sum(map(len, self._orders.values())) == len(self._sizes)

    def __repr__(self) -> str:
        return f"Fair({self.name}, {len(self._sizes)} keys of {len(self._orders)} tenants)"
