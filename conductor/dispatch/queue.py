"""The conductor's own queue: the order in which waiting requests are sent.

Pure. Clients take turns (`FairTurns`): a client with hundreds of requests delays another's single request by one turn,
not by hundreds. Among one client's requests, higher priorities go first (the body's ``priority``). Within a priority,
the order is first come first served, or shortest first with ageing: each second of waiting makes a request count as
``ageing`` seconds shorter, so that a long one is overtaken for a bounded time only. With

    rank = seconds of prefill + ageing * arrival

the order never changes while requests wait, as the clock is the same for all. Example, ageing 0.1: a prompt of 3 s that
arrived at 0 has rank 3.0; one of 0.5 s overtakes it if it arrives before second 25, but not later.

A turn belongs to the client: its first request in order takes its first turn. Example: A has waited with two requests,
turns 0 and 1, when B comes with one, turn 0, and A with an urgent one, turn 2. The order is A's urgent one, B's, A's
first, A's second.

A request moved because its worker was lost precedes all that were not moved, as it has already waited. Among several
such requests, those of higher priority come first, then those that reached the conductor first.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tanghulu.fair_turns import FairTurns
from tanghulu.types import RequestId

ORDERS = ("fcfs", "sjf")
_Rank = tuple[int, float, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """Order of the queue: ``name`` is one of ORDERS; ``ageing`` in seconds of prefill per second of waiting."""

    name: str = "fcfs"
    ageing: float = 0.1

    def rank_s(self, prefill_s: float, now_s: float) -> float:
        """Return the rank that orders requests of one priority; equal ranks go in order of arrival."""
        return prefill_s + self.ageing * now_s if self.name == "sjf" else 0.0


@dataclass(slots=True)
class _Line:
    """One client's requests in order, and as many turns."""

    ranks: list[tuple[_Rank, RequestId]] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[float, _Rank, RequestId]]:
        for turn, (rank, request_id) in zip(self.turns[:], self.ranks[:], strict=True):
            yield turn, rank, request_id

    def remove(self, rank: _Rank, request_id: RequestId) -> None:
        del self.ranks[bisect.bisect_left(self.ranks, (rank, request_id))]


class WaitingQueue(Generic[T]):
    """Waiting requests, in the order in which they will be sent. The dispatcher bounds their number."""

    def __init__(self, order: QueueOrder = QueueOrder()) -> None:
        self.order = order
        self._items: dict[RequestId, tuple[_Rank, str | None, T]] = {}
        self._front = _Line()
        self._lines: dict[str, _Line] = {}
        self._turns = FairTurns()
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._items

    def __iter__(self) -> Iterator[T]:
        """Iterate in order; the queue may change meanwhile, and removed items are skipped."""
        lines = [list(line) for line in self._lines.values()]
        for _, request_id in self._front.ranks[:]:
            if request_id in self._items:
                yield self._items[request_id][2]
        for _, _, request_id in heapq.merge(*lines):
            if request_id in self._items:
                yield self._items[request_id][2]

    def push(
        self,
        request_id: RequestId,
        item: T,
        now_s: float,
        priority: int = 0,
        prefill_s: float = 0.0,
        client: str | None = "",
        weight: float = 1.0,
    ) -> None:
        """Enqueue ``item`` of ``client``, which arrived at ``now_s``. None: ahead of all clients, by arrival.

        A client of ``weight`` 2 has two turns for each turn of another client.
        """
        assert request_id not in self._items
        self._sequence += 1
        rank_s = now_s if client is None else self.order.rank_s(prefill_s, now_s)
        rank = (-priority, rank_s, self._sequence)
        self._items[request_id] = rank, client, item
        if client is None:
            bisect.insort(self._front.ranks, (rank, request_id))
            return
        line = self._lines.setdefault(client, _Line())
        bisect.insort(line.ranks, (rank, request_id))
        line.turns.append(self._turns.take(client, weight))

    def take(self, request_id: RequestId) -> None:
        """Remove an item that is now being served: its client has had a turn."""
        self._remove(request_id, 0)

    def discard(self, request_id: RequestId) -> None:
        """Remove an item that is not served; its client loses its last turn. No error if it is not waiting."""
        if request_id in self._items:
            self._remove(request_id, -1)

    def _remove(self, request_id: RequestId, which_turn: int) -> None:
        rank, client, _ = self._items.pop(request_id)
        if client is None:
            self._front.remove(rank, request_id)
            return
        line = self._lines[client]
        line.remove(rank, request_id)
        turn = line.turns.pop(which_turn)
        if which_turn == 0:
            self._turns.served(turn)
        if not line.ranks:
            del self._lines[client]

    def check(self) -> None:
        waiting = [
            (rank, request_id) for line in (self._front, *self._lines.values()) for rank, request_id in line.ranks
        ]
        assert sorted(waiting) == sorted((rank, request_id) for request_id, (rank, _, _) in self._items.items())
        for line in self._lines.values():
            assert line.ranks
            assert len(line.ranks) == len(line.turns)
            assert line.ranks == sorted(line.ranks)
            assert line.turns == sorted(line.turns)
        assert self._front.ranks == sorted(self._front.ranks)
