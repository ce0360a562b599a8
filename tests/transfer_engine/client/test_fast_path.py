"""One slice over one idle stream: what happens when it does not go as hoped."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tanghulu.errors import DeadlineExceeded, LeaseExpired, NodeUnavailable, TransferFailed
from tanghulu.transfer_engine.core import wire
from tanghulu.transfer_engine.core.segment import Endpoint, SegmentDescriptor
from tanghulu.transfer_engine.engine import EngineConfig, Opcode, TransferEngine, TransferRequest
from tests.transfer_engine.segment_process import HOST_ID, SegmentProcess, random_bytes

READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 100_000


@pytest.fixture
def mortal(no_descriptor_leaks: None) -> Iterator[SegmentProcess]:
    with SegmentProcess(size_bytes=4 << 20) as process:
        yield process


@pytest.mark.parametrize("opcode", list(Opcode))
def test_the_short_way_keeps_its_deadline_and_leaves_the_rest_to_the_long_one(
    mortal: SegmentProcess, engine: TransferEngine, eager_engine: TransferEngine, opcode: Opcode
):
    patient = engine.open_segment(mortal.descriptor, transport="tcp")
    eager = eager_engine.open_segment(mortal.descriptor, transport="tcp")
    landing = bytearray(b"\x11" * 1000)
    mortal.signal(signal.SIGSTOP)
    for each, remote in ((engine, patient), (eager_engine, eager)):
        with pytest.raises(DeadlineExceeded):
            each.transfer([TransferRequest(opcode, landing, remote, 0, 1000)], 0.25)
        each.check()
    assert landing == b"\x11" * 1000
    waking = threading.Timer(0.3, mortal.signal, [signal.SIGCONT])  # the short way gives up first
    waking.start()
    eager_engine.transfer([TransferRequest(WRITE, b"\x22" * 1000, eager, 0, 1000)], 20)
    waking.join()
    assert mortal.peek(0, 1000) == b"\x22" * 1000
    engine.transfer([TransferRequest(WRITE, b"\x33" * 1000, patient, 0, 1000)], 5)
    assert mortal.peek(0, 1000) == b"\x33" * 1000
    assert mortal.counters()["fenced"] >= (2 if opcode is WRITE else 1)


class Interrupt(BaseException):
    """What a signal's handler raises, as Ctrl-C does."""


@pytest.mark.parametrize("opcode", list(Opcode))
def test_an_interrupt_ends_it_for_good(mortal: SegmentProcess, engine: TransferEngine, opcode: Opcode):
    """The caller's thread is taken out of the kernel: no byte of its READ lands later, nor of its WRITE."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    remote = engine.open_segment(mortal.descriptor, transport="tcp")
    before = signal.signal(signal.SIGALRM, interrupt)
    mortal.signal(signal.SIGSTOP)
    landing = bytearray(b"late" * 25)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupt):
            engine.transfer([TransferRequest(opcode, landing, remote, 0, 100)], 20)
    finally:
        signal.signal(signal.SIGALRM, before)
    mortal.signal(signal.SIGCONT)
    engine.transfer([TransferRequest(WRITE, b"new!" * 25, remote, 0, 100)], 10)
    assert mortal.peek(0, 100) == b"new!" * 25
    assert mortal.counters()["fenced"] == (opcode is WRITE)
    assert landing == b"late" * 25


class Owner:
    """Greets, and answers the first READ of each connection as it is told: pieces, and waits between them."""

    def __init__(self, pieces: Callable[[int], list[bytes | float]]) -> None:
        self._pieces = pieces
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.closing = threading.Event()
        address = "{}:{}".format(*self._listener.getsockname())
        self.descriptor = SegmentDescriptor("s", 1 << 20, "elsewhere", 1, (Endpoint("tcp", address),))

    def _serve(self) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            while True:
                client = stack.enter_context(self._listener.accept()[0])
                with contextlib.suppress(OSError):
                    self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        client.sendall(wire.pack_reply(wire.parse_head(client.recv(wire.HEAD_BYTES)).slice_id, 0))
        head = wire.parse_head(client.recv(wire.HEAD_BYTES, socket.MSG_WAITALL))
        for piece in self._pieces(head.slice_id):
            if isinstance(piece, float):
                self.closing.wait(piece)
            else:
                client.sendall(piece)

    def close(self) -> None:
        self.closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()


@pytest.fixture
def owner_that(no_descriptor_leaks: None) -> Iterator[Callable[[Callable[[int], list[bytes | float]]], Owner]]:
    with contextlib.ExitStack() as stack:

        def make(pieces: Callable[[int], list[bytes | float]]) -> Owner:
            owner = Owner(pieces)
            stack.callback(owner.close)
            return owner

        yield make


PAYLOAD = random_bytes(SIZE, 1).tobytes()


def reply(slice_id: int) -> bytes:
    return wire.pack_reply(slice_id, SIZE)


def read(owner: Owner, deadline_s: float, length: int = SIZE, **config: float) -> bytearray:
    landing = bytearray(length)
    settings = EngineConfig(retries_max=0, **config)  # type: ignore[arg-type]
    with TransferEngine(host_id=HOST_ID, transports=["tcp"], config=settings) as engine:
        remote = engine.open_segment(owner.descriptor)
        try:
            engine.transfer([TransferRequest(READ, landing, remote, 0, length)], deadline_s)
        finally:
            engine.check()
    return landing


@pytest.mark.parametrize(
    "cut",
    [(1,), (wire.REPLY_BYTES - 1,), (wire.REPLY_BYTES,), (wire.REPLY_BYTES + 1, 7), (5, wire.REPLY_BYTES, SIZE)],
)
def test_an_answer_in_pieces(owner_that, cut: tuple[int, ...]):
    def pieces(slice_id: int) -> list[bytes | float]:
        whole, told = reply(slice_id) + PAYLOAD, []
        for length in cut:
            told += [whole[:length], 0.02]
            whole = whole[length:]
        return [*told, whole]

    assert read(owner_that(pieces), 10) == PAYLOAD


@pytest.mark.parametrize("known_bytes", [0, 10, wire.REPLY_BYTES, wire.REPLY_BYTES + 1000])
def test_an_answer_that_stops_short_of_the_deadline(owner_that, known_bytes: int):
    owner = owner_that(lambda slice_id: [(reply(slice_id) + PAYLOAD)[:known_bytes], 5.0])
    begun_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        read(owner, 0.3)
    assert 0.29 < time.monotonic() - begun_s < 4.5


def test_an_answer_that_trickles_is_given_its_time_once(owner_that):
    """However often something comes: a slice has the patience of its path, and the caller its deadline."""
    owner = owner_that(lambda slice_id: [reply(slice_id)] + [b"x", 0.05] * 200)
    begun_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        read(owner, 0.5, slice_deadline_s=0.4)
    assert time.monotonic() - begun_s < 8, "not the ten seconds that all of it takes"


def test_a_refusal_that_falls_into_the_payload_s_place(owner_that):
    error = LeaseExpired("no lease" * 100)
    for length in (1, 5, 900, SIZE):
        owner = owner_that(lambda slice_id: [wire.pack_refusal(slice_id, error)])
        with pytest.raises(LeaseExpired, match="no lease"):
            read(owner, 10, length)


@pytest.mark.parametrize("end", [b"", b"\0" * 10, b"\0" * wire.REPLY_BYTES])
def test_an_answer_that_is_none(owner_that, end: bytes):
    owner = owner_that(lambda slice_id: [end + reply(slice_id + 1), PAYLOAD])
    with pytest.raises((TransferFailed, NodeUnavailable)):
        read(owner, 10)
