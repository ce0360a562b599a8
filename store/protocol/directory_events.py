"""The messages of EVENTS. Followers of the directory get its changes as the very values on the wire."""

from __future__ import annotations

from enum import Enum

from tanghulu.rpc.wire import U64, FastMessage


class DirectoryEventKind(Enum):
    """The kind of a change."""

    STORED = 0  # node_id holds keys now
    REMOVED = 1  # node_id no longer holds keys
    NODE_GONE = 2  # node_id no longer holds anything
    SYNCED = 3  # the snapshot is complete; changes follow
    RESET = 4  # forget everything; a snapshot follows
    MOVED = 5  # another master reports these ranges from now on

    __hash__ = object.__hash__  # see Pin


class DirectoryEvent(FastMessage, frozen=True):
    """One change. ``sequence`` grows by one from change to change; a snapshot's events share that of its start.

    STORED and REMOVED may repeat what the follower knows already; applying them again changes nothing. ``ranges``: the
    ranges of keys of a SYNCED, RESET or MOVED, a bit for each; 0: all. A master keeps hundreds of thousands, which
    refer to atoms only: no garbage collection visits them.
    """

    sequence: U64
    kind: DirectoryEventKind
    node_id: str = ""
    keys: tuple[str, ...] = ()
    ranges: U64 = 0


class EventsRequest(FastMessage, frozen=True):
    """Follow the keys that begin with ``key_prefix``: a snapshot (RESET, STORED events, SYNCED), then changes.

    All events of a snapshot have the sequence at which it was taken. A caller resumes behind the event
    ``after_sequence`` of the master of ``master_generation``, if the master still has the rest; 0: a snapshot.
    ``ranges`` are those of the requested events, a bit for each; 0: all, which one master must own then. Of ``fresh``
    among them the caller has nothing yet: their snapshots come between the changes.
    """

    key_prefix: str = ""
    after_sequence: U64 = 0
    master_generation: U64 = 0
    ranges: U64 = 0
    fresh: U64 = 0


class EventBatch(FastMessage, frozen=True):
    """Some events; none in a sign of life.

    A batch of changes covers all events from ``first_sequence`` to ``last_sequence``, including those without a key of
    the prefix. If the first is not the one behind the last batch, something was lost: follow anew. 0: the batch is of a
    snapshot.
    """

    master_generation: U64
    events: list[DirectoryEvent]
    first_sequence: U64 = 0
    last_sequence: U64 = 0
