"""What a store does when room, leases, nodes or bytes go: real processes, real sockets, real shared memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tanghulu
import tanghulu.aio
from tanghulu.errors import ChunkNotFound, MasterUnavailable, NodeUnavailable, StoreFull, TanghuluError
from tanghulu.store.client import Client
from tests.store.cluster import Cluster, eventually, num_fds


def pattern(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


# --- eviction, leases


def test_a_small_node_takes_everything_and_evicts_the_oldest(transport: str) -> None:
    with Cluster(1, "64MiB") as cluster, tanghulu.connect(cluster.address, transport=transport) as client:
        for i in range(200):
            client.put(f"k{i}", pattern(1 << 20, i))
        node, keys = cluster.nodes[0], [f"k{i}" for i in range(200)]
        # The directory is a little behind evictions.
        eventually(lambda: sum(client.exists_many(keys)) == node.metric("tanghulu_node_chunks"))
        alive = [i for i in range(200) if client.exists(f"k{i}")]
        assert alive == list(range(200 - len(alive), 200))
        assert len(alive) >= 60
        for i in alive:
            with client.get(f"k{i}") as chunk:
                assert chunk == pattern(1 << 20, i)
        assert node.metric("tanghulu_node_evictions_total") == 200 - len(alive)
        by = {
            each: node.metric("tanghulu_node_evictions_by_reason_total", reason=each)
            for each in ("room", "write_buffer")
        }
        assert sum(by.values()) == 200 - len(alive)
        assert node.metric("tanghulu_rpc_seconds_count", method="hello") >= 1
        assert cluster.master.metric("tanghulu_rpc_seconds_count", method="announce") >= 1


def test_a_large_value_evicts_the_oldest_and_what_was_moved_is_whole() -> None:
    with Cluster(1, "64MiB") as cluster, tanghulu.connect(cluster.address, transport="tcp") as client:
        node, size = cluster.nodes[0], 256 << 10
        keys = [f"k{i}" for i in range(230)]
        for i, key in enumerate(keys):
            client.put(key, pattern(size, i))
        eventually(lambda: node.metric("tanghulu_node_chunks") == len(keys))
        order = [keys[i * 67 % len(keys)] for i in range(len(keys))]
        for key in order:
            client.get(key).close()
        client.put("large", pattern(16 << 20, 999))
        assert node.metric("tanghulu_node_moves_total") > 0
        num_gone = int(node.metric("tanghulu_node_evictions_total"))
        assert num_gone * size <= 17 << 20
        eventually(lambda: sum(client.exists_many(keys)) == len(keys) - num_gone)
        assert client.exists_many(order) == [place >= num_gone for place in range(len(order))]
        for shm in ("shm", "tcp"):
            with tanghulu.connect(cluster.address, transport=shm) as reader:
                for key in order[num_gone:]:
                    with reader.get(key) as chunk:
                        assert chunk == pattern(size, keys.index(key))
                with reader.get("large") as chunk:
                    assert chunk == pattern(16 << 20, 999)


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
        chunks = [(client if i < 2 else other).get(f"k{i}") for i in range(4)]  # they may map 3/4 of the node
        with pytest.raises(StoreFull, match="leased"):
            client.put("more", pattern(5 << 20, 9), deadline_s=0.3)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(client.put, "more", pattern(5 << 20, 9))
            eventually(lambda: cluster.nodes[0].metric("tanghulu_node_waiting_puts") == 1)
            chunks[2].close()
            assert future.result().ok
        assert [client.exists(f"k{i}") for i in range(4)] == [True, True, False, False]
        for chunk in chunks:
            chunk.close()


def test_a_client_killed_between_reserve_and_commit_leaves_nothing(
    cluster: Cluster, client: Client, transport: str
) -> None:
    script = (
        "import sys, time, tanghulu\n"
        "from tanghulu.store.client.logic import carriers\n"
        "def stop(*args):\n"
        "    print('reserved', flush=True); time.sleep(60)\n"
        "carriers._commit_at_nodes = stop\n"
        "with tanghulu.connect(sys.argv[1], deadline_s=60, transport=sys.argv[2]) as c:\n"
        "    c.put('half', bytes(8 << 20))\n"
    )
    node = cluster.nodes[0]
    eventually(lambda: node.metric("tanghulu_node_write_buffers") == 0)  # their memory would become free meanwhile
    before = node.metric("tanghulu_node_used_bytes")
    command = [sys.executable, "-c", script, cluster.address, transport]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"reserved\n"
        assert node.metric("tanghulu_node_used_bytes") == before + (8 << 20)
        victim.send_signal(signal.SIGKILL)
    eventually(lambda: node.metric("tanghulu_node_used_bytes") == before)
    assert node.metric("tanghulu_node_leases") == 0
    eventually(lambda: not client.exists("half"))  # the master believes what was promised, for 3 s at most


def test_a_chunk_outlives_the_connection_it_came_by(cluster: Cluster, client: Client) -> None:
    value = pattern(1 << 20)
    client.put("kept", value)
    client.put("lost", value)
    kept, lost = client.get("kept"), client.get("lost")
    (node,) = client._driver._idle.keys() - {""}
    client._driver.context.leases.released(node, client._driver.context.leases.held(node)[-1])
    for connection in client._driver._idle[node]:
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


# --- damage


def test_a_corrupt_byte_is_found_and_the_chunk_dropped(cluster: Cluster, client: Client) -> None:
    value = pattern(1 << 20)
    client.put("bad", value)
    chunk = client.get("bad")
    link = next(iter(client._driver._sessions._links.values()))
    memory = link.remote.map_writable()
    assert memory is not None
    address = chunk.numpy().__array_interface__["data"][0] - link.address
    chunk.close()
    memory[address + 12345] ^= 0xFF
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
            client.exists("known", deadline_s=0.5)
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
    assert num_fds() <= before, "fewer: what another test had left open was closed meanwhile"
    node = cluster.nodes[0]
    eventually(lambda: node.metric("tanghulu_node_sessions") == 0)
    assert node.metric("tanghulu_node_leases") == 0
    assert os.listdir("/proc/self/fd")
