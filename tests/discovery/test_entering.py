"""How a process comes into its cluster: whom it waits for, what it is told at once, and what stands in its log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from tanghulu.discovery import entering
from tanghulu.discovery.base import DEFAULT_TTL_S, Instance
from tanghulu.discovery.entering import enter, meet
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import DeadlineExceeded, MasterUnavailable, NotLeader, Unauthorized
from tanghulu.types import Address
from tests.discovery.memory import MemoryDiscovery, MemoryRegistration, MemoryRegistry
from tests.discovery.sources import etcd_here
from tests.free_ports import free_port
from tests.store.master.running_master import instance

AWAY = MasterUnavailable("master at h:1: refused")


class Away(MemoryDiscovery):
    """A source that fails so often, each time with the next error, before it is there."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(MemoryRegistry())
        self._errors = list(errors)

    async def look(self) -> None:
        if self._errors:
            raise self._errors.pop(0)

    async def register(self, instance: Instance, ttl_s: float = DEFAULT_TTL_S) -> MemoryRegistration:
        await self.look()
        return await super().register(instance, ttl_s)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entering, "_RETRY_S", 1e-6)
    monkeypatch.setattr(entering, "_RETRY_MOST_S", 1e-6)


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


def events(logs: Sequence[Any]) -> list[str]:
    return [line["event"] for line in logs]


async def test_a_master_that_is_away_is_waited_for_with_two_lines(logs: list[Any]) -> None:
    async with Away(*[AWAY, DeadlineExceeded("late"), NotLeader.naming("")] * 9) as discovery:
        await (await enter(discovery, instance())).close()
    assert events(logs) == ["discovery.waiting", "discovery.found"]


async def test_one_that_is_there_makes_no_line(logs: list[Any]) -> None:
    async with Away() as discovery:
        await meet(discovery)
        await (await enter(discovery, instance())).close()
    assert events(logs) == []


async def test_a_refusal_is_not_tried_again(logs: list[Any]) -> None:
    refusal = Unauthorized("a token is needed")
    async with Away(refusal, refusal) as discovery:
        with pytest.raises(Unauthorized):
            await meet(discovery)
        with pytest.raises(Unauthorized):
            await enter(discovery, instance())
    assert events(logs) == []


async def test_a_start_at_a_wrong_address_ends(monkeypatch: pytest.MonkeyPatch, logs: list[Any]) -> None:
    monkeypatch.setattr(entering, "MEET_S", 0.0)
    async with Away(AWAY) as discovery:
        with pytest.raises(MasterUnavailable, match="refused; is it running, and is this its address"):
            await meet(discovery)


async def test_a_start_waits_longer_where_only_the_leader_is_missing(
    monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    monkeypatch.setattr(entering, "MEET_S", 0.0)
    async with Away(*[NotLeader.naming("")] * 3) as discovery:
        await meet(discovery)
    assert events(logs) == ["discovery.waiting", "discovery.found"]
    monkeypatch.setattr(entering, "LEADER_S", 0.0)
    async with Away(NotLeader.naming("")) as discovery:
        with pytest.raises(MasterUnavailable, match="no leader is elected yet"):
            await meet(discovery)


async def test_nobody_at_the_masters_address() -> None:
    for masters in (Address("127.0.0.1", free_port()), f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"):
        async with MasterDiscovery(masters) as discovery:
            with pytest.raises(MasterUnavailable) as raised:
                await discovery.look()
            assert not isinstance(raised.value, NotLeader)


async def test_an_etcd_that_answers_is_the_right_address() -> None:
    async with etcd_here() as address:
        async with MasterDiscovery(f"etcd://{address}") as discovery:
            with pytest.raises(NotLeader, match="no master leads in"):
                await discovery.look()
    async with MasterDiscovery(f"etcd://{address}") as discovery:
        with pytest.raises(MasterUnavailable) as raised:
            await discovery.look()
        assert not isinstance(raised.value, NotLeader)
