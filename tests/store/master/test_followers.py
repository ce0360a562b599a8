"""Followers of a master's events, on a shell without a process around it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from tanghulu.errors import Overloaded
from tanghulu.protos import directory_pb2 as pb
from tanghulu.runtime.clock import ManualClock
from tanghulu.store.directory_feed import DirectoryEventKind
from tanghulu.store.master.core import Master
from tanghulu.store.master.directory.announcement import ChunkEntry, NodeAnnouncement, ReportPiece
from tanghulu.store.master.directory.events import EventRing
from tanghulu.store.master.directory.rebuild import ALONE_S
from tanghulu.store.master.metrics import MasterMetrics
from tanghulu.store.master.rpc.followers import follow
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol.key_slots import NUM_SLOTS
from tests.store.master.running_master import instance

K = DirectoryEventKind


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


async def kinds_until_synced(stream: AsyncIterator[pb.EventBatch]) -> list[int]:
    kinds: list[int] = []
    while pb.DirectoryEvent.SYNCED not in kinds:
        kinds += [event.kind for event in (await anext(stream)).events]
    return kinds


async def test_a_follower_that_lags_is_cut_off() -> None:
    shell = make_shell()
    shell.master.directory.log = EventRing(4)
    stream = follow(shell, pb.EventsRequest())
    await kinds_until_synced(stream)
    for number in range(10):
        store(shell, f"k{number}")
    with pytest.raises(Overloaded, match="subscribe again"):
        await anext(stream)


async def test_changes_during_the_snapshot_follow_it() -> None:
    shell = make_shell()
    stream = follow(shell, pb.EventsRequest())
    first = await anext(stream)
    assert first.events[0].kind == pb.DirectoryEvent.RESET
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
    stream = follow(shell, pb.EventsRequest(after_sequence=last, master_generation=3))
    assert list((await anext(stream)).events[0].keys) == ["one"]
    await stream.aclose()
    for after, generation in ((last, 4), (last + 99, 3), (0, 3)):
        stream = follow(shell, pb.EventsRequest(after_sequence=after, master_generation=generation))
        assert (await kinds_until_synced(stream))[0] == pb.DirectoryEvent.RESET
        await stream.aclose()


async def test_a_filtered_follower_is_told_the_whole_range() -> None:
    shell = make_shell()
    stream = follow(shell, pb.EventsRequest(key_prefix="kv/"))
    await kinds_until_synced(stream)
    last = shell.master.directory.log.last
    for key in ("x", "y", "kv/1"):
        store(shell, key)
    batch = await anext(stream)
    assert (batch.first_sequence, batch.last_sequence) == (last + 1, last + 3)
    assert [list(event.keys) for event in batch.events] == [["kv/1"]]
    await stream.aclose()


async def test_no_snapshot_before_the_directory_is_complete() -> None:
    shell = make_shell()
    shell.master = Master(4, 0.0)
    stream = follow(shell, pb.EventsRequest())
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done()
    shell.master.tick(3.0, 3.0)
    shell.changed()
    assert (await waiting).events[0].kind == pb.DirectoryEvent.RESET
    await stream.aclose()
