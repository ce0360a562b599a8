"""wait_for: consumers that come first, with real processes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import tanghulu
from tanghulu import aio
from tanghulu.errors import ChunkNotFound, InvalidRequest, MasterUnavailable
from tanghulu.store.client.chunk import Chunk
from tanghulu.store.client.logic.commit import CommitCall
from tanghulu.store.protocol.types import CommitResult, NewChunk
from tanghulu.types import ChunkKey
from tests.store.cluster import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(1, "64MiB") as running:
        yield running


def test_what_is_there_is_told_at_once_and_what_is_not_at_the_deadline(cluster: Cluster) -> None:
    with tanghulu.connect(cluster.address) as store:
        store.put("here", b"1")
        assert store.wait_for("here")
        began = time.monotonic()
        assert not store.wait_for("nowhere", deadline_s=0.3)
        assert store.wait_for_many(["here", "nowhere"], deadline_s=0.3) == [True, False]
        assert store.wait_for_many([]) == []
        assert 0.35 < time.monotonic() - began < 10.0
        assert store.remove("here")
        assert not store.wait_for("here", deadline_s=0.1)


async def test_a_wait_of_a_task_ends_when_the_client_is_closed(cluster: Cluster) -> None:
    store = await aio.connect(cluster.address)
    waiting = asyncio.create_task(store.wait_for("nowhere", deadline_s=600))
    while not await asyncio.to_thread(cluster.master.metric, "tanghulu_master_waiting_calls"):
        assert not waiting.done()
    await store.close()
    with pytest.raises(InvalidRequest, match="the client is closed"):
        async with asyncio.timeout(60):
            await waiting


def test_a_put_wakes_who_waits(cluster: Cluster) -> None:
    """Far sooner than any polling would be worth: within the time of a few round trips."""
    woken: list[float] = []
    with tanghulu.connect(cluster.address) as store, ThreadPoolExecutor(1) as threads:
        for number in range(10):
            ready = threading.Event()

            def consume(key: str, ready: threading.Event = ready) -> float:
                ready.set()
                assert store.wait_for(key, deadline_s=20)
                return time.monotonic()

            consumer = threads.submit(consume, f"woken-{number}")
            assert ready.wait(30)
            while not cluster.master.metric("tanghulu_master_waiting_calls"):
                assert not consumer.done()
            put_s = time.monotonic()
            store.put(f"woken-{number}", b"1")
            woken.append(consumer.result(20) - put_s)
        assert store.remove_matching("^woken-") == 10
    assert min(woken) < 0.2, f"woken after {woken}"


async def test_many_keys_and_many_waiters(cluster: Cluster) -> None:
    keys = [f"many-{number}" for number in range(50)]
    async with aio.connect(cluster.address) as store:
        waiters = [asyncio.create_task(store.wait_for(key, deadline_s=20)) for key in keys]
        all_of_them = asyncio.create_task(store.wait_for_many(keys, deadline_s=20))
        await asyncio.sleep(0)
        await store.put(keys[0], b"1")
        assert await waiters[0]
        assert not all_of_them.done()
        await store.put_many([(key, b"1") for key in keys[1:]])
        assert await asyncio.gather(*waiters) == [True] * len(keys)
        assert await all_of_them == [True] * len(keys)
        assert all(await store.remove_many(keys))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", [4096, 300_000, 6 << 20])
def test_who_was_told_that_a_key_is_there_can_get_it(cluster: Cluster, transport: str, size: int) -> None:
    """However the value is put: the master hears of it before its node serves it."""
    keys = [f"told-{transport}-{size}-{number}" for number in range(12)]

    def consume() -> list[int]:
        with tanghulu.connect(cluster.address, transport=transport) as store:
            found = []
            for key in keys:
                assert store.wait_for(key, deadline_s=20)
                with store.get(key) as chunk:
                    found.append(chunk.size_bytes)
            return found

    with tanghulu.connect(cluster.address, transport=transport) as store, ThreadPoolExecutor(1) as threads:
        consumer = threads.submit(consume)
        for number, key in enumerate(keys):
            while not cluster.master.metric("tanghulu_master_waiting_calls"):
                assert not consumer.done()
            store.put(key, bytes(size))
            if number >= 4:
                store.remove(keys[number - 4])
        assert consumer.result(60) == [size] * len(keys)
        store.remove_many(keys)


async def test_many_keys_that_are_just_being_put_can_be_got(cluster: Cluster) -> None:
    keys = [f"just-{number}" for number in range(40)]
    async with aio.connect(cluster.address, transport="tcp") as store, aio.connect(cluster.address) as putter:
        for _ in range(4):
            waiter = asyncio.create_task(store.wait_for_many(keys, deadline_s=20))
            putting = asyncio.create_task(putter.put_many([(key, bytes(100_000)) for key in keys]))
            assert all(await waiter)
            for chunk in await store.get_many(keys):
                assert isinstance(chunk, Chunk), chunk
                chunk.close()
            assert not any(status.existed for status in await putting)
            assert all(await putter.remove_many(keys))


def test_what_a_dead_putter_has_promised_is_not_there(cluster: Cluster) -> None:
    """The master names its node for a while; a get says so after a second, and not only at its deadline."""
    with tanghulu.connect(cluster.address) as store:
        store.put("before", bytes(10))
        ((node, mapped),) = store._driver.context.mapped.items()
        commit = CommitCall(store._driver.context, node, mapped.generation, [NewChunk(ChunkKey("promised"), 7, 100)])
        answers = store._driver._call(commit.calls, 5.0)
        assert commit.results(answers) == [CommitResult.ACCEPTED]
        assert store.exists("promised")
        began = time.monotonic()
        with pytest.raises(ChunkNotFound):
            store.get("promised", deadline_s=20)
        assert time.monotonic() - began < 10
        store.remove("before")


def test_a_master_that_restarts_is_asked_again() -> None:
    with Cluster(1, "64MiB") as cluster, tanghulu.connect(cluster.address) as store, ThreadPoolExecutor(1) as threads:
        consumer = threads.submit(store.wait_for, "later", deadline_s=30)
        while not cluster.master.metric("tanghulu_master_waiting_calls"):
            assert not consumer.done()
        cluster.restart_master()
        with tanghulu.connect(cluster.address) as producer:
            until_s = time.monotonic() + 60
            while not producer.nodes() and time.monotonic() < until_s:
                assert not consumer.done()
            producer.put("later", b"1", deadline_s=20)
        assert consumer.result(30)
        cluster.master.kill()
        with pytest.raises(MasterUnavailable):
            store.wait_for("never", deadline_s=0.5)
