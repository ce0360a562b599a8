"""Three masters, a real etcd, real nodes: the leader is killed, or stands still, while clients put and get.

All three own a part of the keys; what happens to any of them, and to its keys, is in ``test_shared_ranges``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import tanghulu
import tanghulu.aio
from tanghulu.errors import ChunkNotFound, DeadlineExceeded, MasterUnavailable, NotLeader, TanghuluError
from tanghulu.store.client import Client
from tanghulu.store.directory_feed import DirectoryEventKind, follow_directory
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tests.store.cluster import Process, eventually
from tests.store.elected_cluster import ElectedCluster
from tests.store.fault_tools import Background

#: From a leader's end until another leads, and all ranges have owners; etcd's own granularity is half a second.
MAX_TAKEOVER_S = 5.0


@pytest.fixture(scope="module")
def elected() -> Iterator[ElectedCluster]:
    with ElectedCluster() as cluster:
        yield cluster


class Load:
    """Puts and gets; remembers what was acknowledged."""

    def __init__(self, address: str) -> None:
        self.client = tanghulu.connect(address, deadline_s=10.0)
        self.acknowledged: list[str] = []
        self.put_errors: list[TanghuluError] = []

    def put(self) -> None:
        key = f"k/{len(self.acknowledged)}/{len(self.put_errors)}"
        try:
            self.client.put(key, key.encode() * 50)
        except TanghuluError as error:
            self.put_errors.append(error)
        else:
            self.acknowledged.append(key)

    def has_put(self, number: int) -> bool:
        return len(self.acknowledged) >= number

    def get(self) -> None:
        """One of those that were acknowledged, by a client that has not seen it."""
        if self.acknowledged:
            key = self.acknowledged[(7 * len(self.acknowledged)) // 11]
            self.client._driver.context.locations.forget(key)
            assert read(self.client, key) == key.encode() * 50


def read(client: Client, key: str) -> bytes:
    with client.get(key) as chunk:
        return chunk.bytes()


def take_over(cluster: ElectedCluster, lost: Process) -> None:
    """Wait until another master leads than the ``lost`` one, and the others own all ranges."""
    cluster.leader(lost.address)
    others = [each for each in cluster.masters if each is not lost]
    eventually(lambda: sum(each.metric("tanghulu_master_owned_ranges") for each in others) == NUM_RANGES)


def kill(cluster: ElectedCluster, master: Process) -> None:
    master.kill()
    take_over(cluster, master)


def stop_and_continue(cluster: ElectedCluster, master: Process) -> None:
    """It stands still until the others have taken over, then wakes and must not be obeyed by anybody."""
    master.popen.send_signal(signal.SIGSTOP)
    try:
        take_over(cluster, master)
    finally:
        master.popen.send_signal(signal.SIGCONT)
    with pytest.raises(NotLeader), tanghulu.connect(master.address, deadline_s=5.0) as zombie:
        zombie.exists("anything")


def endure(cluster: ElectedCluster, num_kills: int) -> list[float]:
    """Kill or stop the leader so many times under load; returns how long each takeover took."""
    took_s: list[float] = []
    load = Load(cluster.address)
    other = Load(cluster.finder_spec)
    with load.client, other.client, Background(load.put) as puts, Background(other.put):
        with Background(load.get) as gets:
            for index in range(num_kills):
                num_before = len(load.acknowledged)
                leader = cluster.leader()
                began_s = time.monotonic()
                (stop_and_continue if index % 2 else kill)(cluster, leader)
                took_s.append(time.monotonic() - began_s)
                if not leader.alive:
                    cluster.replace(leader)
                eventually(partial(load.has_put, num_before + 20))
    assert not gets.errors, gets.errors[:3]
    assert not puts.errors, puts.errors[:3]
    for failed in load.put_errors + other.put_errors:
        assert isinstance(failed, MasterUnavailable), failed
    with tanghulu.connect(cluster.address) as fresh:
        for each in (load, other):
            for key in each.acknowledged:
                assert read(fresh, key) == key.encode() * 50
    print(f"takeovers [s]: {[round(s, 2) for s in took_s]}; {len(load.acknowledged)} puts acknowledged")
    return took_s


def test_a_lost_leader_is_replaced_and_nothing_acknowledged_is_lost(elected: ElectedCluster) -> None:
    assert max(endure(elected, 2)) <= MAX_TAKEOVER_S


@pytest.mark.parametrize("how", [kill, stop_and_continue])
def test_who_waits_for_a_key_waits_on_at_its_next_owner(
    elected: ElectedCluster, how: Callable[[ElectedCluster, Process], None]
) -> None:
    key = f"awaited/{how.__name__}"
    with tanghulu.connect(elected.address) as consumer, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(consumer.wait_for, key, deadline_s=30.0)
        owner = asked(elected.masters)
        how(elected, owner)
        if not owner.alive:
            elected.replace(owner)
        asked([each for each in elected.masters if each.address != owner.address])
        with tanghulu.connect(elected.finder_spec, deadline_s=20.0) as producer:
            producer.put(key, b"1")
        assert waiting.result(30.0)


def asked(masters: Sequence[Process]) -> Process:
    """Which of ``masters`` is the one where a call waits."""
    found: list[Process] = []
    eventually(lambda: bool(found.extend(m for m in masters if m.metric("tanghulu_master_waiting_calls")) or found))
    return found[0]


@pytest.mark.slow
def test_leaders_lost_again_and_again(elected: ElectedCluster) -> None:
    """``TEST_KILLS=10`` makes it the long one for by hand."""
    assert max(endure(elected, int(os.environ.get("TEST_KILLS", "3")))) <= MAX_TAKEOVER_S


@pytest.mark.slow
async def test_whoever_mirrors_the_directory_follows_the_leader(elected: ElectedCluster) -> None:
    """As the conductor does, by the list and by etcd; the leader stands still, so no connection breaks."""
    pairs: list[set[str]] = [set(), set()]

    async def mirror(masters: str, keys: set[str]) -> None:
        async for batch in follow_directory(masters, "m/"):
            for event in batch:
                if event.kind is DirectoryEventKind.STORED:
                    keys.update(event.keys)

    async with asyncio.TaskGroup() as group:
        specs = (elected.address, elected.finder_spec)
        tasks = [group.create_task(mirror(spec, keys)) for spec, keys in zip(specs, pairs, strict=True)]
        async with tanghulu.aio.connect(elected.address, deadline_s=10.0) as client:
            await client.put("m/1", b"1")
            await until(lambda: pairs == [{"m/1"}] * 2)
            leader = elected.leader()
            leader.popen.send_signal(signal.SIGSTOP)
            try:
                await client.put("m/2", b"2")
                assert await client.exists("m/1")
                await until(lambda: pairs == [{"m/1", "m/2"}] * 2)
            finally:
                leader.popen.send_signal(signal.SIGCONT)
        for task in tasks:
            task.cancel()


async def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - two streams tell
            await asyncio.sleep(0.02)


def test_followers_send_callers_on_and_a_resigning_leader_is_replaced_at_once() -> None:
    """Its lease would run out in a minute: one that is given back need not."""
    with ElectedCluster(num_masters=2, num_nodes=1, ttl_s=60.0) as elected:
        leader = elected.leader()
        follower = next(m for m in elected.masters if m is not leader)
        with pytest.raises(NotLeader, match=leader.address):
            tanghulu.connect(follower.address)
        with tanghulu.connect(f"{follower.address},{leader.address}") as client:
            client.put("here", b"1")
            leader.stop()
            assert elected.leader(leader.address, deadline_s=30.0) is follower
            assert client.exists("here")
            with pytest.raises(ChunkNotFound):
                client.get("not here")


@pytest.mark.slow
def test_without_etcd_nobody_leads_and_with_it_all_is_back(elected: ElectedCluster) -> None:
    """An etcd that hangs: the leader steps down before its lease can be over; what is held stays held."""
    with tanghulu.connect(elected.address, deadline_s=10.0) as client:
        client.put("kept", b"k")
        leader = elected.leader()
        elected.etcd.popen.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: leader.metric("tanghulu_master_leading") == 0.0, elected.ttl_s + 1.0)
            with pytest.raises((MasterUnavailable, DeadlineExceeded)):
                client.put("unsure", b"u", deadline_s=1.0)
            assert read(client, "kept") == b"k", "who knows where it is needs no master"
        finally:
            elected.etcd.popen.send_signal(signal.SIGCONT)
        elected.leader()
        client.put("after", b"a")
        assert read(client, "kept") == b"k"
    with tanghulu.connect(elected.finder_spec, deadline_s=10.0) as fresh:
        assert fresh.exists_many(["kept", "after"]) == [True, True]
