"""Whether the directory may answer "not found": the states of a master that knows nothing yet. Pure.

The master keeps no log; all its knowledge comes from the nodes. So a new master must not take its ignorance for an
answer until the nodes have reported. It cannot know how many there are. A first start and a restart look alike until
somebody renews a lease that this master never gave: then there was a predecessor, more of its nodes may
come at any moment (each notices within a third of its lease), and only the deadline ends the wait. The first to
come may be a node as new as the master, with nothing in it; so for ``ALONE_S`` no report is taken for everybody's.

    FRESH -- ALONE_S without a sign of a predecessor --> COUNTED -- all registered have reported --> READY
      |                                                    |                                           ^ ^
      +------ a lease of a predecessor is renewed ---------+--> REBUILDING ---------- deadline --------+ |
      +------------------------------------------ deadline ---------------------------------------------+

A master that is told which nodes its predecessor had begins as COUNTED.
"""

from __future__ import annotations

from enum import Enum

REBUILD_S = 3.0
#: Longer than a node takes to renew its lease at a master that has come back: it tries again every 0.2 to 0.5 s.
ALONE_S = 1.0


class Knowledge(Enum):
    """The states of the master's knowledge of the nodes' chunks."""

    FRESH = "new; a predecessor's nodes may not have noticed it yet"
    COUNTED = "the nodes that registered, or those that it was told of, are all there are"
    REBUILDING = "successor of another master; nodes that it has not heard of may hold chunks"
    READY = "a key that it does not know is not there"


class RebuildEvent(Enum):
    """The events that change what the master knows."""

    ALL_REPORTED = "each registered node, at least one, has sent a complete report"
    ALONE = "ALONE_S have passed"
    STRAY_LEASE = "an instance renewed a lease that this master never gave"
    DEADLINE = "REBUILD_S have passed"


TRANSITIONS: dict[tuple[Knowledge, RebuildEvent], Knowledge] = {
    (Knowledge.FRESH, RebuildEvent.ALL_REPORTED): Knowledge.FRESH,
    (Knowledge.FRESH, RebuildEvent.ALONE): Knowledge.COUNTED,
    (Knowledge.FRESH, RebuildEvent.STRAY_LEASE): Knowledge.REBUILDING,
    (Knowledge.FRESH, RebuildEvent.DEADLINE): Knowledge.READY,
    (Knowledge.COUNTED, RebuildEvent.ALL_REPORTED): Knowledge.READY,
    (Knowledge.COUNTED, RebuildEvent.ALONE): Knowledge.COUNTED,
    (Knowledge.COUNTED, RebuildEvent.STRAY_LEASE): Knowledge.REBUILDING,
    (Knowledge.COUNTED, RebuildEvent.DEADLINE): Knowledge.READY,
    (Knowledge.REBUILDING, RebuildEvent.ALL_REPORTED): Knowledge.REBUILDING,
    (Knowledge.REBUILDING, RebuildEvent.ALONE): Knowledge.REBUILDING,
    (Knowledge.REBUILDING, RebuildEvent.STRAY_LEASE): Knowledge.REBUILDING,
    (Knowledge.REBUILDING, RebuildEvent.DEADLINE): Knowledge.READY,
    (Knowledge.READY, RebuildEvent.ALL_REPORTED): Knowledge.READY,
    (Knowledge.READY, RebuildEvent.ALONE): Knowledge.READY,
    (Knowledge.READY, RebuildEvent.STRAY_LEASE): Knowledge.READY,
    (Knowledge.READY, RebuildEvent.DEADLINE): Knowledge.READY,
}


class Rebuild:
    """The state of this master between its start and READY."""

    def __init__(self, now_s: float, rebuild_s: float = REBUILD_S, *, counted: bool = False) -> None:
        self.state = Knowledge.COUNTED if counted else Knowledge.FRESH
        self._alone_s = now_s + min(ALONE_S, rebuild_s)
        self._deadline_s = now_s + rebuild_s

    @property
    def is_ready(self) -> bool:
        """Whether an unknown key is a missing key."""
        return self.state is Knowledge.READY

    def handle(self, event: RebuildEvent) -> None:
        """Take ``event``."""
        self.state = TRANSITIONS[self.state, event]

    def tick(self, now_s: float) -> None:
        """Let the deadlines pass that are over at ``now_s``."""
        if now_s >= self._alone_s:
            self.handle(RebuildEvent.ALONE)
        if now_s >= self._deadline_s:
            self.handle(RebuildEvent.DEADLINE)
