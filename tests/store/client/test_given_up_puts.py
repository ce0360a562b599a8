"""Puts that are given up on the way, cancelled or interrupted at any step: nothing stays reserved for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import tanghulu
import tanghulu.aio
from tanghulu.store.client import Client
from tanghulu.store.client.drivers.asynchronous import AsyncioDriver
from tanghulu.store.client.drivers.blocking import BlockingDriver
from tanghulu.store.client.logic.effects import CallPeers
from tanghulu.store.protocol.methods import RESERVE
from tests.store.cluster import Cluster, eventually
from tests.store.fault_tools import MIB, value

#: By which way a put of that size goes, where memory is mapped and where it is not.
WAYS = {"buffer": ("shm", 4096), "inline": ("tcp", 4096), "in place": ("tcp", MIB), "transfer": ("shm", 6 * MIB)}
MOST_STEPS = 20


@pytest.fixture(params=[*WAYS, "transfer over tcp"])
def way(request: pytest.FixtureRequest) -> tuple[str, int]:
    return WAYS.get(request.param, ("tcp", 6 * MIB))


class Steps:
    """Counts the effects of a driver, and gives up before one of them; what came of those before is known."""

    def __init__(self, last: int, give_up: Callable[[], None]) -> None:
        self.left, self.give_up = last, give_up

    def next(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.give_up()


@pytest.mark.parametrize("kind", ["one", "many"])
def test_an_interrupted_put_gives_back_what_it_has(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, way: tuple[str, int], kind: str
) -> None:
    transport, size = way
    perform = BlockingDriver._perform
    with tanghulu.connect(cluster.address, transport=transport) as client, tanghulu.connect(cluster.address) as other:
        for number in range(3):
            client.put(f"warm{number}", value("warm", size))
        for last in range(1, MOST_STEPS):
            key, finished = f"interrupted/{transport}/{size}/{kind}/{last}", False
            steps = Steps(last, _interrupt)

            def stepped(driver: Any, effect: Any, deadline: Any, steps: Steps = steps) -> Any:
                steps.next()
                return perform(driver, effect, deadline)

            with monkeypatch.context() as patched:
                patched.setattr(BlockingDriver, "_perform", stepped)
                try:
                    put(client, key, size, kind)
                    finished = True
                except KeyboardInterrupt:
                    pass
            eventually(lambda: cluster.nodes[0].metric("tanghulu_node_leases") == 0)
            assert uses_are_ended(client._driver)
            if finished:
                break
        assert finished
        assert put(other, "after", size, kind)
        other.remove_matching("^")


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_cancelled_put_gives_back_what_it_has(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, way: tuple[str, int], when: str
) -> None:
    """Cancelled before a step, or in the middle of it, when what it sends may have been heard."""
    transport, size = way
    perform = AsyncioDriver._perform
    async with tanghulu.aio.connect(cluster.address, transport=transport) as client:
        for number in range(3):
            await client.put(f"warm{number}", value("warm", size))
        for last in range(1, MOST_STEPS):
            key, finished = f"cancelled/{transport}/{size}/{when}/{last}", False
            steps = Steps(last, _cancel)

            async def stepped(driver: Any, effect: Any, deadline: Any, steps: Steps = steps) -> Any:
                if when == "before" or _reserves(effect):
                    steps.next()
                    return await perform(driver, effect, deadline)
                performing = asyncio.ensure_future(perform(driver, effect, deadline))
                await asyncio.sleep(0)
                try:
                    steps.next()
                finally:
                    if steps.left == 0:
                        performing.cancel()
                        await asyncio.wait({performing})
                return await performing

            with monkeypatch.context() as patched:
                patched.setattr(AsyncioDriver, "_perform", stepped)
                try:
                    await client.put(key, value(key, size))
                    finished = True
                except asyncio.CancelledError:
                    pass
            await asyncio.to_thread(eventually, lambda: cluster.nodes[0].metric("tanghulu_node_leases") == 0)
            assert uses_are_ended(client._driver)
            if finished:
                break
        assert finished
        await client.remove_matching("^")


def put(client: Client, key: str, size: int, kind: str) -> bool:
    if kind == "one":
        return client.put(key, value(key, size)).ok
    return all(each.ok for each in client.put_many([(f"{key}/{n}", value(key, size)) for n in range(3)]))


def _reserves(effect: Any) -> bool:
    """Whether the answer would be a range that only the connection can give back, if nobody waits for it."""
    return isinstance(effect, CallPeers) and any(call.method == RESERVE.number for _, call in effect.calls)


def uses_are_ended(driver: Any) -> bool:
    """Of all write buffers."""
    return all(each._begun == each._ended for each in driver.context.write_buffers._open.values())


def _interrupt() -> None:
    raise KeyboardInterrupt


def _cancel() -> None:
    raise asyncio.CancelledError
