"""Blocks on their way between a device and buffers, in several threads; the device is main memory.

Its copies are as late as copies may be, or at once.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from tanghulu.errors import NodeUnavailable, Overloaded
from tanghulu.transfer_engine.gpu import mover as gpu_mover
from tanghulu.transfer_engine.gpu import staging

torch = pytest.importorskip("torch", reason="torch is not installed")

from tanghulu.transfer_engine.gpu.mover import BlockMover  # noqa: E402
from tanghulu.transfer_engine.gpu.staging import CudaCopier, DeviceBlocks, DeviceCopier, HostCopier, StagingRing  # noqa: E402
from tests.transfer_engine.gpu.late_copier import LateCopier  # noqa: E402
from tests.workers.compute.fake_gpu import GPU, fake_gpu  # noqa: E402

CPU = torch.device("cpu")
LAYERS = (8, 24, 8)
SIZE = sum(LAYERS)
IN_HALF, NUM_BLOCKS = 2, 40
MAKERS = pytest.mark.parametrize("make_copier", [LateCopier, HostCopier])


class Device:
    """Blocks of a layer's piece each, full of noise, a mover of them, and what its calls did."""

    def __init__(self, make_copier: Callable[[], DeviceCopier], num_helpers: int, num_callers: int = 1) -> None:
        noise = torch.Generator().manual_seed(1)
        shapes = [(NUM_BLOCKS, size) for size in LAYERS]
        self.parts = [torch.randint(0, 256, shape, generator=noise, dtype=torch.uint8) for shape in shapes]
        self.copiers = [make_copier() for _ in range(num_callers + num_helpers)]
        rings = [StagingRing(CPU, 2 * IN_HALF * SIZE, each) for each in self.copiers]
        self.mover = BlockMover(DeviceBlocks(self.parts), rings[:num_callers], rings[num_callers:])
        self.before = [self.bytes_of(block) for block in range(NUM_BLOCKS)]
        self.threads: set[str] = set()

    def bytes_of(self, block: int) -> bytes:
        return b"".join(part[block].numpy().tobytes() for part in self.parts)

    def check(self) -> None:
        assert not any(each.num_under_way for each in self.copiers if isinstance(each, LateCopier))
        assert self.mover._free.qsize() + self.mover._idle.qsize() == len(self.copiers)

    def read_into(self, seen: dict[int, bytes]) -> gpu_mover.Move:
        def move(at: int, buffers: Sequence[memoryview]) -> int:
            self.threads.add(threading.current_thread().name)
            seen.update({at + index: bytes(buffer) for index, buffer in enumerate(buffers)})
            return len(buffers)

        return move

    def write(self, at: int, buffers: Sequence[memoryview]) -> int:
        self.threads.add(threading.current_thread().name)
        for index, buffer in enumerate(buffers):
            buffer[:] = bytes([100 + at + index]) * SIZE
        return len(buffers)


@contextmanager
def device(make_copier: Callable[[], DeviceCopier], num_helpers: int, num_callers: int = 1) -> Iterator[Device]:
    made = Device(make_copier, num_helpers, num_callers)
    try:
        yield made
        made.check()
    finally:
        made.mover.close()


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_mover, "_ROUND_BYTES", IN_HALF * SIZE)


@MAKERS
@pytest.mark.parametrize("num_helpers", [0, 1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 30])
def test_all_blocks_arrive_in_both_directions(make_copier, num_helpers: int, count: int):
    blocks = random.Random(count).sample(range(NUM_BLOCKS), count)
    with device(make_copier, num_helpers) as there:
        seen: dict[int, bytes] = {}
        assert there.mover.drain(blocks, there.read_into(seen), shareable=True) == count
        assert seen == {number: there.before[block] for number, block in enumerate(blocks)}
        assert there.mover.fill(blocks, there.write, shareable=True) == count
        for block in range(NUM_BLOCKS):
            wanted = bytes([100 + blocks.index(block)]) * SIZE if block in blocks else there.before[block]
            assert there.bytes_of(block) == wanted


@MAKERS
def test_helpers_share_a_call_and_only_a_shareable_one(make_copier):
    with device(make_copier, 2) as there:
        together = threading.Barrier(3)

        def move(at: int, buffers: Sequence[memoryview]) -> int:
            if at in (0, 10, 20):
                together.wait(10)  # three threads are in a move at once
            return there.write(at, buffers)

        assert there.mover.fill(range(30), move, shareable=True) == 30
        assert len(there.threads) == 3
        there.threads.clear()
        assert there.mover.fill(range(30), there.write) == 30
        assert there.threads == {threading.current_thread().name}


def test_a_call_without_an_idle_helper_goes_on_alone():
    with device(LateCopier, 1, num_callers=2) as there:
        inside, go_on = threading.Event(), threading.Event()

        def slow(at: int, buffers: Sequence[memoryview]) -> int:
            if at:  # the helper
                inside.set()
                assert go_on.wait(10)
            return len(buffers)

        first = threading.Thread(target=there.mover.drain, args=(range(4), slow), kwargs={"shareable": True})
        first.start()
        assert inside.wait(10)
        seen: dict[int, bytes] = {}
        assert there.mover.drain(range(30), there.read_into(seen), shareable=True) == 30
        assert there.threads == {threading.current_thread().name}
        go_on.set()
        first.join(10)


@MAKERS
@pytest.mark.parametrize("failure", [None, Overloaded("no slots")])
@pytest.mark.parametrize("failing", [5, 14, 20])
def test_a_failure_ends_a_fill_with_the_blocks_before_it(make_copier, failing: int, failure: Exception | None):
    """Be it short or raised, in whichever thread: 14 and 20 are a helper's, and 20 its first."""
    with device(make_copier, 2) as there:

        def move(at: int, buffers: Sequence[memoryview]) -> int:
            if not at <= failing < at + len(buffers):
                return there.write(at, buffers)
            if failure is not None and at == failing:
                raise failure
            return there.write(at, buffers[: failing - at])

        moved = there.mover.fill(range(30), move, shareable=True)
        assert moved == failing
        assert all(there.bytes_of(block) == bytes([100 + block]) * SIZE for block in range(moved))
        assert there.bytes_of(failing) == there.before[failing]


@MAKERS
def test_what_is_raised_by_any_thread_of_a_drain_is_raised_when_all_have_ended(make_copier):
    with device(make_copier, 2) as there:
        for failing in (0, 10, 24):

            def move(at: int, buffers: Sequence[memoryview], failing: int = failing) -> int:
                if at == failing:
                    raise NodeUnavailable("the node is away")
                return len(buffers)

            with pytest.raises(NodeUnavailable):
                there.mover.drain(range(30), move, shareable=True)
            there.check()
        with pytest.raises(NodeUnavailable):
            there.mover.fill(range(30), lambda at, buffers: move(at, buffers, 0), shareable=True)


def test_bugs_are_not_taken_for_misses():
    with device(HostCopier, 2) as there:

        def move(at: int, buffers: Sequence[memoryview]) -> int:
            assert at < 20, "a bug"
            return len(buffers)

        with pytest.raises(AssertionError, match="a bug"):
            there.mover.fill(range(30), move, shareable=True)


class TestCudaCopier:
    """With tensors of a GPU that is not there, and streams that only count."""

    @pytest.fixture
    def copier(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaCopier]:
        monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **more: object())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        with fake_gpu():
            yield CudaCopier([GPU], settled=True)

    @pytest.mark.parametrize(("least", "num_copies"), [(1 << 18, 0), (8, 2 * 3 * 5)])
    def test_small_pieces_cross_the_link_as_one(self, monkeypatch, copier: CudaCopier, least: int, num_copies: int):
        monkeypatch.setattr(staging, "LEAST_PIECE_BYTES", least)
        copied: list[Any] = []
        copy = copier.copy
        monkeypatch.setattr(copier, "copy", lambda half, to, source: (copied.append(to), copy(half, to, source)))
        blocks = DeviceBlocks([torch.empty(NUM_BLOCKS, size, dtype=torch.uint8, device=GPU) for size in LAYERS])
        staged = torch.empty(5, SIZE, dtype=torch.uint8)
        copier.gather(0, staged, blocks, [7, 3, 9, 0, 1])
        copier.scatter(1, blocks, [7, 3, 9, 0, 1], staged)
        assert len(copied) == num_copies
