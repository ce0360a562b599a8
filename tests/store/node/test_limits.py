"""Limits on keys, values and connections, with a real node: each has a typed answer, and the node works on."""

from __future__ import annotations

import re

import pytest

import tanghulu
from tanghulu.errors import InvalidRequest, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.store.client.logic import messages
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import KeysRequest, PutRequest
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import MAX_KEY_BYTES, Address, ChunkKey
from tests.store.cluster import Cluster
from tests.store.hostile.peers import greeted


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
        call = methods.CHUNK_STAT.call(KeysRequest(["fits"]))
        address = Address.parse(cluster.nodes[0].address)
        opened: list[FastConnection] = []
        with pytest.raises((Overloaded, NodeUnavailable), match="has reached its limit"):
            open_nine(address, call, opened)
        assert len(opened) > 2
        for connection in opened:
            connection.close()
        assert store.get("fits").size_bytes == 2 << 20


def open_nine(address: Address, call: messages.AnyCall, opened: list[FastConnection]) -> None:
    for _ in range(9):
        opened.append(FastConnection(address))
        opened[-1].call(call.method, call.request, call.reply_type)


def test_values_inside_a_message_are_bounded_too() -> None:
    with Cluster(1, "64MiB", "--max-value", "2MiB") as cluster:
        connection, _ = greeted(cluster.nodes[0].address, "raw")
        value = bytes(3 << 20)
        for items, data in (
            ([NewChunk(ChunkKey("large"), 1, len(value))], value),
            ([NewChunk(ChunkKey("k" * (MAX_KEY_BYTES + 1)), 1, 1)], b"1"),
            ([NewChunk(ChunkKey("short"), 1, 3), NewChunk(ChunkKey("shorter"), 2, 3)], b"12345"),
        ):
            call = methods.PUT.call(PutRequest(items, False, 1000), [data])
            outcome = connection.call_one(call)
            refused = outcome if isinstance(outcome, TanghuluError) else outcome.message.results[0]
            assert isinstance(refused, InvalidRequest)
            assert re.search(r"at most 2\.0 MiB|1 to 1024 bytes|expected `str` of length|add up", str(refused), re.I)
        connection.close()
