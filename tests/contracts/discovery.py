"""What every Discovery keeps to, whoever serves it.

A test module of implementations imports these tests and has the fixtures ``src``, a Source, and ``discovery``, one
that the source has opened.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tanghulu.discovery.base import Discovery, EventKind, InstanceEvent
from tanghulu.discovery.entering import enter
from tanghulu.errors import Conflict
from tanghulu.types import Place, Role
from tests.discovery.sources import Source
from tests.store.master.running_master import instance

PUT, DELETE, SYNCED = EventKind.PUT, EventKind.DELETE, EventKind.SYNCED


class Watcher:
    """A running watch; ``take`` gives the next events."""

    def __init__(self, events: asyncio.Queue[InstanceEvent]) -> None:
        self._events = events

    async def take(self, deadline_s: float = 30.0) -> InstanceEvent:
        return await asyncio.wait_for(self._events.get(), deadline_s)

    async def synced(self) -> list[str]:
        """The ids that were there when the watch began."""
        ids = []
        while (event := await self.take()).kind is not SYNCED:
            assert event.kind is PUT
            ids.append(event.instance.id)
        return sorted(ids)

    async def is_silent(self, seconds: float) -> bool:
        try:
            await self.take(seconds)
        except TimeoutError:
            return True
        return False


@asynccontextmanager
async def watching(discovery: Discovery, *roles: Role, namespace: str = "default") -> AsyncIterator[Watcher]:
    queue: asyncio.Queue[InstanceEvent] = asyncio.Queue()
    stream = discovery.watch(*roles, namespace=namespace)

    async def pump() -> None:
        async for event in stream:
            queue.put_nowait(event)

    task = asyncio.create_task(pump())
    try:
        yield Watcher(queue)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()


async def test_an_empty_source_is_synced_at_once(discovery: Discovery) -> None:
    async with watching(discovery) as watcher:
        assert await watcher.synced() == []


async def test_instances_come_whole_before_synced(discovery: Discovery) -> None:
    one = instance(
        "n/1 ü",
        place=Place("ü", "r", "h"),
        metrics_address="h:1",
        unix_path="/tmp/x.sock",
        generation=2**48 - 1,
        attributes={"a": "ü", "b": ""},
    )
    await discovery.register(one)
    async with watching(discovery) as watcher:
        assert await watcher.take() == InstanceEvent(PUT, one)
        assert await watcher.take() == InstanceEvent(SYNCED)


async def test_changes_come_in_order(discovery: Discovery) -> None:
    async with watching(discovery) as watcher:
        assert await watcher.synced() == []
        registration = await discovery.register(instance())
        assert await watcher.take() == InstanceEvent(PUT, instance())
        changed = instance(attributes={"draining": "true"})
        await registration.update(changed)
        assert await watcher.take() == InstanceEvent(PUT, changed)
        await registration.close()
        gone = await watcher.take()
        assert gone.kind is DELETE
        assert gone.instance is not None
        assert gone.instance.id == changed.id
        await registration.close()  # twice is once
        assert await watcher.is_silent(0.1)


async def test_an_id_keeps_its_role_while_its_process_lives(src: Source, discovery: Discovery) -> None:
    registration = await discovery.register(instance("one"))
    async with src.open() as other:
        with pytest.raises(Conflict, match="is a node and cannot register as a worker"):
            await enter(other, instance("one", Role.BOTH))
    async with watching(discovery) as watcher:
        assert await watcher.take() == InstanceEvent(PUT, instance("one"))
        await registration.close()
        await discovery.register(instance("one", Role.BOTH))


async def test_roles_and_namespaces_are_told_apart(discovery: Discovery) -> None:
    await discovery.register(instance("node"))
    await discovery.register(instance("worker", Role.BOTH))
    await discovery.register(instance("conductor", Role.CONDUCTOR))
    await discovery.register(instance("elsewhere", namespace="other"))
    async with watching(discovery) as everybody, watching(discovery, Role.NODE, Role.BOTH) as some:
        async with watching(discovery, namespace="other") as other:
            assert await everybody.synced() == ["conductor", "node", "worker"]
            assert await some.synced() == ["node", "worker"]
            assert await other.synced() == ["elsewhere"]
            await discovery.register(instance("late", Role.CONDUCTOR))
            assert (await everybody.take()).instance == instance("late", Role.CONDUCTOR)
            assert await some.is_silent(0.1)


async def test_everybody_sees_the_same(src: Source, discovery: Discovery) -> None:
    async with src.open() as second, src.open() as third:
        async with watching(second) as one, watching(third) as other:
            assert await one.synced() == await other.synced() == []
            await discovery.register(instance())
            assert await one.take() == await other.take() == InstanceEvent(PUT, instance())


async def test_a_lease_is_renewed_while_the_process_lives(discovery: Discovery) -> None:
    async with watching(discovery) as watcher:
        await watcher.synced()
        await discovery.register(instance(), ttl_s=1.0)
        assert (await watcher.take()).kind is PUT
        assert await watcher.is_silent(1.6)


async def test_a_killed_process_vanishes_at_its_leases_end(src: Source, discovery: Discovery) -> None:
    async with watching(discovery) as watcher:
        await watcher.synced()
        doomed = await src.doomed(instance("doomed"), ttl_s=2.0)
        assert (await watcher.take()).kind is PUT
        assert await watcher.is_silent(2.2)
        killed_s = time.monotonic()
        await doomed.kill()
        event = await watcher.take()
        assert event.kind is DELETE
        assert event.instance is not None
        assert event.instance.id == "doomed"
        assert 0.3 < time.monotonic() - killed_s < 6.0 + src.late_s
    async with watching(discovery) as later:
        assert await later.synced() == []


async def test_a_successor_takes_the_place_of_a_killed_process(src: Source, discovery: Discovery) -> None:
    doomed = await src.doomed(instance(generation=1), ttl_s=1.0)
    async with watching(discovery) as watcher:
        assert await watcher.synced() == ["n1"]
        await doomed.kill()
        await discovery.register(instance(generation=2))
        event = await watcher.take()
        assert event == InstanceEvent(PUT, instance(generation=2))
        assert await watcher.is_silent(1.2)


async def test_leaving_the_context_unregisters(src: Source, discovery: Discovery) -> None:
    async with watching(discovery) as watcher:
        await watcher.synced()
        async with src.open() as short:
            await short.register(instance("a"))
            await short.register(instance("b"))
            assert {(await watcher.take()).instance.id, (await watcher.take()).instance.id} == {"a", "b"}
        events = [await watcher.take(), await watcher.take()]
        assert {event.kind for event in events} == {DELETE}


async def test_many_come_and_go(discovery: Discovery) -> None:
    registrations = await asyncio.gather(*(discovery.register(instance(f"n{n:03}")) for n in range(60)))
    async with watching(discovery) as watcher:
        assert await watcher.synced() == [f"n{n:03}" for n in range(60)]
        await asyncio.gather(*(registration.close() for registration in registrations[:30]))
        gone = {(await watcher.take()).instance.id for _ in range(30)}
        assert gone == {f"n{n:03}" for n in range(30)}
        await registrations[40].update(replace(instance("n040"), metrics_address="x:1"))
        assert (await watcher.take()).instance.metrics_address == "x:1"


async def test_it_says_whether_one_could_register(discovery: Discovery) -> None:
    await discovery.look()
    await discovery.register(instance())
