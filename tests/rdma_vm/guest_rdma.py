"""Run by pytest in the first guest: the transports' contract, and what happens to links, against the second guest.

The owner of the segment runs in the other guest (guest_agent.py); the set-up goes over the control network, the data
over two soft-RoCE devices with a network each.
"""

# ruff: noqa: E402 - the folders of what is imported are no packages

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "transfer_engine")]

from guest_agent import RemoteAgent, RemoteOwner
from segment_process import HOST_ID, random_bytes
from test_transfer_contract import (  # noqa: F401 - pytest collects them from here
    TestBadInput,
    test_a_dropped_handle_lets_its_links_go,
    test_an_empty_batch_is_complete,
    test_asyncio,
    test_cancel_before_waiting,
    test_eight_threads,
    test_many_ranges_and_both_directions_in_one_batch,
    test_more_threads_than_links,
    test_one_batch_to_several_segments,
    test_opening_twice_gives_one_segment,
    test_random_batches_against_a_model,
    test_status_moves_a_batch_along,
    test_the_edges_of_the_segment,
)

from tanghulu.errors import LeaseExpired, NodeUnavailable, TransferFailed
from tanghulu.transfer_engine.engine import (
    EngineConfig,
    Opcode,
    RemoteSegment,
    TransferBatch,
    TransferEngine,
    TransferRequest,
)

READ, WRITE = Opcode.READ, Opcode.WRITE
PEER = "10.77.2.2"
LARGE = 32 << 20


@pytest.fixture(scope="session")
def agent() -> Iterator[RemoteAgent]:
    agent = RemoteAgent(PEER)
    yield agent
    agent.close()


@pytest.fixture(scope="session")
def owner(agent: RemoteAgent) -> RemoteOwner:
    return RemoteOwner(agent, PEER)


@pytest.fixture
def transport() -> str:
    return "rdma"


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    config = EngineConfig(slice_deadline_s=1.5, retries_max=6, pause_s=0.2, pause_max_s=0.4, pause_after_errors=1)
    with TransferEngine(host_id=HOST_ID, config=config) as engine:
        yield engine
        engine.check()


@pytest.fixture
def remote(engine: TransferEngine, owner: RemoteOwner) -> RemoteSegment:
    return engine.open_segment(owner.descriptor, transport="rdma")


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "descriptors leak"


@pytest.mark.parametrize("length", [1, 4095, 65_537, (1 << 20) + 1, 16 << 20])
@pytest.mark.parametrize("offset", [0, 4097])
def test_bytes_arrive(engine: TransferEngine, remote: RemoteSegment, owner: RemoteOwner, length: int, offset: int):
    source, destination = random_bytes(length + 7, length), np.zeros(length + 9, np.uint8)
    engine.transfer([TransferRequest(WRITE, source, remote, offset, length, source_offset=7)], 20)
    assert owner.peek(offset, min(length, 1000)) == source[7:1007].tobytes()
    engine.transfer([TransferRequest(READ, destination, remote, offset, length, source_offset=5)], 20)
    assert np.array_equal(destination[5 : 5 + length], source[7:])
    assert not destination[:5].any()
    assert not destination[5 + length :].any()


def test_both_devices_share_a_batch(engine: TransferEngine, remote: RemoteSegment):
    assert [path.local_device for path in remote.paths.paths] == ["rxe0", "rxe1"]
    handle = engine.submit(TransferBatch([TransferRequest(READ, bytearray(LARGE), remote, 0, LARGE)]))
    assert handle.wait(30).ok
    assert arrived(handle.story(0)) == {"rxe0", "rxe1"}


def test_rdma_is_preferred_to_tcp(engine: TransferEngine, owner: RemoteOwner):
    assert engine.open_segment(owner.descriptor).transport == "rdma"


# --- links that fail; each test leaves them whole

FAULTS: dict[str, tuple[str, str, str]] = {
    "the peer's link": ("there", "ip link set eth0 down", "ip link set eth0 up"),
    "our link": ("here", "ip link set eth0 down", "ip link set eth0 up"),
    "all packets": ("there", "tc qdisc add dev eth0 root netem loss 100%", "tc qdisc del dev eth0 root"),
}


@pytest.mark.parametrize("opcode", list(Opcode))
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_device_fails_in_the_middle_and_heals(
    engine: TransferEngine, remote: RemoteSegment, owner: RemoteOwner, agent: RemoteAgent, fault: str, opcode: Opcode
):
    where, break_it, mend_it = FAULTS[fault]
    shell = agent_shell(agent) if where == "there" else local_shell
    data, landing = random_bytes(LARGE, 5), np.zeros(LARGE, np.uint8)
    engine.transfer([TransferRequest(WRITE, data if opcode is READ else landing, remote, 0, LARGE)], 30)
    local = landing if opcode is READ else data
    handle = engine.submit(TransferBatch([TransferRequest(opcode, local, remote, 0, LARGE)]))
    results = []
    waiting = threading.Thread(target=lambda: results.append(handle.wait(30)))
    waiting.start()
    while handle.done_bytes < 2 << 20:
        waiting.join(0.005)
    shell(break_it)
    try:
        waiting.join()
        assert results[0].ok, handle.story(0)
        assert "rxe1" in arrived(handle.story(0))
        assert any("lost" in line and "rxe0" in line for line in handle.story(0))
        if opcode is WRITE:
            engine.transfer([TransferRequest(READ, landing, remote, 0, LARGE)], 30)
        assert np.array_equal(data, landing)
    finally:
        shell(mend_it)
    wait_for_device(engine, remote, "rxe0")


def test_packets_are_lost_in_the_middle(engine: TransferEngine, remote: RemoteSegment, agent: RemoteAgent):
    data, landing = random_bytes(8 << 20, 6), np.zeros(8 << 20, np.uint8)
    shells = [agent_shell(agent), local_shell]
    for shell in shells:
        shell("tc qdisc add dev eth0 root netem loss 1%; tc qdisc add dev eth1 root netem loss 1%")
    try:
        engine.transfer([TransferRequest(WRITE, data, remote, 0, data.size)], 60)
        engine.transfer([TransferRequest(READ, landing, remote, 0, data.size)], 60)
    finally:
        for shell in shells:
            shell("tc qdisc del dev eth0 root; tc qdisc del dev eth1 root")
    assert np.array_equal(data, landing)


def test_the_owner_is_killed_in_the_middle(engine: TransferEngine, agent: RemoteAgent):
    for opcode in Opcode:
        mortal = RemoteOwner(agent, PEER, size_bytes=LARGE)
        remote = engine.open_segment(mortal.descriptor, transport="rdma")
        handle = engine.submit(TransferBatch([TransferRequest(opcode, bytearray(LARGE), remote, 0, LARGE)]))
        mortal.kill()
        start_s = time.monotonic()
        result = handle.wait(30)
        assert isinstance(result.errors[0], NodeUnavailable | TransferFailed), handle.story(0)
        assert time.monotonic() - start_s < 15
        remote.close()


# --- leases


def test_no_range_is_free_while_a_queue_pair_reaches_it(engine: TransferEngine, agent: RemoteAgent):
    leasing = RemoteOwner(agent, PEER, access=True, size_bytes=4 << 20)
    leasing.open_session(7, None)
    remote = engine.open_segment(leasing.descriptor, session_id=7, transport="rdma")
    lease = leasing.grant(7, 0, 1 << 20, WRITE, False)
    data = random_bytes(1 << 20, 1)
    write = [TransferRequest(WRITE, data, remote, 0, data.size, lease_id=lease)]
    engine.transfer(write, 10)
    assert leasing.peek(0, 100) == data[:100].tobytes()
    assert leasing.pass_time(2.0) == []  # its queue pair is closed first, then it is free
    assert [each.lease_id for each in leasing.next_freed()] == [lease]
    with pytest.raises(LeaseExpired):
        engine.transfer(write, 10)
    assert not leasing.busy(0, 1 << 20)
    with pytest.raises(NodeUnavailable):
        engine.open_segment(leasing.descriptor, session_id=8, transport="rdma")


def test_a_range_outside_is_refused_and_not_tried_again(engine: TransferEngine, remote: RemoteSegment):
    """The engine checks bounds itself; here its idea of the segment is made too large."""
    outside = remote.size_bytes
    remote.size_bytes += 4096
    try:
        handle = engine.submit(TransferBatch([TransferRequest(WRITE, bytearray(100), remote, outside, 100)]))
        result = handle.wait(10)
    finally:
        remote.size_bytes = outside
    assert not result.ok
    assert "REM_ACCESS_ERR" in str(result.errors[0])
    assert sum("post" in line for line in handle.story(0)) == 1
    engine.transfer([TransferRequest(READ, bytearray(100), remote, 0, 100)], 10)


# --- small tools


def agent_shell(agent: RemoteAgent) -> Callable[[str], Any]:
    return lambda line: agent.call("shell", line)


def local_shell(line: str) -> None:
    subprocess.run(line, shell=True, check=True)


def arrived(story: list[str]) -> set[str]:
    return {device for line in story if " arrived " in line for device in ("rxe0", "rxe1") if f"via {device}" in line}


def wait_for_device(engine: TransferEngine, remote: RemoteSegment, device: str) -> None:
    """Until it carries slices again; a paused path is probed by the transfers themselves."""
    until_s = time.monotonic() + 20
    seen: set[str] = set()
    while device not in seen:
        assert time.monotonic() < until_s, f"{device} is not used again"
        handle = engine.submit(TransferBatch([TransferRequest(READ, bytearray(4 << 20), remote, 0, 4 << 20)]))
        assert handle.wait(20).ok, handle.story(0)
        seen |= arrived(handle.story(0))
