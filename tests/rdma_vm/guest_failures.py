"""Run by pytest in the first guest: what happens when links, packets and owners fail in the middle of transfers.

A batch is driven until some of it has arrived, then the fault is injected while nobody drives, then it is waited for.
Its windows are smaller than what is left then, so the failing device has slices on it for certain.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tanghulu.errors import DeadlineExceeded, InvalidRequest, LeaseExpired, NodeUnavailable, TransferFailed
from tanghulu.transfer_engine.core.segment import SessionKey
from tanghulu.transfer_engine.engine import (
    BatchResult,
    Opcode,
    RemoteSegment,
    TransferBatch,
    TransferCancelled,
    TransferEngine,
    TransferHandle,
    TransferRequest,
)
from tests.rdma_vm.guest_agent import RemoteAgent, RemoteOwner
from tests.rdma_vm.guest_config import CONFIG, MIB
from tests.transfer_engine.segment_process import HOST_ID, random_bytes

READ, WRITE = Opcode.READ, Opcode.WRITE
LARGE = 20 * MIB
Shell = Callable[[str], Any]

#: A cable that is pulled: nothing comes in, nothing goes out. (The peer's link is not set down: the emulator then keeps
#: what we send to it, which no network does, and a guest that WRITEs stops answering, its kernel included.)
PULL = (
    "tc qdisc add dev {0} ingress && tc filter add dev {0} ingress matchall action drop"
    " && tc qdisc add dev {0} root netem loss 100%"
)
PLUG = "tc qdisc del dev {0} ingress; tc qdisc del dev {0} root"
#: Where, how it is broken, how it is mended.
FAULTS: dict[str, tuple[str, str, str]] = {
    "the peer's cable": ("there", PULL.format("eth0"), PLUG.format("eth0")),
    "our link": ("here", "ip link set eth0 down", "ip link set eth0 up"),
    "the peer's answers": ("there", "tc qdisc add dev eth0 root netem loss 100%", "tc qdisc del dev eth0 root"),
}


@pytest.fixture(scope="module")
def data() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return random_bytes(LARGE, 5)


@pytest.fixture(scope="module")
def others() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return random_bytes(LARGE, 6)


# --- links that fail; each test leaves them whole


@pytest.mark.parametrize("opcode", list(Opcode))
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_device_fails_in_the_middle_and_heals(
    engine: TransferEngine, remote: RemoteSegment, agent: RemoteAgent, data: Any, fault: str, opcode: Opcode
):
    where, break_it, mend_it = FAULTS[fault]
    shell = agent.shell if where == "there" else local_shell
    landing = np.zeros(LARGE, np.uint8)
    engine.transfer([TransferRequest(WRITE, data if opcode is READ else landing, remote, 0, LARGE)], 30)
    handle = begin(engine, TransferRequest(opcode, landing if opcode is READ else data, remote, 0, LARGE))
    with broken(shell, break_it, mend_it):
        assert handle.wait(30).ok, handle.story(0)
        assert any(" lost " in line and "rxe0" in line for line in handle.story(0))
        assert "rxe1" in arrived(handle)
        assert holds(remote, engine, data) if opcode is WRITE else np.array_equal(data, landing)
    until_used(engine, remote, "rxe0")


def test_both_devices_fail_and_tcp_serves(engine: TransferEngine, owner: RemoteOwner, data: Any):
    remote = engine.open_segment(owner.descriptor)
    assert remote.transport == "rdma"
    handle = begin(engine, TransferRequest(WRITE, data, remote, 0, LARGE))
    down = "ip link set eth0 down; ip link set eth1 down"
    with broken(local_shell, down, down.replace("down", "up")):
        assert handle.wait(40).ok, handle.story(0)
        assert "tcp" in arrived(handle)
    assert holds(remote, engine, data)
    until_used(engine, remote, "rxe0")


def test_packets_are_lost_in_the_middle(engine: TransferEngine, remote: RemoteSegment, agent: RemoteAgent, data: Any):
    size = 8 * MIB
    landing = np.zeros(size, np.uint8)
    lose = "tc qdisc add dev eth0 root netem loss 1%; tc qdisc add dev eth1 root netem loss 1%"
    mend = "tc qdisc del dev eth0 root; tc qdisc del dev eth1 root"
    with broken(agent.shell, lose, mend), broken(local_shell, lose, mend):
        engine.transfer([TransferRequest(WRITE, data, remote, 0, size)], 50)
        engine.transfer([TransferRequest(READ, landing, remote, 0, size)], 50)
    assert np.array_equal(data[:size], landing)


@pytest.mark.parametrize("opcode", list(Opcode))
def test_the_deadline_and_a_cancel_leave_nothing_under_way(
    engine: TransferEngine, remote: RemoteSegment, agent: RemoteAgent, data: Any, others: Any, opcode: Opcode
):
    engine.transfer([TransferRequest(WRITE, others, remote, 0, LARGE)], 30)
    local = np.zeros(LARGE, np.uint8) if opcode is READ else data
    handles = [begin(engine, TransferRequest(opcode, local, remote, 0, LARGE), 1) for _ in range(2)]
    pull, plug = (f"{line.format('eth0')}; {line.format('eth1')}" for line in (PULL, PLUG))
    with broken(agent.shell, pull, plug):
        assert isinstance(handles[0].wait(0.3).errors[0], DeadlineExceeded)
        waiting = Waiting(handles[1], 30)
        handles[1].cancel()
        assert isinstance(waiting.result().errors[0], TransferCancelled)
    if opcode is READ:
        landed = local.copy()
        engine.transfer([TransferRequest(READ, np.empty_like(local), remote, 0, LARGE)], 30)
        assert np.array_equal(local, landed)
    else:
        engine.transfer([TransferRequest(WRITE, others, remote, 0, LARGE)], 30)
        assert holds(remote, engine, others)


# --- writes that come late


@pytest.mark.parametrize("stopped", [False, True])
def test_a_write_that_was_retried_does_not_land_again(
    engine: TransferEngine, agent: RemoteAgent, data: Any, others: Any, stopped: bool
):
    """Packets of the first attempt wait in our own queue for 2 s, until the retry and a later WRITE have ended.

    ``stopped``: the owner cannot say that its end is destroyed, so the retry waits behind a fence until it goes on.
    """
    owner = agent.start_owner(size_bytes=LARGE)
    remote = engine.open_segment(owner.descriptor, transport="rdma")
    size = 2 * MIB
    write = TransferRequest(WRITE, data, remote, 0, size)
    engine.transfer([write], 30)
    with broken(local_shell, "tc qdisc add dev eth0 root netem delay 2s limit 100000", "tc qdisc del dev eth0 root"):
        if stopped:
            owner.signal(signal.SIGSTOP)
        handle = engine.submit(TransferBatch([write]))
        if stopped:
            waiting = Waiting(handle, 30)
            waiting.until(lambda: any(" lost " in line for line in handle.story(0)))
            owner.signal(signal.SIGCONT)
            assert waiting.result().ok, handle.story(0)
            assert owner.counters()["fenced"] >= 1
        assert handle.wait(30).ok, handle.story(0)
        assert any(" lost " in line and "rxe0" in line for line in handle.story(0))
        engine.transfer([TransferRequest(WRITE, others, remote, 0, size)], 30)
        while " 0b 0p" not in local_shell("tc -s qdisc show dev eth0 | grep backlog"):
            pass
    assert holds(remote, engine, others[:size])
    owner.kill()


# --- owners that stop and die


def test_a_stopped_owner_serves_on(engine: TransferEngine, agent: RemoteAgent, data: Any):
    """The owner's process takes no part in a transfer."""
    owner = agent.start_owner(size_bytes=LARGE)
    remote = engine.open_segment(owner.descriptor, transport="rdma")
    landing = np.zeros(LARGE, np.uint8)
    engine.transfer([TransferRequest(READ, landing, remote, 0, LARGE)], 30)
    owner.signal(signal.SIGSTOP)
    engine.transfer([TransferRequest(WRITE, data, remote, 0, LARGE)], 30)
    assert holds(remote, engine, data)
    owner.kill()


@pytest.mark.parametrize("opcode", list(Opcode))
def test_the_owner_is_killed_in_the_middle(engine: TransferEngine, agent: RemoteAgent, opcode: Opcode):
    mortal = agent.start_owner(size_bytes=LARGE)
    remote = engine.open_segment(mortal.descriptor, transport="rdma")
    handle = begin(engine, TransferRequest(opcode, bytearray(LARGE), remote, 0, LARGE))
    mortal.kill()
    start_s = time.monotonic()
    result = handle.wait(30)
    assert isinstance(result.errors[0], NodeUnavailable | TransferFailed), handle.story(0)
    assert result.num_bytes == 0
    assert time.monotonic() - start_s < 20
    with pytest.raises((NodeUnavailable, TransferFailed)):
        engine.transfer([TransferRequest(opcode, bytearray(10), remote, 0, 10)], 10)
    remote.close()
    with pytest.raises(NodeUnavailable, match="cannot be opened"):
        engine.open_segment(mortal.descriptor, transport="rdma")


def test_another_generation_and_another_segment(engine: TransferEngine, owner: RemoteOwner):
    for wrong in ({"generation": 2}, {"name": "other"}):
        with pytest.raises(NodeUnavailable):
            engine.open_segment(structs.replace(owner.descriptor, **wrong), transport="rdma")


def test_devices_that_are_not_there(owner: RemoteOwner):
    config = dataclasses.replace(CONFIG, rdma_devices=("rxe1", "mlx5_0"))
    with TransferEngine(host_id=HOST_ID, config=config) as engine:
        with pytest.raises(NodeUnavailable, match="mlx5_0"):
            engine.open_segment(owner.descriptor, transport="rdma")


# --- leases and bounds


def test_no_range_is_free_while_a_queue_pair_reaches_it(engine: TransferEngine, agent: RemoteAgent):
    leasing = agent.start_owner(access=True, size_bytes=4 * MIB)
    session = leasing.open_session(7, None)
    remote = engine.open_segment(leasing.descriptor, session, transport="rdma")
    lease = leasing.grant(7, 0, MIB, WRITE, False)
    data = random_bytes(MIB, 1)
    write = [TransferRequest(WRITE, data, remote, 0, data.size, lease_id=lease)]
    engine.transfer(write, 10)
    assert leasing.peek(0, 100) == data[:100].tobytes()
    assert leasing.pass_time(2.0) == []  # its queue pair is closed first, then it is free
    assert [each.lease_id for each in leasing.next_freed()] == [lease]
    with pytest.raises(LeaseExpired):
        engine.transfer(write, 10)
    assert not leasing.busy(0, MIB)
    with pytest.raises(NodeUnavailable):
        engine.open_segment(leasing.descriptor, SessionKey(8, session.secret), transport="rdma")


def test_a_range_outside_is_refused_and_not_tried_again(engine: TransferEngine, remote: RemoteSegment):
    """The engine checks bounds itself; here its idea of the segment is made too large."""
    outside = remote.size_bytes
    remote.size_bytes += 4096
    try:
        handle = engine.submit(TransferBatch([TransferRequest(WRITE, bytearray(100), remote, outside, 100)]))
        result = handle.wait(10)
    finally:
        remote.size_bytes = outside
    assert isinstance(result.errors[0], InvalidRequest)
    assert "REM_ACCESS_ERR" in str(result.errors[0])
    assert sum("post" in line for line in handle.story(0)) == 1
    engine.transfer([TransferRequest(READ, bytearray(100), remote, 0, 100)], 10)


# --- small tools


class Waiting:
    """A thread that waits for a batch."""

    def __init__(self, handle: TransferHandle, deadline_s: float) -> None:
        self._results: list[BatchResult] = []
        self._thread = threading.Thread(target=lambda: self._results.append(handle.wait(deadline_s)))
        self._thread.start()

    def until(self, condition: Callable[[], bool]) -> None:
        """Let it go on until the condition holds."""
        while not condition() and self._thread.is_alive():
            self._thread.join(0.02)

    def result(self) -> BatchResult:
        """Once the batch has ended."""
        self._thread.join()
        return self._results[0]


def begin(engine: TransferEngine, request: TransferRequest, done_bytes: int = 2 * MIB) -> TransferHandle:
    """A batch of which so much has arrived, and nobody drives it."""
    handle = engine.submit(TransferBatch([request]))
    while handle.done_bytes < done_bytes:
        handle.status()
    assert not handle.done
    return handle


@contextmanager
def broken(shell: Shell, break_it: str, mend_it: str) -> Iterator[None]:
    shell(break_it)
    try:
        yield
    finally:
        shell(mend_it)


def local_shell(line: str) -> str:
    return subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout


def arrived(handle: TransferHandle) -> set[str]:
    lines = [line for line in handle.story(0) if " arrived " in line]
    return {word for line in lines for word in ("rxe0", "rxe1", "tcp") if f"via {word}" in line or f" {word} " in line}


def holds(remote: RemoteSegment, engine: TransferEngine, wanted: Any) -> bool:
    landing = np.zeros(wanted.size, np.uint8)
    engine.transfer([TransferRequest(READ, landing, remote, 0, wanted.size)], 30)
    return np.array_equal(wanted, landing)


def until_used(engine: TransferEngine, remote: RemoteSegment, device: str) -> None:
    """Until the device carries slices again: a paused path is probed by the transfers themselves."""
    until_s = time.monotonic() + 20
    landing = bytearray(4 * MIB)
    while True:
        handle = engine.submit(TransferBatch([TransferRequest(READ, landing, remote, 0, len(landing))]))
        assert handle.wait(20).ok, handle.story(0)
        if device in arrived(handle):
            return
        assert time.monotonic() < until_s, f"{device} is not used again"
