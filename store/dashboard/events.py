"""What happened to the cluster, found by comparing it with how it was a second before. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Events that are kept.
MAX_EVENTS = 200


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """One change; ``number`` counts from 1, ``at_s`` is the time of day."""

    number: int
    at_s: float
    kind: str
    text: str


class EventLog:
    """The last ``MAX_EVENTS`` changes of workers, nodes and counters."""

    def __init__(self) -> None:
        self._events: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        self._states: dict[str, str] = {}
        self._counts: dict[str, float] = {}
        self._number = 0

    def states(self, at_s: float, part: str, states: Mapping[str, str]) -> None:
        """Compare the parts of one kind (``part``: "worker", "node"), each with its state, with those told before."""
        known = {name.partition(" ")[2]: state for name, state in self._states.items() if name.startswith(f"{part} ")}
        for name, state in states.items():
            if known.get(name) != state:
                self._add(at_s, f"{part}.{state}", f"{part} {name} is {state}")
        for name in known.keys() - states.keys():
            self._add(at_s, f"{part}.gone", f"{part} {name} is gone")
            del self._states[f"{part} {name}"]
        self._states |= {f"{part} {name}": state for name, state in states.items()}

    def count(self, at_s: float, kind: str, total: float, text: str) -> None:
        """Note how much the counter ``kind`` grew; ``text`` says what, with {} where the growth belongs."""
        grown = total - self._counts.get(kind, total)
        self._counts[kind] = total
        if grown > 0:
            self._add(at_s, kind, text.format(int(grown)))

    def last(self, num_events: int) -> list[dict[str, Any]]:
        """The newest events, the newest first."""
        return [asdict(each) for each in list(self._events)[: -num_events - 1 : -1]]

    def _add(self, at_s: float, kind: str, text: str) -> None:
        self._number += 1
        self._events.append(ClusterEvent(self._number, at_s, kind, text))
