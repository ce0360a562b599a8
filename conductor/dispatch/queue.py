"""The conductor's own queue: the order in which waiting requests are sent.

Pure. Priorities come first (higher is sooner, as in the body's ``priority``). Within one, the queue is first come first
served, or shortest first with ageing: each second of waiting makes a request count as ``ageing`` seconds shorter, so
that a long one is overtaken for a bounded time only. With

    rank = seconds of prefill + ageing * arrival

the order never changes while requests wait, as the clock is the same for all. Example, ageing 0.1: a prompt of 3 s that
came at 0 has rank 3.0; one of 0.5 s goes ahead of it if it comes before second 25, later ones do not.

A request that was moved because its worker was lost goes in front of all that were not: it has waited already. Of
several such requests those of higher priority come first, and then those that came to the conductor first.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tanghulu.types import RequestId

ORDERS = ("fcfs", "sjf")
_Rank = tuple[bool, int, float, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """The order of the queue: ``name`` is one of ORDERS; ``ageing`` in seconds of prefill a second of waiting."""

    name: str = "fcfs"
    ageing: float = 0.1

    def rank_s(self, prefill_s: float, now_s: float) -> float:
        """The rank by which requests of one priority are ordered; equal ones go in the order of arrival."""
        return prefill_s + self.ageing * now_s if self.name == "sjf" else 0.0


class WaitingQueue(Generic[T]):
    """Requests that wait, in the order in which they are to be sent. The dispatcher bounds their number."""

    def __init__(self, order: QueueOrder = QueueOrder()) -> None:
        self.order = order
        self._items: dict[RequestId, tuple[_Rank, T]] = {}
        self._ranks: list[tuple[_Rank, RequestId]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._items

    def __iter__(self) -> Iterator[T]:
        """Iterate in order; the queue may be changed meanwhile."""
        return iter([self._items[request_id][1] for _, request_id in self._ranks])

    def push(
        self,
        request_id: RequestId,
        item: T,
        now_s: float,
        priority: int = 0,
        prefill_s: float = 0.0,
        front: bool = False,
    ) -> None:
        """Let ``item``, which came at ``now_s``, wait. ``front``: ahead of all that are not, in order of arrival."""
        assert request_id not in self._items
        self._sequence += 1
        if front:
            rank = (False, -priority, now_s, self._sequence)
        else:
            rank = (True, -priority, self.order.rank_s(prefill_s, now_s), self._sequence)
        self._items[request_id] = rank, item
        bisect.insort(self._ranks, (rank, request_id))

    def discard(self, request_id: RequestId) -> None:
        """Remove ``item``; no error if it does not wait."""
        found = self._items.pop(request_id, None)
        if found is not None:
            del self._ranks[bisect.bisect_left(self._ranks, (found[0], request_id))]

    def check(self) -> None:
        assert self._ranks == sorted((rank, request_id) for request_id, (rank, _) in self._items.items())
