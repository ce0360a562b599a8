"""Whether the directory may say "not found": the states of a master that knows nothing yet. Pure.

The master keeps no log; what it knows, nodes told it. So a new master must not take its ignorance for an answer until
the nodes have reported. It cannot know how many there are. A first start and a restart look alike until
somebody renews a lease that this master never gave: then there was a predecessor, more of its nodes may
come at any moment (each notices within a third of its lease), and only the deadline ends the wait.

    FRESH ------ all registered nodes have reported, or deadline ------> READY
      |                                                                    ^
      +-- a lease of a predecessor is renewed --> REBUILDING -- deadline --+
"""

from __future__ import annotations

from enum import Enum

REBUILD_S = 3.0


class Knowledge(Enum):
    """How much the master knows of what the nodes hold."""

    FRESH = "new; as far as it knows, the nodes that registered are all there are"
    REBUILDING = "successor of another master; nodes that it has not heard of may hold chunks"
    READY = "a key that it does not know is not there"


class RebuildEvent(Enum):
    """What moves it on."""

    ALL_REPORTED = "each registered node, at least one, has sent a complete report"
    STRAY_LEASE = "an instance renewed a lease that this master never gave"
    DEADLINE = "REBUILD_S have passed"


TRANSITIONS: dict[tuple[Knowledge, RebuildEvent], Knowledge] = {
    (Knowledge.FRESH, RebuildEvent.ALL_REPORTED): Knowledge.READY,
    (Knowledge.FRESH, RebuildEvent.STRAY_LEASE): Knowledge.REBUILDING,
    (Knowledge.FRESH, RebuildEvent.DEADLINE): Knowledge.READY,
    (Knowledge.REBUILDING, RebuildEvent.ALL_REPORTED): Knowledge.REBUILDING,
    (Knowledge.REBUILDING, RebuildEvent.STRAY_LEASE): Knowledge.REBUILDING,
    (Knowledge.REBUILDING, RebuildEvent.DEADLINE): Knowledge.READY,
    (Knowledge.READY, RebuildEvent.ALL_REPORTED): Knowledge.READY,
    (Knowledge.READY, RebuildEvent.STRAY_LEASE): Knowledge.READY,
    (Knowledge.READY, RebuildEvent.DEADLINE): Knowledge.READY,
}


class Rebuild:
    """Where this master stands between its start and READY."""

    def __init__(self, now_s: float, rebuild_s: float = REBUILD_S) -> None:
        self.state = Knowledge.FRESH
        self._deadline_s = now_s + rebuild_s

    @property
    def is_ready(self) -> bool:
        """Whether an unknown key is a missing key."""
        return self.state is Knowledge.READY

    def handle(self, event: RebuildEvent) -> None:
        """Take ``event``."""
        self.state = TRANSITIONS[self.state, event]

    def tick(self, now_s: float) -> None:
        """Notice the deadline."""
        if now_s >= self._deadline_s:
            self.handle(RebuildEvent.DEADLINE)
