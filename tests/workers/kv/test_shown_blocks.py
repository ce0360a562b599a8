"""Blocks that are shown to other workers: which go together, and what one that cannot be shown does to the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
import xxhash

from tanghulu.errors import NodeUnavailable
from tanghulu.workers.kv.peer_server import SHARED_BYTES, ShownBlocks

LAYER_BYTES, BLOCK_BYTES = 64, 128


class Window:
    """A window whose blocks have their number in each byte; ``broken`` cannot be shown."""

    def __init__(self) -> None:
        self.broken: set[int] = set()
        self.going_on = threading.Event()
        self.going_on.set()
        self.threads: list[tuple[int, tuple[int, ...]]] = []

    def show(self, block_ids: Sequence[int], offsets: Sequence[int]) -> list[memoryview]:
        assert [offset // BLOCK_BYTES for offset in offsets] == list(block_ids)
        self.going_on.wait(10)
        self.threads.append((threading.get_ident(), tuple(block_ids)))
        if self.broken & set(block_ids):
            raise NodeUnavailable("the device is gone")
        return [memoryview(bytes([block]) * BLOCK_BYTES) for block in block_ids]

    def take(self, block_ids: Sequence[int]) -> list[int]:
        raise NotImplementedError

    def give_back(self, offset: int) -> None:
        raise NotImplementedError

    def leave(self, offsets: Sequence[int]) -> None:
        raise NotImplementedError


def ask(shown: ShownBlocks, *block_ids: int) -> asyncio.Future[list[list[int]]]:
    return shown.show(block_ids, [block * BLOCK_BYTES for block in block_ids])


def sums(*block_ids: int) -> list[list[int]]:
    return [[xxhash.xxh3_64_intdigest(bytes([block]) * LAYER_BYTES)] * 2 for block in block_ids]


async def test_small_pins_of_one_turn_share_a_thread_and_each_gets_its_checksums() -> None:
    window = Window()
    shown = ShownBlocks(window, LAYER_BYTES, BLOCK_BYTES)
    assert await asyncio.gather(ask(shown, 1, 2), ask(shown, 3)) == [sums(1, 2), sums(3)]
    assert len({thread for thread, _ in window.threads}) == 1
    assert await ask(shown, 4) == sums(4)


async def test_a_large_pin_does_not_hold_up_the_small_ones_beside_it() -> None:
    window = Window()
    large_bytes = SHARED_BYTES // 2
    shown = ShownBlocks(window, LAYER_BYTES, large_bytes)  # two of these blocks go together
    asked = [ask(shown, 1), ask(shown, 2, 3, 4), ask(shown, 5)]
    assert await asyncio.gather(*asked) == [sums(1), sums(2, 3, 4), sums(5)]
    assert sorted(blocks for _, blocks in window.threads) == [(1,), (2, 3, 4), (5,)]


async def test_blocks_that_cannot_be_shown_fail_their_own_pin_alone() -> None:
    window = Window()
    window.broken = {2}
    shown = ShownBlocks(window, LAYER_BYTES, BLOCK_BYTES)
    good, bad, other = ask(shown, 1), ask(shown, 2), ask(shown, 3)
    with pytest.raises(NodeUnavailable, match="device"):
        await bad
    assert (await good, await other) == (sums(1), sums(3))


async def test_closing_waits_for_the_blocks_of_readers_that_hung_up() -> None:
    window = Window()
    window.going_on.clear()
    shown = ShownBlocks(window, LAYER_BYTES, BLOCK_BYTES)
    left = [ask(shown, 1), ask(shown, 2)]
    closing = asyncio.ensure_future(shown.close())
    for each in left:
        each.cancel()
    await asyncio.sleep(0)
    assert not closing.done()
    window.going_on.set()
    await closing
    assert [blocks for _, blocks in window.threads] == [(1,), (2,)]
