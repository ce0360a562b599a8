"""Calls over gRPC, whose callers know no owners: the leader of several masters answers them for all owners.

A client of the fast lane is refused with MOVED by a master that does not own all keys of a call, and asks the owners
itself. For others the leader does what such a client does: it goes by its own map, splits the call, asks each owner,
itself among them, believes only those that prove their lease, and joins the answers in the order of the keys. A key
whose owner does not answer in time is a typed error, never a "missing".

Bounded are the calls under way, the bytes of their requests (for a listing: of its pages), the streams of events, and
the time of each call, which is less than what a client waits for one of several masters.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

from tanghulu.discovery.masters import ATTEMPT_S
from tanghulu.errors import InvalidRequest, MasterUnavailable, NotLeader, Overloaded
from tanghulu.masters import Masters
from tanghulu.protos import directory_pb2 as pb
from tanghulu.rpc.fast_client import Call
from tanghulu.store.client.drivers.asynchronous import AsyncioDriver
from tanghulu.store.client.logic.context import ask_each_owner
from tanghulu.store.client.settings import Settings
from tanghulu.store.directory_feed import follow_directory
from tanghulu.store.master.rpc.waiting import MAX_WAIT_S
from tanghulu.store.master.rpc.wire import check_count, event_to_wire, list_limit
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind
from tanghulu.store.protocol.messages import LocateReply, LocateRequest, MastersReply, MastersRequest

#: What one call may take; a caller with several masters asks the next after ATTEMPT_S.
CALL_S = ATTEMPT_S * 2 / 3
#: One round of a call that waits for keys; between two of them owners may change.
WAIT_ROUND_S = CALL_S
#: Calls under way, those that wait for keys among them, and the bytes of their requests, or of a listing's pages.
MAX_CALLS = 4096
MAX_BYTES = 64 << 20
#: What a key costs beside its characters; and what it costs in a listing.
_KEY_BYTES, _LISTED_BYTES = 64, 256
#: Streams of events of all owners; each remembers so many keys, about 150 bytes each, and begins again beyond them.
MAX_STREAMS = 32
STREAM_KEYS = 1 << 16


class Forwarding:
    """See the module. ``itself``: the address of this master, and what it shows to the others."""

    def __init__(self, server: MasterServer, itself: Masters) -> None:
        self._server = server
        self._itself = itself
        self._driver: AsyncioDriver | None = None
        self._num_calls = self._num_bytes = self._num_streams = 0

    async def close(self) -> None:
        """Hang up at the other masters."""
        driver, self._driver = self._driver, None
        if driver is not None:
            await driver.close()

    # --- calls

    async def locate(self, request: LocateRequest) -> LocateReply:
        """Who holds its keys, or only whether somebody does."""
        check_count(len(request.keys))
        with self._room(_size_of(request.keys)):
            reply: LocateReply = await self._ask(methods.LOCATE.call(request))
        return reply

    async def wait(self, request: pb.WaitRequest) -> pb.WaitReply:
        """Wait until all keys are stored, or until the time of ``request`` is over."""
        check_count(len(request.keys))
        if not request.keys:
            raise InvalidRequest("WAIT names no key")
        until_s = self._server.now_s + min(request.deadline_ms / 1000, MAX_WAIT_S)
        with self._room(_size_of(request.keys)):
            while True:
                left_s = max(until_s - self._server.now_s, 0.0)
                round_s = min(left_s, WAIT_ROUND_S)
                part = pb.WaitRequest(keys=request.keys, deadline_ms=int(round_s * 1000))
                reply: pb.WaitReply = await self._ask(methods.WAIT.call(part), round_s)
                if 0 not in reply.found or left_s <= WAIT_ROUND_S:
                    return reply

    async def list_keys(self, request: pb.ListKeysRequest) -> pb.ListKeysReply:
        """A page of the keys of all owners, in order."""
        page = pb.ListKeysRequest(prefix=request.prefix, after=request.after, limit=list_limit(request))
        num_owners = len(set(self._server.ownership.map.owners))
        with self._room(page.limit * num_owners * _LISTED_BYTES):
            reply: pb.ListKeysReply = await self._ask(methods.LIST_KEYS.call(page))
        return reply

    async def replicate(self, request: pb.ReplicateRequest) -> pb.ReplicateReply:
        """Have chunks copied ahead by the owners of their keys."""
        check_count(len(request.keys))
        with self._room(_size_of(request.keys)):
            reply: pb.ReplicateReply = await self._ask(methods.REPLICATE.call(request))
        return reply

    async def nodes(self) -> pb.NodesReply:
        """All nodes, with the chunks of all owners' keys, and drains that are over when every owner says so."""
        with self._room(0):
            reply: pb.NodesReply = await self._ask(methods.NODES.call(pb.NodesRequest()))
        return reply

    async def _ask(self, call: Call[Any], waits_s: float = 0.0) -> Any:
        """The owners' answers to ``call`` as one; raises MasterUnavailable if one did not answer in time.

        ``waits_s``: what it is to wait at the owners.
        """
        driver = self._driver_by_map()
        deadline = driver.deadline(waits_s + CALL_S)
        try:
            reply = await driver.run(ask_each_owner(driver.context, deadline, call, waits=True), deadline)
        except MasterUnavailable as error:  # MOVED, say, which the caller does not know
            raise MasterUnavailable(f"the owner of some keys did not answer the leader: {error.message}") from error
        return reply.message

    @contextlib.contextmanager
    def _room(self, num_bytes: int) -> Iterator[None]:
        if self._num_calls >= MAX_CALLS or (self._num_calls and self._num_bytes + num_bytes > MAX_BYTES):
            raise Overloaded(
                f"this master asks the owners of keys for {self._num_calls} calls of {self._num_bytes} bytes already; "
                "try again"
            )
        self._num_calls += 1
        self._num_bytes += num_bytes
        self._server.metrics.counts.forwarded += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._num_bytes -= num_bytes

    def _driver_by_map(self) -> AsyncioDriver:
        """The client by which owners are asked, which knows what this master knows of them."""
        known = self._server.ownership.map
        if not known.version:
            raise NotLeader.naming("")
        if self._driver is None:
            self._driver = AsyncioDriver(Settings(master=self._itself, deadline_s=CALL_S))
        context = self._driver.context
        if context.owners is None or known.replaces(context.owners.map):
            context.take_masters(MastersReply.of(known, MastersRequest()))
        return self._driver

    # --- streams

    async def follow(self, request: pb.EventsRequest) -> AsyncGenerator[pb.EventBatch, None]:
        """The events of all owners as those of one master, from a snapshot on; raises Overloaded."""
        if self._num_streams >= MAX_STREAMS:
            raise Overloaded(f"this master follows the others for {self._num_streams} callers; follow each owner")
        self._num_streams += 1
        self._server.metrics.counts.forwarded += 1
        generation = self._server.rng.getrandbits(63) | 1  # a stream is not resumed: the next one has other numbers
        numbering = Numbering(generation)
        try:
            feed = follow_directory(self._itself, request.key_prefix, STREAM_KEYS)
            async with contextlib.aclosing(feed) as batches:  # type: ignore[type-var]
                async for events in batches:
                    for batch in numbering.batches(events):
                        yield batch
        finally:
            self._num_streams -= 1

    def __repr__(self) -> str:
        return f"Forwarding({self._num_calls} calls, {self._num_bytes} bytes, {self._num_streams} streams)"


class Numbering:
    """Numbers events as a single master does: a snapshot has one number, each change behind it the next."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._last = 1
        self._is_synced = False

    def batches(self, events: Iterable[DirectoryEvent]) -> Iterator[pb.EventBatch]:
        """The messages that tell ``events``."""
        batch = self._batch()
        for event in events:
            if event.kind is DirectoryEventKind.RESET and self._is_synced:
                yield from self._full(batch)
                self._is_synced = False
                batch = self._batch()
            if self._is_synced:
                self._last += 1
                batch.last_sequence = self._last
            batch.events.append(event_to_wire(DirectoryEvent(self._last, event.kind, event.node_id, event.keys)))
            if event.kind is DirectoryEventKind.SYNCED:
                yield from self._full(batch)
                self._is_synced = True
                batch = self._batch()
        yield from self._full(batch)

    def _batch(self) -> pb.EventBatch:
        first = self._last + 1 if self._is_synced else 0
        return pb.EventBatch(master_generation=self._generation, first_sequence=first, last_sequence=first)

    @staticmethod
    def _full(batch: pb.EventBatch) -> Iterator[pb.EventBatch]:
        if batch.events:
            yield batch


def _size_of(keys: Iterable[str]) -> int:
    return sum(len(key) + _KEY_BYTES for key in keys)
