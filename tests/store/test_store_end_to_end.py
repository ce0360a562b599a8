"""The store as its users see it: real processes, real sockets, real shared memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from store_cluster import Cluster, eventually, num_fds

import tanghulu
import tanghulu.aio
from tanghulu.errors import (
    ChunkNotFound,
    InvalidRequest,
    MasterUnavailable,
    NodeUnavailable,
    StoreFull,
    TanghuluError,
)
from tanghulu.store.checksums import compute
from tanghulu.store.client import Client, PutItem

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


def test_bad_requests_are_refused_at_the_door(client: Client) -> None:
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


# --- eviction, leases


def test_a_small_node_takes_everything_and_evicts_the_oldest(transport: str) -> None:
    with Cluster(1, "64MiB") as cluster, tanghulu.connect(cluster.address, transport=transport) as client:
        for i in range(200):
            client.put(f"k{i}", pattern(1 << 20, i))
        alive = [i for i in range(200) if client.exists(f"k{i}")]
        assert alive == list(range(200 - len(alive), 200))
        assert len(alive) >= 60
        for i in alive:
            with client.get(f"k{i}") as chunk:
                assert chunk == pattern(1 << 20, i)
        assert cluster.nodes[0].metric("tanghulu_node_evictions_total") == 200 - len(alive)


def test_pins_and_time_to_live() -> None:
    with Cluster(1, "16MiB") as cluster, tanghulu.connect(cluster.address) as client:
        client.put("hard", pattern(1 << 20), pin="hard")
        client.put("soft", pattern(1 << 20), pin="soft")
        client.put("brief", b"x", ttl_s=0.05)
        for i in range(40):
            client.put(f"k{i}", pattern(1 << 20, i))
        assert client.exists("hard")
        assert client.exists("soft")
        eventually(lambda: not client.exists("brief"))
        with pytest.raises(StoreFull, match="hard pins"):
            client.put("hard2", pattern(4 << 20), pin="hard")


def test_a_put_waits_for_leases_and_then_says_so() -> None:
    with (
        Cluster(1, "16MiB") as cluster,
        tanghulu.connect(cluster.address) as client,
        tanghulu.connect(cluster.address) as other,
    ):
        for i in range(4):
            client.put(f"k{i}", pattern(4 << 20, i))
        chunks = [(client if i < 2 else other).get(f"k{i}") for i in range(4)]  # one client may map half of the node
        with pytest.raises(StoreFull, match="leased"):
            client.put("more", pattern(4 << 20, 9), deadline_s=0.3)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(client.put, "more", pattern(4 << 20, 9))
            eventually(lambda: cluster.nodes[0].metric("tanghulu_node_waiting_puts") == 1)
            chunks[2].close()
            assert future.result().ok
        assert [client.exists(f"k{i}") for i in range(4)] == [True, True, False, True]
        for chunk in chunks:
            chunk.close()


def test_a_client_killed_between_reserve_and_commit_leaves_nothing(
    cluster: Cluster, client: Client, transport: str
) -> None:
    script = (
        "import sys, time, tanghulu\n"
        "from tanghulu.store.client import puts\n"
        "def stop(*args):\n"
        "    print('reserved', flush=True); time.sleep(60)\n"
        "puts._commit = stop\n"
        "with tanghulu.connect(sys.argv[1], deadline_s=60, transport=sys.argv[2]) as c:\n"
        "    c.put('half', bytes(8 << 20))\n"
    )
    node = cluster.nodes[0]
    before = node.metric("tanghulu_node_used_bytes")
    command = [sys.executable, "-c", script, cluster.address, transport]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"reserved\n"
        assert node.metric("tanghulu_node_used_bytes") == before + (8 << 20)
        victim.send_signal(signal.SIGKILL)
    eventually(lambda: node.metric("tanghulu_node_used_bytes") == before)
    assert node.metric("tanghulu_node_leases") == 0
    assert not client.exists("half")


def test_a_chunk_outlives_the_connection_it_came_by(cluster: Cluster, client: Client) -> None:
    value = pattern(1 << 20)
    client.put("kept", value)
    client.put("lost", value)
    kept, lost = client.get("kept"), client.get("lost")
    (node,) = client._shell._idle.keys() - {""}
    client._shell.context.leases.released(node, max(client._shell.context.leases.held(node)))
    for connection in client._shell._idle[node]:
        connection.close()
    eventually(lambda: cluster.nodes[0].metric("tanghulu_node_sessions") == 0)
    assert cluster.nodes[0].metric("tanghulu_node_leases") == 2, "mapped: in quarantine"
    assert client.stat("kept").num_leases == 1
    assert client.stat("lost").num_leases == 0, "given back when the client came back without it"
    assert kept == value
    kept.close()
    lost.close()
    assert client.stat("kept").num_leases == 0
    assert cluster.nodes[0].metric("tanghulu_node_leases") == 0


async def test_third_parties_use_grpc(cluster: Cluster, client: Client) -> None:
    import grpc.aio

    from tanghulu.protos import store_pb2, store_pb2_grpc
    from tanghulu.rpc import grpc_edge

    async with grpc_edge.channel(cluster.nodes[0].address) as channel:
        node = store_pb2_grpc.StoreNodeStub(channel)
        items = [store_pb2.PutItem(key=k, version=i + 1, size_bytes=3) for i, k in enumerate(["g1", "g2"])]
        put = await node.Put(store_pb2.PutRequest(items=items, visible=True, inline_data=b"onetwo"))
        assert [result.existed for result in put.results] == [False, False]
        got = await node.Get(store_pb2.GetRequest(keys=["g2", "absent", "g1"], verify=True))
        assert got.inline_data == b"twoone"
        assert [item.status.code for item in got.items] == ["", "CHUNK_NOT_FOUND", ""]
        assert (await node.Exists(store_pb2.ExistsRequest(keys=["g1", "absent"]))).found == bytes([1, 0])
        assert (await node.Stat(store_pb2.StatRequest(keys=["g1"]))).chunks[0].size_bytes == 3
        with client.get("g1") as chunk:
            assert chunk == b"one"
        assert (await node.Remove(store_pb2.RemoveRequest(keys=["g1"]))).removed == bytes([1])
        assert not client.exists("g1")
        with pytest.raises(grpc.aio.AioRpcError, match="add up"):
            await node.Put(store_pb2.PutRequest(items=items, inline_data=b"short"))


# --- damage


def test_a_corrupt_byte_is_found_and_the_chunk_dropped(cluster: Cluster, client: Client) -> None:
    value = pattern(1 << 20)
    client.put("bad", value)
    chunk = client.get("bad")
    link = next(iter(client._shell._links.values()))
    assert link.view is not None
    address = chunk.numpy().__array_interface__["data"][0] - link.address
    chunk.close()
    link.view[address + 12345] ^= 0xFF
    with pytest.raises(TanghuluError) as caught:
        client.get("bad")
    assert caught.value.code == "CHECKSUM_MISMATCH"
    eventually(lambda: not client.exists("bad"))
    assert cluster.nodes[0].metric("tanghulu_node_corrupt_chunks_total") == 1
    assert not client.put("bad", value).existed
    with client.get("bad") as chunk:
        assert chunk == value


def test_replicas_survive_the_loss_of_a_node() -> None:
    with Cluster(2, "64MiB") as cluster, tanghulu.connect(cluster.address) as client:
        values = {f"r{i}": pattern(100_000 * (i % 2) + 10, i) for i in range(10)}
        for status in client.put_many(list(values.items()), replicas=2):
            assert status.num_replicas == 2
        assert client.put("greedy", b"x", replicas=5).num_replicas == 2
        (single,) = client.put_many([("single", b"x" * 100_000)], prefer_node=cluster.nodes[0].name)
        assert single.ok
        cluster.nodes[0].kill()
        for key, value in values.items():
            with client.get(key) as chunk:
                assert chunk == value
        with pytest.raises((NodeUnavailable, ChunkNotFound)):
            client.get("single")
        assert client.put("after", b"y").ok
        eventually(lambda: not client.exists("single"))
        with pytest.raises(ChunkNotFound):
            client.get("single")


def test_without_nodes_and_without_a_master() -> None:
    with Cluster(1, "16MiB") as cluster, tanghulu.connect(cluster.address) as client:
        client.put("known", b"value")
        cluster.master.kill()
        with client.get("known") as chunk:
            assert chunk == b"value"
        with pytest.raises(MasterUnavailable):
            client.put("unannounced", b"value", deadline_s=0.5)
        with pytest.raises(MasterUnavailable):
            client.exists("known")
        cluster.restart_master()
        eventually(lambda: client.exists("unannounced"))
        with client.get("unannounced") as chunk:
            assert chunk == b"value"
        assert client.exists("known")
        cluster.nodes[0].kill()
        with pytest.raises(NodeUnavailable):
            client.put("k", b"x", deadline_s=1)


def test_nothing_is_left_open(cluster: Cluster) -> None:
    def use() -> None:
        with tanghulu.connect(cluster.address) as client:
            client.put("fd", pattern(1 << 20))
            client.get("fd").close()
        with tanghulu.connect(cluster.address, transport="tcp") as client:
            client.get("fd").close()
            client.remove("fd")

    use()
    gc.collect()
    before = num_fds()
    for _ in range(5):
        use()
    gc.collect()
    assert num_fds() == before
    node = cluster.nodes[0]
    eventually(lambda: node.metric("tanghulu_node_sessions") == 0)
    assert node.metric("tanghulu_node_leases") == 0
    assert os.listdir("/proc/self/fd")
