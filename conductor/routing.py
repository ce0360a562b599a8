"""What a policy is shown: the views of workers and request, built from registry, cache mirror and own dispatches."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from tanghulu.conductor.events import CacheMirror, Hits
from tanghulu.conductor.in_flight import InFlightBlocks
from tanghulu.conductor.lifecycle import Flight
from tanghulu.conductor.policies.base import Decision, Policy, RequestView, WorkerView
from tanghulu.conductor.registry import Registry
from tanghulu.conductor.requests import GenerationRequest
from tanghulu.conductor.served_model import ServedModel
from tanghulu.conductor.shortlist import shortlist
from tanghulu.conductor.worker_state import views
from tanghulu.types import InstanceId, Place


@dataclass(frozen=True, slots=True)
class Route:
    """A decision with what it was made from. ``rest_tokens``: what the prefill worker will have to compute."""

    decision: Decision | None
    request: RequestView
    workers: tuple[WorkerView, ...]
    hits: Hits

    @property
    def rest_tokens(self) -> int:
        """Tokens behind the longest prefix that the chosen prefill worker holds or can fetch; at least one."""
        if self.decision is None:
            return self.request.num_tokens
        chosen = next(w for w in self.workers if w.id == self.decision.prefill)
        hit_blocks = max(chosen.match_blocks, self.request.store_hit_blocks)
        return max(1, self.request.num_tokens - hit_blocks * self.request.block_tokens)


class Router:
    """Asks the policy."""

    def __init__(self, registry: Registry, mirror: CacheMirror, policy: Policy, place: Place) -> None:
        self.policy = policy
        self.in_flight = InFlightBlocks()
        self._registry = registry
        self._place = place
        self._mirror = mirror

    def choose(self, flight: Flight, model: ServedModel) -> Route:
        """Workers for both phases of ``flight`` with all its tokens so far."""
        return self._route(self.policy, flight, model)

    def explain(self, request: GenerationRequest, model: ServedModel) -> Route:
        """Where ``request`` would go now; changes nothing, not even whose turn it is."""
        return self._route(copy.deepcopy(self.policy), Flight(request, 0), model)

    def sent(self, wire_id: str, worker: InstanceId, flight: Flight, model: ServedModel) -> None:
        """``flight`` was sent to ``worker``, which computes its blocks until ``InFlightBlocks.end``."""
        sequence = flight.sequence(lambda: model.empty_sequence(flight.request.salt))
        self.in_flight.begin(wire_id, worker, tuple(sequence.block_hashes))

    def choose_decode(self, flight: Flight, model: ServedModel) -> InstanceId | None:
        """A worker that goes on with the KV that ``flight`` has at its prefill worker."""
        request, workers, _ = self._views(flight, model)
        return self.policy.choose_decode(request, workers)

    def _route(self, policy: Policy, flight: Flight, model: ServedModel) -> Route:
        request, workers, hits = self._views(flight, model)
        decision = policy.choose(request, workers) if workers else None
        return Route(decision, request, tuple(workers), hits)

    def _views(self, flight: Flight, model: ServedModel) -> tuple[RequestView, list[WorkerView], Hits]:
        sequence = flight.sequence(lambda: model.empty_sequence(flight.request.salt))
        hits = self._mirror.hits(sequence.block_hashes)
        request = RequestView(
            len(sequence),
            sequence.block_tokens,
            model.card.block_bytes,
            hits.store,
            session=flight.request.session,
            place=self._place,
            named_blocks=len(sequence.block_hashes),
        )
        usable = self._registry.usable(model.card.model)
        kept = ([w for w in usable if w.id not in flight.avoid] or usable) if flight.avoid else usable
        coming = self.in_flight.match(sequence.block_hashes)
        if self.policy.ranks:
            kept = shortlist(kept, hits.workers, coming)
        return request, with_both_phases(views(kept, hits.workers, coming)), hits


def with_both_phases(shown: list[WorkerView]) -> list[WorkerView]:
    """With one kind of worker alone alive, it does the other phase too: every worker can do both."""
    if not any(v.can_prefill for v in shown):
        shown = [replace(v, can_prefill=True) for v in shown]
    if not any(v.can_decode for v in shown):
        shown = [replace(v, can_decode=True) for v in shown]
    return shown
