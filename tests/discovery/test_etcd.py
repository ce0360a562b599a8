"""What strangers and newer versions write into etcd's range, and streams that end in the middle of a call."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from tanghulu.discovery.base import EventKind, Instance
from tanghulu.discovery.etcd import EtcdDiscovery
from tanghulu.discovery.etcd_client import EtcdClient
from tanghulu.discovery.instance_wire import InstanceEntry
from tanghulu.errors import MasterUnavailable
from tanghulu.rpc.wire import encode
from tanghulu.types import Address, InstanceId, Role
from tests.discovery.sources import etcd_here

_RANGE = b"/tanghulu/default/"
_NEWER = encode(InstanceEntry("oracle", "oracle", "h:1"))
_NOWHERE = encode(InstanceEntry("nowhere", "node", "nowhere"))


def _instance(name: str) -> Instance:
    return Instance(InstanceId(name), Role.NODE, Address("h", 1))


async def test_an_entry_that_cannot_be_read_is_passed_over_and_counted():
    async with etcd_here() as address, EtcdDiscovery(address) as discovery:
        lease = await discovery.client.grant(60)
        for name, value in ((b"garbage", b"\xff\xff"), (b"oracle", _NEWER), (b"\xff", b"\xff")):
            await discovery.client.put(_RANGE + name, value, lease)
        await discovery.register(_instance("one"))
        async with asyncio.timeout(30), aclosing(discovery.watch()) as events:
            first = await anext(events)
            assert (first.kind, first.instance and first.instance.id) == (EventKind.PUT, "one")
            assert (await anext(events)).kind is EventKind.SYNCED
            assert discovery.num_unreadable == 3
            await discovery.client.put(_RANGE + b"nowhere", _NOWHERE, lease)
            await discovery.client.revoke(lease)  # all four are deleted
            await discovery.register(_instance("two"))
            assert (await anext(events)).instance == _instance("two")
            assert discovery.num_unreadable == 4


async def test_a_stream_that_ended_before_a_write_is_an_etcd_that_is_away():
    client = EtcdClient((Address("one", 1), Address("two", 1)))
    try:
        with pytest.raises(MasterUnavailable, match="etcd at one:1 ended the call"):
            async with client._asking():
                raise asyncio.InvalidStateError("RPC already finished.")
        assert client.peer == "etcd at two:1"
    finally:
        await client.close()


class _FailingPuts(EtcdClient):
    """An etcd client whose next ``fails`` puts fail; ``lose`` ends all leases, as one that ran out."""

    fails = 0

    async def put(self, key: bytes, value: bytes, lease: int) -> None:
        if self.fails:
            self.fails -= 1
            raise MasterUnavailable("etcd did not answer in time")
        await super().put(key, value, lease)


async def test_a_key_whose_put_failed_is_put_at_the_next_renewal():
    async with etcd_here() as address, EtcdDiscovery(address) as discovery:
        await discovery.client.close()
        discovery.client = client = _FailingPuts((address,))
        registration = await discovery.register(_instance("one"), 0.3)
        client.fails = 2
        async with asyncio.timeout(30), aclosing(discovery.watch()) as events:
            await client.revoke(registration._lease)
            async for event in events:
                if event.kind is EventKind.PUT and not client.fails:
                    break
        client.fails = 1
        moved = Instance(InstanceId("one"), Role.NODE, Address("elsewhere", 1))
        with pytest.raises(MasterUnavailable):
            await registration.update(moved)
        async with asyncio.timeout(30), aclosing(discovery.watch()) as events:
            async for event in events:
                if event.instance == moved:
                    break
