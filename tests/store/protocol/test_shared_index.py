from __future__ import annotations

import os
import random
import signal
import time

import pytest
import xxhash

import tanghulu
from tanghulu.errors import ChunkNotFound, DeadlineExceeded
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.client.logic.leases import REPORT_READS, Reads
from tanghulu.store.protocol.directory_messages import MAX_KEYS_PER_CALL
from tanghulu.store.protocol.shared_index import (
    ENTRIES_PER_BUCKET,
    HEADER_BYTES,
    MAX_SILENCE_S,
    Entry,
    IndexPlace,
    IndexReader,
    IndexWriter,
    index_bytes,
    num_buckets_for,
)
from tests.store.cluster import Cluster, eventually

CHUNKS = 1 << 16


class Pair:
    """A segment with chunks and an index, seen from both sides."""

    def __init__(self, num_buckets: int = 64) -> None:
        self.memory = memoryview(bytearray(CHUNKS))
        self.index = memoryview(bytearray(index_bytes(num_buckets)))
        self.writer = IndexWriter(self.index, 7, 100.0)
        self.reader = IndexReader(self.memory, self.index, IndexPlace(0, num_buckets, 7))

    def put(self, key: str, offset: int, value: bytes, version: int = 1) -> None:
        self.memory[offset : offset + len(value)] = value
        self.writer.publish(key, version, offset, len(value), xxhash.xxh3_64_intdigest(value))

    def found(self, key: str) -> Entry:
        entry = self.reader.find(key, 100.0)
        assert entry is not None
        return entry


def test_a_published_chunk_is_read_without_the_node() -> None:
    pair = Pair()
    pair.put("a", 64, b"hello", version=9)
    entry = pair.found("a")
    assert (entry.version, entry.offset, entry.size_bytes) == (9, 64, 5)
    assert pair.reader.read(entry) == b"hello"
    target = bytearray(5)
    assert pair.reader.read_into(entry, memoryview(target))
    assert target == b"hello"
    assert pair.reader.find("b", 100.0) is None


def test_a_retracted_chunk_is_not_found_and_not_read() -> None:
    pair = Pair()
    pair.put("a", 64, b"hello")
    entry = pair.found("a")
    pair.writer.withdraw("a")
    assert pair.reader.find("a", 100.0) is None
    assert pair.reader.read(entry) is None, "the bytes are still there, the entry is not"
    assert not pair.reader.read_into(entry, memoryview(bytearray(5)))


def test_bytes_that_changed_under_the_reader_are_not_returned() -> None:
    pair = Pair()
    pair.put("a", 64, b"hello")
    entry = pair.found("a")
    pair.memory[66] ^= 1
    assert pair.reader.read(entry) is None


@pytest.mark.parametrize("position", range(0, 56, 5))
def test_a_torn_entry_is_not_found(position: int) -> None:
    pair = Pair()
    pair.put("a", 64, b"hello")
    pair.index[pair.found("a").position + position] ^= 0x10
    assert pair.reader.find("a", 100.0) is None


def test_an_entry_that_points_outside_the_chunks_is_not_followed() -> None:
    pair = Pair()
    pair.writer.publish("a", 1, CHUNKS - 4, 8, 0)
    assert pair.reader.find("a", 100.0) is None


def test_a_silent_owner_is_not_believed() -> None:
    pair = Pair()
    pair.put("a", 64, b"hello")
    assert pair.reader.find("a", 100.0 + MAX_SILENCE_S + 0.01) is None
    pair.writer.beat(101.0)
    assert pair.reader.find("a", 101.0) is not None
    pair.writer.close()
    assert pair.reader.find("a", 101.0) is None


def test_a_newer_put_of_a_key_replaces_its_entry() -> None:
    pair = Pair()
    pair.put("a", 64, b"hello", version=1)
    old = pair.found("a")
    pair.put("a", 128, b"world", version=2)
    assert pair.reader.read(old) is None
    assert pair.reader.read(pair.found("a")) == b"world"
    assert len(pair.writer.entries()) == 1


def test_a_full_bucket_forgets_older_entries_and_never_lies() -> None:
    pair, rng = Pair(num_buckets=1), random.Random(3)
    held: dict[str, bytes] = {}
    for i in range(200):
        key, value = f"k{rng.randrange(12)}", rng.randbytes(16)
        if key in held and rng.random() < 0.4:
            pair.writer.withdraw(key)
            del held[key]
        else:
            pair.put(key, 64 * (i % 64), value)
            held[key] = value
        for name in [f"k{n}" for n in range(12)]:
            entry = pair.reader.find(name, 100.0)
            value_read = None if entry is None else pair.reader.read(entry)
            assert value_read is None or value_read == held[name]
        assert len(pair.writer.entries()) <= ENTRIES_PER_BUCKET


def test_the_size_of_an_index() -> None:
    assert num_buckets_for(1 << 30) == 16384
    assert index_bytes(16384) == HEADER_BYTES + (4 << 20)
    assert num_buckets_for(1) == 64
    assert num_buckets_for(1 << 60) == 1 << 20


def test_reads_are_told_by_node_and_in_order() -> None:
    reads, odd, even = Reads(), PeerId("odd"), PeerId("even")
    assert not reads.noted
    for i in range(REPORT_READS):
        assert not reads.due
        reads.note(odd if i % 2 else even, f"k{i}", 10)
    assert reads.due
    taken = reads.take()
    assert taken[even][0][:2] == ["k0", "k2"]
    assert taken[odd][1] == 10 * REPORT_READS // 2
    assert not reads.noted
    assert reads.take() == {}
    for i in range(MAX_KEYS_PER_CALL + 5):
        reads.note(odd, f"k{i}", 10)
    assert reads.take()[odd][0] == [f"k{i}" for i in range(5, MAX_KEYS_PER_CALL + 5)], "no more than a call may have"


# --- with real processes


def test_a_client_of_the_same_host_reads_without_asking_and_is_counted(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    with tanghulu.connect(cluster.address) as writer, tanghulu.connect(cluster.address) as reader:
        value = os.urandom(3000)
        writer.put("shared/a", value)
        writer.put("shared/b", value)
        assert reader.get("shared/a").bytes() == value  # the first one asks, and opens the node's memory
        inline = node.metric("tanghulu_node_read_bytes_total", transport="inline")
        buffer = bytearray(3000)
        for _ in range(5):
            assert reader.get("shared/b").bytes() == value
            assert reader.get_into("shared/b", buffer) == 3000
            assert buffer == value
        assert node.metric("tanghulu_node_read_bytes_total", transport="inline") == inline
        assert reader.stat("shared/b").num_hits == 10
        writer.remove("shared/b")
        with pytest.raises(ChunkNotFound):
            reader.get("shared/b")
        writer.put("shared/b", b"again")
        assert reader.get("shared/b").bytes() == b"again"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_bytes_written_are_counted_by_their_carrier(cluster: Cluster, transport: str) -> None:
    node = cluster.nodes[0]
    before = node.metric("tanghulu_node_written_bytes_total", transport=transport)
    with tanghulu.connect(cluster.address, transport=transport) as client:
        client.put(f"written/{transport}", bytes(2 << 20))
        assert node.metric("tanghulu_node_written_bytes_total", transport=transport) == before + (2 << 20)
        client.remove(f"written/{transport}")


def test_a_value_with_a_time_to_live_ends_on_time_for_everybody(cluster: Cluster) -> None:
    with tanghulu.connect(cluster.address) as client:
        client.put("shared/warm", b"x")
        client.put("shared/short", b"x", ttl_s=1.0)
        assert client.get("shared/short").bytes() == b"x"
        end = time.monotonic() + 1.0
        eventually(lambda: time.monotonic() > end)
        with pytest.raises(ChunkNotFound):
            client.get("shared/short")


def test_a_node_that_the_master_may_have_given_up_is_asked_and_not_believed() -> None:
    with Cluster(1, "16MiB") as cluster, tanghulu.connect(cluster.address, deadline_s=5.0) as client:
        client.put("a", b"x")
        eventually(lambda: client.get("a").bytes() == b"x" and bool(client._driver.context.mapped))
        ((_, mapped),) = client._driver.context.mapped.items()
        eventually(lambda: mapped.index.is_kept(time.monotonic()))
        process = cluster.master.popen
        process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: not mapped.index.is_kept(time.monotonic()))
            asked = cluster.nodes[0].metric("tanghulu_node_hits_total")
            assert client.get("a").bytes() == b"x", "who knows where it is needs no master"
            assert cluster.nodes[0].metric("tanghulu_node_hits_total") == asked + 1
        finally:
            process.send_signal(signal.SIGCONT)
        eventually(lambda: mapped.index.is_kept(time.monotonic()))


def test_a_stopped_node_is_not_read_from() -> None:
    with Cluster(1, "16MiB") as cluster, tanghulu.connect(cluster.address, deadline_s=5.0) as client:
        client.put("a", b"x")
        assert client.get("a").bytes() == b"x"
        process = cluster.nodes[0].popen
        process.send_signal(signal.SIGSTOP)
        try:
            end = time.monotonic() + MAX_SILENCE_S
            eventually(lambda: time.monotonic() > end)
            with pytest.raises(DeadlineExceeded):
                client.get("a", deadline_s=0.3)
        finally:
            process.send_signal(signal.SIGCONT)
        eventually(lambda: client.get("a").bytes() == b"x")
