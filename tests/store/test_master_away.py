"""A single master that is away for a moment: who has met it waits up to the deadline, and nobody else is kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise
from random import Random
from typing import Any

import pytest

import tanghulu
from tanghulu import aio
from tanghulu.discovery.masters import ATTEMPT_S, SEEK_MOST_S, MasterFinder, Seeking
from tanghulu.errors import (
    ChunkNotFound,
    DirectoryIncomplete,
    MasterUnavailable,
    NodeUnavailable,
    NotLeader,
    TanghuluError,
)
from tanghulu.masters import Masters
from tanghulu.store.client import block_store
from tanghulu.store.client.logic import operations, query
from tanghulu.store.client.logic.directory_client import refresh_nodes
from tanghulu.store.client.logic.effects import MASTER, CallPeers, Deadline, PeerId
from tanghulu.store.client.model import PutItem, PutOptions
from tanghulu.store.client.settings import ENGINE_ANSWER_S, Settings
from tanghulu.store.client.signed_kv import KvClient
from tanghulu.store.protocol.messages import PutRequest
from tanghulu.types import Address, BlockHash, Fingerprint
from tanghulu.workers.kv import store_adapter
from tests.free_ports import free_port
from tests.store.client.test_logic import FakeCluster, node
from tests.store.client.test_terms import ElectedMaster, serving
from tests.store.cluster import Cluster
from tests.store.master.running_master import until

A = Address("h", 1)
REFUSED = NodeUnavailable("refused")
#: A call that would wait so long never ends, as far as a test can tell.
FOR_EVER_S = 3600.0


# --- the tries of one call, in virtual time


def tries(seeking: Seeking, back_s: float, error: TanghuluError = REFUSED) -> list[float]:
    """When a call tries that begins at 0 s, until the master is back or the call gives up."""
    now_s, asked_s = 0.0, [0.0]
    while now_s < back_s:
        pause_s = seeking.pause_s(A, error, now_s)
        if pause_s is None:
            break
        now_s += pause_s
        asked_s.append(now_s)
    return asked_s


@pytest.mark.parametrize("seed", range(20))
def test_who_waits_tries_until_the_master_is_back(seed: int) -> None:
    asked_s = tries(Seeking(MasterFinder(A), 0.0, 5.0, waits=True, rng=Random(seed)), 2.0)
    assert 2.0 <= asked_s[-1] <= 2.0 + 1.5 * SEEK_MOST_S
    pauses = [after - before for before, after in pairwise(asked_s)]
    assert all(0 < pause <= 1.5 * SEEK_MOST_S for pause in pauses)


@pytest.mark.parametrize("seed", range(20))
def test_who_waits_gives_up_within_the_deadline(seed: int) -> None:
    asked_s = tries(Seeking(MasterFinder(A), 0.0, 1.0, waits=True, rng=Random(seed)), FOR_EVER_S)
    assert 1.0 - 1.5 * SEEK_MOST_S <= asked_s[-1] < 1.0


def test_many_callers_do_not_try_at_the_same_moments() -> None:
    each = [tries(Seeking(MasterFinder(A), 0.0, 5.0, waits=True, rng=Random(seed)), 1.0)[1:] for seed in range(50)]
    moments = [at for asked_s in each for at in asked_s]
    assert len(set(moments)) == len(moments)


def test_who_does_not_wait_tries_once_and_several_masters_are_always_sought() -> None:
    assert tries(Seeking(MasterFinder(A), 0.0, 5.0), 2.0) == [0.0]
    assert len(tries(Seeking(MasterFinder(Masters.parse("h:1,h:2")), 0.0, 5.0), 2.0)) > 3


def test_another_leader_than_the_one_that_was_named_is_not_waited_for() -> None:
    assert tries(Seeking(MasterFinder(A), 0.0, 5.0, waits=True), 2.0, NotLeader.naming("h:9")) == [0.0]
    assert len(tries(Seeking(MasterFinder(A), 0.0, 5.0, waits=True), 2.0, NotLeader.naming(""))) > 3


def test_a_single_master_that_stands_still_has_all_of_the_time() -> None:
    assert Seeking(MasterFinder(A), 10.0, 5.0, waits=True).attempt_s(12.0) == 3.0
    assert Seeking(MasterFinder(Masters.parse("h:1,h:2")), 10.0, 5.0).attempt_s(12.0) == ATTEMPT_S


# --- what a client can do without the master is not kept by it


class Away(FakeCluster):
    """A cluster whose master is gone: calls that wait for it use up the deadline."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.dead.add("master")
        self.context.nodes.expire()
        self.puts: list[PutRequest] = []

    def _perform(self, effect: Any) -> Any:
        if isinstance(effect, CallPeers) and effect.waits and effect.calls[0][0] == MASTER:
            self.clock.advance(self.deadline.remaining_s())
        if isinstance(effect, CallPeers):
            self.puts += [call.request for _, call in effect.calls if isinstance(call.request, PutRequest)]
        return super()._perform(effect)

    @property
    def in_time(self) -> bool:
        return self.clock.now_s() == 0.0


def test_keys_whose_holders_are_known_are_read_before_the_master_is_waited_for() -> None:
    fake = Away("a")
    fake.values["a"].update(known=b"right", unknown=b"right")
    fake.context.locations.set("known", (PeerId("a"),))
    unknown, known = fake.run(operations.get_many(fake.context, fake.deadline, ["unknown", "known"]))
    assert bytes(known.bytes()) == b"right"
    assert isinstance(unknown, MasterUnavailable)
    assert fake.asked == ["master", "a", "master"]
    assert not fake.in_time, "the unknown key waited in the end"


def test_a_key_is_asked_for_again_when_the_master_is_back() -> None:
    class Back(Away):
        def _perform(self, effect: Any) -> Any:
            answer = super()._perform(effect)
            self.dead.discard("master")
            return answer

    fake = Back("a")
    fake.values["a"].update(known=b"right", unknown=b"right")
    fake.directory["unknown"] = ["a"]
    fake.context.locations.set("known", (PeerId("a"),))
    found = fake.run(operations.get_many(fake.context, fake.deadline, ["unknown", "known"]))
    assert [bytes(chunk.bytes()) for chunk in found] == [b"right", b"right"]
    assert fake.asked == ["master", "a", "master", "a"]


@pytest.mark.parametrize("options", [PutOptions(visible=False), PutOptions(visible=False, replicas=2)])
def test_a_put_that_nobody_has_to_see_goes_to_a_known_node_at_once(options: PutOptions) -> None:
    fake = Away("a", "b")
    assert fake.run(operations.put(fake.context, fake.deadline, PutItem("k", b"v"), options)).ok
    assert fake.in_time


def test_the_list_of_nodes_is_waited_for_only_by_who_has_none_or_misses_one() -> None:
    fake = Away("a")
    fake.run(refresh_nodes(fake.context))
    assert fake.in_time
    fake.run(refresh_nodes(fake.context, force=True))
    assert not fake.in_time
    fake = Away()
    with pytest.raises(MasterUnavailable):
        fake.run(refresh_nodes(fake.context))
    assert not fake.in_time


def test_a_node_may_keep_a_put_for_the_master_until_the_deadline_and_for_room_a_share_of_it() -> None:
    fake = Away("a", "b", "c")
    fake.context.nodes.update([node(name, host="here") for name in "abc"], 1e9)
    fake.context.maps_memory = False
    fake.run(operations.put(fake.context, fake.deadline, PutItem("k", b"v"), PutOptions()))
    (put,) = fake.puts
    assert put.master_ms == fake.deadline.remaining_ms()
    assert put.deadline_ms == fake.deadline.remaining_ms() // 3


def test_an_engine_does_not_wait_until_a_master_has_learnt_what_its_nodes_hold() -> None:
    for waits, fails in ((False, True), (True, False)):
        fake = FakeCluster("a")
        fake.deadline, fake.incomplete, fake.reported_s = Deadline(30.0, fake.clock.now_s), True, 0.5
        fake.values["a"]["k"] = b"right"
        fake.context.waits_for_master = waits
        (result,) = fake.run(operations.get_many(fake.context, fake.deadline, ["k"]))
        assert isinstance(result, DirectoryIncomplete) is fails
        assert (fake.clock.now_s() == 0.0) is fails
        if fails:
            with pytest.raises(DirectoryIncomplete):
                fake.run(query.match_prefix(fake.context, fake.deadline, ["k"]))


# --- both drivers, and a master that listens, stops and listens again


class Master:
    """A master in this event loop, at one address for good."""

    def __init__(self) -> None:
        self._master = ElectedMaster(7)
        self._master.holds("k")
        self._open = self._server(0)
        self.address = ""

    def _server(self, port: int) -> Any:
        return serving(self._master, port)

    async def start(self) -> None:
        self.address, _ = await self._open.__aenter__()

    async def stop(self) -> None:
        await self._open.__aexit__(None, None, None)
        self._open = self._server(Address.parse(self.address).port)


@asynccontextmanager
async def asking(driver: str, address: str) -> AsyncIterator[Callable[[str, float], Awaitable[bool]]]:
    """``exists(key, deadline_s)`` by a client of this kind."""
    if driver == "asyncio":
        async with aio.connect(address) as store:
            yield lambda key, deadline_s: store.exists(key, deadline_s=deadline_s)
        return
    client = await asyncio.to_thread(tanghulu.connect, address)
    with ThreadPoolExecutor(8) as threads:
        loop = asyncio.get_running_loop()
        yield lambda key, s: loop.run_in_executor(threads, lambda: client.exists(key, deadline_s=s))
    await asyncio.to_thread(client.close)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[TanghuluError]:
    """What calls were told that then waited, or gave up."""
    errors: list[TanghuluError] = []
    pause_s = Seeking.pause_s

    def counted(seeking: Seeking, asked: Any, error: TanghuluError, now_s: float) -> float | None:
        errors.append(error)
        return pause_s(seeking, asked, error, now_s)

    monkeypatch.setattr(Seeking, "pause_s", counted)
    return errors


@pytest.mark.parametrize("driver", ["asyncio", "blocking"])
async def test_calls_wait_for_a_master_that_restarts(driver: str, refused: list[TanghuluError]) -> None:
    master = Master()
    await master.start()
    async with asking(driver, master.address) as exists:
        assert await exists("k", 30.0)
        await master.stop()
        calls = [asyncio.ensure_future(exists(key, FOR_EVER_S)) for key in ("k", "nobody's", "k")]
        await until(lambda: len(refused) > 6)
        assert not any(call.done() for call in calls)
        await master.start()
        assert await asyncio.gather(*calls) == [True, False, True]
        assert await exists("k", 30.0), "on a connection that is open"
        await master.stop()
        with pytest.raises(MasterUnavailable, match=rf"no master answered at {master.address} for \d+\.\d s: cannot"):
            await exists("k", 0.5)


@pytest.mark.parametrize("driver", ["asyncio", "blocking"])
async def test_a_master_that_was_never_met_is_told_at_once(driver: str) -> None:
    address = f"127.0.0.1:{free_port()}"

    async def connect() -> None:
        if driver == "asyncio":
            await aio.connect(address, deadline_s=FOR_EVER_S)
        else:
            await asyncio.to_thread(tanghulu.connect, address, deadline_s=FOR_EVER_S)

    with pytest.raises(MasterUnavailable, match=f"no master answered at {address}: cannot connect"):
        await connect()


async def test_a_worker_computes_what_it_cannot_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever time there is for the bytes of a prefix."""
    monkeypatch.setattr(store_adapter, "LOAD_DEADLINE_S", FOR_EVER_S)
    monkeypatch.setattr(block_store, "FIRST_REST_S", 0.0)
    monkeypatch.setattr(block_store, "MAX_REST_S", 0.0)
    master = Master()
    await master.start()
    client = KvClient(Settings(master=Masters.parse(master.address), master_answer_s=ENGINE_ANSWER_S))
    adapter = store_adapter.StoreAdapter(block_store.BlockStore(client, FOR_EVER_S), Fingerprint(bytes(16)), 4)

    def load() -> int:
        return adapter.load([BlockHash(bytes(16))], [memoryview(bytearray(8))], set())

    async def is_answered() -> bool:
        try:
            return await asyncio.to_thread(load) == 0
        except MasterUnavailable:  # it was not fast enough
            return False

    await until(is_answered)
    await master.stop()
    for _ in range(3):
        with pytest.raises(MasterUnavailable):
            await asyncio.to_thread(load)
    await master.start()
    await until(is_answered)
    await asyncio.to_thread(adapter.close)
    await master.stop()


def test_a_worker_takes_the_first_blocks_and_then_leaves_a_store_without_master_alone() -> None:
    class Half:
        def __init__(self, error: TanghuluError) -> None:
            self.error = error

        def get_many_into(self, keys: Any, buffers: Any, **_: object) -> list[Any]:
            return [len(buffers[0]), self.error]

    hashes, buffers = [BlockHash(bytes([n] * 16)) for n in (1, 2)], [memoryview(bytearray(8)) for _ in range(2)]
    for error, is_available in (
        (MasterUnavailable("away"), False),
        (DirectoryIncomplete("rebuilding"), False),
        (ChunkNotFound("gone"), True),
        (NodeUnavailable("away"), True),
    ):
        half: Any = Half(error)
        adapter = store_adapter.StoreAdapter(block_store.BlockStore(half), Fingerprint(bytes(16)), 4)
        assert adapter.load(hashes, buffers, set()) == 1
        assert adapter.is_available is is_available


# --- real processes


@pytest.mark.slow
def test_nothing_fails_while_the_only_master_is_killed_and_started_again() -> None:
    """Puts of every carrier, gets, removals and questions, begun while nobody listens."""
    with Cluster(2, "64MiB") as cluster, ExitStack() as stack:
        opened = (tanghulu.connect(cluster.address, transport=each, deadline_s=60) for each in ("shm", "tcp"))
        clients = [stack.enter_context(client) for client in opened]
        for number, client in enumerate(clients):
            client.put(f"old-{number}", b"old")
            client.put(f"gone-{number}", b"gone")
        cluster.master.kill()
        begun = threading.Barrier(13)

        def run(call: Callable[[], Any]) -> Any:
            begun.wait(30)
            return call()

        with ThreadPoolExecutor(12) as threads:
            results = []
            for number, client in enumerate(clients):
                sizes = {f"new-{number}-{size}": size for size in (10, 300_000, 3 << 20)}
                calls: list[Callable[[], Any]] = [
                    *(lambda c=client, k=key, s=size: c.put(k, bytes(s)).ok for key, size in sizes.items()),  # type: ignore[misc]
                    lambda c=client, n=number: all(s.ok for s in c.put_many([(f"m-{n}-{i}", b"m") for i in range(9)])),  # type: ignore[misc]
                    lambda c=client, n=number: c.exists_many([f"old-{n}", f"old-{1 - n}"]) == [True, True],  # type: ignore[misc]
                    lambda c=client, n=number: c.remove(f"gone-{n}"),  # type: ignore[misc]
                ]
                results += [threads.submit(run, call) for call in calls]
            begun.wait(30)
            cluster.restart_master()
            assert [result.result(120) for result in results] == [True] * len(results)
        for number, client in enumerate(clients):
            assert not client.exists(f"gone-{number}")
            with clients[1 - number].get(f"new-{number}-3145728") as chunk:
                assert chunk.size_bytes == 3 << 20
