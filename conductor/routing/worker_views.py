"""The workers that routing may choose from, with views kept from one decision to the next.

Pure. Most of a policy's input is unchanged since the last decision: of 128 workers, a few have reported since then, and
a few hold part of the prompt. So ``WorkerViews`` keeps one view of each worker and updates only what has changed; a
tracker whose load changes puts its number in a set, and only these are refreshed: at once after a report, so that no
request waits for it, else by the next decision. Example: 128 workers, a prompt held by one worker, and another request
just sent to one: its load is updated, and the held blocks in one view and in the view of the previous prompt's holder;
the other 125 are not touched.

With very many workers, a policy is shown a shortlist. A view and a score cost about a microsecond; with a thousand
workers that is a millisecond per request. But only three kinds can win: those that hold much of the prompt, those that
are computing much of it, and those that have little to do. Example: of 1000 workers with a limit of 256, the 64 best
holders, the 64 computing most of it, and the 64 least loaded ones of each phase fill the list; the best of the whole
thousand is on it unless 64 hold more and 64 do less.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Generic, TypeVar

from tanghulu.conductor.routing.kind import KindOfWorkers
from tanghulu.conductor.routing.policies.base import Ranked, Shown, WorkerView
from tanghulu.conductor.routing.worker_state import Viewed, views
from tanghulu.types import InstanceId, Role

W = TypeVar("W", bound=Viewed)
#: Most workers shown to a policy without a shortlist.
LIMIT = 256
_pressure = operator.attrgetter("load.pressure")


class WorkerViews(Generic[W]):
    """Workers in a fixed order and roles, with their views. A worker is in one WorkerViews: the latest made."""

    def __init__(self, workers: Sequence[W]) -> None:
        self.workers = list(workers)
        self._number_of = {worker.id: number for number, worker in enumerate(self.workers)}
        self._stale: set[int] = set()
        self._kinds: dict[Role, KindOfWorkers] = {}
        for number, worker in enumerate(self.workers):
            worker.load.watch(self._stale, number, self._load)
            worker.load.kind = self._kinds.setdefault(worker.role, KindOfWorkers())
            worker.load.kind.report(number, worker.load.reported)
            worker.load.renew()
        shown = self._shown = Shown(map(copy.copy, views(self.workers, {}, {})))
        self._found: list[WorkerView] = []
        self._seats: list[list[tuple[Ranked, int]]] = [[] for _ in shown]
        self._seat(shown.prefill, [v.can_prefill for v in shown])
        self._seat(shown.decode, [v.can_decode for v in shown])

    def views(self, hits: Mapping[InstanceId, int], coming: Mapping[InstanceId, int]) -> Shown:
        """Return a view of each, with its present and coming blocks of a prompt.

        This is the cached list: it must not be changed, and is valid until the next call or a worker's report.
        """
        number_of, shown = self._number_of, self._shown
        while self._stale:
            self._load(next(iter(self._stale)))
        self._forget_prompt()
        found = hits.keys() | coming.keys() if coming else hits
        for number in sorted([number_of[holder] for holder in found if holder in number_of]):
            view = shown[number]
            view.found(hits.get(view.id, 0), coming.get(view.id, 0) if coming else 0)
            self._found.append(view)
            shown.holders.append(number)
            for ranked, place in self._seats[number]:
                ranked.holders.append(place)
                if view.match_blocks > ranked.longest:
                    ranked.longest = view.match_blocks
        return shown

    def _load(self, number: int) -> None:
        worker, view = self.workers[number], self._shown[number]
        kind = worker.load.kind
        if kind.report(number, worker.load.reported):
            for other in kind.unmeasured:
                self.workers[other].load.renew()
        self._stale.discard(number)
        view.place = worker.place
        worker.load.show(view)
        for ranked, place in self._seats[number]:
            ranked.loaded(place)

    def _forget_prompt(self) -> None:
        """Clear the workers' blocks of the last prompt."""
        for view in self._found:
            view.found(0, 0)
        self._found.clear()
        shown = self._shown
        shown.holders.clear()
        for ranked in (shown.prefill, shown.decode):
            ranked.holders.clear()
            ranked.longest = 0

    def check(self) -> None:
        for kind in self._kinds.values():
            kind.check()
        fresh, shown = views(self.workers, {}, {}), self._shown
        assert all(0 <= number < len(self.workers) for number in self._stale)
        for number, view in enumerate(fresh):
            kept = copy.copy(shown[number])
            kept.found(0, 0)
            assert number in self._stale or view == kept
        plain = Shown(shown)
        assert shown.holders == plain.holders
        for ranked, made in ((shown.prefill, plain.prefill), (shown.decode, plain.decode)):
            assert ranked == made
            bounds = {"may_fetch": True, "fastest": 0.0}
            assert vars(ranked) | bounds == vars(made) | bounds
            assert ranked.may_fetch or not made.may_fetch
            assert ranked.fastest >= made.fastest

    def _seat(self, ranked: Ranked, able: Sequence[bool]) -> None:
        for place, number in enumerate(itertools.compress(itertools.count(), able)):
            self._seats[number].append((ranked, place))


def shortlist(workers: Sequence[W], hits: Mapping[InstanceId, int], coming: Mapping[InstanceId, int]) -> list[W]:
    """Return at most LIMIT workers, in the order of ``workers``; all of them if there are no more."""
    if len(workers) <= LIMIT:
        return list(workers)
    share = LIMIT // 4
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


def views_of(
    worker_views: WorkerViews[W],
    avoid: Set[InstanceId],
    ranks: bool,
    hits: Mapping[InstanceId, int],
    coming: Mapping[InstanceId, int],
) -> list[WorkerView]:
    """Return the views of ``worker_views``, without the workers in ``avoid`` unless there are no others.

    With very many workers, only the shortlist is included, if the policy ``ranks`` workers.
    """
    kept: Sequence[W] = worker_views.workers
    if avoid:
        kept = [w for w in kept if w.id not in avoid] or kept
    if ranks and len(kept) > LIMIT:
        kept = shortlist(kept, hits, coming)
    return worker_views.views(hits, coming) if kept is worker_views.workers else views(kept, hits, coming)
