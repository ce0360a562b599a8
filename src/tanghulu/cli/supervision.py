"""Supervision of the embedded cluster: decides when to start, restart and end its processes. Decisions only.

    WAITING --(its delay is over)--> STARTING --ready--> READY
    STARTING, READY --exited--> WAITING
    STARTING, READY --exited--> DEAD                              and then the whole cluster ends

Until all children have been ready together a child is restarted at most MAX_RESTARTS times: a failure then is most
likely due to its configuration. A child that refuses its configuration before it was ever ready ends the cluster at
once; one that was ready with the same configuration refuses it for a temporary reason, such as a port in use. From then
on a dead child is restarted for ever, with delays growing up to MAX_BACKOFF_S, as the others keep serving; only a
``vital`` one, without which nothing is served, ends the cluster. A child that stayed ready for STABLE_S has its
restarts forgiven.

A child that has reported being alive must keep reporting. If it is silent for ``hung_s`` it is killed, and so
restarted. A late check does not count as its silence: then this process itself was stalled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

MAX_RESTARTS = 5
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 30.0
#: Checks for silent children per ``hung_s``.
LOOKS = 4
STABLE_S = 60.0
#: Exit codes of a process that refuses its command line or its configuration.
REFUSALS = (2, 7)


class ChildState(Enum):
    """The states of a child."""

    WAITING = "waiting"  # for its start, or for its restart after a delay
    STARTING = "starting"  # spawned, not yet ready
    READY = "ready"  # serves
    DEAD = "dead"  # died too often
    STOPPED = "stopped"  # ended because the cluster ends


class ChildEvent(Enum):
    """The events of a child."""

    START = "start"
    READY = "ready"
    EXITED = "exited"
    GIVEN_UP = "given up"
    STOP = "stop"


_TABLE: dict[tuple[ChildState, ChildEvent], ChildState] = {
    (ChildState.WAITING, ChildEvent.START): ChildState.STARTING,
    (ChildState.STARTING, ChildEvent.READY): ChildState.READY,
    (ChildState.STARTING, ChildEvent.EXITED): ChildState.WAITING,
    (ChildState.READY, ChildEvent.EXITED): ChildState.WAITING,
    (ChildState.STARTING, ChildEvent.GIVEN_UP): ChildState.DEAD,
    (ChildState.READY, ChildEvent.GIVEN_UP): ChildState.DEAD,
} | {(state, ChildEvent.STOP): ChildState.STOPPED for state in ChildState if state is not ChildState.DEAD}


@dataclass(eq=False)
class Child:
    """One child's position in the plan."""

    name: str
    state: ChildState = ChildState.WAITING
    vital: bool = False
    num_restarts: int = 0
    been_ready: bool = False
    alive_s: float | None = None
    ready_since_s: float = 0.0
    start_at_s: float = 0.0

    def on(self, event: ChildEvent) -> None:
        """Apply the transition table; an unknown pair is a programming error."""
        key = (self.state, event)
        assert key in _TABLE, f"{self.name}: {event} in {self.state}"
        self.state = _TABLE[key]


@dataclass
class Supervision:
    """The plan for all children; pass it events with the time, and perform what it returns.

    With ``hung_s`` 0 no child is killed.
    """

    hung_s: float = 0.0
    children: dict[str, Child] = field(default_factory=dict)
    been_ready: bool = False
    _looked_s: float = 0.0

    def add(self, name: str, *, vital: bool = False) -> None:
        """Add a child, to be started by the next ``tick``."""
        assert name not in self.children, name
        self.children[name] = Child(name, vital=vital)

    def tick(self, now_s: float) -> list[str]:
        """Return the names of the children to start now."""
        due = [c for c in self.children.values() if c.state is ChildState.WAITING and now_s >= c.start_at_s]
        for child in due:
            child.on(ChildEvent.START)
        return [child.name for child in due]

    def next_tick_s(self) -> float | None:
        """Return the time of the next delayed start; None if there is none."""
        return min((c.start_at_s for c in self.children.values() if c.state is ChildState.WAITING), default=None)

    def alive(self, name: str, now_s: float) -> None:
        """Note a child's report of being alive."""
        child = self.children[name]
        if child.state is ChildState.READY:
            child.alive_s = now_s

    def look(self, now_s: float) -> list[str]:
        """Return the names of the hung children to kill now; called every ``hung_s / LOOKS``."""
        period_s = self.hung_s / LOOKS
        late_s, self._looked_s = now_s - self._looked_s - period_s, now_s
        kills = []
        for child in self.children.values():
            if child.alive_s is None:
                continue
            if late_s > period_s:
                child.alive_s += late_s
            if now_s - child.alive_s >= self.hung_s:
                child.alive_s = None
                kills.append(child.name)
        return kills

    def ready(self, name: str, now_s: float) -> None:
        child = self.children[name]
        child.on(ChildEvent.READY)
        child.ready_since_s = now_s
        child.been_ready = True
        self.been_ready = self.been_ready or self.all_ready

    def exited(self, name: str, code: int, now_s: float, last_words: str = "") -> str | None:
        """Plan the restart of a child whose process exited unexpectedly; or return why the cluster has to end."""
        child = self.children[name]
        if code in REFUSALS and not child.been_ready:
            return self.refused(name, last_words or f"exited with {code}")
        if child.state is ChildState.READY and now_s - child.ready_since_s >= STABLE_S:
            child.num_restarts = 0
        child.alive_s = None
        if child.num_restarts >= MAX_RESTARTS and (child.vital or not self.been_ready):
            child.on(ChildEvent.GIVEN_UP)
            return f"{name} exited with {code} and was restarted {MAX_RESTARTS} times before"
        child.on(ChildEvent.EXITED)
        child.start_at_s = now_s + min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(child.num_restarts, 16))
        child.num_restarts += 1
        return None

    def refused(self, name: str, message: str) -> str | None:
        """Return why the cluster has to end: the child would refuse its configuration again. None if it may not."""
        child = self.children[name]
        if child.been_ready:
            return None  # its exit is like any other
        child.on(ChildEvent.GIVEN_UP)
        return f"{name}: {message}"

    def stop(self) -> None:
        """Plan no more starts: the cluster is ending."""
        for child in self.children.values():
            child.alive_s = None
            if child.state is not ChildState.DEAD:
                child.on(ChildEvent.STOP)

    @property
    def all_ready(self) -> bool:
        return all(c.state is ChildState.READY for c in self.children.values())
