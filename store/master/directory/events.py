"""A bounded log of numbered events from which any number of followers read, each with its own cursor. Pure.

One ring is the bounded queue of all followers at once: a follower that falls behind the oldest event is cut off
(``Lagged``) and restarts with a snapshot. Weights bound the memory where events differ in size.
"""

from __future__ import annotations

from typing import Generic, TypeVar

E = TypeVar("E")


#: At most this weight leaves with each new event, beyond the event's own: no step is long.
SHRINK_WEIGHT = 256


class Lagged(Exception):
    """The events behind the cursor are no longer in the ring. Raised and caught inside the master only."""


class EventRing(Generic[E]):
    """Events numbered from 1 on, without gaps; the newest up to ``max_weight`` are kept.

    ``max_weight`` may change at any time. When it falls, the excess leaves a few events at a time.
    """

    def __init__(self, max_weight: int) -> None:
        self.max_weight = max_weight
        self._events: dict[int, tuple[int, E]] = {}  # by number: (weight, event)
        self._weight = 0
        self.last = 0  # number of the newest event; 0 before the first

    @property
    def first(self) -> int:
        """Number of the oldest kept event; ``last + 1`` if there is none."""
        return self.last - len(self._events) + 1

    def append(self, event: E, weight: int = 1) -> int:
        """Add ``event``; return its number. The oldest events leave; the newest always stays."""
        self.last += 1
        self._events[self.last] = (weight, event)
        self._weight += weight
        leaving = weight + SHRINK_WEIGHT
        while self._weight > self.max_weight and len(self._events) > 1 and leaving > 0:
            gone, _ = self._events.pop(self.first)
            self._weight -= gone
            leaving -= gone
        return self.last

    def read(self, after: int, max_weight: int) -> list[tuple[int, E]]:
        """Return (number, event) behind number ``after``, oldest first, up to ``max_weight`` (at least one, if any).

        Raises Lagged if some of them are gone, or if ``after`` is a number never assigned.
        """
        if after + 1 < self.first or after > self.last:
            raise Lagged
        taken: list[tuple[int, E]] = []
        weight = 0
        for number in range(after + 1, self.last + 1):
            event_weight, event = self._events[number]
            if taken and weight + event_weight > max_weight:
                break
            weight += event_weight
            taken.append((number, event))
        return taken

    def check(self) -> None:
        """Assert that the weight is the sum of the kept events' weights."""
        assert self._weight == sum(weight for weight, _ in self._events.values())
        assert list(self._events) == list(range(self.first, self.last + 1))

    def __repr__(self) -> str:
        return f"EventRing({self.first}..{self.last})"
