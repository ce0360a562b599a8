"""The master as a process: killed, restarted on its port, stopped."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tanghulu.discovery.base import EventKind, InstanceEvent
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import LeaseExpired, MasterUnavailable, NodeUnavailable
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.directory_messages import NodesRequest
from tanghulu.types import Address, Role
from tests.store.master.running_master import FakeNode, K, MasterProcess, asking, following, instance, until


@pytest.fixture
async def master() -> AsyncIterator[MasterProcess]:
    with tempfile.TemporaryDirectory(prefix="th-mp-") as scratch:
        process = MasterProcess(Path(scratch) / "run", "--debug", "rebuild_s=1.5")
        await process.start()
        yield process
        await process.close()


async def test_everything_comes_back_after_a_kill(master: MasterProcess) -> None:
    """Killed -9 and restarted: instances register again, nobody is told that they went, the node reports again."""
    events: list[InstanceEvent] = []
    async with MasterDiscovery(master.address) as discovery, asyncio.TaskGroup() as group:
        await discovery.register(instance("n1"), ttl_s=1.0)
        await discovery.register(instance("w1", Role.BOTH), ttl_s=1.0)
        watch = discovery.watch()

        async def pump() -> None:
            async for event in watch:
                events.append(event)

        pumping = group.create_task(pump())
        n1 = await FakeNode.connect(master.address, instance("n1"))
        await n1.report(("kv/a", 1, 10))
        async with following(master.address) as mirror:
            await until(lambda: len(events) == 3 and ("n1", "kv/a") in mirror.pairs)
            generation = discovery.master_generation

            await master.kill()
            await master.start()
            await until(lambda: discovery.master_generation != generation, 10)
            await n1.connection.close()
            n1 = await _connected(master.address)
            assert (await n1.holders("kv/a")) == ([[]], True), "not found is not yet an answer"
            assert mirror.pairs == {("n1", "kv/a")}, "a follower keeps what it knows until there is something better"
            assert (await n1.announce()).report_wanted
            await n1.report(("kv/a", 1, 10), ("kv/b", 1, 10))
            assert (await n1.holders("kv/a", "none")) == ([["n1"], []], True)
            await until(lambda: mirror.kinds.count(K.RESET) == 2 and K.SYNCED in mirror.kinds[-1:])
            assert mirror.pairs == {("n1", "kv/a"), ("n1", "kv/b")}
            assert (await n1.holders("kv/a", "none")) == ([["n1"], []], False)
        await n1.connection.close()
        assert sorted(e.instance.id for e in events if e.instance is not None) == ["n1", "w1"]
        assert {e.kind for e in events} == {EventKind.PUT, EventKind.SYNCED}
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
        await watch.aclose()
    await master.stop()
    assert '"level": "error"' not in master.log()
    assert "Traceback" not in master.log()


async def _connected(address: Address) -> FakeNode:
    """A connection on which the node may announce: it has registered again."""
    while True:
        node = await FakeNode.connect(address, instance("n1"))
        try:
            await node.announce()
        except LeaseExpired:
            await node.connection.close()
        else:
            return node


async def test_who_died_meanwhile_is_told_gone_after_its_grace(master: MasterProcess, monkeypatch) -> None:
    monkeypatch.setattr("tanghulu.discovery.master.DEFAULT_TTL_S", 0.5)
    async with MasterDiscovery(master.address) as discovery, MasterDiscovery(master.address) as dying:
        registration = await dying.register(instance("n1"))
        watch = discovery.watch()
        assert [(await anext(watch)).kind for _ in range(2)] == [EventKind.PUT, EventKind.SYNCED]
        await master.kill()
        assert registration._renewing is not None
        registration._renewing.cancel()
        await master.start()
        gone = await asyncio.wait_for(anext(watch), 10)
        assert (gone.kind, gone.instance) == (EventKind.DELETE, instance("n1"))
        await watch.aclose()


async def test_without_a_master(master: MasterProcess, monkeypatch) -> None:
    monkeypatch.setattr("tanghulu.discovery.master.REGISTER_DEADLINE_S", 0.3)
    async with MasterDiscovery(master.address) as discovery:
        registration = await discovery.register(instance("n1"), ttl_s=0.6)
        await master.kill()
        changed = instance("n1", attributes={"draining": "true"})
        with pytest.raises(
            MasterUnavailable, match=r"is it running|unavailable"
        ):  # killed before the call, or under it
            await registration.update(changed)
        with pytest.raises(MasterUnavailable, match=r"did not answer within 0\.3 s"):
            await discovery.register(instance("n2"))
        await master.start()
        async with asking(master.address) as ask:

            async def draining() -> bool:
                nodes = (await ask(methods.NODES, NodesRequest())).nodes
                return bool(nodes) and nodes[0].draining

            await until(draining)
        await master.stop()
        await registration.close()


async def test_a_stop_ends_open_streams_at_once_and_quietly(master: MasterProcess) -> None:
    async with following(master.address) as mirror, MasterDiscovery(master.address) as discovery:
        watch = discovery.watch()
        assert (await anext(watch)).kind is EventKind.SYNCED
        await until(lambda: K.SYNCED in mirror.kinds)
        node = await FakeNode.connect(master.address, instance("n1"))
        await asyncio.wait_for(master.stop(), 5)
        with pytest.raises(NodeUnavailable):
            await node.holders("k")
        await watch.aclose()
    assert "Traceback" not in master.log()
    assert "ERROR" not in master.log()
    assert "Warning" not in master.log()


async def test_a_taken_port_is_said_and_exits_1(master: MasterProcess) -> None:
    command = "from tanghulu.store.master.main import COMMAND; COMMAND()"
    outcome = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", command, "--port", str(master.address.port)],
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert outcome.returncode == 1
    assert b"choose another --port" in outcome.stderr
    assert b"Traceback" not in outcome.stderr
