"""One follower of the directory's events: a snapshot unless it can go on where it stopped, then changes in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tanghulu.errors import Overloaded
from tanghulu.protos import directory_pb2 as pb
from tanghulu.store.master.directory.events import Lagged
from tanghulu.store.master.rpc.wire import event_to_wire
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind

#: Keys and events of one message.
BATCH_WEIGHT = 8192
SNAPSHOT_KEYS = 2048
#: Events of this time go to a follower as one message: a message costs more than the delay is worth.
COALESCE_S = 0.005


async def follow(server: MasterServer, request: pb.EventsRequest) -> AsyncIterator[pb.EventBatch]:
    """The batches for one follower, without end. Raises Overloaded when it lags behind the log.

    While the directory is incomplete no snapshot is given: a follower of the master's predecessor keeps what it
    knows until there is something better.
    """
    log = server.master.directory.log
    generation = server.master.generation
    cursor = request.after_sequence
    if not (request.master_generation == generation and 0 < cursor <= log.last and log.first <= cursor + 1):
        while not server.master.directory.is_ready:
            await server.news()
        cursor = log.last
        async for batch in _snapshot(server, request.key_prefix, cursor):
            yield batch
    async for batch in _changes(server, request.key_prefix, cursor):
        yield batch


async def _snapshot(server: MasterServer, prefix: str, sequence: int) -> AsyncIterator[pb.EventBatch]:
    generation = server.master.generation

    def batch(*events: DirectoryEvent) -> pb.EventBatch:
        return pb.EventBatch(master_generation=generation, events=map(event_to_wire, events))

    yield batch(DirectoryEvent(sequence, DirectoryEventKind.RESET))
    walk, more, stored = server.master.directory.walk(), True, DirectoryEventKind.STORED
    while more:
        server.require_generation(generation)
        page, more = server.master.directory.snapshot(walk, prefix, SNAPSHOT_KEYS)
        if page:
            yield batch(*(DirectoryEvent(sequence, stored, node_id, tuple(keys)) for node_id, keys in page.items()))
        await asyncio.sleep(0)  # there may be a million keys without the prefix
    yield batch(DirectoryEvent(sequence, DirectoryEventKind.SYNCED))


async def _changes(server: MasterServer, prefix: str, sent: int) -> AsyncIterator[pb.EventBatch]:
    log, generation = server.master.directory.log, server.master.generation
    cursor = sent
    while True:
        server.require_generation(generation)
        try:
            numbered = log.read(cursor, BATCH_WEIGHT)
        except Lagged:
            server.metrics.cut_off_followers.inc()
            raise Overloaded(f"this follower fell behind event {log.first}; subscribe again") from None
        if not numbered:
            await server.news()
            await asyncio.sleep(COALESCE_S)
            continue
        cursor = numbered[-1][0]
        wanted = [kept for _, event in numbered if (kept := _filtered(event, prefix)) is not None]
        if wanted:
            yield pb.EventBatch(
                master_generation=generation,
                events=map(event_to_wire, wanted),
                first_sequence=sent + 1,
                last_sequence=cursor,
            )
            sent = cursor


def _filtered(event: DirectoryEvent, prefix: str) -> DirectoryEvent | None:
    if not prefix or event.kind is DirectoryEventKind.NODE_GONE:
        return event
    keys = tuple(key for key in event.keys if key.startswith(prefix))
    return DirectoryEvent(event.sequence, event.kind, event.node_id, keys) if keys else None
