"""Digests of requests: shown what a copy through mapped memory moved, in order, and void if it was for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.engine import Opcode, TransferEngine, TransferRequest
from tests.transfer_engine.segment_process import SegmentProcess, random_bytes

READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 16 << 20


class Shown:
    """A digest that keeps what it is shown."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_void = False

    def add(self, piece: memoryview) -> None:
        self.data += piece

    def void(self) -> None:
        self.is_void = True


@pytest.fixture
def mortal(no_descriptor_leaks: None) -> Iterator[SegmentProcess]:
    with SegmentProcess(size_bytes=SIZE) as process:
        yield process


@pytest.mark.parametrize("length", [1, 100_000, 3 << 20, SIZE])
def test_copies_are_shown(mortal: SegmentProcess, engine: TransferEngine, length: int) -> None:
    remote = engine.open_segment(mortal.descriptor, transport="shm")
    data, landing = random_bytes(length, 1), bytearray(length)
    written, read = Shown(), Shown()
    engine.transfer([TransferRequest(WRITE, data, remote, 0, length, digest=written)], 10)
    engine.transfer([TransferRequest(READ, landing, remote, 0, length, digest=read)], 10)
    assert landing == data.tobytes() == written.data == read.data
    assert not written.is_void
    assert not read.is_void


def test_several_requests_are_shown_one_after_the_other(mortal: SegmentProcess, engine: TransferEngine) -> None:
    remote = engine.open_segment(mortal.descriptor, transport="shm")
    data, one = random_bytes(SIZE, 2), Shown()
    cuts = [0, 70_000, 6 << 20, SIZE]
    requests = [
        TransferRequest(WRITE, data, remote, begin, end - begin, begin, digest=one)
        for begin, end in itertools.pairwise(cuts)
    ]
    engine.transfer(requests, 10)
    assert one.data == data.tobytes() == mortal.peek(0, SIZE)


def test_streams_show_nothing(mortal: SegmentProcess, engine: TransferEngine) -> None:
    remote = engine.open_segment(mortal.descriptor, transport="tcp")
    digest = Shown()
    engine.transfer([TransferRequest(WRITE, random_bytes(SIZE, 3), remote, 0, SIZE, digest=digest)], 10)
    assert not digest.data


@pytest.mark.parametrize("number", [1, 2])
def test_what_was_copied_for_an_owner_who_is_gone_is_void(
    mortal: SegmentProcess, engine: TransferEngine, number: int
) -> None:
    remote = engine.open_segment(mortal.descriptor, transport="shm")
    mortal.kill()
    digests = [Shown() for _ in range(number)]
    data = random_bytes(SIZE // number, 4)
    requests = [
        TransferRequest(WRITE, data, remote, at * len(data), len(data), digest=digest)
        for at, digest in enumerate(digests)
    ]
    with pytest.raises(NodeUnavailable):
        engine.transfer(requests, 5)
    assert all(digest.is_void for digest in digests)
