"""The routing service's state: workers, their blocks and the requests in progress at them; and its answers.

Pure: times go in. It uses the conductor's own parts (policies, prefix index, blocks in flight, load), so a gateway
using it decides as a conductor would. Its callers report what it cannot see: workers and their loads, KV events or, for
engines without them, the ends of prefills (``assumed``).

    worker:   put_worker -> report, events … -> remove_worker
    request:  best (with a request id) or add_request -> prefill_completed -> free

An added request counts until it is freed, however long it runs; only removing its worker drops it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from tanghulu.auth.api_keys import ApiKey
from tanghulu.conductor.dispatch.router import with_both_phases
from tanghulu.conductor.index.assumed import AssumedBlocks
from tanghulu.conductor.index.events import events_of
from tanghulu.conductor.index.prefix_index import PrefixIndex, Stored
from tanghulu.conductor.routing.in_flight import InFlightBlocks
from tanghulu.conductor.routing.overrides import NO_OVERRIDES, RoutingOverrides, RoutingPolicies, restricted
from tanghulu.conductor.routing.policies.base import Candidate, RequestView, Shown, WorkerView
from tanghulu.conductor.routing.worker_state import LoadTracker, views
from tanghulu.conductor.routing.worker_views import WorkerViews, views_of
from tanghulu.conductor.routing_service.worker_networks import WorkerNetworks
from tanghulu.errors import InvalidRequest, NodeUnavailable, Overloaded
from tanghulu.session.load import WorkerLoad
from tanghulu.session.outputs import KvChange
from tanghulu.types import BlockHash, InstanceId, Place, Role

MAX_REQUESTS = 1_000_000
#: Limit per key, if keys are required: no key takes the places of the others.
MAX_REQUESTS_PER_KEY = MAX_REQUESTS // 4
MAX_WORKERS = 10_000
UNKNOWN_BLOCKS = 1 << 40
#: Derives the names of tenants' blocks; new in each process, as are its known blocks.
_SECRET = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class RoutingClient:
    """The key used by a caller. Its requests and its tenant's blocks have names of their own."""

    client: str = ""
    tenant: str = ""

    @classmethod
    def of(cls, key: ApiKey | None) -> RoutingClient:
        """Return the caller with ``key``; None if no keys are required."""
        return cls() if key is None else cls(key.client, "" if key.shared_prefixes else key.tenant)

    def request(self, request_id: str) -> str:
        """Return the local name of a request. A key's own name has no slash."""
        return f"{self.client}/{request_id}" if self.client else request_id

    def blocks(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Return the local names of a prompt's blocks: no other tenant can name the same, whatever hashes it sends."""
        if not self.tenant:
            return hashes
        own = hashlib.blake2b(self.tenant.encode(), digest_size=16, key=_SECRET).digest()
        return [BlockHash(hashlib.blake2b(each, digest_size=16, key=own).digest()) for each in hashes]


#: The caller if no keys are required.
ANYBODY = RoutingClient()


@dataclass(frozen=True, slots=True)
class RoutingQuery:
    """A prompt to route, and whose it is: the names of its full blocks, its length, the request's overrides."""

    hashes: Sequence[BlockHash]
    num_tokens: int
    overrides: RoutingOverrides = NO_OVERRIDES
    session: str = ""
    caller: RoutingClient = ANYBODY


@dataclass(frozen=True, slots=True)
class Best:
    """The workers for a request, the leading blocks present or coming at its prefill worker, and the reasons."""

    prefill: InstanceId
    decode: InstanceId
    overlap_blocks: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class PotentialLoad:
    """The load of a worker if it got the request as well."""

    worker: InstanceId
    prefill_tokens: int
    decode_blocks: int
    num_requests: int


@dataclass(eq=False)
class RoutableWorker:
    """A worker that can be sent requests. ``num_blocks`` are used by requests in progress that were added here.

    ``url`` is that of its HTTP API, "" if unknown.
    """

    id: InstanceId
    role: Role
    place: Place
    load: LoadTracker
    num_blocks: int = 0
    url: str = ""


@dataclass(eq=False)
class _Added:
    client: str
    prefill: RoutableWorker
    decode: RoutableWorker
    hashes: Sequence[BlockHash]
    num_blocks: int
    prefilled: bool = False


class RoutingService:
    """Routing as a service. ``block_tokens`` and ``block_bytes`` are those of the single served model."""

    def __init__(
        self,
        policies: RoutingPolicies,
        block_tokens: int,
        block_bytes: int,
        assumed: AssumedBlocks | None = None,
        networks: WorkerNetworks | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self.networks = networks or WorkerNetworks()
        self.index = PrefixIndex()
        self._policies, self._block_bytes, self._assumed = policies, block_bytes, assumed
        self._in_flight = InFlightBlocks()
        self._targets: dict[InstanceId, RoutableWorker] = {}
        self._worker_views: WorkerViews[RoutableWorker] = WorkerViews([])
        self._added: dict[str, _Added] = {}
        self._num_of: Counter[str] = Counter()

    @property
    def num_requests(self) -> int:
        return len(self._added)

    @property
    def workers(self) -> list[RoutableWorker]:
        return list(self._targets.values())

    # --- workers

    def put_worker(self, worker: InstanceId, role: Role, place: Place = Place(), url: str = "") -> None:
        """Register a worker, or update its registration.

        Raises InvalidRequest for a role that neither prefills nor decodes, or a url that is invalid or outside the
        workers' networks, Overloaded beyond MAX_WORKERS.
        """
        if url:
            url = self.networks.checked_url(url)
        if not (role.prefills or role.decodes):
            raise InvalidRequest(f"worker {worker!r} has role {role.value!r}; it must be prefill, decode or worker")
        known = self._targets.get(worker)
        if known is not None:
            known.role, known.place, known.url = role, place, url
            known.load.renew()
            self._worker_views = WorkerViews(self.workers)
            return
        if len(self._targets) >= MAX_WORKERS:
            raise Overloaded(f"there are {MAX_WORKERS} workers already; remove one first")
        self._targets[worker] = RoutableWorker(worker, role, place, LoadTracker(), url=url)
        self._worker_views = WorkerViews(self.workers)
        self.report(worker, WorkerLoad())

    def remove_worker(self, worker: InstanceId) -> None:
        """Remove a worker, its blocks and the requests added to it; an unknown one is no error."""
        target = self._targets.pop(worker, None)
        if target is None:
            return
        self._worker_views = WorkerViews(self.workers)
        self.index.remove_holder(worker)
        if self._assumed is not None:
            self._assumed.forget(worker)
        for request_id in [r for r, a in self._added.items() if target in (a.prefill, a.decode)]:
            self._free(request_id)

    def report(self, worker: InstanceId, load: WorkerLoad) -> None:
        """Record a worker's own load figures. Raises InvalidRequest for an unknown worker.

        One that does not report its number of blocks is assumed to have room.
        """
        if not load.blocks_total:
            load = structs.replace(load, blocks_free=UNKNOWN_BLOCKS)
        self._target(worker).load.report(load)

    def kv_event(self, worker: InstanceId, change: KvChange) -> None:
        """Apply an event of a worker's cache. Raises InvalidRequest for an unknown worker."""
        self._target(worker)
        for event in events_of(worker, change):
            self.index.apply(event)

    def applier(self, worker: InstanceId) -> Callable[[KvChange], None]:
        """Return a function that applies the events of a worker, until it is removed."""

        def apply(change: KvChange) -> None:
            if worker in self._targets:
                self.kv_event(worker, change)

        return apply

    def dump_events(self) -> Iterator[Stored]:
        """Yield events that turn an empty index into this one."""
        return self.index.dump()

    # --- requests

    def best(self, query: RoutingQuery, now_s: float, request_id: str = "", explain: bool = False) -> Best:
        """Choose the workers for a request; ``request_id`` adds it there, ``explain`` returns all candidates.

        Raises NodeUnavailable if no worker can take it, InvalidRequest for a request id already in use.
        """
        policy, request = self._policies.of(query.overrides), self._request(query)
        hits, coming = self._overlaps(query.hashes, now_s)
        ranks = policy.ranks and not (query.overrides.prefill or query.overrides.decode)
        every = with_both_phases(views_of(self._worker_views, frozenset(), ranks, hits, coming))
        shown = restricted(every, query.overrides)
        decision = policy.choose(request, shown) if shown else None
        if decision is None:
            raise NodeUnavailable(
                f"no worker can take the request, of {len(every)} registered; check roles, and the workers it names"
            )
        chosen = next(view for view in shown if view.id == decision.prefill)
        candidates = decision.candidates if explain else ()
        if request_id:
            self._add(request_id, query, chosen, self._targets[decision.decode])
        return Best(decision.prefill, decision.decode, chosen.match_blocks, candidates)

    def ranked(
        self, targets: Sequence[RoutableWorker], query: RoutingQuery, now_s: float, most: int = 1
    ) -> list[RoutableWorker]:
        """Return the best of ``targets``, all of which do both phases; with the next ones, up to ``most`` in all.

        Those are the ones with the least time to the first token.
        """
        hits, coming = self._overlaps(query.hashes, now_s)
        policy, request = self._policies.of(query.overrides), self._request(query)
        shown = Shown(restricted(views(targets, hits, coming), query.overrides))
        decision = policy.choose(request, shown) if shown else None
        if decision is None:
            return []
        at = next(at for at, view in enumerate(shown) if view.id == decision.prefill)
        others = [*shown[at + 1 :], *shown[:at]]  # equal ones take turns
        if most > 1:
            others.sort(key=lambda view: view.wait_s + view.prefill_s(request, view.match_blocks))
        return [self._targets[view.id] for view in (shown[at], *others[: most - 1])]

    def add_request(
        self, request_id: str, query: RoutingQuery, prefill: InstanceId, decode: InstanceId, now_s: float
    ) -> None:
        """Add a request routed by a gateway. Raises InvalidRequest for unknown workers and a used id."""
        hits, coming = self._overlaps(query.hashes, now_s)
        view = views([self._target(prefill)], hits, coming)[0]
        self._add(request_id, query, view, self._target(decode))

    def prefill_completed(self, request_id: str, now_s: float, caller: RoutingClient = ANYBODY) -> bool:
        """Record the first token of a request; repeated calls change nothing. False if it is not in progress."""
        name = caller.request(request_id)
        added = self._added.get(name)
        if added is None or added.prefilled:
            return added is not None
        added.prefilled = True
        self._in_flight.end(name)
        added.prefill.load.on_report(name)
        added.decode.load.release_decode(name)
        added.decode.load.sent(name, 0, added.num_blocks)
        if self._assumed is not None:
            for worker in {added.prefill.id, added.decode.id}:
                self.kv_event(worker, self._assumed.used(worker, added.hashes, now_s))
        return True

    def free(self, request_id: str, caller: RoutingClient = ANYBODY) -> bool:
        """Free an ended request of ``caller``; False if it was not in progress."""
        return self._free(caller.request(request_id))

    def _free(self, name: str) -> bool:
        added = self._added.pop(name, None)
        if added is None:
            return False
        self._num_of[added.client] -= 1
        if not self._num_of[added.client]:
            del self._num_of[added.client]
        self._in_flight.end(name)
        for target in {added.prefill, added.decode}:
            target.load.on_report(name)
            target.load.release_decode(name)
            target.num_blocks -= added.num_blocks
        return True

    # --- queries

    def overlaps(self, hashes: Sequence[BlockHash], now_s: float) -> dict[InstanceId, int]:
        """Return the leading blocks each worker holds or is computing; workers without any are omitted."""
        hits, coming = self._overlaps(hashes, now_s)
        return {worker: max(hits.get(worker, 0), coming.get(worker, 0)) for worker in hits.keys() | coming.keys()}

    def potential_loads(self, query: RoutingQuery, now_s: float) -> list[PotentialLoad]:
        request = self._request(query)
        hits, coming = self._overlaps(query.hashes, now_s)
        return [
            PotentialLoad(
                view.id,
                view.queue_tokens + request.rest_tokens(view.match_blocks),
                target.num_blocks + request.num_blocks,
                view.num_requests + 1,
            )
            for target, view in zip(self._worker_views.workers, self._worker_views.views(hits, coming), strict=True)
        ]

    def check(self) -> None:
        self.index.check()
        self._worker_views.check()
        assert self._worker_views.workers == self.workers
        self._in_flight.check()
        used = dict.fromkeys(self._targets.values(), 0)
        for added in self._added.values():
            for target in {added.prefill, added.decode}:
                used[target] += added.num_blocks
        assert used == {target: target.num_blocks for target in self._targets.values()}
        assert set(self.index.holders) <= set(self._targets)
        assert len(self._in_flight) <= len(self._added)
        assert self._num_of == Counter(added.client for added in self._added.values())
        for target in self._targets.values():
            target.load.check()

    # --- helpers

    def _target(self, worker: InstanceId) -> RoutableWorker:
        target = self._targets.get(worker)
        if target is None:
            raise InvalidRequest(f"worker {worker!r} is unknown; registered: {', '.join(self._targets) or 'none'}")
        return target

    def _request(self, query: RoutingQuery) -> RequestView:
        num_tokens = max(1, query.num_tokens, len(query.hashes) * self.block_tokens)
        named = len(query.hashes)
        session = query.session and query.caller.request(query.session)
        return RequestView(num_tokens, self.block_tokens, self._block_bytes, session=session, named_blocks=named)

    def _overlaps(
        self, hashes: Sequence[BlockHash], now_s: float
    ) -> tuple[Mapping[InstanceId, int], Mapping[InstanceId, int]]:
        if self._assumed is not None:
            for worker, change in self._assumed.sweep(now_s):
                self.kv_event(worker, change)
        return self.index.match(hashes), self._in_flight.match(hashes)

    def _add(self, request_id: str, query: RoutingQuery, prefill: WorkerView, decode: RoutableWorker) -> None:
        name, client = query.caller.request(request_id), query.caller.client
        if name in self._added:
            raise InvalidRequest(f"request {request_id!r} is already in progress")
        if len(self._added) >= MAX_REQUESTS:
            raise Overloaded(f"{MAX_REQUESTS} requests are in progress; free those that have ended")
        if client and self._num_of[client] >= MAX_REQUESTS_PER_KEY:
            raise Overloaded(f"{MAX_REQUESTS_PER_KEY} requests of this key are in progress; free those that have ended")
        request, target = self._request(query), self._targets[prefill.id]
        rest_tokens = request.rest_tokens(prefill.match_blocks)
        self._added[name] = _Added(client, target, decode, query.hashes, request.num_blocks)
        self._num_of[client] += 1
        self._in_flight.begin(name, target.id, query.hashes)
        target.load.sent(name, rest_tokens, request.num_blocks)
        for each in {target, decode}:
            each.num_blocks += request.num_blocks
        if decode is not target:
            decode.load.reserve_decode(name, request.num_blocks)
