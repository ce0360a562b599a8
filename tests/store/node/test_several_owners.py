"""A real node, and two real masters that share the keys: what it tells whom, also while ranges change hands."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tanghulu import aio
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.masters import Masters
from tanghulu.runtime.process import SupervisorLine
from tanghulu.store.client.aio import AsyncClient
from tanghulu.store.node.main import Node, NodeConfig
from tanghulu.store.node.reporting import conversation
from tanghulu.store.protocol.key_slots import range_of
from tanghulu.types import Role
from tests.store.master.running_master import InProcess, SeveralMasters, several_masters_here, until

KEYS = [f"k{n}" for n in range(24)]
DEADLINE_S = 30.0


@asynccontextmanager
async def node_here(masters: SeveralMasters) -> AsyncIterator[Node]:
    """A node in this event loop. The masters that do not lead are told of it, as etcd tells them of admitted nodes."""
    with tempfile.TemporaryDirectory(prefix="th-node-") as run_dir:
        config = NodeConfig(port=0, master=Masters.of(masters.addresses[0]), memory=16 << 20, checks=True)
        line = SupervisorLine(-1, lambda: None)
        process = InProcess(
            Role.NODE, config, Path(run_dir), line, CollectorRegistry(), "127.0.0.1:1", secrets.randbits(48)
        )
        process.address = asyncio.get_running_loop().create_future()
        node = Node(process, config)
        serving = asyncio.create_task(node.run())
        async with AsyncExitStack() as stack:
            await until(lambda: node._registration is not None or serving.done())
            for address in masters.addresses[1:]:
                discovery = await stack.enter_async_context(MasterDiscovery(address))
                registration = await discovery.register(node._instance(node._port.address))
                stack.push_async_callback(registration.close)
            await asyncio.wait({serving, process.address}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            try:
                yield node
            finally:
                process.stopping.set()
                await serving


@pytest.fixture
async def masters() -> AsyncIterator[SeveralMasters]:
    async with several_masters_here(forget=True) as several:
        yield several


@pytest.fixture
async def node(masters: SeveralMasters) -> AsyncIterator[Node]:
    async with node_here(masters) as made:
        yield made


@pytest.fixture
async def client(masters: SeveralMasters, node: Node) -> AsyncIterator[AsyncClient]:
    async with aio.connect(str(masters.addresses[0])) as made:
        yield made


def known_to(masters: SeveralMasters, index: int) -> set[str]:
    directory = masters.ownerships[index].directory
    assert directory is not None
    return set(directory.walk())


async def put_all(client: AsyncClient, keys: list[str], value: bytes) -> None:
    statuses = await client.put_many([(key, value) for key in keys], deadline_s=DEADLINE_S)
    assert all(status.ok for status in statuses), statuses


async def test_put_get_and_remove_with_two_owners(masters: SeveralMasters, node: Node, client: AsyncClient) -> None:
    await put_all(client, KEYS, b"value" * 100)
    assert all(await client.exists_many(KEYS, deadline_s=DEADLINE_S))
    await until(lambda: node.state.reports.map is not None and not node.state.reports.leader.ranges)
    await until(lambda: known_to(masters, 0) == {key for key in KEYS if range_of(key) % 2 == 0})
    await until(lambda: known_to(masters, 1) == {key for key in KEYS if range_of(key) % 2 == 1})
    for key in KEYS:
        with await client.get(key, deadline_s=DEADLINE_S) as chunk:
            assert chunk.bytes() == b"value" * 100
    for key in KEYS[:8]:
        assert await client.remove(key, deadline_s=DEADLINE_S)
    assert known_to(masters, 0) | known_to(masters, 1) == set(KEYS[8:]), "a removal is answered when its owner knows"
    assert await client.exists_many(KEYS, deadline_s=DEADLINE_S) == [False] * 8 + [True] * 16


async def test_a_range_that_moves_is_reported_to_its_new_owner(
    masters: SeveralMasters, node: Node, client: AsyncClient
) -> None:
    await put_all(client, KEYS, b"v" * 10)
    masters.share(lambda number: 1 - number % 2)
    assert all(await client.exists_many(KEYS, deadline_s=DEADLINE_S))
    assert known_to(masters, 0) == {key for key in KEYS if range_of(key) % 2 == 1}
    masters.share(lambda number: 1)
    assert all(await client.exists_many(KEYS, deadline_s=DEADLINE_S))
    await put_all(client, ["new1", "new2", "new3"], b"w")
    masters.share(lambda number: 0)
    assert all(await client.exists_many([*KEYS, "new1", "new2", "new3"], deadline_s=DEADLINE_S))
    assert not await client.exists("missing", deadline_s=DEADLINE_S)
    assert set(node.state.reports.owners) == {masters.addresses[0]}


async def test_puts_and_removals_while_ranges_move(masters: SeveralMasters, node: Node, client: AsyncClient) -> None:
    shares = [lambda n: 1 - n % 2, lambda n: int(n < 32), lambda n: 1, lambda n: n % 2, lambda n: 0]
    kept: list[str] = []
    for number, share in enumerate(shares):
        keys = [f"{number}-{n}" for n in range(20)]
        putting = asyncio.create_task(put_all(client, keys, b"x" * 300))
        removing = [asyncio.create_task(client.remove(key, deadline_s=DEADLINE_S)) for key in kept[:5]]
        await asyncio.sleep(0)
        masters.share(share)
        await putting
        assert await asyncio.gather(*removing) == [True] * len(removing)
        gone, kept = kept[:5], [*kept[5:], *keys]
        assert not any(await client.exists_many(gone, deadline_s=DEADLINE_S))
        assert all(await client.exists_many(kept, deadline_s=DEADLINE_S))
        for key in kept[-3:]:
            with await client.get(key, deadline_s=DEADLINE_S) as chunk:
                assert chunk.bytes() == b"x" * 300


async def test_masters_that_take_long_to_greet(masters: SeveralMasters, monkeypatch: pytest.MonkeyPatch) -> None:
    greet = conversation.greet

    async def slow(*arguments: Any) -> None:
        await asyncio.sleep(0.3)  # several ticks of the node
        await greet(*arguments)

    monkeypatch.setattr(conversation, "greet", slow)
    async with asyncio.timeout(DEADLINE_S), node_here(masters) as node:
        await until(lambda: node.state.reports.map is not None and node._reporter.connected.is_set())
