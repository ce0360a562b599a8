"""Long copies: whoever copies, all bytes are there, the digest sees them in order, and nobody copies afterwards."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.engine import EngineConfig, TransferEngine
from tanghulu.transfer_engine.transports.shm.long_copy import PIECE_BYTES, CopyHelper, LongCopy

READ, WRITE = Opcode.READ, Opcode.WRITE
SIZE = 7 * PIECE_BYTES + 12_345


class Shown:
    """A digest that keeps what it is shown."""

    def __init__(self, on_add: Callable[[], None] = lambda: None) -> None:
        self.data = bytearray()
        self._on_add = on_add

    def add(self, piece: memoryview) -> None:
        self._on_add()
        self.data += piece

    def void(self) -> None:
        raise AssertionError("nothing was lost")


def random_bytes(size: int) -> Buffer:
    return Buffer(bytearray(np.random.default_rng(size).bytes(size)))


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("wanted", [False, True], ids=["alone", "helped"])
@pytest.mark.parametrize("size", [1, PIECE_BYTES, PIECE_BYTES + 1, SIZE])
def test_everything_is_copied_and_shown_in_order(opcode: Opcode, wanted: bool, size: int) -> None:
    helper = CopyHelper(wanted=wanted)
    source = random_bytes(size + 100)
    for digest in (None, Shown(), Shown()):
        to = Buffer(bytearray(size + 200))
        helper.copy(opcode, to, 150, source, 70, size, digest)
        expected = bytes(source.memory[70 : 70 + size])
        assert to.memory[150 : 150 + size] == expected
        assert not any(to.memory[:150]), "before it"
        assert not any(to.memory[150 + size :]), "behind it"
        assert digest is None or digest.data == expected
    helper.close()


@given(
    st.integers(1, SIZE),
    st.lists(st.booleans(), max_size=12),
    st.sampled_from([0.5, 0.75]),
    st.sampled_from([0, 0.5, 1]),
)
def test_parts_in_any_order_make_the_whole(size: int, turns: list[bool], share: float, own: float) -> None:
    source, to = random_bytes(size), Buffer(bytearray(size))
    work = LongCopy(to, 0, source, 0, size, share)
    seen = 0
    for helps in turns:
        if helps:
            work.help()
        elif (part := work.copy_front(own)) is not None:
            assert part[0] == seen, "the caller's pieces follow one another"
            seen = part[1]
    while work.copy_front() is not None:
        pass
    assert to.memory == source.memory


def test_a_helper_that_comes_too_late_finds_nothing_and_holds_nothing() -> None:
    array = np.zeros(SIZE, np.uint8)
    gone = weakref.ref(array)
    to, source = Buffer(array), random_bytes(SIZE)
    work = LongCopy(to, 0, source, 0, SIZE, 0.5)
    work.copy_front()
    work.end()
    work.help()
    assert not array[PIECE_BYTES:].any()
    del to, array
    gc.collect()
    assert gone() is None


def test_nobody_copies_when_a_copy_has_failed() -> None:
    helper = CopyHelper(wanted=True)
    source = random_bytes(SIZE)

    def refuse() -> None:
        raise InterruptedError("no more")

    for _ in range(20):
        to = Buffer(bytearray(SIZE))
        with pytest.raises(InterruptedError):
            helper.copy(WRITE, to, 0, source, 0, SIZE, Shown(refuse))
        to.array[:] = 0
        assert not to.array.any()
    helper.close()


def test_a_busy_helper_is_not_waited_for() -> None:
    helper = CopyHelper(wanted=True)
    goes_on = threading.Event()
    source = random_bytes(SIZE)

    class Slow(LongCopy):
        def help(self) -> None:
            goes_on.wait(20)
            super().help()

    helper._recruit(Slow(Buffer(bytearray(SIZE)), 0, source, 0, SIZE, 0.5))
    to, digest = Buffer(bytearray(SIZE)), Shown()
    helper.copy(READ, to, 0, source, 0, SIZE, digest)
    assert to.memory == source.memory == digest.data
    goes_on.set()
    helper.close()


def test_many_callers_share_one_helper() -> None:
    helper = CopyHelper(wanted=True)
    wrong: list[int] = []

    def call(number: int) -> None:
        source = random_bytes(SIZE + number)
        for opcode in (READ, WRITE) * 4:
            to, digest = Buffer(bytearray(SIZE + number)), Shown()
            helper.copy(opcode, to, 0, source, 0, SIZE + number, digest)
            if not to.memory == source.memory == digest.data:
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    helper.close()
    assert not wrong


def test_a_machine_with_one_core_has_no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    config = EngineConfig()
    assert not config.copy_helper
    with TransferEngine(host_id="here", config=config) as engine:
        source, to = random_bytes(SIZE), Buffer(bytearray(SIZE))
        engine._helper.copy(WRITE, to, 0, source, 0, SIZE, None)
        assert to.memory == source.memory
        assert engine._helper._thread is None
