"""Draining, restoring and filling with real processes, and the administrator's commands on them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner

import tanghulu
from tanghulu.cli.main import EXIT_CODES
from tanghulu.cli.store import COMMAND
from tanghulu.cli.store_admin import Disagreement
from tanghulu.conductor.replicating import request_copies
from tanghulu.errors import (
    ChecksumMismatch,
    ChunkNotFound,
    DeadlineExceeded,
    InvalidRequest,
    MasterUnavailable,
    TanghuluError,
)
from tanghulu.store.admin.check import CheckFinding, Kind, compare
from tanghulu.store.client import Client
from tanghulu.store.client.model import KeyInfo
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.messages import Verified
from tests.store.cluster import Cluster, Process, eventually

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(scope="module")
def trio() -> Iterator[Cluster]:
    """A master and three nodes at three places, of which one may be drained and taken back."""
    with Cluster(0) as cluster:
        for index in range(3):
            cluster.add_node("64MiB", "--place", f"z/r{index}/h{index}")
        yield cluster


@pytest.fixture
def store(trio: Cluster) -> Iterator[Client]:
    with tanghulu.connect(trio.address) as client:
        yield client
        client.remove_matching("^")


def run(cluster: Cluster, *arguments: str) -> Any:
    """One command with --json; raises what it raises."""
    outcome = CliRunner().invoke(
        COMMAND, [*arguments, "--master", cluster.address, "--json"], standalone_mode=False, catch_exceptions=True
    )
    if isinstance(outcome.exception, TanghuluError):
        raise outcome.exception
    assert outcome.exception is None, outcome.exception
    return json.loads(outcome.stdout)


def holders(client: Client, key: str) -> set[str]:
    return set(client.list_keys(key, limit=1)[0].nodes)


def value_of(index: int) -> bytes:
    """Small ones travel inside requests, large ones by transfer."""
    return bytes([index % 251]) * (100 * KIB if index % 5 == 0 else 2000)


def test_a_drained_node_may_be_stopped_and_nothing_is_lost(trio: Cluster, store: Client) -> None:
    leaving = trio.add_node("64MiB", "--place", "z/r9/h9")
    store.nodes()  # a client's own list may be a second old
    for index in range(120):
        pin = "hard" if index == 7 else "none"
        store.put(f"d/{index}", value_of(index), prefer_node=leaving.name, pin=pin, ttl_s=600.0 if index == 8 else None)
    assert all(holders(store, f"d/{index}") == {leaving.name} for index in range(120))
    outcome = run(trio, "drain", leaving.name)
    assert (outcome["drained"], outcome["num_chunks"]) == (True, 120)
    assert next(view for view in store.nodes() if view.id == leaving.name).drained
    after = store.put("d/after", b"x", prefer_node=leaving.name)
    assert after.ok
    assert leaving.name not in holders(store, "d/after"), "it takes nothing any more"
    leaving.stop()
    trio.nodes.remove(leaving)
    with tanghulu.connect(trio.address) as fresh:
        for index in range(120):
            with fresh.get(f"d/{index}") as chunk:
                assert chunk.bytes() == value_of(index)
        assert fresh.stat("d/7").pin.value == "hard", "a copy is as pinned as its source"
        assert 500.0 < (fresh.stat("d/8").ttl_s or 0.0) <= 600.0, "and ends with it"


def test_a_drain_can_be_undone(trio: Cluster, store: Client) -> None:
    node = trio.nodes[0]
    run(trio, "drain", node.name, "--no-wait")
    eventually(lambda: next(view for view in store.nodes() if view.id == node.name).draining)
    assert run(trio, "undrain", node.name) == {"node": node.name, "draining": False}
    store.put("u", b"x", prefer_node=node.name)
    assert holders(store, "u") == {node.name}


def test_a_node_names_the_socket_of_another_in_its_run_dir(trio: Cluster) -> None:
    taken = str(trio.nodes[0].run_dir)
    command = [sys.executable, "-m", "tanghulu", "node", "--master", trio.address, "--port", "0", "--memory", "64MiB"]
    done = subprocess.run([*command, "--run-dir", taken], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"127.0.0.1 and {taken}/segment.sock: [Errno 98] Address already in use" in done.stderr


@pytest.mark.slow
def test_the_only_node_cannot_be_drained() -> None:
    with Cluster(1) as alone, tanghulu.connect(alone.address) as client:
        client.put("k", b"x")
        with pytest.raises(InvalidRequest, match="no other node"):
            run(alone, "drain", alone.nodes[0].name)
        small = alone.add_node("1MiB")
        client.put("large", bytes(2 * MIB), prefer_node=alone.nodes[0].name)
        with pytest.raises(DeadlineExceeded, match="1 chunks are left"):
            run(alone, "drain", alone.nodes[0].name, "--timeout-s", "1.5")
        assert small.alive


@pytest.mark.slow
def test_a_dead_nodes_replicas_are_restored_elsewhere(trio: Cluster, store: Client) -> None:
    dying = trio.add_node("64MiB", "--place", "z/r8/h8")
    other = trio.nodes[0].name
    with tanghulu.connect(trio.address) as writer:
        writer.nodes()
        for index in range(40):
            writer.put(f"r/{index}", value_of(index), replicas=2, prefer_node=dying.name)
    lost = [f"r/{index}" for index in range(40) if dying.name in holders(store, f"r/{index}")]
    assert lost
    assert all(len(holders(store, f"r/{index}")) == 2 for index in range(40))
    dying.kill()
    trio.nodes.remove(dying)
    eventually(lambda: all(len(holders(store, key) - {dying.name}) == 2 for key in lost))
    assert all(dying.name not in holders(store, key) for key in lost)
    assert other in {view.id for view in store.nodes()}
    assert trio.master.metric("tanghulu_master_copies_total", outcome="done", reason="restore") >= len(lost)


def test_a_dead_node_is_noticed_at_once_by_its_connections(trio: Cluster, store: Client) -> None:
    """A client by its refused connection, the master by the broken one; only a node that hangs takes heartbeats."""
    dying = trio.add_node("16MiB", "--place", "z/r7/h7")
    store.nodes()
    store.put("n", b"x" * 100 * KIB, prefer_node=dying.name)
    with tanghulu.connect(trio.address) as reader:
        assert reader.exists("n")
        dying.kill()
        trio.nodes.remove(dying)
        with pytest.raises(TanghuluError) as refusal:
            reader.get("n", deadline_s=30)
        assert not isinstance(refusal.value, DeadlineExceeded), "a refused connection is an answer"
        eventually(lambda: dying.name not in {view.id for view in store.nodes()})


@pytest.mark.slow
def test_a_node_that_stands_still_is_gone_after_its_heartbeats(trio: Cluster, store: Client) -> None:
    hanging = trio.add_node("16MiB", "--place", "z/r6/h6")
    hanging.popen.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    eventually(lambda: hanging.name not in {view.id for view in store.nodes()})
    assert time.monotonic() - began_s > 1.5
    hanging.popen.send_signal(signal.SIGCONT)
    eventually(lambda: hanging.name in {view.id for view in store.nodes()})
    hanging.stop()
    trio.nodes.remove(hanging)


def test_the_only_master_owns_everything_and_leads(trio: Cluster, store: Client) -> None:
    (view,) = run(trio, "masters")
    assert (view["ranges"], view["leads"], view["state"]) == (list(range(NUM_RANGES)), True, "ready")
    eventually(lambda: run(trio, "masters")[0]["num_keys"] == len(store.list_keys()))  # those of lost nodes are swept


@pytest.mark.slow
def test_an_empty_node_that_joins_is_filled() -> None:
    with Cluster(0) as cluster:
        full = [cluster.add_node("16MiB", "--place", f"z/r{i}/h{i}") for i in range(2)]
        with tanghulu.connect(cluster.address) as client:
            for index in range(200):
                client.put(f"f/{index:03}", bytes([index]) * 128 * KIB, prefer_node=full[index % 2].name)
            held = {info.key for info in client.list_keys("f/")}
            joined = cluster.add_node("16MiB", "--place", "z/r2/h2")

            def used() -> dict[str, int]:
                return {view.id: view.used_bytes for view in client.nodes()}

            eventually(lambda: used()[joined.name] > 6 * MIB)
            kept = {info.key for info in client.list_keys("f/")}
            assert kept == held, "moved, nothing lost"
            for key in list(kept)[::7]:
                with client.get(key) as chunk:
                    assert chunk.bytes() == bytes([int(key[2:])]) * 128 * KIB
            eventually(lambda: sum(used().values()) < 28 * MIB)


@pytest.mark.slow
def test_a_hot_chunk_is_copied_to_more_nodes(trio: Cluster, store: Client) -> None:
    place = {node.name: node for node in trio.nodes}
    store.put("hot", b"h" * 50 * KIB, prefer_node=trio.nodes[0].name)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(tanghulu.connect(trio.address, transport="tcp")) for _ in range(2)]
        until = time.monotonic() + 60.0
        while len(holders(store, "hot")) < 2:
            assert time.monotonic() < until, "it stayed where it was"
            for reader in readers:
                for _ in range(200):
                    reader.get("hot").close()
    assert holders(store, "hot") <= set(place)


def corrupt(node: Process, needle: bytes) -> None:
    """Flip bytes of a value in the node's segment, wherever the kernel shows its memory."""
    pid = node.popen.pid
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            where, access = line.split()[:2]
            if "tanghulu" not in line or not access.startswith("rw"):
                continue
            begin, end = (int(part, 16) for part in where.split("-"))
            memory.seek(begin)
            position = memory.read(end - begin).find(needle)
            if position >= 0:
                memory.seek(begin + position)
                memory.write(b"\xff" * 8)
                return
    raise AssertionError("the value is nowhere in the node's segment")


def test_check_finds_corrupt_chunks_and_repairs(trio: Cluster, store: Client) -> None:
    node = trio.nodes[1]
    for index in range(20):
        store.put(f"c/{index}", b"needle-%03d-" % index * 1000, replicas=2, prefer_node=node.name)
    assert run(trio, "check")["findings"] == []
    corrupt(node, b"needle-004-needle-004-")
    with pytest.raises(ChecksumMismatch, match="1 corrupt chunk") as raised:
        run(trio, "check")
    assert EXIT_CODES[raised.value.code] == 6
    outcome = run(trio, "check", "--repair")
    assert [(each["kind"], each["key"]) for each in outcome["findings"]] == [("corrupt", "c/4")]
    assert outcome["left"] == []
    with store.get("c/4") as chunk:
        assert chunk.bytes() == b"needle-004-" * 1000


def test_check_compares_the_listing_with_what_nodes_hold() -> None:
    listing = [KeyInfo("a", 1, 7, ("n1", "n2")), KeyInfo("b", 1, 8, ("n1",)), KeyInfo("gone", 1, 9, ("n9",))]
    chunk: Callable[..., Verified] = lambda key, version, corrupt=False: Verified(key, version, 1, corrupt)  # noqa: E731
    held = {
        "n1": {"a": chunk("a", 7, True), "b": chunk("b", 3)},
        "n2": {"x": chunk("x", 1)},
    }
    assert set(compare(listing, held)) == {
        CheckFinding(Kind.CORRUPT, "n1", "a"),
        CheckFinding(Kind.MISSING, "n1", "b"),
        CheckFinding(Kind.UNLISTED, "n1", "b"),
        CheckFinding(Kind.MISSING, "n2", "a"),
        CheckFinding(Kind.UNLISTED, "n2", "x"),
    }
    assert EXIT_CODES.get(Disagreement.code, 1) == 1


def test_evict_by_key_and_by_bytes(trio: Cluster, store: Client) -> None:
    node = trio.nodes[0].name
    for index in range(10):
        store.put(f"e/{index}", bytes(100 * KIB), prefer_node=node, pin="hard" if index == 9 else "none")
    named = run(trio, "evict", "e/3", "e/9", "--node", node)[node]
    assert named == {"num_chunks": 1, "num_bytes": 100 * KIB}, "a hard pin stays"
    eventually(lambda: not store.exists("e/3"))
    with pytest.raises(ChunkNotFound, match=r"not in the store: e/nowhere$"):
        run(trio, "evict", "e/8", "e/nowhere")
    eventually(lambda: not store.exists("e/8"))
    store.put("e/8", bytes(100 * KIB), prefer_node=node)
    more = run(trio, "evict", "--bytes", "250KiB", "--node", node)[node]
    assert more["num_chunks"] == 3
    left = [f"e/{i}" for i in range(4, 10)]
    eventually(lambda: sorted(info.key for info in store.list_keys("e/")) == left)


def test_top_tells_rates(trio: Cluster, store: Client) -> None:
    store.put("t", b"x", prefer_node=trio.nodes[0].name)
    rows = run(trio, "top", "--interval-s", "0.2")
    assert {row["node"] for row in rows} == {node.name for node in trio.nodes}
    assert [(row["state"], row["puts"]) for row in rows] == [("up", 0.0)] * 3
    assert sum(row["num_chunks"] for row in rows) >= 1


def test_watch_follows_what_is_stored(trio: Cluster, store: Client) -> None:
    store.put("w/1", b"x")
    outcome = CliRunner().invoke(COMMAND, ["watch", "w/", "--count", "3", "--json", "--master", trio.address])
    events = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert [event["event"] for event in events] == ["reset", "stored", "synced"]
    assert events[1]["key"] == "w/1"


def test_keys_are_copied_ahead_when_somebody_asks(trio: Cluster, store: Client) -> None:
    keys = [f"ahead/{index}" for index in range(20)]
    for index, key in enumerate(keys):
        store.put(key, value_of(index))
    with pytest.raises(ChunkNotFound, match=r"not in the store: ahead/unknown$"):
        run(trio, "replicate", *keys[:5], "ahead/unknown", "--holders", "3", "--for-s", "30")
    said = run(trio, "replicate", *keys[:10], "--holders", "3", "--for-s", "30")
    assert said == {"taken": 10, "keys": 10, "holders": 3, "for_s": 30.0}
    eventually(lambda: all(len(holders(store, key)) == 3 for key in keys[:10]))
    assert all(len(holders(store, key)) == 1 for key in keys[10:]), "nobody asked for these"
    assert all(store.get(key).bytes() == value_of(index) for index, key in enumerate(keys))
    with pytest.raises(InvalidRequest, match="for_s=0 must be more than 0"):
        store.replicate(keys, for_s=0)


def test_a_conductor_asks_the_master_for_copies(trio: Cluster, store: Client) -> None:
    keys = [f"asked/{index}" for index in range(10)]
    for index, key in enumerate(keys):
        store.put(key, value_of(index))
    assert asyncio.run(request_copies(trio.address, [*keys, "asked/unknown"], 2, 30.0)) == 10
    eventually(lambda: all(len(holders(store, key)) == 2 for key in keys))
    with pytest.raises(InvalidRequest, match="holders=0 must be"):
        asyncio.run(request_copies(trio.address, keys, 0, 30.0))
    with pytest.raises(MasterUnavailable):
        asyncio.run(request_copies("127.0.0.1:1", keys, 2, 30.0))
