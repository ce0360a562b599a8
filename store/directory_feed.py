"""Following the directory from outside: the master's event stream as values, over restarts and losses.

``async for batch in follow_directory(address, "kv/")`` gives lists of DirectoryEvent. The first is RESET: forget
everything; then STORED events up to SYNCED; then changes. After an interruption it goes on where it stopped, if the
master still has what came after; otherwise RESET comes again, and what the follower knew stays true until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import structlog

from tanghulu.discovery.masters import PING_MS, SILENCE_MS, MasterFinder
from tanghulu.errors import MasterUnavailable, TanghuluError, Unauthorized
from tanghulu.masters import Masters
from tanghulu.protos import directory_pb2 as pb
from tanghulu.protos import directory_pb2_grpc
from tanghulu.rpc.grpc_edge import channel, typed_errors
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind
from tanghulu.types import Address

__all__ = ["DirectoryEvent", "DirectoryEventKind", "EventCursor", "follow_directory"]

_log = structlog.get_logger(__name__)
_RETRY_S = 0.2
#: Time until a token that was refused is shown again: somebody has to do something first.
_REFUSED_S = 5.0
_KINDS = {
    pb.DirectoryEvent.STORED: DirectoryEventKind.STORED,
    pb.DirectoryEvent.REMOVED: DirectoryEventKind.REMOVED,
    pb.DirectoryEvent.NODE_GONE: DirectoryEventKind.NODE_GONE,
    pb.DirectoryEvent.SYNCED: DirectoryEventKind.SYNCED,
    pb.DirectoryEvent.RESET: DirectoryEventKind.RESET,
}


class EventCursor:
    """The event up to which a follower knows everything. Pure."""

    def __init__(self) -> None:
        self.master_generation = 0
        self.sequence = 0
        self._synced = False

    @property
    def resumes_after(self) -> int:
        """The sequence to ask for; 0 (a snapshot) unless the last snapshot was complete."""
        return self.sequence if self._synced else 0

    def take(self, generation: int, events: list[DirectoryEvent], first: int, last: int) -> bool:
        """Take a batch; False if something in front of it was lost, upon which the cursor asks for a snapshot."""
        if first:
            if not self._synced or generation != self.master_generation or first != self.sequence + 1:
                self._synced = False
                return False
            self.sequence = last
        for event in events:
            if event.kind is DirectoryEventKind.RESET:
                self._synced = False
            elif event.kind is DirectoryEventKind.SYNCED:
                self._synced, self.sequence, self.master_generation = True, event.sequence, generation
        return True

    def __repr__(self) -> str:
        return f"EventCursor({self.master_generation:x}:{self.resumes_after})"


async def follow_directory(
    masters: Masters | Address | str, key_prefix: str = ""
) -> AsyncIterator[list[DirectoryEvent]]:
    """Yield the directory's events for keys that begin with ``key_prefix``, without end; waits for an absent master.

    Close the generator (or cancel its task) to stop. A new master gives its snapshot when it is complete, up
    to 3 s after its start; until then nothing comes.
    """
    cursor = EventCursor()
    finder = MasterFinder(masters)
    while True:
        asked: Address | None = None
        refused = False
        try:
            asked = await finder.find()
            async with aclosing(_follow(asked, finder.masters, key_prefix, cursor)) as batches:
                async for events in batches:
                    yield events
        except TanghuluError as error:
            _log.warning("directory_events.interrupted", error=error.message, at=repr(cursor))
            if asked is not None:
                finder.failed(asked, error)
            refused = isinstance(error, Unauthorized)
        await asyncio.sleep(_REFUSED_S if refused else _RETRY_S)


async def _follow(
    address: Address, masters: Masters, key_prefix: str, cursor: EventCursor
) -> AsyncGenerator[list[DirectoryEvent], None]:
    """The batches of one stream; ends at a gap, raises when the master is lost."""
    request = pb.EventsRequest(
        key_prefix=key_prefix, after_sequence=cursor.resumes_after, master_generation=cursor.master_generation
    )
    several, tls = masters.several, masters.credentials.tls
    opened = channel(address, PING_MS, SILENCE_MS, tls) if several else channel(address, tls=tls)
    async with opened as connection:
        call = directory_pb2_grpc.DirectoryStub(connection).Events(
            request, wait_for_ready=not several, metadata=masters.credentials.metadata
        )
        try:
            async with typed_errors(f"master at {address}", MasterUnavailable):
                async for batch in call:
                    events = _from_wire(batch)
                    if not cursor.take(batch.master_generation, events, batch.first_sequence, batch.last_sequence):
                        _log.warning("directory_events.gap", at=repr(cursor), first=batch.first_sequence)
                        return
                    yield events
        finally:
            call.cancel()


def _from_wire(batch: pb.EventBatch) -> list[DirectoryEvent]:
    return [
        DirectoryEvent(event.sequence, kind, event.node_id, tuple(event.keys))
        for event in batch.events
        if (kind := _KINDS.get(event.kind)) is not None
    ]
