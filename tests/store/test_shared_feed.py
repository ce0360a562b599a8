"""Followers of masters that share the ranges of keys on a real etcd: what they mirror is what the nodes hold."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, cast

import pytest

import tanghulu
import tanghulu.aio
from tanghulu.conductor.index.events import CacheMirror
from tanghulu.conductor.replicating import request_copies
from tanghulu.errors import TanghuluError
from tanghulu.store.admin.check import check
from tanghulu.store.directory_feed import DirectoryEventKind, follow_directory
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.types import BlockHash, Fingerprint, InstanceId, kv_chunk_key, parse_kv_chunk_key
from tests.store.cluster import Process
from tests.store.elected_cluster import ElectedCluster
from tests.store.fault_tools import Background
from tests.store.test_shared_ranges import are_even

pytestmark = pytest.mark.slow
K = DirectoryEventKind
Pairs = set[tuple[str, str]]


@pytest.fixture(scope="module")
def sharing() -> Iterator[ElectedCluster]:
    with ElectedCluster(3, 2) as cluster:
        yield cluster


class Load:
    """Puts one key after the other, and removes some of them; ``removed`` are those that it began to remove."""

    def __init__(self, address: str, name: str) -> None:
        self.client = tanghulu.connect(address, deadline_s=60.0)
        self.fingerprint = Fingerprint(name.encode().ljust(32, b"\0"))
        self.put: list[str] = []
        self.removed: set[str] = set()

    def step(self) -> None:
        number = len(self.put)
        key = kv_chunk_key(self.fingerprint, BlockHash(number.to_bytes(16, "big") + bytes(16)))
        self.client.put(key, key.encode())
        self.put.append(key)
        if number % 10 == 9:
            self.removed.add(self.put[number - 5])
            self.client.remove(self.put[number - 5])


class Mirrors:
    """What a follower of the feed knows, and what a conductor makes of it."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.pairs: Pairs = set()
        self.conductor = CacheMirror()
        self.num_resets = 0
        self.wrong: list[str] = []

    async def follow(self, masters: str) -> None:
        async with aclosing(cast(Any, follow_directory(masters, "kv/"))) as batches:
            async for batch in batches:
                for event in batch:
                    self.conductor.directory_event(event)
                    pairs = {(event.node_id, key) for key in event.keys}
                    self.num_resets += event.kind is K.RESET
                    if event.kind is K.STORED:
                        self.pairs |= pairs
                    elif event.kind is K.REMOVED:
                        self.pairs -= pairs
                        self.wrong += [key for key in event.keys if key not in self._load.removed]

    def check(self, held: Pairs) -> None:
        """Assert that the conductor knows of each node the blocks that it holds, and no others."""
        self.conductor.check()
        for node in {node for node, _ in held} | set(self.conductor.store.holders):
            keys = [parse_kv_chunk_key(key) for holder, key in held if holder == node]
            assert self.conductor.store.blocks_of(InstanceId(node)) == {parsed[1] for parsed in keys if parsed}


def held_by_nodes(address: str) -> Pairs:
    with tanghulu.connect(address, deadline_s=60.0) as client:
        held: Pairs = set()
        for view in client.nodes():
            after, more = "", True
            while more:
                page = client.verify(view.id, after)
                held |= {(view.id, chunk.key) for chunk in page.chunks if chunk.key.startswith("kv/")}
                after, more = page.chunks[-1].key if page.chunks else after, page.more
        return held


@asynccontextmanager
async def following(load: Load, *masters: str) -> AsyncIterator[list[Mirrors]]:
    mirrors = [Mirrors(load) for _ in masters]
    tasks = [asyncio.create_task(mirror.follow(each)) for mirror, each in zip(mirrors, masters, strict=True)]
    try:
        yield mirrors
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), outcome


async def until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - processes tell
            await asyncio.sleep(0.05)


async def lose_and_return(cluster: ElectedCluster, victim: Process, how: str) -> None:
    if how == "stopped":
        others = [each for each in cluster.masters if each is not victim]
        victim.popen.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: sum(each.metric("tanghulu_master_owned_ranges") for each in others) == NUM_RANGES)
        finally:
            victim.popen.send_signal(signal.SIGCONT)
    else:
        await asyncio.to_thread(victim.kill if how == "killed" else victim.stop)
        await until(lambda: are_even(cluster))
        await asyncio.to_thread(cluster.replace, victim)
    await until(lambda: are_even(cluster))


@pytest.mark.parametrize(
    "moves",
    [
        (("killed", True), ("ended", False)),
        pytest.param((("stopped", False), ("killed", False), ("stopped", True)), marks=pytest.mark.by_hand),
    ],
)
async def test_a_mirror_holds_what_nodes_hold_whichever_master_is_lost_or_comes(
    sharing: ElectedCluster, moves: tuple[tuple[str, bool], ...]
) -> None:
    await until(lambda: are_even(sharing))
    load = Load(sharing.address, f"{len(moves)} moves")
    async with following(load, sharing.address, sharing.finder_spec) as mirrors:
        with Background(load.step) as putting:
            await until(lambda: len(load.put) > 50)
            for how, of_leader in moves:
                leader = await asyncio.to_thread(sharing.leader)
                victim = leader if of_leader else next(each for each in sharing.masters if each is not leader)
                await lose_and_return(sharing, victim, how)
                before = len(load.put)
                await until(lambda: len(load.put) > before + 20)  # noqa: B023 - awaited here
        assert not putting.errors, putting.errors[:3]
        held = await asyncio.to_thread(held_by_nodes, sharing.address)
        assert {key for _, key in held}.intersection(load.put) == set(load.put) - load.removed
        await until(lambda: all(mirror.pairs == held for mirror in mirrors))
        for mirror in mirrors:
            mirror.check(held)
            assert mirror.num_resets == 1, "it never had to begin again"
            assert not mirror.wrong, mirror.wrong[:5]
    load.client.close()


async def test_a_node_is_drained_when_every_owner_has_moved_its_keys(sharing: ElectedCluster) -> None:
    """Whoever owns them: a master is lost meanwhile, and its successor has to look for itself."""
    await until(lambda: are_even(sharing))
    joined = await asyncio.to_thread(sharing.add_node, "64MiB")
    async with tanghulu.aio.connect(sharing.address, deadline_s=60.0) as client:
        keys = [f"drained/{number}" for number in range(200)]
        for key in keys:
            await client.put(key, key.encode(), prefer_node=joined.name)
        assert {view.id: view.num_chunks for view in await client.nodes()}[joined.name] == len(keys)
        await client.drain(joined.name)
        victim = next(each for each in sharing.masters if each.metric("tanghulu_master_leading") == 0)
        await asyncio.to_thread(victim.kill)

        async def drained() -> bool:
            with suppress(TanghuluError):
                return any(view.id == joined.name and view.drained for view in await client.nodes())
            return False

        async with asyncio.timeout(60.0):
            while not await drained():  # noqa: ASYNC110 - masters tell
                await asyncio.sleep(0.1)
        owners = await client.masters()
        assert sum(len(each.ranges) for each in owners) == NUM_RANGES
        assert sum(each.leads for each in owners) == 1
        assert str(victim.address) not in {each.address for each in owners}
        await asyncio.to_thread(joined.stop)
        sharing.nodes.remove(joined)
        for key in keys:
            with await client.get(key) as chunk:
                assert chunk.bytes() == key.encode()
        assert await request_copies(sharing.finder_spec, keys, 2, 60.0) == len(keys)
        async with asyncio.timeout(60.0):
            while not all(len(each.nodes) == 2 for each in await client.list_keys("drained/")):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert not (await check(client, with_repair=False)).findings
        assert await client.remove_matching("^drained/") == len(keys)
        assert not await client.list_keys("drained/")
    await asyncio.to_thread(sharing.replace, victim)
