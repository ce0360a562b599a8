"""What followers of the directory are told, as values. Shared by the master and by those who follow it."""

from __future__ import annotations

from enum import Enum

import msgspec


class DirectoryEventKind(Enum):
    """What changed."""

    STORED = "node_id holds keys now"
    REMOVED = "node_id holds keys no longer"
    NODE_GONE = "node_id holds nothing any more"
    SYNCED = "the snapshot is complete; changes follow"
    RESET = "forget everything; a snapshot follows"
    MOVED = "another master tells of these ranges from now on"


class DirectoryEvent(msgspec.Struct, frozen=True, gc=False):
    """One change. ``sequence`` grows by one from change to change; a snapshot's events share that of its start.

    STORED and REMOVED may tell what the follower knows already; applying them again changes nothing. ``ranges``: of
    which ranges of keys SYNCED, RESET and MOVED tell, a bit for each; 0: of all. A master keeps hundreds of thousands,
    which refer to atoms only: no garbage collection looks at them.
    """

    sequence: int
    kind: DirectoryEventKind
    node_id: str = ""
    keys: tuple[str, ...] = ()
    ranges: int = 0
