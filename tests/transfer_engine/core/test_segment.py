"""Who can write to a segment, and to what its owner publishes beside it."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tanghulu.transfer_engine.core.segment import F_SEAL_FUTURE_WRITE, MemorySegment, map_shared

SIZE = 3 * mmap.PAGESIZE


@pytest.fixture
def segment() -> Iterator[MemorySegment]:
    made = MemorySegment.create("s", SIZE, published_bytes=mmap.PAGESIZE)
    made.check()
    yield made
    made.close()


def _map(fd: int, *, writable: bool = False) -> mmap.mmap:
    return map_shared(fd, os.fstat(fd).st_size, writable=writable)


def test_a_reader_sees_what_is_written_and_cannot_write(segment: MemorySegment) -> None:
    reading, published = segment.descriptors(writable=False)
    assert segment.published is not None
    segment.view[:5] = b"hello"
    segment.published.view[:5] = b"index"
    with _map(reading) as area, _map(published) as index:
        assert (area[:5], index[:5]) == (b"hello", b"index")
        segment.published.view[:5] = b"later"
        assert index[:5] == b"later"
        for each in (area, index):
            with pytest.raises(TypeError, match="readonly"):
                each[0] = 1
    for fd in (reading, published):
        with pytest.raises(PermissionError):
            _map(fd, writable=True)
        with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
            os.pwrite(fd, b"x", 0)


def test_a_writer_writes_to_the_segment_alone(segment: MemorySegment) -> None:
    _, published, writing = segment.descriptors(writable=True)
    with _map(writing, writable=True) as area:
        area[:5] = b"hello"
    assert bytes(segment.view[:5]) == b"hello"
    if not fcntl.fcntl(published, fcntl.F_GET_SEALS) & F_SEAL_FUTURE_WRITE:
        pytest.skip("kernel: before Linux 5.1 there is no such seal")
    try:
        again = os.open(f"/proc/self/fd/{published}", os.O_RDWR)  # who is root may
    except PermissionError:
        return
    with pytest.raises(PermissionError):
        _map(again, writable=True)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    os.close(again)


def test_slices_keep_a_closed_segment_mapped_and_no_longer() -> None:
    segment = MemorySegment.create("s", SIZE, published_bytes=mmap.PAGESIZE)
    assert segment.published is not None
    before, slices = _num_mapped(), [segment.view[:5], segment.published.view[:5]]
    slices[0][:] = b"hello"
    segment.close()
    assert bytes(slices[0]) == b"hello"
    assert _num_mapped() == before
    slices.clear()
    assert _num_mapped() == before - 2


def _num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:tanghulu-s")


def test_a_kernel_without_the_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    call: Callable[..., Any] = fcntl.fcntl

    def old(fd: int, number: int, argument: int = 0) -> Any:
        if number == fcntl.F_ADD_SEALS and argument & F_SEAL_FUTURE_WRITE:
            raise OSError(22, "Invalid argument")
        return call(fd, number, argument)

    monkeypatch.setattr(fcntl, "fcntl", old)
    with capture_logs() as logs:
        segment = MemorySegment.create("s", SIZE, published_bytes=mmap.PAGESIZE)
    assert [each["event"] for each in logs] == ["segment.not_sealed"]
    published = segment.descriptors(writable=False)[1]
    with pytest.raises(PermissionError):
        _map(published, writable=True)
    segment.close()


def test_a_process_that_cannot_open_its_descriptors_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_proc(path: str, flags: int) -> int:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "open", no_proc)
    with capture_logs() as logs:
        segment = MemorySegment.create("s", SIZE)
    assert [each["event"] for each in logs] == ["segment.not_read_only"]
    (reading,) = segment.descriptors(writable=False)
    with _map(reading) as area:
        segment.view[:5] = b"hello"
        assert area[:5] == b"hello"
    segment.close()
