"""The mover of blocks beside plain copying threads, with main memory in the device's place; and a step beside it.

    python -m benchmarks.transfer.mover --threads 2 --mib 512

A block takes two copies, between a buffer and a ring and between the ring and the device. As many plain threads make
the same copies of the same pieces, in a loop, through buffers as long as the mover's. ``ratio`` is to be at least .85.
``step`` is how much longer a product of matrices takes beside the mover: at most 1.1 where there are cores for both.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from tanghulu.transfer_engine.gpu.mover import _ROUND_BYTES, BlockMover
from tanghulu.transfer_engine.gpu.staging import MIB, DeviceBlocks, StagingRing

#: Bytes of a block's parts.
SHAPES = {"blocks of 1 MiB": [MIB], "pieces of 32 KiB": [32 << 10] * 64}


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def step_beside(act: Callable[[], object]) -> float:
    """Return how many times as long a product takes while ``act`` runs again and again."""
    one, ended = torch.randn(512, 512), threading.Event()

    def median() -> float:
        return statistics.median(seconds(lambda: one @ one) for _ in range(300))

    alone = median()
    other = threading.Thread(target=lambda: [act() for _ in iter(ended.is_set, True)])
    other.start()
    beside = median()
    ended.set()
    other.join()
    return beside / alone


class Plain:
    """Threads that copy blocks between ``rows`` and the parts of a device, through buffers of two rounds."""

    def __init__(self, num_threads: int, device: Sequence[np.ndarray], rows: np.ndarray, ids: Sequence[int]) -> None:
        self.device, self.rows, self.ids = device, rows, ids
        self.in_round = _ROUND_BYTES // rows.shape[1]
        rings = [torch.ones(2 * self.in_round, rows.shape[1], dtype=torch.uint8) for _ in range(num_threads)]
        self.buffers = [ring.numpy() for ring in rings]  # the memory of a ring, whose pages are small ones
        self.threads = ThreadPoolExecutor(num_threads)

    def run(self, loads: bool) -> None:
        shares = np.array_split(np.arange(len(self.rows)), len(self.buffers))
        list(self.threads.map(self.share, self.buffers, shares, [loads] * len(shares)))

    def share(self, buffer: np.ndarray, numbers: np.ndarray, loads: bool) -> None:
        for at in range(0, len(numbers), self.in_round):
            some = numbers[at : at + self.in_round]
            for hop in (self.outside, self.inside) if loads else (self.inside, self.outside):
                for row, number in zip(buffer[at % len(buffer) :], some, strict=False):
                    hop(row, number, loads)

    def outside(self, staged: np.ndarray, number: int, loads: bool) -> None:
        move(self.rows[number], staged, loads)

    def inside(self, staged: np.ndarray, number: int, loads: bool) -> None:
        column = 0
        for part in self.device:
            move(staged[column : column + part.shape[1]], part[self.ids[number]], loads)
            column += part.shape[1]


def move(outer: np.ndarray, inner: np.ndarray, loads: bool) -> None:
    (inner if loads else outer)[:] = outer if loads else inner


def measure(shape: str, sizes: Sequence[int], num_threads: int, mib: int, rounds: int) -> None:
    size, count = sum(sizes), mib * MIB // sum(sizes)
    parts = [torch.ones(count, each, dtype=torch.uint8) for each in sizes]
    rings = [StagingRing(torch.device("cpu"), 2 * _ROUND_BYTES) for _ in range(num_threads)]
    mover = BlockMover(DeviceBlocks(parts), rings[:1], rings[1:])
    rows, ids = np.ones((count, size), dtype=np.uint8), np.random.default_rng(1).permutation(count).tolist()
    plain = Plain(num_threads, [each.numpy() for each in parts], rows, ids)

    def outside(at: int, buffers: Sequence[memoryview], loads: bool) -> int:
        for row, buffer in zip(rows[at:], buffers, strict=False):
            move(row, np.frombuffer(buffer, dtype=np.uint8), loads)
        return len(buffers)

    def ours(loads: bool) -> None:
        (mover.fill if loads else mover.drain)(ids, partial(outside, loads=loads), shareable=True)

    for loads in (True, False):
        pairs = [[seconds(partial(way, loads)) for way in (ours, plain.run)] for _ in range(rounds)]
        moved, copied = (count * size / min(each) / 1e9 for each in zip(*pairs, strict=True))
        print(f"{'load' if loads else 'save'} {shape}: {moved:.2f} GB/s, plain {copied:.2f}, ", end="")
        print(f"ratio {moved / copied:.2f}, step {step_beside(partial(ours, loads)):.2f}", flush=True)
    mover.close()
    plain.threads.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mib", type=int, default=512, help="MiB moved at a time")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for shape, sizes in SHAPES.items():
        measure(shape, sizes, args.threads, args.mib, args.rounds)


if __name__ == "__main__":
    main()
