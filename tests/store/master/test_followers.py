"""Followers of a master's events, on a shell without a process around it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from tanghulu.auth.tenants import Identity, Right
from tanghulu.errors import KeysMoved, Overloaded
from tanghulu.rpc.fast_server import Peer
from tanghulu.store.followed_ranges import EventCursor
from tanghulu.store.master.core import Master
from tanghulu.store.master.directory.events import EventRing
from tanghulu.store.master.directory.rebuild import ALONE_S
from tanghulu.store.master.metrics import MasterMetrics
from tanghulu.store.master.rpc import followers
from tanghulu.store.master.rpc.directory_service import MAX_STREAMS, DirectoryCalls
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol.announcements import ChunkEntry, NodeAnnouncement, ReportPiece
from tanghulu.store.protocol.directory_events import DirectoryEvent, DirectoryEventKind, EventBatch, EventsRequest
from tanghulu.store.protocol.key_slots import NUM_RANGES, NUM_SLOTS, range_of
from tests.store.master.running_master import instance
from tests.virtual.clock import ManualClock

K = DirectoryEventKind


def follow(
    shell: MasterServer, request: EventsRequest, caller: Identity | None = None
) -> AsyncGenerator[EventBatch, None]:
    return followers.follow(shell, request, caller)


def make_shell() -> MasterServer:
    master = Master(3, 0.0)
    shell = MasterServer(master, ManualClock(), MasterMetrics(CollectorRegistry()), random.Random(0))
    master.register(instance("n1"), 3.0, 0.0)
    master.announce(NodeAnnouncement("n1", 7, report_id=1, piece=ReportPiece(0, NUM_SLOTS, [("k", 1, 1, 0)])), 0.0)
    master.tick(ALONE_S, ALONE_S)
    return shell


def store(shell: MasterServer, *keys: str) -> None:
    shell.master.announce(NodeAnnouncement("n1", 7, [ChunkEntry(key, 1, 1) for key in keys]), 0.0)
    shell.changed()


async def kinds_until_synced(stream: AsyncIterator[EventBatch]) -> list[DirectoryEventKind]:
    kinds: list[DirectoryEventKind] = []
    while K.SYNCED not in kinds:
        kinds += [event.kind for event in (await anext(stream)).events]
    return kinds


async def test_a_follower_that_lags_is_cut_off() -> None:
    shell = make_shell()
    shell.master.directory.log = EventRing(4)
    stream = follow(shell, EventsRequest())
    await kinds_until_synced(stream)
    for number in range(10):
        store(shell, f"k{number}")
    with pytest.raises(Overloaded, match="subscribe again"):
        await anext(stream)


async def test_changes_during_the_snapshot_follow_it() -> None:
    shell = make_shell()
    stream = follow(shell, EventsRequest())
    first = await anext(stream)
    assert first.events[0].kind == K.RESET
    store(shell, "during")
    await kinds_until_synced(stream)
    change = await anext(stream)
    assert (change.first_sequence, change.last_sequence) == (first.events[0].sequence + 1,) * 2
    assert list(change.events[0].keys) == ["during"]
    await stream.aclose()


async def test_who_names_its_last_event_is_spared_the_snapshot() -> None:
    shell = make_shell()
    last = shell.master.directory.log.last
    store(shell, "one")
    stream = follow(shell, EventsRequest(after_sequence=last, master_generation=3))
    assert list((await anext(stream)).events[0].keys) == ["one"]
    await stream.aclose()
    for after, generation in ((last, 4), (last + 99, 3), (0, 3)):
        stream = follow(shell, EventsRequest(after_sequence=after, master_generation=generation))
        assert (await kinds_until_synced(stream))[0] == K.RESET
        await stream.aclose()


async def test_a_filtered_follower_is_told_the_whole_range() -> None:
    shell = make_shell()
    stream = follow(shell, EventsRequest(key_prefix="kv/"))
    await kinds_until_synced(stream)
    last = shell.master.directory.log.last
    for key in ("x", "y", "kv/1"):
        store(shell, key)
    batch = await anext(stream)
    assert (batch.first_sequence, batch.last_sequence) == (last + 1, last + 3)
    assert [list(event.keys) for event in batch.events] == [["kv/1"]]
    await stream.aclose()


async def test_a_tenant_does_not_count_what_others_do() -> None:
    shell = make_shell()
    caller = Identity("acme", frozenset({Right.READ}), "acme")
    last = shell.master.directory.log.last
    stream = follow(shell, EventsRequest("@acme/", after_sequence=last, master_generation=3), caller)
    reset = (await anext(stream)).events[0]
    assert (reset.kind, reset.sequence) == (K.RESET, 0), "it is not resumed"
    cursor = EventCursor(3)
    assert await kinds_until_synced(stream)
    seen = []
    for keys in (("x", "@acme/1"), ("y", "z", "@acme/2", "@acme/3"), ("@acme/4",)):
        for key in keys:
            store(shell, key)
        batch = await anext(stream)
        seen.append((batch.first_sequence, batch.last_sequence, [event.sequence for event in batch.events]))
        assert cursor.take(3, [], batch.first_sequence, batch.last_sequence)
    assert seen == [(1, 1, [1]), (2, 3, [2, 3]), (4, 4, [4])]
    await stream.aclose()


async def test_a_tenants_streams_are_bounded() -> None:
    calls, caller = DirectoryCalls(make_shell()), Identity("acme", frozenset({Right.READ}), "acme")

    def begin(identity: Identity) -> Peer:
        peer = Peer(None, False, "somebody", identity=identity)
        calls._events(peer, EventsRequest(), memoryview(b""))
        return peer

    peers = [begin(caller) for _ in range(MAX_STREAMS)]
    with pytest.raises(Overloaded, match="its limit"):
        begin(caller)
    peers += [begin(Identity("node", frozenset(Right), "")), begin(Identity("b", frozenset({Right.READ}), "b"))]
    for on_close in peers.pop(0).on_close:
        on_close()
    peers.append(begin(caller))
    for peer in peers:
        for on_close in peer.on_close:
            on_close()


async def test_no_snapshot_before_the_directory_is_complete() -> None:
    shell = make_shell()
    shell.master = Master(4, 0.0)
    stream = follow(shell, EventsRequest())
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done()
    shell.master.tick(3.0, 3.0)
    shell.changed()
    assert (await waiting).events[0].kind == K.RESET
    await stream.aclose()


EVERY = (1 << NUM_RANGES) - 1


async def test_a_range_that_leaves_is_told_among_the_changes_and_the_others_go_on() -> None:
    shell = make_shell()
    stream = follow(shell, EventsRequest(ranges=EVERY))
    await kinds_until_synced(stream)
    shell.master.directory.forget_range(range_of("k"))
    other = next(key for key in ("a", "b", "c") if range_of(key) != range_of("k"))
    store(shell, other)
    moved, stored = (await anext(stream)).events
    assert (moved.kind, moved.ranges) == (K.MOVED, 1 << range_of("k"))
    assert (stored.kind, list(stored.keys)) == (K.STORED, [other])
    await stream.aclose()


async def test_who_knows_the_other_ranges_gets_the_snapshot_of_one_alone() -> None:
    shell = make_shell()
    other = next(key for key in ("a", "b", "c") if range_of(key) != range_of("k"))
    store(shell, other)
    last, fresh = shell.master.directory.log.last, 1 << range_of("k")
    stream = follow(
        shell,
        EventsRequest(ranges=EVERY, fresh=fresh, after_sequence=last, master_generation=shell.master.generation),
    )
    events: list[DirectoryEvent] = []
    while not events or events[-1].kind != K.SYNCED:
        events += (await anext(stream)).events
    assert [key for event in events for key in event.keys] == ["k"]
    assert {event.ranges for event in events if event.kind != K.STORED} == {fresh}
    await stream.aclose()


async def test_a_range_that_is_not_known_whole_is_waited_for_and_the_others_are_told() -> None:
    shell = make_shell()
    shell.master.directory.forget_range(range_of("k"))
    shell.master.directory.begin_range(range_of("k"))
    stream = follow(shell, EventsRequest(ranges=EVERY))
    synced = 0
    while not synced:
        synced = sum(e.ranges for e in (await anext(stream)).events if e.kind == K.SYNCED)
    assert synced == EVERY & ~(1 << range_of("k"))
    await stream.aclose()


async def test_who_follows_an_only_master_is_sent_on_when_others_own_ranges_too() -> None:
    shell = make_shell()
    stream = follow(shell, EventsRequest())
    await kinds_until_synced(stream)
    shell.master.directory.forget_range(range_of("k"))
    shell.changed()
    with pytest.raises(KeysMoved):
        await anext(stream)
