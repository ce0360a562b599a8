"""Session affinity, a modifier of any policy: a conversation stays where its last turn was prefilled.

It leaves when the worker is gone or when its queue is longer than the shortest one by more than ``patience_s``. The
memory is bounded: beyond ``MAX_SESSIONS`` the sessions unused for longest are forgotten. Requests without a session
name are the inner policy's alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from tanghulu.conductor.routing.policies.base import Decision, RequestView, RoutingPolicy, WorkerView, prefillers
from tanghulu.types import InstanceId

MAX_SESSIONS = 65_536


class SessionAffinity:
    """Remembers each session's worker; asks ``inner`` for everything else."""

    def __init__(self, inner: RoutingPolicy, patience_s: float = 2.0, max_sessions: int = MAX_SESSIONS) -> None:
        assert max_sessions > 0
        self.ranks = False
        self.name = f"{inner.name}+session-affinity"
        self._inner = inner
        self._patience_s = patience_s
        self._max_sessions = max_sessions
        self._homes: OrderedDict[str, InstanceId] = OrderedDict()

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """The session's worker while it is there and not far behind; else the inner policy's choice, remembered."""
        home = self._home(request, prefillers(workers)) if request.session else None
        if home is not None:
            workers = [w for w in workers if w.id == home.id or not w.can_prefill or w.can_decode]
            workers = [w if w.id == home.id else _decode_only(w) for w in workers]
        decision = self._inner.choose(request, workers)
        if decision is not None and request.session:
            self._remember(request.session, decision.prefill)
        return decision

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        return self._inner.choose_decode(request, workers)

    def check(self) -> None:
        assert len(self._homes) <= self._max_sessions

    def _home(self, request: RequestView, able: Sequence[WorkerView]) -> WorkerView | None:
        home = next((w for w in able if w.id == self._homes.get(request.session)), None)
        if home is None or home.wait_s > min([w.wait_s for w in able]) + self._patience_s:
            return None
        return home

    def _remember(self, session: str, worker: InstanceId) -> None:
        self._homes[session] = worker
        self._homes.move_to_end(session)
        if len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)


def _decode_only(worker: WorkerView) -> WorkerView:
    return replace(worker, can_prefill=False)
