"""Watches of a source to which the path swallows everything, without a reset or a message."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Any

from structlog.testing import capture_logs

from tanghulu.discovery.base import EventKind, Instance
from tanghulu.discovery.etcd import EtcdDiscovery
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.types import Address, InstanceId, Role
from tests.discovery.sources import source
from tests.e2e.faults.network import BreakablePath
from tests.e2e.faults.standing import until
from tests.free_ports import free_port

_PATIENCE_S = 20
_DISCOVERIES: dict[str, Any] = {"etcd": EtcdDiscovery, "master": MasterDiscovery}
_NOTICED = {"etcd": "discovery.etcd_unavailable", "master": "discovery.watch_interrupted"}


async def _watch_through_a_black_hole(kind: str, logs: list[Any]) -> None:
    one = Instance(InstanceId(f"{kind}-one"), Role.NODE, Address("h", 1))
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context((await stack.enter_async_context(source(kind))).open())
        begins, address = ("127.0.0.1", free_port()), near.client._addresses[0] if kind == "etcd" else near.address
        path = await asyncio.to_thread(BreakablePath, begins, (address.host, address.port))
        stack.push_async_callback(asyncio.to_thread, path.close)
        far = await stack.enter_async_context(_DISCOVERIES[kind](Address(*begins)))
        events = await stack.enter_async_context(aclosing(far.watch()))
        assert (await anext(events)).kind is EventKind.SYNCED
        path.black_hole()
        async with asyncio.TaskGroup() as listening:
            next_event = listening.create_task(anext(events))
            await until(lambda: any(line["event"] == _NOTICED[kind] for line in logs), _PATIENCE_S)
            path.heal()
            await near.register(one)
        event = next_event.result()
        assert (event.kind, event.instance) == (EventKind.PUT, one), "the watch goes on when the path is whole"


async def test_a_watch_notices_a_path_that_swallows_everything() -> None:
    """Of etcd by a key that is read beside the watch, of a master by its beats; both at once to save time."""
    with capture_logs() as logs:
        async with asyncio.timeout(_PATIENCE_S), asyncio.TaskGroup() as both:
            for kind in _DISCOVERIES:
                both.create_task(_watch_through_a_black_hole(kind, logs))
