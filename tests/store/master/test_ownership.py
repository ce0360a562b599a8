"""Masters that share the ranges in a real etcd: who comes gets its share, and what a lost one owned is taken over."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tanghulu.discovery.base import Instance
from tanghulu.discovery.etcd_client import EtcdClient
from tanghulu.errors import MasterUnavailable, NotLeader
from tanghulu.store.master.election.masters_view import assign
from tanghulu.store.master.election.ownership import EtcdOwnership
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.terms import Renewals
from tanghulu.types import Address, InstanceId, Role
from tests.discovery.sources import etcd_here
from tests.store.elected_cluster import EtcdServer
from tests.store.master.owning_process import ownership_of

ALL = range(NUM_RANGES)


class Owner:
    """A master's ownership, run by a task of this process."""

    def __init__(self, etcd: Address, name: str) -> None:
        self.name = name
        self.terms: dict[int, int] = {}  # of what it owns, as it was told
        self.ownership: EtcdOwnership = ownership_of(etcd, name, self.terms)
        self.task = asyncio.create_task(self.ownership.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def owners(etcd: Address, *names: str) -> AsyncIterator[list[Owner]]:
    running = [Owner(etcd, name) for name in names]
    try:
        yield running
    finally:
        for each in running:
            await each.stop()


@asynccontextmanager
async def another_process(etcd: Address, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = ("-m", "tests.store.master.owning_process", str(etcd), name)
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - several tasks tell
            await asyncio.sleep(0.02)


@asynccontextmanager
async def admitted(leader: EtcdOwnership, node: Instance) -> AsyncIterator[None]:
    """Let ``node`` in; on a busy machine etcd may tell too late at first."""
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
        while True:
            try:
                await stack.enter_async_context(leader.admitting(node))
                break
            except MasterUnavailable:
                await asyncio.sleep(0.05)
        yield


def shared(running: list[Owner], *names: str) -> bool:
    """Whether all agree on a map in which the masters ``names`` own what they should, and those here do own that."""
    wanted = assign(names)
    agree = all(tuple(each.host if each else "" for each in one.ownership.map.owners) == wanted for one in running)
    mine = all(one.ownership.owned == {n for n in ALL if wanted[n] == one.name} == one.terms.keys() for one in running)
    return agree and mine


async def test_masters_share_all_ranges_and_what_one_gives_back_is_taken() -> None:
    async with etcd_here() as etcd, owners(etcd, "a") as running:
        await until(lambda: shared(running, "a"))
        first = dict(running[0].terms)
        running.append(Owner(etcd, "b"))
        await until(lambda: shared(running, "a", "b"))
        moved = running[1].terms
        assert len(moved) == NUM_RANGES // 2
        assert all(term > first[number] for number, term in moved.items())
        assert all(running[0].ownership.map.term_of(number) == term for number, term in moved.items())
        await running.pop().stop()
        await until(lambda: shared(running, "a"))
        assert all(running[0].terms[number] > term for number, term in moved.items())
        for each in running:
            each.ownership.election.check()


async def test_the_lease_is_proven_by_a_renewal_behind_the_call() -> None:
    async with etcd_here() as etcd, owners(etcd, "a") as running:
        ownership = running[0].ownership
        with pytest.raises(NotLeader):
            await ownership.prove()
        assert Renewals.of(ownership.signature.renewals).confirmed == 0 < ownership.signature.renewals
        await until(lambda: shared(running, "a"))
        before = Renewals.of(ownership.signature.renewals).confirmed
        proofs = await asyncio.gather(*(ownership.prove() for _ in range(50)))
        assert (
            Renewals.of(ownership.signature.renewals).confirmed
            > max(each.requested_before for each in proofs)
            >= before
        )


async def test_owners_know_the_nodes_that_the_leader_lets_in() -> None:
    """Also those that an earlier leader has let in; who comes again unchanged costs etcd nothing."""
    node, other = (Instance(InstanceId(name), Role.NODE, Address(name, 1), generation=7) for name in "mn")
    async with etcd_here() as etcd, owners(etcd, "a", "b") as running:
        client = EtcdClient([etcd])
        try:
            await until(lambda: any(each.ownership.leads for each in running))
            running.sort(key=lambda each: not each.ownership.leads)
            (first, second), terms = running, [each.ownership.term for each in running]
            for each in (node, other):
                async with admitted(first.ownership, each):
                    assert each.id in first.ownership.nodes, "its own watch has told"
            await until(lambda: second.ownership.election.view.leader is not None)
            with pytest.raises(NotLeader, match=first.name):
                async with second.ownership.admitting(node):
                    pass
            await until(lambda: second.ownership.nodes == {"m": node, "n": other})
            await first.stop()
            await until(lambda: second.ownership.leads)
            leader = second.ownership
            assert leader.term > terms[0]
            assert leader.admitted.ids == {"m", "n"}
            await until(lambda: len(leader.owned) == NUM_RANGES)
            before = (await client.range(b"/")).header.revision
            async with admitted(leader, node):
                pass
            assert (await client.range(b"/")).header.revision == before
            restarted = replace(node, generation=8)
            async with admitted(leader, restarted):
                pass
            await leader.admitted.keep(lambda: frozenset("m"))
            await until(lambda: leader.nodes == {"m": restarted})
            assert leader.admitted.ids == {"m"}
        finally:
            await client.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_what_a_lost_master_owned_is_taken_over(how: signal.Signals) -> None:
    async with etcd_here() as etcd, owners(etcd, "a", "b") as running:
        await until(lambda: shared(running, "a", "b"))
        async with another_process(etcd, "c") as process:
            await until(lambda: shared(running, "a", "b", "c"))
            known = running[0].ownership.map
            process.send_signal(how)
            await until(lambda: shared(running, "a", "b"))
            now = running[0].ownership.map
            for number in known.ranges_of(Address("c", 7400)):
                assert now.term_of(number) > known.term_of(number)
            if how is signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
                await until(lambda: shared(running, "a", "b", "c"))


@pytest.mark.slow
async def test_without_etcd_nobody_owns_anything_and_with_it_all_is_back() -> None:
    with EtcdServer() as etcd:
        async with owners(Address.parse(etcd.address), "a", "b") as running:
            await until(lambda: shared(running, "a", "b"))
            before = running[0].ownership.map
            etcd.popen.send_signal(signal.SIGSTOP)
            try:
                await until(lambda: not any(each.ownership.owned or each.terms for each in running))
            finally:
                etcd.popen.send_signal(signal.SIGCONT)
            await until(lambda: shared(running, "a", "b"))
            now = running[0].ownership.map
            assert all(now.term_of(number) > before.term_of(number) for number in ALL)
