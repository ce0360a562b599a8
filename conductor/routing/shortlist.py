"""A shortlist of the workers that are worth a policy's look when there are very many.

Pure. A view and a score cost about a microsecond; with a thousand workers that is a millisecond a request. But only
three kinds can win: those that hold much of the prompt, those that are computing much of it, and those that have
little to do. Example: of 1000 workers with a limit of 256 the 64 best holders, the 64 that compute most of it, and the
64 least loaded ones of each phase fill the list; the best of the whole thousand is on it unless 64 hold more and 64 do
less.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Protocol, TypeVar

from tanghulu.conductor.routing.policies.base import WorkerView
from tanghulu.conductor.routing.worker_state import Viewed, views
from tanghulu.conductor.routing.worker_views import WorkerViews
from tanghulu.types import InstanceId, Role

#: Most workers of which a policy is shown all.
LIMIT = 256
_pressure = operator.attrgetter("load.pressure")


class Load(Protocol):
    """The figures of a load that are compared."""

    pressure: float


class Loaded(Protocol):
    """A worker, as the choice looks at it."""

    @property
    def id(self) -> InstanceId: ...

    @property
    def role(self) -> Role: ...

    @property
    def load(self) -> Load: ...


W = TypeVar("W", bound=Loaded)


def shortlist(
    workers: Sequence[W], hits: Mapping[InstanceId, int], coming: Mapping[InstanceId, int], limit: int = LIMIT
) -> list[W]:
    """At most ``limit`` workers, in the order of ``workers``; all of them if they are not more."""
    if len(workers) <= limit:
        return list(workers)
    share = limit // 4
    chosen = {
        *heapq.nlargest(share, hits, key=hits.__getitem__),
        *heapq.nlargest(share, coming, key=coming.__getitem__),
    }
    prefill = decode = share
    for worker in sorted(workers, key=_pressure):
        wanted = (prefill > 0 and worker.role.prefills) or (decode > 0 and worker.role.decodes)
        if wanted:
            chosen.add(worker.id)
            prefill, decode = prefill - worker.role.prefills, decode - worker.role.decodes
        if prefill <= 0 and decode <= 0:
            break
    return [w for w in workers if w.id in chosen]


V = TypeVar("V", bound=Viewed)


def views_of(
    worker_views: WorkerViews[V],
    avoid: Set[InstanceId],
    ranks: bool,
    hits: Mapping[InstanceId, int],
    coming: Mapping[InstanceId, int],
) -> list[WorkerView]:
    """The views of ``worker_views``, without the workers in ``avoid`` unless there are no others.

    Of very many workers only the shortlist is viewed, if the policy ``ranks`` workers.
    """
    kept: Sequence[V] = worker_views.workers
    if avoid:
        kept = [w for w in kept if w.id not in avoid] or kept
    if ranks and len(kept) > LIMIT:
        kept = shortlist(kept, hits, coming)
    return worker_views.views(hits, coming) if kept is worker_views.workers else views(kept, hits, coming)
