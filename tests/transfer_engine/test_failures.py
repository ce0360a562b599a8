"""What happens to transfers when the owner dies, stalls, restarts or refuses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tanghulu.errors import DeadlineExceeded, InvalidRequest, LeaseExpired, NodeUnavailable, Overloaded, TransferFailed
from tanghulu.transfer_engine.core.segment import Endpoint, SegmentDescriptor, SessionKey
from tanghulu.transfer_engine.core.transport import MAX_TOKENS, ConnectContext, Fences
from tanghulu.transfer_engine.core.wire import (
    REPLY_BYTES,
    SHM_ANSWER_BYTES,
    Head,
    Op,
    name_hash,
    pack_shm_hello,
    parse_reply,
    secret_numbers,
)
from tanghulu.transfer_engine.engine import (
    EngineConfig,
    Opcode,
    TransferBatch,
    TransferCancelled,
    TransferEngine,
    TransferRequest,
    TransferState,
)
from tanghulu.transfer_engine.transports.tcp import transport as tcp
from tests.transfer_engine.segment_process import HOST_ID, SegmentProcess, random_bytes

READ, WRITE = Opcode.READ, Opcode.WRITE
LARGE = 64 << 20


@pytest.fixture
def mortal(no_descriptor_leaks: None) -> Iterator[SegmentProcess]:
    """An owner of this test alone."""
    with SegmentProcess() as process:
        yield process


def test_killed_before_a_transfer(mortal: SegmentProcess, engine: TransferEngine):
    for transport in ("shm", "tcp", None):
        remote = engine.open_segment(mortal.descriptor, transport=transport)
        engine.transfer([TransferRequest(READ, bytearray(10), remote, 0, 10)], 5)
    mortal.kill()
    for transport in ("shm", "tcp", None):
        remote = engine.open_segment(mortal.descriptor, transport=transport)
        for opcode in Opcode:
            with pytest.raises(NodeUnavailable):
                engine.transfer([TransferRequest(opcode, bytearray(10), remote, 0, 10)], 5)
        remote.close()
        with pytest.raises(NodeUnavailable, match="cannot be opened"):
            engine.open_segment(mortal.descriptor, transport=transport)


@pytest.mark.parametrize("opcode", list(Opcode))
def test_killed_during_a_transfer(mortal: SegmentProcess, engine: TransferEngine, transport: str, opcode: Opcode):
    remote = engine.open_segment(mortal.descriptor, transport=transport)
    handle = engine.submit(TransferBatch([TransferRequest(opcode, bytearray(LARGE), remote, 0, LARGE)]))
    mortal.kill()  # far more than the sockets' buffers hold is on its way
    result = handle.wait(30)
    handle.check()
    assert isinstance(result.errors[0], NodeUnavailable), handle.story(0)
    assert result.num_bytes == 0


async def test_killed_under_asyncio(mortal: SegmentProcess, engine: TransferEngine):
    remote = await engine.open_segment_async(mortal.descriptor, transport="tcp")
    waiting = asyncio.create_task(
        engine.transfer_async([TransferRequest(READ, bytearray(LARGE), remote, 0, LARGE)], 10)
    )
    await asyncio.sleep(0)
    mortal.kill()
    with pytest.raises(NodeUnavailable):
        await waiting


def test_a_stalled_owner_and_the_deadline(mortal: SegmentProcess, engine: TransferEngine):
    """tcp: what has not arrived is named, and nothing lands afterwards. shm needs no owner's help."""
    mortal.poke(0, b"\xff" * 10_000)
    over_tcp = engine.open_segment(mortal.descriptor, transport="tcp")
    over_shm = engine.open_segment(mortal.descriptor, transport="shm")
    landings = [bytearray(5_000), bytearray(5_000)]
    mortal.signal(signal.SIGSTOP)
    requests = [TransferRequest(READ, each, over_tcp, 0, 5_000) for each in landings]
    handle = engine.submit(TransferBatch(requests))
    result = handle.wait(0.2)
    assert [type(error) for error in result.errors] == [DeadlineExceeded, DeadlineExceeded]
    assert handle.status() == [TransferState.FAILED, TransferState.FAILED]
    engine.transfer([TransferRequest(READ, bytearray(10), over_shm, 0, 10)], 5)
    mortal.signal(signal.SIGCONT)
    other = bytearray(5_000)
    engine.transfer([TransferRequest(READ, other, over_tcp, 0, 5_000)], 5)  # answered behind all that was asked before
    assert other == b"\xff" * 5_000
    assert not any(map(any, landings))


def test_opening_a_stalled_owner(mortal: SegmentProcess, eager_engine: TransferEngine):
    mortal.signal(signal.SIGSTOP)
    for transport in ("shm", "tcp"):
        with pytest.raises(NodeUnavailable):
            eager_engine.open_segment(mortal.descriptor, transport=transport)


def test_cancel_from_another_thread(mortal: SegmentProcess, engine: TransferEngine):
    remote = engine.open_segment(mortal.descriptor, transport="tcp")
    mortal.signal(signal.SIGSTOP)
    handle = engine.submit(TransferBatch([TransferRequest(READ, bytearray(100), remote, 0, 100)]))
    results = []
    waiting = threading.Thread(target=lambda: results.append(handle.wait(60)))
    waiting.start()
    handle.cancel()
    waiting.join(30)
    assert isinstance(results[0].errors[0], TransferCancelled)


async def test_cancelling_the_coroutine_cancels_the_batch(mortal: SegmentProcess, engine: TransferEngine):
    remote = await engine.open_segment_async(mortal.descriptor, transport="tcp")
    mortal.signal(signal.SIGSTOP)
    handle = engine.submit(TransferBatch([TransferRequest(READ, bytearray(100), remote, 0, 100)]))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await handle.wait_async(60)
    assert handle.done
    assert isinstance(handle.wait(0).errors[0], TransferCancelled)


def test_a_stalled_path_is_tried_again_until_it_works(mortal: SegmentProcess, eager_engine: TransferEngine):
    """Also: the retried WRITE's first connection is fenced, so that it cannot land behind the retry."""
    remote = eager_engine.open_segment(mortal.descriptor, transport="tcp")
    source = random_bytes(300_000, 3)
    mortal.signal(signal.SIGSTOP)
    handle = eager_engine.submit(TransferBatch([TransferRequest(WRITE, source, remote, 0, source.size)]))
    results = []
    waiting = threading.Thread(target=lambda: results.append(handle.wait(30)))
    waiting.start()
    while not any("lost" in line for line in handle.story(0)):
        waiting.join(0.02)
    mortal.signal(signal.SIGCONT)
    waiting.join()
    assert results[0].ok, handle.story(0)
    assert mortal.peek(0, source.size) == source.tobytes()
    assert mortal.counters()["fenced"] >= 1


def test_retries_are_bounded(mortal: SegmentProcess):
    config = EngineConfig(slice_deadline_s=0.05, retries_max=2)
    with TransferEngine(host_id=HOST_ID, config=config) as engine:
        remote = engine.open_segment(mortal.descriptor, transport="tcp")
        mortal.signal(signal.SIGSTOP)
        handle = engine.submit(TransferBatch([TransferRequest(READ, bytearray(10), remote, 0, 10)]))
        result = handle.wait(30)
        assert isinstance(result.errors[0], TransferFailed)
        told = [line.split(maxsplit=3)[3].split()[0] for line in handle.story(0)]
        assert told == ["post", "lost"] * 3 + ["exhausted"]


@pytest.mark.parametrize("opcode", list(Opcode))
def test_shm_fails_over_to_tcp(mortal: SegmentProcess, engine: TransferEngine, opcode: Opcode):
    remote = engine.open_segment(mortal.descriptor)
    pinned = engine.open_segment(mortal.descriptor, transport="shm")
    assert remote.transport == pinned.transport == "shm"
    mortal.hang_up_shm()
    handle = engine.submit(TransferBatch([TransferRequest(opcode, bytearray(3 << 20), remote, 0, 3 << 20)]))
    assert handle.wait(30).ok
    assert [word for line in handle.story(0) for word in ("shm", "tcp") if f"arrived {word}" in line] == ["tcp"]
    engine.transfer([TransferRequest(opcode, bytearray(10), remote, 0, 10)], 5)
    with pytest.raises(NodeUnavailable):
        engine.transfer([TransferRequest(opcode, bytearray(10), pinned, 0, 10)], 5)


def test_a_new_generation_at_the_old_address(mortal: SegmentProcess, engine: TransferEngine):
    remotes = [engine.open_segment(mortal.descriptor, transport=name) for name in ("shm", "tcp", None)]
    mortal.kill()
    with SegmentProcess(generation=2, port=mortal.tcp_port, folder=mortal.folder) as successor:
        successor.poke(0, b"new")
        for remote in remotes:
            with pytest.raises(NodeUnavailable):
                engine.transfer([TransferRequest(WRITE, b"old", remote, 0, 3)], 5)
            remote.close()
        for transport in ("shm", "tcp", None):
            with pytest.raises(NodeUnavailable, match="generation 1"):
                engine.open_segment(mortal.descriptor, transport=transport)
        assert successor.peek(0, 3) == b"new"
        engine.transfer([TransferRequest(WRITE, b"now", engine.open_segment(successor.descriptor), 0, 3)], 5)
        assert successor.peek(0, 3) == b"now"


def test_another_segment_at_the_address(mortal: SegmentProcess, engine: TransferEngine):
    descriptor = mortal.descriptor
    wrong = SegmentDescriptor("other", descriptor.size_bytes, HOST_ID, 1, descriptor.endpoints)
    for transport in ("shm", "tcp"):
        with pytest.raises(NodeUnavailable):
            engine.open_segment(wrong, transport=transport)
    larger = SegmentDescriptor(descriptor.name, 1 << 40, HOST_ID, 1, descriptor.endpoints)
    with pytest.raises(NodeUnavailable):
        engine.open_segment(larger, transport="shm")


def test_nobody_listens(engine: TransferEngine):
    endpoints = (Endpoint("shm", "/nowhere/listener"), Endpoint("tcp", "127.0.0.1:9"))
    nobody = SegmentDescriptor("nobody", 10, HOST_ID, 1, endpoints)
    with pytest.raises(NodeUnavailable, match=r"shm: .* tcp: "):
        engine.open_segment(nobody)
    with pytest.raises(NodeUnavailable, match="is not served over"):
        engine.open_segment(SegmentDescriptor("nobody", 10, HOST_ID, 1, ()))


# --- leases


@pytest.fixture
def leasing(no_descriptor_leaks: None) -> Iterator[SegmentProcess]:
    with SegmentProcess(access=True, size_bytes=4 << 20) as process:
        yield process


def test_leases_over_tcp(leasing: SegmentProcess, engine: TransferEngine):
    session = leasing.open_session(7, None)
    remote = engine.open_segment(leasing.descriptor, session, transport="tcp")
    lease = leasing.grant(7, 1000, 500, WRITE, False)
    data = random_bytes(500, 1)

    def write(offset: int, length: int, lease_id: int, through=remote) -> None:
        engine.transfer([TransferRequest(WRITE, data, through, offset, length, lease_id=lease_id)], 5)

    write(1000, 500, lease)
    assert leasing.peek(1000, 500) == data.tobytes()
    for offset, length in ((999, 10), (1400, 101), (0, 5)):
        with pytest.raises(InvalidRequest):
            write(offset, length, lease)
    with pytest.raises(InvalidRequest, match="WRITE, not for READ"):
        engine.transfer([TransferRequest(READ, bytearray(5), remote, 1000, 5, lease_id=lease)], 5)
    other = engine.open_segment(leasing.descriptor, leasing.open_session(8, None), transport="tcp")
    for lease_id, through in ((lease, other), (lease + 1, remote), (0, remote)):
        with pytest.raises(LeaseExpired):
            write(1000, 500, lease_id, through)
    assert [each.lease_id for each in leasing.pass_time(1.0)] == [lease]
    with pytest.raises(LeaseExpired):
        write(1000, 500, lease)
    assert leasing.counters()["connections"]["tcp"] == 2  # refusals keep connections
    assert leasing.peek(1000, 500) == data.tobytes()


def test_a_link_is_not_closed_under_a_wake(
    mortal: SegmentProcess, engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
):
    """The number of a closed descriptor may be another file's by the time that the wake writes to it."""
    link = engine.open_segment(mortal.descriptor, transport="tcp")._peers["tcp"].connect()
    closing, write = threading.Thread(target=link.close), os.eventfd_write

    def write_late(fd: int, value: int) -> None:
        closing.start()
        closing.join(0.2)
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", write_late)
    link.wake()
    closing.join()
    link.wake()


def test_one_refused_request_leaves_the_others(leasing: SegmentProcess, engine: TransferEngine):
    session = leasing.open_session(7, None)
    remote = engine.open_segment(leasing.descriptor, session, transport="tcp")
    lease = leasing.grant(7, 0, 3 << 20, WRITE, False)
    size = 1 << 19
    batch = [
        TransferRequest(WRITE, bytes([n]) * size, remote, n * size, size, lease_id=lease + n % 2) for n in range(6)
    ]
    result = engine.submit(TransferBatch(batch)).wait(30)
    assert [type(error) for error in result.errors] == [type(None), LeaseExpired] * 3
    assert result.num_bytes == 3 * size
    assert leasing.peek(2 * size, 4) == b"\2\2\2\2"
    assert leasing.peek(3 * size, 4) == b"\0\0\0\0"


def test_a_write_in_progress_keeps_its_range(leasing: SegmentProcess, engine: TransferEngine):
    """Its lease ends in the middle; the range is free when its connection is closed, not before."""
    session = leasing.open_session(7, None)
    lease = leasing.grant(7, 0, 2 << 20, WRITE, False)
    remote = engine.open_segment(leasing.descriptor, session, transport="tcp")
    link = tcp.connect(ConnectContext(leasing.descriptor, session, EngineConfig())).connect()
    link.greet(remote.paths.paths[0], 5, engine._clock)
    stream = link._connections[remote.paths.paths[0]]
    stream._sock.setblocking(True)
    stream._sock.sendall(Head(Op.WRITE, 1, 7, lease, 1, 0, 1000).pack() + b"half" * 100)
    while leasing.peek(396, 4) != b"half":
        pass
    assert leasing.pass_time(60.0) == [], "longer than its bytes take at the least rate"
    assert leasing.busy(0, 10)
    link.close()
    assert [each.lease_id for each in leasing.next_freed()] == [lease]
    assert not leasing.busy(0, 10)


def test_a_transfer_may_take_longer_than_its_lease(leasing: SegmentProcess, engine: TransferEngine):
    """Each slice that is moved renews it; a client that stops loses it, and in the end everyone does."""
    session = leasing.open_session(7, None)
    remote = engine.open_segment(leasing.descriptor, session, transport="tcp")
    lease = leasing.grant(7, 0, 4 << 20, READ, False)

    def read(offset: int) -> None:
        engine.transfer([TransferRequest(READ, bytearray(1 << 20), remote, offset, 1 << 20, lease_id=lease)], 5)

    for part in range(4):
        read(part << 20)
        assert leasing.pass_time(0.9) == []
    assert [each.lease_id for each in leasing.pass_time(0.1)] == [lease]
    with pytest.raises(LeaseExpired):
        read(0)


def test_shm_ranges_are_quarantined_until_released_or_exit(leasing: SegmentProcess, engine: TransferEngine):
    session = leasing.open_session(7, os.getpid())
    remote = engine.open_segment(leasing.descriptor, session, transport="shm")
    lease = leasing.grant(7, 0, 100, READ, True)
    engine.transfer([TransferRequest(READ, bytearray(100), remote, 0, 100, lease_id=lease)], 5)
    with pytest.raises(Overloaded):
        leasing.grant(7, 4096, 1 << 20, READ, True)
    assert leasing.pass_time(2.0) == []
    assert leasing.close_session(7) == []
    remote.close()
    assert leasing.busy(0, 100)


def test_only_the_session_s_process_may_map(leasing: SegmentProcess, engine: TransferEngine):
    for session in (leasing.open_session(7, os.getpid() + 1), leasing.open_session(8, None)):
        with pytest.raises(NodeUnavailable, match="shm: "):
            engine.open_segment(leasing.descriptor, session, transport="shm")
        assert engine.open_segment(leasing.descriptor, session).transport == "tcp"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_wrong_secret_is_refused_as_an_unknown_session_is(
    leasing: SegmentProcess, engine: TransferEngine, transport: str
):
    session = leasing.open_session(7, os.getpid())
    refusals = []
    almost = session.secret[:-1] + bytes([session.secret[-1] ^ 1])
    for shown in (SessionKey(7, bytes(16)), SessionKey(7, almost), SessionKey(8, session.secret)):
        with pytest.raises(NodeUnavailable, match="send HELLO first") as refused:
            engine.open_segment(leasing.descriptor, shown, transport=transport)
        refusals.append(refused.value.message.replace("session 8", "session 7"))
    assert len(set(refusals)) == 1
    assert engine.open_segment(leasing.descriptor, session, transport=transport).transport == transport


def test_a_connection_serves_the_session_of_its_hello_alone(leasing: SegmentProcess, engine: TransferEngine):
    own, other = leasing.open_session(7, None), leasing.open_session(8, None)
    lease = leasing.grant(other.session_id, 0, 100, READ, False)
    descriptor = leasing.descriptor
    first, second = secret_numbers(own.secret)
    hello = Head(
        Op.HELLO, 0, own.session_id, name_hash(descriptor.name), descriptor.generation, 5, first, digest=second
    )
    read = Head(Op.READ, 1, other.session_id, lease, descriptor.generation, 0, 100)
    with socket.create_connection(("127.0.0.1", leasing.tcp_port)) as sock:
        sock.settimeout(30)
        sock.sendall(hello.pack())
        assert not parse_reply(sock.recv(REPLY_BYTES, socket.MSG_WAITALL))[0]
        sock.sendall(read.pack())
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


@pytest.mark.parametrize("may_write", [False, True])
def test_memory_is_given_for_reading_unless_the_session_may_write(leasing: SegmentProcess, may_write: bool):
    session = leasing.open_session(7, os.getpid(), may_write)
    descriptor = leasing.descriptor
    written = []
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(descriptor.endpoints_of("shm")[0].address)
        sock.sendall(pack_shm_hello(descriptor.name, descriptor.generation, session))
        _, fds, _, _ = socket.recv_fds(sock, SHM_ANSWER_BYTES, 3)
    for each in fds:
        with contextlib.suppress(OSError):
            written.append(os.pwrite(each, b"forged", 0))
        os.close(each)
    assert fds
    assert written == [6] * may_write


def test_lease_ids_cannot_be_guessed(leasing: SegmentProcess):
    leasing.open_session(7, None)
    ids = [leasing.grant(7, 10 * n, 10, READ, False) for n in range(20)]
    assert len(set(ids)) == 20
    assert min(ids) > 1 << 48
    assert len({later - earlier for earlier, later in itertools.pairwise(ids)}) == 19


CLIENT = """
import os, sys, pickle
from tanghulu.transfer_engine.core.segment import SessionKey
from tanghulu.transfer_engine.engine import *
descriptor = pickle.loads(bytes.fromhex(sys.argv[1]))
engine = TransferEngine(host_id=descriptor.host_id)
print("ready", flush=True)
session = SessionKey(7, bytes.fromhex(sys.stdin.readline()))
remote = engine.open_segment(descriptor, session, transport="shm")
print("mapped", flush=True); sys.stdin.readline()
"""


def test_a_process_that_exits_frees_its_quarantine(leasing: SegmentProcess):
    arguments = [sys.executable, "-c", CLIENT, pickle.dumps(leasing.descriptor).hex()]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        session = leasing.open_session(7, client.pid)
        client.stdin.write(session.secret.hex() + "\n")
        client.stdin.flush()
        assert client.stdout.readline() == "mapped\n"
        lease = leasing.grant(7, 0, 100, READ, True)
        assert leasing.pass_time(2.0) == []
        assert leasing.close_session(7) == []
        client.kill()
        assert [each.lease_id for each in leasing.next_freed()] == [lease]
    assert not leasing.busy(0, 100)


def test_a_forked_child_does_not_inherit_the_mapping(leasing: SegmentProcess, engine: TransferEngine):
    session = leasing.open_session(7, os.getpid())
    remote = engine.open_segment(leasing.descriptor, session, transport="shm")
    assert remote.shm is not None
    text = Path("/proc/self/smaps").read_text()
    mapping = text[text.index("tanghulu-arena") :]
    assert " dc" in mapping[mapping.index("VmFlags:") :].splitlines()[0]  # "do not copy" on fork


def test_results_do_not_depend_on_numpy(engine: TransferEngine, mortal: SegmentProcess):
    remote = engine.open_segment(mortal.descriptor)
    for source in (b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), np.frombuffer(b"bytes", np.uint8)):
        engine.transfer([TransferRequest(WRITE, source, remote, 0, 5)], 5)
        assert mortal.peek(0, 5) == b"bytes"


def test_fences_remember_a_bounded_number():
    fences = Fences()
    for token in range(3):
        fences.add(token)
    assert fences.since(0) == (3, [0, 1, 2])
    assert fences.since(2) == (3, [2])
    assert fences.since(3) == (3, [])
    for token in range(3, MAX_TOKENS + 10):
        fences.add(token)
    num_told, tokens = fences.since(2)
    assert num_told == MAX_TOKENS + 10
    assert tokens == list(range(10, MAX_TOKENS + 10))
