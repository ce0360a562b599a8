"""What operators do to single nodes: drain, evict, verify. Pure logic for the drivers, with its part of the wire."""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.protos import directory_pb2, store_pb2
from tanghulu.store.client.logic import query as directory
from tanghulu.store.client.logic.context import Context, ask_master
from tanghulu.store.client.logic.effects import CallPeers, Logic, PeerId
from tanghulu.store.client.logic.query import ask_node
from tanghulu.store.client.model import Evicted, TenantView, Verified, VerifiedPage
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.types import validate_keys


def drain(context: Context, node: str, draining: bool) -> Logic[None]:
    """Tell the node to take no new chunks (the master then has its chunks copied away), or to take them again."""
    request = store_pb2.DrainRequest(draining=draining)
    yield from ask_node(context, node, methods.DRAIN.call(request))
    context.nodes.expire()


def evict(context: Context, node: str, keys: Sequence[str], num_bytes: int) -> Logic[Evicted]:
    """Evict ``keys`` as far as they are there and neither read nor pinned hard, then ``num_bytes`` by the policy."""
    validate_keys(keys)
    if num_bytes < 0:
        raise InvalidRequest(f"{num_bytes} bytes cannot be evicted")
    request = store_pb2.EvictRequest(keys=keys, num_bytes=num_bytes)
    reply = yield from ask_node(context, node, methods.EVICT.call(request))
    for key in keys:
        context.locations.forget(key)
    return Evicted(reply.message.num_chunks, reply.message.num_bytes)


def replicate(keys: Sequence[str], holders: int, for_s: float) -> Logic[int]:
    """Ask the master to have each of ``keys`` held by so many nodes for a while; how many of them it took."""
    validate_keys(keys)
    num_taken = 0
    for start in range(0, len(keys), directory.KEYS_PER_CALL):
        part = keys[start : start + directory.KEYS_PER_CALL]
        request = directory_pb2.ReplicateRequest(keys=part, holders=max(0, holders), for_s=for_s)
        call = methods.REPLICATE.call(request)
        reply = yield from ask_master(call)
        num_taken += reply.message.num_taken
    return num_taken


def tenants(context: Context) -> Logic[list[TenantView]]:
    """All tenants by name, summed over the nodes; a tenant hears of itself only. Raises what any node answered."""
    views = yield from directory.nodes(context)
    call = methods.TENANTS.call(store_pb2.TenantsRequest())
    outcomes = yield CallPeers([(PeerId(view.id), call) for view in views])
    told: dict[str, list[store_pb2.TenantUsage]] = {}
    for outcome in outcomes:
        if isinstance(outcome, TanghuluError):
            raise outcome
        for usage in outcome.message.tenants:
            told.setdefault(usage.tenant, []).append(usage)
    capacity_bytes = sum(view.capacity_bytes for view in views)
    return [_sum_up(name, told[name], capacity_bytes) for name in sorted(told)]


def _sum_up(tenant: str, told: Sequence[store_pb2.TenantUsage], capacity_bytes: int) -> TenantView:
    used_bytes = sum(usage.used_bytes for usage in told)
    return TenantView(
        tenant,
        used_bytes,
        used_bytes / capacity_bytes if capacity_bytes else 0.0,
        max(usage.quota_bytes for usage in told),
        max(usage.cluster_quota_bytes for usage in told),
        sum(usage.num_chunks for usage in told),
        sum(usage.hits for usage in told),
        sum(usage.hit_bytes for usage in told),
        sum(usage.misses for usage in told),
        sum(usage.evictions for usage in told),
        sum(usage.evicted_bytes for usage in told),
    )


def verify(context: Context, node: str, after: str, drop_corrupt: bool, report: bool) -> Logic[VerifiedPage]:
    """The node's chunks behind the key ``after``, each compared with its checksums; corrupt ones may be dropped.

    ``report`` has the node tell the master again everything that it holds.
    """
    request = store_pb2.VerifyRequest(after=after, drop_corrupt=drop_corrupt, report=report)
    reply = yield from ask_node(context, node, methods.VERIFY.call(request))
    chunks = tuple(Verified(c.key, c.version, c.size_bytes, c.corrupt) for c in reply.message.chunks)
    return VerifiedPage(chunks, reply.message.more)
