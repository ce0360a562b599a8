"""The SSD tier of a real node: down, up, over a restart, and over a damaged, full or foreign file."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tanghulu
from tanghulu.errors import ChunkNotFound, StoreFull, TanghuluError
from tanghulu.store.client import Client
from tanghulu.store.protocol.types import Tier
from tests.store.cluster import Cluster, Process, eventually

KIB, MIB = 1 << 10, 1 << 20
NUM = 48


def value(i: int, size: int = MIB) -> bytes:
    return i.to_bytes(4, "little") * (size // 4)


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    return tmp_path / "node.tier"


@pytest.fixture
def cluster(ssd: Path) -> Iterator[Cluster]:
    """A node with 16 MiB of memory over an SSD of 128 MiB."""
    with Cluster(0) as cluster:
        add_node(cluster, ssd)
        yield cluster


def add_node(cluster: Cluster, ssd: Path, size: str = "128MiB", *flags: str) -> Process:
    return cluster.add_node("16MiB", "--ssd-path", str(ssd), "--ssd-size", size, *flags)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with tanghulu.connect(cluster.address) as client:
        yield client


def fill(client: Client, node: Process, num: int = NUM, size: int = MIB) -> list[str]:
    """More than memory holds, waiting where the disk is slower than the puts; all of it can be had afterwards."""
    keys = [f"k{i:03}" for i in range(num)]
    for i, key in enumerate(keys):
        client.put(key, value(i, size))
        if i * size % (4 * MIB) == 0:
            eventually(lambda: node.metric("tanghulu_node_ssd_queued_bytes") < 32 * MIB)
    return keys


def test_what_memory_evicts_comes_back_from_the_ssd(cluster: Cluster, client: Client) -> None:
    node = cluster.nodes[0]
    keys = fill(client, node)
    assert all(client.exists_many(keys))
    assert client.stat(keys[0]).tier is Tier.SSD
    assert client.stat(keys[-1]).tier is Tier.MEMORY
    for i, key in enumerate(keys):
        with client.get(key) as chunk:
            assert bytes(chunk) == value(i), key
    assert client.stat(keys[-1]).tier is Tier.MEMORY
    assert node.metric("tanghulu_node_tier_hits_total", tier="ssd") >= NUM - 16
    assert node.metric("tanghulu_node_ssd_promotions_total") >= NUM - 16
    eventually(lambda: node.metric("tanghulu_node_used_bytes") <= 0.95 * 16 * MIB)
    assert node.metric("tanghulu_node_evictions_by_reason_total", reason="watermark") > 0
    (view,) = client.nodes()
    assert view.ssd_capacity_bytes > 100 * MIB
    eventually(lambda: client.nodes()[0].ssd_used_bytes > 16 * MIB)


def test_many_who_ask_for_one_chunk_share_one_promotion(cluster: Cluster, client: Client) -> None:
    node = cluster.nodes[0]
    keys = fill(client, node, 24)
    before = node.metric("tanghulu_node_ssd_promotions_total")
    with ThreadPoolExecutor(8) as threads:
        values = list(threads.map(lambda _: bytes(client.get(keys[0])), range(16)))
    assert values == [value(0)] * 16
    assert node.metric("tanghulu_node_ssd_promotions_total") == before + 1
    assert client.put(keys[1], b"again").existed, "it is on the SSD"
    assert bytes(client.get(keys[1])) == value(1)
    client.eviction_policy(node.name, "sieve")
    assert bytes(client.get(keys[2])) == value(2)


@pytest.mark.slow
def test_a_batch_larger_than_memory_is_read_in_one_call(cluster: Cluster, client: Client) -> None:
    keys = fill(client, cluster.nodes[0], 640, 64 * KIB)
    chunks = client.get_many(keys)
    assert [bytes(c) if not isinstance(c, TanghuluError) else c for c in chunks] == [
        value(i, 64 * KIB) for i in range(640)
    ]


def test_chunks_survive_a_restart_and_removed_ones_stay_away(cluster: Cluster, client: Client, ssd: Path) -> None:
    node = cluster.nodes[0]
    keys = fill(client, node)
    for key in keys[:3]:
        assert client.remove(key)
    on_ssd = [key for key in keys[3:] if client.stat(key).tier is Tier.SSD]
    assert len(on_ssd) >= 24
    eventually(lambda: node.metric("tanghulu_node_ssd_queued_bytes") == 0)
    node.kill()
    again = add_node(cluster, ssd)
    assert again.metric("tanghulu_node_ssd_recovered_chunks_total") >= len(on_ssd)
    with tanghulu.connect(cluster.address) as fresh:
        eventually(lambda: [each.id for each in fresh.nodes()] == [again.name])  # the killed one's lease is over
        eventually(lambda: all(fresh.exists_many(on_ssd)))
        for key in on_ssd:
            with fresh.get(key) as chunk:
                assert bytes(chunk) == value(int(key[1:]))
        assert not any(fresh.exists_many(keys[:3]))
        for key in keys[:3]:
            with pytest.raises(ChunkNotFound):
                fresh.get(key)
    assert again.metric("tanghulu_node_ssd_corrupt_chunks_total") == 0


def test_a_node_that_ends_in_order_keeps_what_memory_held(cluster: Cluster, client: Client, ssd: Path) -> None:
    keys = [f"k{i:03}" for i in range(12)]
    for i, key in enumerate(keys):
        assert client.put(key, value(i)).ok
    cluster.nodes[0].stop()
    again = add_node(cluster, ssd)
    assert again.metric("tanghulu_node_ssd_recovered_chunks_total") == len(keys)
    with tanghulu.connect(cluster.address) as fresh:
        eventually(lambda: all(fresh.exists_many(keys)))
        assert [bytes(fresh.get(key)) for key in keys] == [value(i) for i in range(12)]


def test_what_is_pinned_hard_survives_the_end_of_its_node_before_all_else(tmp_path: Path) -> None:
    """Nobody has read it, and the flash shall be spared; it is in memory again when nobody has asked for it."""
    ssd, spared = tmp_path / "node.tier", ("--ssd-admission", "reused", "--ssd-write-rate", "1MiB")
    with Cluster(0) as cluster, tanghulu.connect(cluster.address) as client:
        node = add_node(cluster, ssd, "16MiB", *spared)
        eventually(lambda: len(client.nodes()) == 1)
        keys = [f"hard{i}" for i in range(4)]
        for i, key in enumerate(keys):
            assert client.put(key, value(i), pin="hard").ok
        for i in range(8):
            client.put(f"k{i}", value(i))
        node.stop()
        for _ in range(2):  # the second time nothing has to be written
            node = add_node(cluster, ssd, "16MiB", *spared)
            eventually(lambda: all(client.exists_many(keys)))
            eventually(lambda: all(client.stat(key).tier is Tier.MEMORY for key in keys))
            fill(client, node, 24)
            assert [bytes(client.get(key)) for key in keys] == [value(i) for i in range(4)]
            with pytest.raises(StoreFull):
                client.put("one more", value(9), pin="hard")
            node.stop()


def test_bits_that_flip_in_the_file_are_found_and_counted(cluster: Cluster, client: Client, ssd: Path) -> None:
    node = cluster.nodes[0]
    keys = fill(client, node)
    on_ssd = [key for key in keys if client.stat(key).tier is Tier.SSD]
    eventually(lambda: node.metric("tanghulu_node_ssd_queued_bytes") == 0)
    with ssd.open("r+b") as file:  # every record's value, and the head of the one that holds on_ssd[0]
        data = file.read()
        place = data.index(on_ssd[0].encode())
        for position in [place, *range(4096 + 512 * KIB, len(data), MIB)]:
            file.seek(position)
            file.write(bytes([data[position] ^ 1]))
    outcomes = client.get_many(on_ssd)
    for key, outcome in zip(on_ssd, outcomes, strict=True):
        if isinstance(outcome, TanghuluError):
            assert isinstance(outcome, ChunkNotFound)
        else:
            assert bytes(outcome) == value(int(key[1:]))
            outcome.close()
    assert isinstance(outcomes[0], ChunkNotFound)
    num_missing = sum(isinstance(each, ChunkNotFound) for each in outcomes)
    assert num_missing >= len(on_ssd) - 2
    assert node.metric("tanghulu_node_ssd_corrupt_chunks_total") == num_missing
    assert client.put(on_ssd[0], b"again").ok
    assert bytes(client.get(on_ssd[0])) == b"again"


@pytest.mark.slow
def test_a_full_disk_costs_chunks_and_nothing_else(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], capture_output=True)
    limit = [] if made.returncode == 0 else [8 * MIB]
    try:
        with Cluster(0) as cluster, tanghulu.connect(cluster.address) as client:
            node = add_node(cluster, mount / "node.tier", "128MiB")
            if limit:
                subprocess.run(["prlimit", f"--pid={node.popen.pid}", f"--fsize={limit[0]}"], check=True)
            keys = fill(client, node)
            eventually(lambda: node.metric("tanghulu_node_ssd_queued_bytes") == 0)
            assert node.metric("tanghulu_node_ssd_write_errors_total") > 0
            assert node.metric("tanghulu_node_ssd_admissions_total", verdict="paused") == 0
            assert node.metric("tanghulu_node_ssd_evictions_total") > 0, "it goes on in what the disk has given"
            assert 0 < node.metric("tanghulu_node_ssd_capacity_bytes") <= 8 * MIB
            # What was evicted is told a moment later.
            eventually(lambda: sum(client.exists_many(keys)) < NUM)
            assert sum(client.exists_many(keys)) > 16
            for i, outcome in enumerate(
                client.get_many(keys)
            ):  # what comes up displaces others, which have no way down
                if isinstance(outcome, TanghuluError):
                    assert isinstance(outcome, ChunkNotFound)
                else:
                    assert bytes(outcome) == value(i)
            assert client.put("new", b"value").ok
            assert client.remove("new"), "a disk that is full keeps nobody from removing"
            node.stop()
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", str(mount)], check=True)
