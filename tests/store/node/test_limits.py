"""Limits on keys, values and connections, with a real node: each has a typed answer, and the node works on."""

from __future__ import annotations

import pytest

import tanghulu
from tanghulu.errors import InvalidRequest, NodeUnavailable, Overloaded
from tanghulu.protos import store_pb2, store_pb2_grpc
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.grpc_edge import channel
from tanghulu.store.client.logic import messages
from tanghulu.types import MAX_KEY_BYTES, Address
from tests.store.cluster import Cluster


def test_values_and_keys_and_connections_are_bounded() -> None:
    with (
        Cluster(1, "64MiB", "--max-value", "2MiB", "--max-connections", "8") as cluster,
        tanghulu.connect(cluster.address) as store,
    ):
        assert store.put("fits", bytes(2 << 20)).ok
        with pytest.raises(InvalidRequest, match=r"takes at most 2\.0 MiB"):
            store.put("large", bytes((2 << 20) + 1))
        assert store.put("k" * MAX_KEY_BYTES, b"1").ok
        for key in ("", "k" * (MAX_KEY_BYTES + 1)):
            with pytest.raises(InvalidRequest, match=f"1 to {MAX_KEY_BYTES} bytes"):
                store.put(key, b"1")
        call = messages.node_stat(["fits"])
        address = Address.parse(cluster.nodes[0].address)
        opened: list[FastConnection] = []
        with pytest.raises((Overloaded, NodeUnavailable), match="takes no more"):
            open_nine(address, call, opened)
        assert len(opened) > 2
        for connection in opened:
            connection.close()
        assert store.get("fits").size_bytes == 2 << 20


def open_nine(address: Address, call: messages.AnyCall, opened: list[FastConnection]) -> None:
    for _ in range(9):
        opened.append(FastConnection(address))
        opened[-1].call(call.method, call.request, call.reply_type)


async def test_grpc_puts_are_bounded_too() -> None:
    with Cluster(1, "64MiB", "--max-value", "2MiB") as cluster:
        async with channel(cluster.nodes[0].address) as link:
            value = bytes(3 << 20)
            item = store_pb2.PutItem(key="large", version=1, size_bytes=len(value))
            reply = await store_pb2_grpc.StoreNodeStub(link).Put(store_pb2.PutRequest(items=[item], inline_data=value))
            assert reply.results[0].status.code == "INVALID_REQUEST"
            longest = store_pb2.PutItem(key="k" * (MAX_KEY_BYTES + 1), version=1, size_bytes=1)
            with pytest.raises(Exception, match="1 to 1024 bytes"):
                await store_pb2_grpc.StoreNodeStub(link).Put(store_pb2.PutRequest(items=[longest], inline_data=b"1"))
