"""The workers that routing may choose from, with their views kept from one decision to the next.

Pure. Most of what a policy is shown has not changed since the last decision: of 128 workers a few have reported since
then, a few hold part of the prompt. So the views of those who hold nothing of it are kept in a list; a tracker whose
load changes leaves its number in a set, and only these are made anew. Example: 128 workers, 8 reports, a prompt that
one worker holds: nine views are made or looked up, and the other 119 are not even touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from tanghulu.conductor.policies.base import Ranked, Shown
from tanghulu.conductor.worker_state import Viewed, views
from tanghulu.types import InstanceId

W = TypeVar("W", bound=Viewed)


class Roster(Generic[W]):
    """Some workers in a fixed order and in fixed roles. A worker is on one roster at a time: the latest one made."""

    def __init__(self, workers: Sequence[W]) -> None:
        self.workers = list(workers)
        self._number_of = {worker.id: number for number, worker in enumerate(self.workers)}
        self._stale: set[int] = set()
        for number, worker in enumerate(self.workers):
            worker.load.watch(self._stale, number)
        shown = self._shown = Shown(views(self.workers, {}, {}))
        self._seats: list[list[tuple[Ranked, int]]] = [[] for _ in shown]
        self._seat(shown.prefill, [v.can_prefill for v in shown])
        self._seat(shown.decode, [v.can_decode for v in shown])

    def views(self, hits: Mapping[InstanceId, int], coming: Mapping[InstanceId, int]) -> Shown:
        """A view of each, with the blocks of a prompt that it has and that are coming to it.

        It is the roster's own list: it must not be changed, and is as it was until the next call.
        """
        number_of, stale, shown = self._number_of, self._stale, self._shown
        for number in stale:
            self._put(number, 0, 0)
        stale.clear()
        for holders in (shown.holders, shown.prefill.holders, shown.decode.holders):
            holders.clear()
        for number in sorted(
            [number_of[h] for h in (hits.keys() | coming.keys() if coming else hits) if h in number_of]
        ):
            id = self.workers[number].id
            self._put(number, hits.get(id, 0), coming.get(id, 0))
            shown.holders.append(number)
            for ranked, place in self._seats[number]:
                ranked.holders.append(place)
            stale.add(number)  # the next prompt is another one
        return shown

    def check(self) -> None:
        """What is kept is what would be made now, but for those that are marked."""
        fresh, shown = views(self.workers, {}, {}), self._shown
        assert all(0 <= number < len(self.workers) for number in self._stale)
        for number, view in enumerate(fresh):
            assert number in self._stale or view == shown[number]
        plain = Shown(shown)
        assert shown.holders == plain.holders
        for kept, made in ((shown.prefill, plain.prefill), (shown.decode, plain.decode)):
            assert kept == made
            assert vars(kept) | {"may_fetch": True} == vars(made) | {"may_fetch": True}
            assert kept.may_fetch or not made.may_fetch

    def _seat(self, ranked: Ranked, able: Sequence[bool]) -> None:
        for place, number in enumerate(itertools.compress(itertools.count(), able)):
            self._seats[number].append((ranked, place))

    def _put(self, number: int, hit_blocks: int, coming_blocks: int) -> None:
        worker = self.workers[number]
        view = worker.load.view(worker.id, worker.role, hit_blocks, coming_blocks, worker.place)
        self._shown[number] = view
        for ranked, place in self._seats[number]:
            ranked.put(place, view)
