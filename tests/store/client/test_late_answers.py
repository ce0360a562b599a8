"""Answers that come when nobody waits for them: what they grant is given back. Without I/O, and with a real node."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

import tanghulu
from tanghulu import aio
from tanghulu.errors import TanghuluError
from tanghulu.store.client import Client
from tanghulu.store.client.logic import operations
from tanghulu.store.client.logic.effects import Notify, PeerId, Transfer
from tests.store.client.test_logic import FakeCluster
from tests.store.cluster import Cluster, Process, eventually
from tests.store.fault_tools import DEADLINE_S, MIB, stopped, value

SOON_S = 0.3


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes of this host; no lease ends by itself."""
    with Cluster(2, "64MiB", "--debug", "lease_ms=600000") as running:
        yield running


def leases(nodes: Cluster) -> float:
    return sum(node.metric("tanghulu_node_leases") for node in nodes.nodes)


def reserved(node: Process) -> float:
    """How many times ranges were reserved."""
    try:
        return node.metric("tanghulu_rpc_seconds_count", method="reserve")
    except KeyError:
        return 0.0


def keys_of(store: Client, nodes: Cluster) -> list[str]:
    """A key with 1 MiB on each of the nodes, in their order."""
    keys: dict[str, str] = {}
    for number in range(100):
        key = f"late/{number}"
        store.put(key, value(key))
        keys.setdefault(store.stat(key).nodes[0], key)
        if len(keys) == len(nodes.nodes):
            return [keys[node.name] for node in nodes.nodes]
    raise AssertionError("all keys went to one node")


def two_connections_each(store: Client, keys: list[str]) -> None:
    """So that the session stays when one connection is broken."""
    while any(len(store._driver._idle.get(PeerId(node.id), ())) < 2 for node in store.nodes()):
        with ThreadPoolExecutor(4) as threads:
            for chunk in threads.map(store.get, keys * 8):
                chunk.close()


# --- without I/O


def test_a_get_that_ends_anywhere_keeps_no_lease() -> None:
    """By an interrupt or a cancelled task, which close the logic where it waits."""
    length = 0
    for end in range(100):
        cluster = FakeCluster("n1")
        cluster.values["n1"]["k"] = b"right"
        cluster.directory["k"] = ["n1"]
        cluster.num_expiring = 1
        logic = operations.get(cluster.context, cluster.deadline, "k")
        try:
            effect: Any = next(logic)
            for _ in range(end):
                effect = logic.send(cluster._perform(effect))
            was_told = isinstance(effect, Notify)  # or the driver says that it was not
            logic.close()
        except StopIteration:
            length = end
            break
        dropped = cluster.context.leases.take_dropped().get(PeerId("n1"), [])
        assert not cluster.context.leases.num_held
        assert bool(dropped) == (isinstance(effect, Transfer) or effect.__class__.__name__ == "OpenSegment")
        if was_told:
            cluster.context.requeue(effect.calls)
            assert cluster.context.leases.take_dropped()
    assert length > 5


# --- with real nodes


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_get_that_was_answered_too_late(nodes: Cluster, transport: str) -> None:
    with tanghulu.connect(nodes.address, transport=transport) as store:
        keys = keys_of(store, nodes)
        large = f"late/large-{transport}"  # not inside the answer
        store.put(large, value(large, 4 * MIB), prefer_node=nodes.nodes[0].name)
        two_connections_each(store, keys)
        for _ in range(3):
            with stopped(nodes.nodes[0].popen.pid), pytest.raises(TanghuluError):
                store.get(large, deadline_s=SOON_S)
            store.exists(large)
        # What the node has not even read yet holds no lease: all answers have to have come, too.
        eventually(lambda: store.exists(large) and not store._driver._late and not leases(nodes))
        assert store.get(large) == value(large, 4 * MIB)
        assert store.remove(large)


def test_a_reservation_that_was_granted_too_late(nodes: Cluster) -> None:
    node = nodes.nodes[0]
    with tanghulu.connect(nodes.address) as store:
        two_connections_each(store, keys_of(store, nodes))
        with stopped(node.popen.pid), contextlib.suppress(TanghuluError):
            store.put("late/reserved", value("r", 4 * MIB), prefer_node=node.name, deadline_s=SOON_S)
        eventually(lambda: bool(store.nodes()) and not leases(nodes))
        store.remove("late/reserved")
        assert not store.put("late/reserved", value("s", 4 * MIB), prefer_node=node.name).existed
        assert store.get("late/reserved") == value("s", 4 * MIB)
        assert store.remove("late/reserved")


def interrupt(number: int, frame: object) -> None:
    """A handler of signals that raises."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """What waits in the block is interrupted soon, as by Ctrl-C."""
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, SOON_S)
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_in_a_get(nodes: Cluster) -> None:
    """Ctrl-C while a node is silent: one node has answered, the other will."""
    with tanghulu.connect(nodes.address) as store:
        keys = keys_of(store, nodes)
        two_connections_each(store, keys)
        for keys_asked in ([keys[0]], keys):
            with stopped(nodes.nodes[0].popen.pid), interrupted():
                store.get_many(keys_asked, deadline_s=20)
        eventually(lambda: store.exists(keys[0]) and not leases(nodes))
        assert store.get(keys[0]) == value(keys[0])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("kind", ["one", "several", "both nodes"])
def test_an_interrupt_while_ranges_are_reserved(nodes: Cluster, transport: str, kind: str) -> None:
    """The node has heard RESERVE, or will, and grants ranges to somebody who does not wait any more."""
    node = nodes.nodes[0]
    keys = [f"late/range-{transport}-{kind}-{number}" for number in range(1 if kind == "one" else 3)]
    with tanghulu.connect(nodes.address, transport=transport, deadline_s=30) as store:
        two_connections_each(store, keys_of(store, nodes))
        items = [(key, value(key, 6 * MIB)) for key in keys]
        before = reserved(node)
        with stopped(node.popen.pid), interrupted():
            store.put_many(items, prefer_node=node.name, replicas=2 if kind == "both nodes" else 1)
        eventually(lambda: reserved(node) > before)
        eventually(lambda: bool(store.exists_many(keys)) and not leases(nodes))
        assert not store._driver.context.leases.num_held
        store.remove_many(keys)
        for key, wanted in items:
            assert not store.put(key, wanted, prefer_node=node.name).existed
            assert store.get(key) == wanted
        store.remove_many(keys)


class InterruptedSocket:
    """Sends, and is interrupted before anybody knows that it has."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def send(self, data: Any) -> int:
        self._inner.send(data)
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("place", ["behind the call", "behind one that is begun", "in the work meanwhile"])
def test_an_interrupt_at_the_worst_moment(nodes: Cluster, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = nodes.nodes[0]
    keys = [f"late/{place}-{number}" for number in range(3 if place == "behind the call" else 1)]
    items = [(key, value(key, 6 * MIB)) for key in keys]
    with tanghulu.connect(nodes.address, deadline_s=30) as store:
        two_connections_each(store, keys_of(store, nodes))
        driver = store._driver
        if place == "in the work meanwhile":
            inner = driver._call_meanwhile
            monkeypatch.setattr(
                driver, "_call_meanwhile", lambda *call: inner(*call[:-1], functools.partial(interrupt, 0, None))
            )
        else:
            for connection in driver._idle[PeerId(node.name)]:
                monkeypatch.setattr(connection, "_socket", InterruptedSocket(connection._socket))
        before = reserved(node)
        with pytest.raises(KeyboardInterrupt):
            store.put_many(items, prefer_node=node.name)
        monkeypatch.undo()
        eventually(lambda: reserved(node) > before)
        eventually(lambda: bool(store.exists_many(keys)) and not leases(nodes))
        assert not driver._late
        for key, wanted in items:
            assert not store.put(key, wanted, prefer_node=node.name).existed
            assert store.get(key) == wanted
            assert store.remove(key)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_asyncio_calls_that_were_cancelled_or_too_late(nodes: Cluster, transport: str) -> None:
    with tanghulu.connect(nodes.address) as helper:
        keys = keys_of(helper, nodes)
        for number, key in enumerate(keys):
            helper.put(f"{key}-large-{transport}", value(key, 4 * MIB), prefer_node=nodes.nodes[number].name)
    large = [f"{key}-large-{transport}" for key in keys]
    async with aio.connect(nodes.address, transport=transport) as store:
        for key in large:
            (await store.get(key)).close()
        with stopped(nodes.nodes[0].popen.pid):
            with pytest.raises(TanghuluError):
                await store.get(large[0], deadline_s=SOON_S)
            for keys_asked in ([large[0]], large):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(store.get_many(keys_asked, deadline_s=20), SOON_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    store.put("late/aio", value("a", 4 * MIB), prefer_node=nodes.nodes[0].name), SOON_S
                )
        await asyncio.to_thread(eventually, lambda: not leases(nodes))  # nothing else is asked of the store meanwhile
        assert await store.get(large[0], deadline_s=DEADLINE_S) == value(keys[0], 4 * MIB)
        await store.remove_many([*large, "late/aio"])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_asyncio_gets_cancelled_at_any_moment(nodes: Cluster, transport: str) -> None:
    with tanghulu.connect(nodes.address) as helper:
        helper.put("late/any", value("any", 4 * MIB))
    async with aio.connect(nodes.address, transport=transport) as store:
        (await store.get("late/any")).close()
        for steps in range(40):
            task = asyncio.ensure_future(store.get("late/any"))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await task).close()
            del task
        await asyncio.to_thread(eventually, lambda: not leases(nodes))
        assert not store._driver.context.leases.num_held
        await store.remove("late/any")


# --- a client that is closed at once


def test_what_a_client_gave_back_before_it_closed_is_given_back(nodes: Cluster) -> None:
    """Though its node could not look before the client was gone: an answer to a closed connection cuts it."""
    eventually(lambda: leases(nodes) == 0)
    store = tanghulu.connect(nodes.address, transport="shm", deadline_s=30)
    chunks = [store.get(key) for key in keys_of(store, nodes) for _ in range(3)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        for node in nodes.nodes:
            stack.enter_context(stopped(node.popen.pid))
        for chunk in chunks:
            chunk.close()
        closing = thread.submit(store.close)
        wait([closing], SOON_S)
        stack.close()
        closing.result()
    eventually(lambda: leases(nodes) == 0)


async def test_what_an_asyncio_client_gave_back_before_it_closed_is_given_back(nodes: Cluster) -> None:
    with tanghulu.connect(nodes.address) as other:
        keys = keys_of(other, nodes)
    eventually(lambda: leases(nodes) == 0)
    store = await aio.connect(nodes.address, transport="shm", deadline_s=30).__aenter__()
    chunks = [await store.get(key) for key in keys for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for node in nodes.nodes:
            stack.enter_context(stopped(node.popen.pid))
        for chunk in chunks:
            chunk.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        closing = asyncio.create_task(store.close())
        await asyncio.wait([closing], timeout=SOON_S)
        stack.close()
        await closing
    eventually(lambda: leases(nodes) == 0)


# --- a client that calls no more


async def test_what_is_dropped_while_nodes_are_told_is_given_back(nodes: Cluster) -> None:
    """A node that has to be connected to again takes a moment, and nobody calls afterwards."""
    with tanghulu.connect(nodes.address) as other:
        keys = keys_of(other, nodes)
    eventually(lambda: leases(nodes) == 0)
    async with aio.connect(nodes.address, transport="shm", deadline_s=30) as store:
        first, second = [await store.get(key) for key in keys]
        driver = store._driver
        lost = PeerId((await store.stat(keys[0])).nodes[0])
        await driver._connections[lost].close()
        async with driver._opening[lost]:  # somebody else connects
            first.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            second.close()
        await asyncio.to_thread(eventually, lambda: leases(nodes) == 0)


def test_what_was_told_on_a_connection_that_broke_is_told_again(nodes: Cluster) -> None:
    """The client's session lives on by its other connection, so the node does not find out by itself."""
    with tanghulu.connect(nodes.address, transport="shm", deadline_s=30) as store:
        keys = keys_of(store, nodes)
        two_connections_each(store, keys)
        node = PeerId(store.stat(keys[0]).nodes[0])
        chunk = store.get(keys[0])
        used = store._driver._idle[node][-1]
        used._send = lambda *sent: None  # type: ignore[method-assign]
        chunk.close()
        store._driver._idle[node].remove(used)
        store._driver._hang_up(node, used)
        eventually(lambda: store.exists(keys[0]) and leases(nodes) == 0)


class Mute:
    """A transport of which nothing leaves."""

    def write(self, data: bytes) -> None:
        pass


async def test_what_was_told_on_an_asyncio_connection_that_broke_is_told_again(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tanghulu.connect(nodes.address) as other:
        keys = keys_of(other, nodes)
    eventually(lambda: leases(nodes) == 0)
    async with aio.connect(nodes.address, transport="shm", deadline_s=30) as store:
        node = PeerId((await store.stat(keys[0])).nodes[0])
        held, chunk = await store.get(keys[0]), await store.get(keys[0])
        connection = store._driver._connections[node]
        with monkeypatch.context() as patched:
            patched.setattr(connection, "_open_transport", Mute)
            chunk.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        connection.abort()
        await asyncio.to_thread(eventually, lambda: leases(nodes) == 1)
        held.close()
        await asyncio.to_thread(eventually, lambda: leases(nodes) == 0)
