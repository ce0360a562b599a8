"""A node that stands still: it costs a client one deadline, then others come first until it gives a sign of life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import tanghulu
from tanghulu.errors import TanghuluError
from tanghulu.store.client.logic.effects import PeerId
from tests.store.cluster import Cluster, Process, eventually
from tests.store.fault_tools import DEADLINE_S, SLACK_S, stopped, timed, value

SIZE = 100_000 // 4096 * 4096


class AsyncCalls:
    """The asyncio client, called as the blocking one is."""

    def __init__(self, address: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = self.loop.run_until_complete(tanghulu.aio.connect(address, transport="tcp"))
        self._driver = self.client._driver

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **options: self.loop.run_until_complete(getattr(self.client, name)(*args, **options))


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture(params=["threads", "asyncio"])
def store(two: Cluster, request: pytest.FixtureRequest) -> Iterator[Any]:
    is_async = request.param == "asyncio"
    opened: Any = AsyncCalls(two.address) if is_async else tanghulu.connect(two.address, transport="tcp")
    yield opened
    opened.remove_matching("^", deadline_s=60)
    opened.close()
    if is_async:
        opened.loop.close()


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except TanghuluError as error:
        return error


def frozen_and_other(cluster: Cluster, store: Any) -> tuple[Process, PeerId, PeerId]:
    frozen = cluster.nodes[0]
    names = [PeerId(each.id) for each in store.nodes()]
    (name,) = [each.id for each in store.nodes() if each.address == str(frozen.address)]
    (other,) = [each for each in names if each != name]
    return frozen, PeerId(name), other


def test_keys_of_a_frozen_node_cost_one_deadline_and_not_one_each(two: Cluster, store: Any) -> None:
    frozen, name, other = frozen_and_other(two, store)
    keys = [f"alone-{number}" for number in range(30)]
    for key in keys:
        store.put(key, value(key, SIZE), prefer_node=name)
        store.get(key).close()
    with stopped(frozen.popen.pid):
        outcomes = timed(lambda: [outcome(partial(store.get, key, deadline_s=DEADLINE_S)) for key in keys])
        assert all(isinstance(each, TanghuluError) for each in outcomes)  # type: ignore[union-attr]
        assert store.put("new", b"x" * SIZE, deadline_s=DEADLINE_S)
        eventually(lambda: [each.id for each in store.nodes()] == [other])
    eventually(lambda: not isinstance(outcome(lambda: store.get(keys[0]).close()), TanghuluError))
    assert all(store.exists_many(keys))


def test_another_holder_comes_first_until_the_frozen_one_answers(two: Cluster, store: Any) -> None:
    frozen, name, other = frozen_and_other(two, store)
    keys = [f"both-{number}" for number in range(30)]
    for key in keys:
        store.put(key, value(key, SIZE), replicas=2)
    with stopped(frozen.popen.pid):
        timed(lambda: [store.get(key, deadline_s=DEADLINE_S).close() for key in keys])
        outcome(lambda: store.eviction_policy(name, deadline_s=0.5))
        nodes = store._driver.context.nodes
        assert nodes.is_suspect(name)
        assert nodes.trusted_first([name, other]) == (other, name)
    eventually(lambda: not isinstance(outcome(lambda: store.eviction_policy(name)), TanghuluError))
    assert not nodes.is_suspect(name)


async def test_leases_on_a_frozen_node_hold_up_no_other_call(two: Cluster) -> None:
    async with tanghulu.aio.connect(two.address, transport="tcp", deadline_s=60.0) as store:
        frozen = two.nodes[0]
        (name,) = [each.id for each in await store.nodes() if each.address == str(frozen.address)]
        with stopped(frozen.popen.pid):
            store._driver.context.leases.drop(PeerId(name), 1)
            async with asyncio.timeout(DEADLINE_S + SLACK_S):
                assert not await store.exists("none", deadline_s=DEADLINE_S)
