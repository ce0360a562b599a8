"""Memory for values that were copied: used again when nobody refers to it, and not before."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.store.client.logic.receive_memory import MIN_BYTES, ReceiveMemory, piece_bytes

SIZE = 2 << 20


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_piece_is_used_again_when_its_last_view_goes():
    memory = ReceiveMemory()
    array = memory.take(SIZE)
    array[:] = 7
    where, view = address(array), array[100:200].data
    del array
    gc.collect()
    assert memory.idle_bytes == 0
    assert address(memory.take(SIZE)) != where  # the view still shows it
    assert bytes(view) == b"\7" * 100
    del view
    memory.check()
    assert where in (address(memory.take(SIZE)), address(memory.take(SIZE)))


def test_smaller_values_are_the_heap_s():
    memory = ReceiveMemory()
    memory.take(MIN_BYTES - 1)[:] = 1
    assert memory.idle_bytes == 0


def test_what_is_idle_is_bounded_and_other_sizes_go_first():
    memory = ReceiveMemory(max_idle_bytes=3 * SIZE)
    several = [memory.take(SIZE) for _ in range(5)]
    several.clear()
    assert memory.idle_bytes == 3 * SIZE
    large = memory.take(2 * SIZE)
    large[:] = 1
    del large
    assert memory.idle_bytes == 3 * SIZE  # one large and one small one
    huge = memory.take(4 * SIZE)
    del huge
    assert memory.idle_bytes <= 3 * SIZE
    memory.check()


@given(num_bytes=st.integers(MIN_BYTES, 1 << 40))
def test_at_most_an_eighth_is_not_used(num_bytes: int):
    size = piece_bytes(num_bytes)
    assert num_bytes <= size <= num_bytes * 9 / 8
    assert size % 4096 == 0
    assert piece_bytes(size) == size


@pytest.mark.parametrize("num_threads", [1, 8])
def test_threads_never_share_a_piece(num_threads: int):
    memory = ReceiveMemory(max_idle_bytes=4 * SIZE)
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(60):
            array = memory.take(SIZE - turn % 3)
            array[::4096] = number
            if (array[::4096] != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    memory.check()
    assert memory.idle_bytes <= (4 + num_threads) * SIZE
