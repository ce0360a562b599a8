"""Real faults with real processes: killed and stopped nodes, masters and clients, flipped bits, clocks that jump.

Always: nothing hangs beyond its deadline, and no wrong byte is ever returned. Nodes assert their invariants all the
time (``checked``). What becomes of a full or damaged SSD stands in test_store_tier.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tanghulu
from tanghulu.errors import ChunkNotFound, NodeUnavailable, TanghuluError
from tanghulu.store.client import Client
from tests.store.cluster import Cluster, Process, eventually
from tests.store.fault_tools import DEADLINE_S, MIB, child, read, says, stopped, tell, timed, value

# --- bits that flip in memory


def flip_in_segment(node: Process, wanted: bytes) -> None:
    """Flip one bit of the first place in the node's memory that reads ``wanted``."""
    folder = Path(f"/proc/{node.popen.pid}/fd")
    for fd in folder.iterdir():
        if "memfd:" not in os.readlink(fd):
            continue
        with open(fd, "r+b", buffering=0) as memory:
            data = memory.read()
            place = data.find(wanted)
            if place >= 0:
                memory.seek(place)
                memory.write(bytes([wanted[0] ^ 16]))
                return
    raise AssertionError("the value is not in the node's memory")


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_flipped_bit_in_a_segment_is_found_and_a_replica_serves(transport: str) -> None:
    # Ids of nodes are drawn, and with the key they decide which replica is read first: with 32 keys both are.
    sizes = {f"k{i}": 256 * 1024 if i % 4 == 0 else 4096 for i in range(32)}
    with Cluster(2, "32MiB") as cluster:
        with tanghulu.connect(cluster.address) as writer:
            for key, size in sizes.items():
                assert writer.put(key, value(key, size), replicas=2).num_replicas == 2
        damaged, sound = cluster.nodes
        for key, size in sizes.items():
            flip_in_segment(damaged, value(key, size))
        with tanghulu.connect(cluster.address, transport=transport) as client:
            for key, size in [*sizes.items()] * 2:
                assert read(client, key, size) is None
            num_found = damaged.metric("tanghulu_node_corrupt_chunks_total")
            assert num_found > 0, "some were read there first"
            sound.kill()
            for key, size in sizes.items():
                # What a client has mapped of the killed one is good for a moment more.
                eventually(lambda key=key, size=size: read(client, key, size) is not None)  # type: ignore[misc]
            eventually(lambda: damaged.metric("tanghulu_node_corrupt_chunks_total") == len(sizes))
            eventually(lambda: isinstance(read(client, "k0", sizes["k0"]), ChunkNotFound))


# --- clients that are stopped


_PINS = """
with tanghulu.connect(sys.argv[1]) as client:
    chunk = client.get("pinned")
    print("pinned", flush=True)
    sys.stdin.readline()
    print(bytes(chunk) == random.Random("pinned").randbytes(4096) * 256, flush=True)
"""

_WRITES = """
from tanghulu.store.client.logic import messages
from tanghulu.store.protocol.messages import ReserveRequest
from tanghulu.store.protocol.methods import RESERVE
from tanghulu.store.protocol.types import NewChunk
with tanghulu.connect(sys.argv[1]) as client:
    client.put("warm", b"x" * MIB)
    driver = client._driver
    node = next(peer for peer in driver._idle if peer)
    call = RESERVE.call(ReserveRequest([NewChunk("torn", 7, 4 * MIB)], 1000))
    (reply,) = driver._exchange(node, [call], 1.0)
    (reservation,) = messages.reservations(reply)
    view = driver._open_segment(node, False).remote.map_writable()
    print("reserved", flush=True)
    sys.stdin.readline()
    view[reservation.offset : reservation.offset + 4 * MIB] = b"!" * (4 * MIB)
    print("written", flush=True)
    sys.stdin.readline()
"""


def overwrite_everything(client: Client, num: int = 48) -> list[str]:
    """Put more than the node holds."""
    keys = [f"other{i}" for i in range(num)]
    for key in keys:
        assert client.put(key, value(key)).ok
    return keys


def read_what_is_left(client: Client, keys: list[str]) -> int:
    outcomes = [read(client, key) for key in keys]
    assert all(each is None or isinstance(each, ChunkNotFound) for each in outcomes)
    return outcomes.count(None)


def test_the_range_of_a_stopped_reader_is_not_reused(cluster_short_leases: Cluster) -> None:
    cluster = cluster_short_leases
    with tanghulu.connect(cluster.address) as client:
        client.put("pinned", value("pinned"))
        with child(_PINS, cluster.address) as reader:
            assert says(reader) == "pinned"
            with stopped(reader.pid):
                keys = overwrite_everything(client)
                assert read_what_is_left(client, keys) > 20
            tell(reader, "look")
            assert says(reader) == "True", "what it had pinned was overwritten"
            reader.wait(10)
        eventually(lambda: cluster.nodes[0].metric("tanghulu_node_leases") == 0)


@pytest.mark.slow
def test_a_stopped_writer_cannot_write_into_what_others_put(cluster_short_leases: Cluster) -> None:
    cluster = cluster_short_leases
    node = cluster.nodes[0]
    with tanghulu.connect(cluster.address) as client, child(_WRITES, cluster.address) as writer:
        assert says(writer) == "reserved"
        with stopped(writer.pid):
            keys = overwrite_everything(client)
        tell(writer, "write")
        assert says(writer) == "written", "long after its lease ended"
        assert read_what_is_left(client, keys) > 20
        with pytest.raises(ChunkNotFound):
            client.get("torn")
        writer.kill()
        writer.wait()
        eventually(lambda: node.metric("tanghulu_node_leases") == 0)
        assert read_what_is_left(client, overwrite_everything(client)) > 24


@pytest.fixture
def cluster_short_leases() -> Iterator[Cluster]:
    with Cluster(1, "32MiB", "--debug", "lease_ms=200") as cluster:
        yield cluster


# --- nodes that are stopped


@pytest.mark.slow
def test_a_stopped_node_costs_a_deadline_and_no_more() -> None:
    with Cluster(2, "64MiB") as cluster, tanghulu.connect(cluster.address) as client:
        keys = [f"both{i}" for i in range(3)]
        for key in keys:
            assert client.put(key, value(key), replicas=2).num_replicas == 2
        assert client.put("single", value("single"), prefer_node=cluster.nodes[0].name).ok
        with stopped(cluster.nodes[0].popen.pid):
            assert read(client, "single") is not None
            outcomes = [read(client, key) for key in keys]
            assert outcomes == [None] * len(keys), "the replica serves when half of the time is over"
            for i in range(2):
                timed(lambda i=i: client.put(f"new{i}", value(f"new{i}"), deadline_s=DEADLINE_S))  # type: ignore[misc]
            eventually(lambda: all(read(client, key) is None for key in keys))  # the master has noticed
        eventually(lambda: read(client, "single") is None)
        for key in keys:
            assert read(client, key) is None


# --- kill -9


@pytest.mark.slow
def test_a_node_killed_in_the_middle_of_puts_and_gets() -> None:
    with Cluster(3, "64MiB") as cluster:
        stopping, failures = threading.Event(), list[BaseException]()
        acknowledged: list[str] = []

        def use(number: int) -> None:
            rng = random.Random(number)
            try:
                with tanghulu.connect(cluster.address, transport=("shm", "tcp")[number % 2]) as client:
                    for i in range(100_000):
                        if stopping.is_set():
                            return
                        key = f"k{number}-{i}"
                        data = value(key)
                        put = timed(lambda: client.put(key, data, replicas=2, deadline_s=DEADLINE_S))  # noqa: B023
                        if not isinstance(put, TanghuluError):
                            acknowledged.append(key)
                        read(client, rng.choice(acknowledged[-20:] or [key]))
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test is to see it
                failures.append(error)

        threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for node in cluster.nodes[:2]:
            reached = len(acknowledged) + 20
            eventually(lambda reached=reached: len(acknowledged) > reached or bool(failures), 20)  # type: ignore[misc]
            node.kill()
            cluster.add_node("64MiB")
        reached = len(acknowledged) + 20
        eventually(lambda: len(acknowledged) > reached or bool(failures), 20)
        stopping.set()
        for thread in threads:
            thread.join()
        assert not failures, failures


def _serves(client: Client) -> bool:
    outcome = timed(lambda: client.put(f"probe{time.monotonic()}", b"x", deadline_s=0.3), 0.3)
    return not isinstance(outcome, TanghuluError)


@pytest.mark.slow
def test_a_master_killed_in_the_middle_of_puts() -> None:
    with Cluster(2, "64MiB") as cluster, tanghulu.connect(cluster.address) as client:
        acknowledged, num_failed = [], 0
        rng = random.Random(5)
        for i in range(24):
            if i == 10:
                cluster.master.kill()
            if i == 14:
                cluster.restart_master()
                eventually(lambda: _serves(client))
            key = f"m{i}"
            outcome = timed(lambda key=key: client.put(key, value(key, 65536 * 2), deadline_s=DEADLINE_S))  # type: ignore[misc]
            if isinstance(outcome, TanghuluError):
                num_failed += 1
            else:
                acknowledged.append(key)
            assert read(client, rng.choice(acknowledged), 65536 * 2) is None, "known locations need no master"
        assert 0 < num_failed <= 6, "no more than while there was none"
        with tanghulu.connect(cluster.address) as fresh:
            for key in acknowledged:
                eventually(lambda key=key: read(fresh, key, 65536 * 2) is None)  # type: ignore[misc]


def _wrong(client: tanghulu.Client, prefix: str) -> list[TanghuluError]:
    """Why keys that are listed cannot be read."""
    outcomes = [read(client, info.key, 8 * MIB) for info in client.list_keys(prefix)]
    assert all(outcome is None or isinstance(outcome, ChunkNotFound) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if outcome is not None]


_BUSY = """
number = int(sys.argv[2])
with tanghulu.connect(sys.argv[1], transport=("shm", "tcp")[number % 2]) as client:
    print("begins", flush=True)
    for i in range(100000):
        key = f"c{number}-{i}"
        client.put(key, random.Random(key).randbytes(4096) * 2048)
        with client.get(key) as chunk:
            assert bytes(chunk) == random.Random(key).randbytes(4096) * 2048
"""


@pytest.mark.slow
def test_clients_killed_in_the_middle_leave_nothing_behind() -> None:
    with Cluster(1, "64MiB", "--eviction", "lru") as cluster, tanghulu.connect(cluster.address) as client:
        node = cluster.nodes[0]
        rng = random.Random(11)
        for number in range(4):
            before = node.metric("tanghulu_node_puts_total")
            with child(_BUSY, cluster.address, str(number)) as busy:
                assert says(busy) == "begins"
                eventually(lambda before=before: node.metric("tanghulu_node_puts_total") > before)  # type: ignore[misc]
                time.sleep(rng.random() * 0.05)  # to hit another moment each time
        eventually(lambda: node.metric("tanghulu_node_leases") == 0)
        eventually(lambda: node.metric("tanghulu_node_sessions") <= 1)
        eventually(lambda: _wrong(client, "c") == [])  # what was promised by who was killed is retracted
        assert read_what_is_left(client, overwrite_everything(client, 64)) >= 60, "all of the memory can be used again"


@pytest.mark.slow
def test_a_node_killed_in_the_middle_of_demotions_comes_back_sound(tmp_path: Path) -> None:
    """Whatever was written halfway is missing, never wrong; what was removed does not come back."""
    ssd = ("--ssd-path", str(tmp_path / "node.tier"), "--ssd-size", "48MiB")
    rng, removed = random.Random(3), set[str]()
    with Cluster(0) as cluster:
        for life in range(3):
            node = cluster.add_node("16MiB", *ssd)
            with tanghulu.connect(cluster.address) as client:
                eventually(lambda: timed(lambda: client.put("alive", b"x").ok) is True)
                found = client.get_many(old := [f"life{life - 1}-{i}" for i in range(60)], deadline_s=20.0)
                for key, outcome in zip(old, found, strict=True):
                    if isinstance(outcome, TanghuluError):
                        # of what was lost the master may still think that the killed node has it
                        assert isinstance(outcome, ChunkNotFound | NodeUnavailable), outcome
                    else:
                        assert key not in removed, "it came back"
                        assert bytes(outcome) == value(key)
                        outcome.close()
                assert not life or sum(not isinstance(each, TanghuluError) for each in found) > 5
                for i in range(60):
                    assert client.put(f"life{life}-{i}", value(f"life{life}-{i}")).ok
                    if i % 5 == 4 and client.remove(gone := f"life{life}-{rng.randrange(i)}"):
                        removed.add(gone)
                    if i > 40 and rng.random() < 0.1:
                        break
            node.kill()  # with writes on their way
        assert len(removed) > 10
