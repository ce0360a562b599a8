"""What tenants with a quota for the whole cluster hold on which node, as the nodes say once a second. Pure.

The nodes keep the quota; here is only added up what each has to know of the others. It is soft state: a new master
knows it within a second, and what a node that is gone held counts no more.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

#: Tenants that one node may name.
MAX_TENANTS = 4096


class TenantTotals:
    """Bytes by node and tenant, as last heard."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[str, int]] = {}

    def told(self, node_id: str, held: Mapping[str, int]) -> None:
        """``node_id`` holds so much; tenants that it does not name hold nothing there."""
        self._by_node[node_id] = dict(list(held.items())[:MAX_TENANTS])

    def elsewhere(self, node_id: str, alive: Container[str]) -> dict[str, int]:
        """What the tenants of ``node_id`` hold on the other nodes that are ``alive``; the rest is forgotten."""
        for gone in [each for each in self._by_node if each not in alive]:
            del self._by_node[gone]
        others = [held for each, held in self._by_node.items() if each != node_id]
        return {tenant: sum(held.get(tenant, 0) for held in others) for tenant in self._by_node.get(node_id, ())}

    def __repr__(self) -> str:
        return f"TenantTotals({len(self._by_node)} nodes)"
