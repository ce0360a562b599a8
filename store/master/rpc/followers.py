"""One follower of the directory's events: a snapshot unless it can go on where it stopped, then changes in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tanghulu.errors import Overloaded
from tanghulu.protos import directory_pb2 as pb
from tanghulu.store.master.directory.events import Lagged
from tanghulu.store.master.rpc.wire import event_to_wire
from tanghulu.store.master.server import Shell
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind

#: Keys and events of one message.
BATCH_WEIGHT = 8192
SNAPSHOT_KEYS = 2048
#: A follower gets what happened in this time as one message: a message costs more than the delay is worth.
COALESCE_S = 0.005


async def follow(shell: Shell, request: pb.EventsRequest) -> AsyncIterator[pb.EventBatch]:
    """The batches for one follower, without end. Raises Overloaded when it lags behind the log.

    While the directory is incomplete no snapshot is given: a follower of the master's predecessor keeps what it
    knows until there is something better.
    """
    log = shell.master.directory.log
    generation = shell.master.generation
    cursor = request.after_sequence
    if not (request.master_generation == generation and 0 < cursor <= log.last and log.first <= cursor + 1):
        while not shell.master.directory.rebuild.is_ready:
            await shell.news()
        cursor = log.last
        async for batch in _snapshot(shell, request.key_prefix, cursor):
            yield batch
    async for batch in _changes(shell, request.key_prefix, cursor):
        yield batch


async def _snapshot(shell: Shell, prefix: str, sequence: int) -> AsyncIterator[pb.EventBatch]:
    generation = shell.master.generation

    def batch(*events: DirectoryEvent) -> pb.EventBatch:
        return pb.EventBatch(master_generation=generation, events=map(event_to_wire, events))

    yield batch(DirectoryEvent(sequence, DirectoryEventKind.RESET))
    after: str | None = ""
    while after is not None:
        shell.require_generation(generation)
        page, after = shell.master.directory.snapshot(prefix, after, SNAPSHOT_KEYS)
        stored = DirectoryEventKind.STORED
        yield batch(*(DirectoryEvent(sequence, stored, node_id, tuple(keys)) for node_id, keys in page.items()))
    yield batch(DirectoryEvent(sequence, DirectoryEventKind.SYNCED))


async def _changes(shell: Shell, prefix: str, sent: int) -> AsyncIterator[pb.EventBatch]:
    log, generation = shell.master.directory.log, shell.master.generation
    cursor = sent
    while True:
        shell.require_generation(generation)
        try:
            numbered = log.read(cursor, BATCH_WEIGHT)
        except Lagged:
            shell.metrics.cut_off_followers.inc()
            raise Overloaded(f"this follower fell behind event {log.first}; subscribe again") from None
        if not numbered:
            await shell.news()
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
