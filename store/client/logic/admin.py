"""Operators' actions on single nodes: drain, evict, verify. Pure logic for the drivers, with its part of the wire."""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.arguments import above_zero, text, whole
from tanghulu.errors import TanghuluError
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.directory_client import call_one, call_owners, refresh_owners
from tanghulu.store.client.logic.effects import MASTER, CallPeers, Deadline, Logic, PeerId, owner_peer
from tanghulu.store.client.logic.query import KEYS_PER_CALL, call_node, leaders_nodes, valid_keys
from tanghulu.store.client.model import MasterView, TenantView
from tanghulu.store.protocol import messages as m
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.directory_messages import NodesRequest, ReplicateRequest
from tanghulu.store.protocol.key_slots import NUM_RANGES, bits_of

#: Longest wait for a stalled master; the others have answered.
_MASTER_S = 2.0
#: Limit of a message; the master and the nodes have bounds of their own.
MAX_HOLDERS, MAX_BYTES = (1 << 31) - 1, (1 << 62) - 1
#: The figures of a tenant that are summed over the nodes.
_SUMMED = ("used_bytes", "num_chunks", "hits", "hit_bytes", "misses", "evictions", "evicted_bytes")


def drain(context: Context, deadline: Deadline, node: str, draining: bool) -> Logic[None]:
    """Have the node refuse new chunks (the master then has its chunks copied away), or accept them again."""
    yield from call_node(context, deadline, node, methods.DRAIN.call(m.DrainRequest(draining)))
    context.nodes.expire()


def evict(context: Context, deadline: Deadline, node: str, keys: Sequence[str], num_bytes: int) -> Logic[m.Evicted]:
    """Evict those of ``keys`` that are present, unread and not pinned hard, then ``num_bytes`` by the policy."""
    keys = valid_keys(keys)
    num_bytes = whole("num_bytes", num_bytes, 0, MAX_BYTES)
    reply = yield from call_node(context, deadline, node, methods.EVICT.call(m.EvictRequest(keys, num_bytes)))
    for key in keys:
        context.locations.forget(key)
    evicted: m.Evicted = reply.message
    return evicted


def replicate(context: Context, deadline: Deadline, keys: Sequence[str], holders: int, for_s: float) -> Logic[int]:
    """Ask the master to keep copies of each of ``keys`` on several nodes for a while; return how many it accepted."""
    keys = valid_keys(keys)
    holders, for_s = whole("holders", holders, 0, MAX_HOLDERS), above_zero("for_s", for_s)
    num_taken = 0
    for start in range(0, len(keys), KEYS_PER_CALL):
        part = keys[start : start + KEYS_PER_CALL]
        request = ReplicateRequest(part, holders, for_s)
        reply = yield from call_owners(context, deadline, methods.REPLICATE.call(request))
        num_taken += reply.message.num_taken
    return num_taken


def masters(context: Context, deadline: Deadline) -> Logic[list[MasterView]]:
    """Return the masters that own ranges of keys, by their first range, with the keys known to each."""
    yield from refresh_owners(context, MASTER)
    owners = context.masters.owners
    if owners is None:
        reply = yield from call_one(MASTER, methods.NODES.call(NodesRequest()))
        return [_master_view(reply, "", range(NUM_RANGES), reply.message.signature.term)]
    known = owners.map
    ranges = {owner: sorted(known.ranges_of(owner)) for owner in known.owners if owner is not None}
    calls = [
        (owner_peer(owner), methods.NODES.call(NodesRequest(ranges=bits_of(numbers))))
        for owner, numbers in ranges.items()
    ]
    outcomes = yield CallPeers(calls, _MASTER_S, waits=False)
    return [
        _master_view(outcome, str(owner), numbers, max(map(known.term_of, numbers)))
        for (owner, numbers), outcome in zip(ranges.items(), outcomes, strict=True)
    ]


def _master_view(
    outcome: messages.AnyReply | TanghuluError, address: str, ranges: Sequence[int], term: int
) -> MasterView:
    if isinstance(outcome, TanghuluError):
        return MasterView(address, tuple(ranges), term, answers=False)
    reply = outcome.message
    return MasterView(address, tuple(ranges), term, reply.leading, reply.num_keys, reply.rebuilding_ranges)


def tenants(context: Context, deadline: Deadline) -> Logic[list[TenantView]]:
    """Return all tenants by name, summed over the nodes; a tenant sees only itself. Raises any node's error."""
    views = yield from leaders_nodes(context, deadline)
    call = methods.TENANTS.call(m.TenantsRequest())
    outcomes = yield CallPeers([(PeerId(view.id), call) for view in views])
    by_tenant: dict[str, list[m.TenantFigures]] = {}
    for outcome in outcomes:
        if isinstance(outcome, TanghuluError):
            raise outcome
        for usage in outcome.message.tenants:
            by_tenant.setdefault(usage.tenant, []).append(usage)
    capacity_bytes = sum(view.capacity_bytes for view in views)
    return [_sum_up(name, by_tenant[name], capacity_bytes) for name in sorted(by_tenant)]


def _sum_up(tenant: str, usages: Sequence[m.TenantFigures], capacity_bytes: int) -> TenantView:
    sums = {name: sum(getattr(usage, name) for usage in usages) for name in _SUMMED}
    quota_bytes = max(usage.quota_bytes for usage in usages)
    cluster_bytes = max(usage.cluster_quota_bytes for usage in usages)
    share = sums["used_bytes"] / capacity_bytes if capacity_bytes else 0.0
    return TenantView(tenant, share=share, quota_bytes=quota_bytes, cluster_quota_bytes=cluster_bytes, **sums)


def verify(
    context: Context, deadline: Deadline, node: str, after: str, drop_corrupt: bool, report: bool
) -> Logic[m.VerifiedPage]:
    """Return the node's chunks behind the key ``after``, compared with their checksums; optionally drop corrupt ones.

    ``report`` has the node report all its chunks to the master again.
    """
    after = text("after", after)
    request = m.VerifyRequest(after, drop_corrupt=drop_corrupt, report=report)
    reply = yield from call_node(context, deadline, node, methods.VERIFY.call(request))
    page: m.VerifiedPage = reply.message
    return page
