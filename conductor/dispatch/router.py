"""Routing of live requests: builds the views of workers and request, and calls the policy."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import Struct, structs

from tanghulu.conductor.dispatch.lifecycle import Flight, MoveLimits
from tanghulu.conductor.dispatch.registry import RegisteredWorker, Registry
from tanghulu.conductor.index.events import CacheMirror, Hits
from tanghulu.conductor.index.hot_prefixes import HotPrefixes
from tanghulu.conductor.routing.expected_output import ExpectedBlocks, OutputEstimate
from tanghulu.conductor.routing.in_flight import InFlightBlocks
from tanghulu.conductor.routing.links import LinkSpeeds
from tanghulu.conductor.routing.overrides import RoutingOverrides, RoutingPolicies, restricted
from tanghulu.conductor.routing.policies.base import Decision, RequestView, RoutingPolicy, Shown, WorkerView
from tanghulu.conductor.routing.policies.registry import decides_fetch
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.conductor.routing.worker_views import views_of
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.errors import InvalidRequest
from tanghulu.session.load import PeerRead
from tanghulu.session.outputs import PrefixHolder
from tanghulu.types import BlockHash, InstanceId, Place


class RoutedRequest(Struct, frozen=True):
    """A decision with the views it was based on. ``rest_tokens``: tokens left to the prefill worker.

    ``workers`` stay as they were until the next decision or worker report. ``coming`` are blocks being computed.
    """

    decision: Decision | None
    request: RequestView
    workers: Sequence[WorkerView]
    hits: Hits
    policy: str
    coming: Mapping[InstanceId, int] = {}

    @property
    def holder(self) -> tuple[InstanceId, int] | None:
        """The worker from which the chosen one fetches a prefix, and the number of leading blocks.

        Decided by the policy; otherwise the worker with the most blocks, if that exceeds those of the chosen worker and
        the store.
        """
        if self.decision is None or not self.hits.workers:
            return None
        if decides_fetch(self.policy):
            fetch = self.decision.fetch
            return (fetch.source, fetch.num_blocks) if fetch is not None else None
        chosen = next(w for w in self.workers if w.id == self.decision.prefill)
        if not chosen.peer_bytes_per_s:
            return None
        longest = max(self.hits.workers.items(), key=lambda each: (each[1], each[0]))
        own = chosen.hit_blocks
        return longest if longest[1] > max(own, self.hits.store) else None

    @property
    def rest_tokens(self) -> int:
        """Tokens after the longest prefix that the chosen prefill worker holds or can fetch; at least one."""
        if self.decision is None:
            return self.request.num_tokens
        chosen = next(w for w in self.workers if w.id == self.decision.prefill)
        hit_blocks = max(chosen.match_blocks, self.request.store_hit_blocks, self.holder[1] if self.holder else 0)
        return max(1, self.request.num_tokens - hit_blocks * self.request.block_tokens)


_NOTHING_HOT: HotPrefixes[BlockHash] = HotPrefixes(0.0)


class Router:
    """Asks the policy for workers, and tracks the work in progress at each."""

    def __init__(
        self,
        registry: Registry,
        mirror: CacheMirror,
        policies: RoutingPolicies,
        place: Place,
        hot: HotPrefixes[BlockHash] = _NOTHING_HOT,
    ) -> None:
        self.policies = policies
        self.hot = hot
        self.in_flight = InFlightBlocks()
        self.output = OutputEstimate()
        self.links = LinkSpeeds()
        self.expected = ExpectedBlocks()
        self._registry = registry
        self._place = place
        self._mirror = mirror

    def choose(self, flight: Flight, model: ServedModel) -> RoutedRequest:
        """Choose workers for both phases of ``flight`` with all its tokens so far."""
        return self._route(self.policies.of(flight.request.routing), flight, model)

    def explain(self, request: GenerationRequest, model: ServedModel) -> RoutedRequest:
        """Return the workers ``request`` would be sent to now; changes nothing, not even a policy's turn."""
        return self._route(copy.deepcopy(self.policies.of(request.routing)), Flight(request, MoveLimits()), model)

    def sent(
        self, wire_id: str, worker: RegisteredWorker, flight: Flight, model: ServedModel, hand_over: bool
    ) -> Sequence[BlockHash]:
        """Record that ``flight`` was sent to ``worker``, which computes its blocks; return these.

        Unless it is to ``hand_over``, it also decodes there.
        """
        sequence = flight.sequence(lambda: model.empty_sequence(flight.request.salt))
        hashes = tuple(sequence.block_hashes)
        self.in_flight.begin(wire_id, worker.id, hashes)
        if not hand_over:
            num_tokens = min(self.output.of(hashes), _most_output(flight)) - len(flight.generated)
            self.expected.begin(wire_id, worker.load, sequence.block_tokens, num_tokens)
        return hashes

    def on_tokens(self, wire_id: str, num_tokens: int) -> None:
        """Record that the worker has prefilled the submission and sent ``num_tokens`` of its answer."""
        self.in_flight.end(wire_id)
        self.expected.came(wire_id, num_tokens)

    def ended(self, wire_id: str) -> None:
        """Record that the submission has ended; no error if that is already recorded."""
        self.in_flight.end(wire_id)
        self.expected.end(wire_id)

    def note_fetch(self, route: RoutedRequest, flight: Flight, model: ServedModel, now_s: float) -> None:
        """Count the blocks the prefill worker of ``flight`` will read from the store."""
        in_store = route.hits.store
        if route.decision is None or not in_store:
            return
        chosen = next(w for w in route.workers if w.id == route.decision.prefill)
        own = max(chosen.match_blocks, route.holder[1] if route.holder else 0)
        if in_store > own:
            sequence = flight.sequence(lambda: model.empty_sequence(flight.request.salt))
            self.hot.fetched(model.card.fingerprint, sequence.block_hashes, own, in_store, now_s)

    def holder_of(self, route: RoutedRequest) -> PrefixHolder | None:
        """Return the worker from which the prefill worker reads its missing prefix, and the prefix's length."""
        return self._prefix_source(*route.holder) if route.holder is not None else None

    def _prefix_source(self, name: InstanceId, num_blocks: int) -> PrefixHolder | None:
        worker = self._registry.workers.get(name)
        if worker is None:
            return None
        instance = worker.instance
        host_id = instance.attributes.get("host_id", "")
        return PrefixHolder(str(instance.address), instance.unix_path, num_blocks, host_id)

    def decode_worker(
        self, flight: Flight, model: ServedModel, reserved: InstanceId | None, holders: Mapping[InstanceId, int]
    ) -> tuple[InstanceId | None, PrefixHolder | None]:
        """Return a worker to continue with the KV that ``flight`` has at its prefill worker.

        The worker already pulling it, else the one chosen with the prefill worker that has a ``reserved`` place; chosen
        anew only if neither can take it. Also return its fallback if that KV is gone: of the other ``holders``, as
        recorded when the prefill began, the one with the most blocks, if any.
        """
        exporter = flight.source.instance_id if flight.source is not None else None
        pulling = flight.ahead[0] if flight.ahead is not None else None
        chosen = next((name for name in (pulling, reserved) if name is not None and self._may_take(name, flight)), None)
        if chosen is None:
            chosen, holders = self._choose_decode(flight, model, exporter)
        others = [(num_blocks, name) for name, num_blocks in holders.items() if name not in (chosen, exporter)]
        num_blocks, name = max(others, default=(0, chosen))
        return chosen, self._prefix_source(name, num_blocks) if name is not None and num_blocks else None

    def _may_take(self, name: InstanceId, flight: Flight) -> bool:
        worker = self._registry.workers.get(name)
        return worker is not None and worker.usable and name not in flight.avoid

    def _choose_decode(
        self, flight: Flight, model: ServedModel, exporter: InstanceId | None
    ) -> tuple[InstanceId | None, Mapping[InstanceId, int]]:
        """Return the policy's current choice, and the number of blocks each worker has."""
        policy = self.policies.of(flight.request.routing)
        request, workers, hits, _ = self._views(policy, flight, model)
        holder = self._registry.workers.get(exporter) if exporter is not None else None
        if holder is not None and request.links is not None:
            request = structs.replace(request, kv_place=holder.place)
        return policy.choose_decode(request, workers), hits.workers

    def note_reads(self, reader: RegisteredWorker, reads: Sequence[PeerRead]) -> None:
        """Update link speeds from KV that ``reader`` has read from other workers."""
        for read in reads:
            source = next((w for w in self._registry.workers.values() if str(w.instance.address) == read.address), None)
            if source is not None:
                self.links.observe(source.place, reader.place, read.num_bytes, read.seconds)

    def check_overrides(self, overrides: RoutingOverrides) -> None:
        """Raise InvalidRequest if the overrides name an unregistered worker (requests do not wait for one), or split
        the phases of a request that its worker takes whole.
        """
        for worker in filter(None, (overrides.prefill, overrides.decode)):
            if worker not in self._registry.workers:
                there = ", ".join(self._registry.workers) or "none"
                raise InvalidRequest(
                    f"the request names worker {worker!r}, which is not registered; registered workers: {there}"
                )
            if self._registry.workers[worker].takes_whole_requests and overrides.decode not in ("", overrides.prefill):
                raise InvalidRequest(
                    f"worker {worker!r} takes requests whole; name it for both phases, or name no decode worker"
                )

    def rest_s(self, flight: Flight, model: ServedModel) -> float:
        """Return seconds of prefill for the tokens of ``flight`` not cached anywhere, on the fastest worker."""
        request, workers, hits, _ = self._views(self.policies.default, flight, model)
        hit_blocks = max([hits.store, *hits.workers.values()])
        return min([w.prefill_s(request, hit_blocks) for w in workers], default=0.0)

    def check(self) -> None:
        self.policies.check()
        self.in_flight.check()
        self.hot.check()
        self.links.check()
        self.expected.check()

    def _route(self, policy: RoutingPolicy, flight: Flight, model: ServedModel) -> RoutedRequest:
        request, workers, hits, coming = self._views(policy, flight, model)
        decision = policy.choose(request, workers) if workers else None
        if decision is not None and self._registry.workers[decision.prefill].takes_whole_requests:
            decision = replace(decision, decode=decision.prefill)
        return RoutedRequest(decision, request, workers, hits, policy.name, coming)

    def _views(
        self, policy: RoutingPolicy, flight: Flight, model: ServedModel
    ) -> tuple[RequestView, Sequence[WorkerView], Hits, Mapping[InstanceId, int]]:
        sequence = flight.sequence(lambda: model.empty_sequence(flight.request.salt))
        hits = self._mirror.hits(sequence.block_hashes)
        request = RequestView(
            len(sequence),
            sequence.block_tokens,
            model.card.block_bytes,
            hits.store,
            session=flight.request.session and f"{flight.request.tenant}/{flight.request.session}",
            place=self._place,
            named_blocks=len(sequence.block_hashes),
            mean_output=self.output.tokens,
            expected_output=self.output.of(sequence.block_hashes),
            most_output=max(1, _most_output(flight) - len(flight.generated)),
            links=self.links if self.links else None,
        )
        coming = self.in_flight.match(sequence.block_hashes)
        overrides = flight.request.routing
        worker_views = self._registry.views(model)
        avoid = flight.avoid | self._registry.too_short(model, len(sequence))
        ranks = policy.ranks and not (overrides.prefill or overrides.decode)
        shown = views_of(worker_views, avoid, ranks, hits.workers, coming)
        return request, restricted(with_both_phases(shown), overrides), hits, coming


def _most_output(flight: Flight) -> int:
    return flight.request.stop.max_new_tokens


def with_both_phases(shown: list[WorkerView]) -> list[WorkerView]:
    """Let one kind of worker do both phases if no other kind is alive: every worker can do both."""
    if isinstance(shown, Shown) and shown.prefill and shown.decode:
        return shown
    if not any(v.can_prefill for v in shown):
        shown = [replace(v, can_prefill=True) for v in shown]
    if not any(v.can_decode for v in shown):
        shown = [replace(v, can_decode=True) for v in shown]
    return shown
