"""The store as its users see it: real processes, real sockets, real shared memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import tanghulu
import tanghulu.aio
from tanghulu.errors import ChunkNotFound, InvalidRequest, MasterUnavailable, TanghuluError
from tanghulu.store.client import Client, PutItem
from tanghulu.store.protocol.checksums import compute
from tests.store.cluster import Cluster, eventually

SIZES = [1, 63, 4096, 65536, 65537, 1 << 20, 16 << 20, 64 << 20]


def pattern(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


# --- round trips


@pytest.mark.parametrize("size", SIZES)
def test_values_of_all_sizes_survive(cluster: Cluster, client: Client, transport: str, size: int) -> None:
    value = pattern(size)
    with tanghulu.connect(cluster.address, transport=transport) as mine:
        assert not mine.put("k", value).existed
        with mine.get("k") as chunk:
            assert len(chunk) == size
            assert chunk == value
        buffer = bytearray(size)
        assert mine.get_into("k", buffer) == size
        assert buffer == value


def test_another_process_reads_what_was_put(cluster: Cluster, client: Client, transport: str) -> None:
    value = pattern(3 << 20)
    client.put("other", value)
    script = (
        "import sys, hashlib, tanghulu\n"
        "with tanghulu.connect(sys.argv[1], transport=sys.argv[2]) as c, c.get('other') as chunk:\n"
        "    print(hashlib.sha256(chunk.view).hexdigest())\n"
    )
    import hashlib

    run = [sys.executable, "-c", script, cluster.address, transport]
    output = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60)
    assert output.stdout.strip() == hashlib.sha256(value).hexdigest()


def test_a_missing_key_is_a_typed_error(client: Client) -> None:
    with pytest.raises(ChunkNotFound, match="nobody"):
        client.get("nobody")
    with pytest.raises(ChunkNotFound):
        client.get_into("nobody", bytearray(1))
    with pytest.raises(ChunkNotFound):
        client.stat("nobody")
    assert not client.exists("nobody")
    assert not client.remove("nobody")


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_second_put_is_a_hit_and_changes_nothing(client: Client, size: int) -> None:
    first = pattern(size, 1)
    assert not client.put("k", first).existed
    assert client.put("k", pattern(size, 2)).existed
    with client.get("k") as chunk:
        assert chunk == first


def test_bad_requests_are_refused_at_the_edge(client: Client) -> None:
    for key, value in [("", b"x"), ("k" * 1025, b"x"), ("k", b""), ("k", 7), ("k", np.zeros((4, 4))[:, 1])]:
        with pytest.raises(InvalidRequest):
            client.put(key, value)
    with pytest.raises(InvalidRequest, match="largest node"):
        client.put("k", np.zeros(300 << 20, np.uint8))
    client.put("k", b"12345")
    with pytest.raises(InvalidRequest, match="5 bytes"):
        client.get_into("k", bytearray(4))
    with pytest.raises(InvalidRequest, match="pin"):
        client.put("k", b"x", pin="velcro")
    with pytest.raises(InvalidRequest, match="read-only"):
        client.get_into("k", b"12345")


def test_nobody_at_the_masters_address() -> None:
    with pytest.raises(MasterUnavailable, match=r"127\.0\.0\.1:1"):
        tanghulu.connect("127.0.0.1:1")
    with pytest.raises(InvalidRequest):
        tanghulu.connect("nonsense")


# --- what a chunk is


def test_a_chunk_is_a_view_of_the_nodes_memory_until_it_is_closed(cluster: Cluster, client: Client) -> None:
    value = pattern(1 << 20)
    client.put("k", value)
    chunk = client.get("k")
    assert client.stat("k").num_leases == 1
    array = chunk.numpy()
    assert not array.flags.writeable
    chunk.close()
    with pytest.raises(InvalidRequest, match="closed"):
        chunk.bytes()
    assert client.remove("k")
    assert array.tobytes() == value, "an array keeps the lease of a closed chunk"
    assert cluster.nodes[0].metric("tanghulu_node_used_bytes") >= len(value)
    del array
    gc.collect()
    client.exists("k")
    eventually(lambda: cluster.nodes[0].metric("tanghulu_node_used_bytes") == 0)


def test_tensors_go_in_and_come_out(client: Client) -> None:
    tensor = torch.randn(3, 1000, 100).to(torch.bfloat16)
    client.put("t", tensor)
    with client.get("t") as chunk:
        assert torch.equal(chunk.torch(torch.bfloat16, (3, 1000, 100)), tensor)
        with pytest.raises(InvalidRequest):
            chunk.torch(torch.bfloat16, (7, 7))
    into = torch.empty_like(tensor)
    assert client.get_into("t", into) == tensor.numel() * 2
    assert torch.equal(into, tensor)


def test_checksums_by_part_travel_with_the_chunk(client: Client) -> None:
    value = pattern(1 << 20)
    client.put("parts", value, part_bytes=1 << 18)
    assert client.stat("parts").checksums == compute(value, 1 << 18)
    given = compute(value, 1 << 16)
    (status,) = client.put_many([PutItem("given", value, given)])
    assert status.ok
    assert client.stat("given").checksums == given
    with client.get("given") as chunk:
        assert chunk == value


# --- many keys in one call


def test_many_keys_in_one_call(cluster: Cluster, client: Client, transport: str) -> None:
    values = {f"m{i}": pattern(1 + i * 1500, i) for i in range(100)}
    with tanghulu.connect(cluster.address, transport=transport) as mine:
        statuses = mine.put_many([*values.items(), ("", b"bad")])
        assert [status.ok for status in statuses] == [True] * 100 + [False]
        assert isinstance(statuses[-1].error, InvalidRequest)
        keys = [*values, "absent"]
        chunks = mine.get_many(keys)
        for key, chunk in zip(values, chunks, strict=False):
            assert not isinstance(chunk, TanghuluError)
            assert chunk == values[key]
            chunk.close()
        assert isinstance(chunks[-1], ChunkNotFound)
        buffers = [bytearray(len(value)) for value in values.values()]
        results = mine.get_many_into(keys, [*buffers, bytearray(1)])
        assert results[:-1] == [len(value) for value in values.values()]
        assert isinstance(results[-1], ChunkNotFound)
        assert buffers == list(values.values())
        layers = [[bytearray(3), bytearray(len(value))] for value in values.values()]
        results = mine.get_many_into(keys, [*layers[:-1], [bytearray(1)], [bytearray(1)]])
        assert results[:-2] == [len(value) for value in list(values.values())[:-1]]
        assert isinstance(results[-2], InvalidRequest), "the list of buffers is too small"
        assert isinstance(results[-1], ChunkNotFound)
        for (first, rest), value in zip(layers[:-1], values.values(), strict=False):
            assert (first + rest)[: len(value)] == value
        assert mine.exists_many(keys) == [True] * 100 + [False]
        assert mine.remove_many(["m0", "absent"]) == [True, False]


def test_match_prefix_counts_up_to_the_first_gap(client: Client) -> None:
    keys = [f"p{i:05}" for i in range(3000)]
    client.put_many([(key, b"x") for key in keys[:2500]])
    assert client.match_prefix(keys) == 2500
    client.remove(keys[1200])
    assert client.match_prefix(keys) == 1200
    assert client.match_prefix([]) == 0
    assert client.match_prefix(["absent", *keys]) == 0


def test_listing_and_removing_by_pattern(client: Client) -> None:
    client.put_many([(f"{kind}/{i}", b"v") for kind in "ab" for i in range(5)])
    assert [info.key for info in client.list_keys("a/")] == [f"a/{i}" for i in range(5)]
    assert len(client.list_keys(limit=3)) == 3
    assert [info.key for info in client.list_keys(after="a/3", limit=2)] == ["a/4", "b/0"]
    assert [info.key for info in client.list_keys("a/", after="a/20")] == ["a/3", "a/4"], "a key that is not there"
    with pytest.raises(InvalidRequest):
        client.list_keys(after="k" * 5000)
    assert client.remove_matching("^a/[0-2]$") == 3
    assert [info.key for info in client.list_keys("a/")] == ["a/3", "a/4"]
    with pytest.raises(InvalidRequest):
        client.remove_matching("(")


# --- several callers


def test_threads_share_a_client(client: Client) -> None:
    def work(thread: int) -> None:
        for i in range(20):
            key, value = f"t{thread}/{i}", pattern(1 + (i * 7919) % 200_000, thread * 100 + i)
            client.put(key, value)
            with client.get(key) as chunk:
                assert chunk == value

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, thread) for thread in range(8)]:
            future.result()


def test_of_concurrent_puts_of_one_key_one_wins(cluster: Cluster, client: Client) -> None:
    barrier = threading.Barrier(6)

    def work(writer: int) -> bool:
        with tanghulu.connect(cluster.address) as mine:
            mine.nodes()
            barrier.wait()
            return mine.put("race", pattern(200_000, writer)).existed

    with ThreadPoolExecutor(6) as pool:
        existed = list(pool.map(work, range(6)))
    assert existed.count(False) == 1
    with client.get("race") as chunk:
        assert chunk == pattern(200_000, existed.index(False))


async def test_asyncio_has_the_same_methods(cluster: Cluster, client: Client, transport: str) -> None:
    import asyncio

    async with tanghulu.aio.connect(cluster.address, transport=transport) as mine:
        values = {f"a{i}": pattern(1 + i * 40_000, i) for i in range(20)}
        await asyncio.gather(*(mine.put(key, value) for key, value in values.items()))
        chunks = await asyncio.gather(*(mine.get(key) for key in values))
        for chunk, value in zip(chunks, values.values(), strict=True):
            assert chunk == value
            chunk.close()
        buffer = bytearray(len(values["a19"]))
        assert await mine.get_into("a19", buffer) == len(buffer)
        assert buffer == values["a19"]
        assert await mine.match_prefix([*values, "absent"]) == 20
        assert await mine.exists("a3")
        assert (await mine.stat("a3")).size_bytes == len(values["a3"])
        with pytest.raises(ChunkNotFound):
            await mine.get("absent")
        assert await mine.remove_matching("^a") == 20
        assert (await mine.nodes())[0].id == cluster.nodes[0].name
