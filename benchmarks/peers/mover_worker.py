"""One end of a transfer in a process of its own: ``python mover_worker.py FD``, told what to do by JSON lines.

A *run* has some callers (threads), each with a part of the area of its own, that move piece after piece for a given
time. Both ends of every piece carry a stamp, which is put at the source before a run and looked for at the destination
after it.
"""

from __future__ import annotations

import statistics
import struct
import sys
import threading
import time
from typing import Any

from jsonlines import serve
from memory import Memory
from movers import MOVERS, OWNERS, Mover, Owner, use_packages

STAMP = struct.Struct("<QQ")


class End:
    """The commands of both ends."""

    def __init__(self) -> None:
        self._owner: Owner
        self._mover: Mover
        self._view = memoryview(b"")

    def own(self, kind: str, packages: str, **settings: Any) -> dict[str, Any]:
        """Offer memory; what the mover has to be told."""
        use_packages(packages)
        self._owner = OWNERS[kind](**settings)
        self._view = self._owner.view
        return self._owner.offer()

    def open(self, kind: str, packages: str, area_bytes: int, **settings: Any) -> None:
        """Connect to an owner."""
        use_packages(packages)
        self._memory = Memory(1, area_bytes)
        self._view = self._memory.view
        self._mover = MOVERS[kind](self._memory, **settings)

    def stamp(self, size: int, num_spots: int, number: int) -> None:
        """Mark both ends of every spot."""
        for spot in range(num_spots if len(self._view) > 1 else 0):
            mark = STAMP.pack(number, spot)
            self._view[spot * size : spot * size + STAMP.size] = mark
            self._view[(spot + 1) * size - STAMP.size : (spot + 1) * size] = mark

    def verify(self, size: int, spots: list[int], number: int) -> None:
        """Find the marks there. Raises ValueError."""
        for spot in spots if len(self._view) > 1 else ():
            mark = STAMP.pack(number, spot)
            ends = [bytes(self._view[at : at + STAMP.size]) for at in (spot * size, (spot + 1) * size - STAMP.size)]
            if ends != [mark, mark]:
                raise ValueError(f"spot {spot} of {size} bytes does not hold what was sent in run {number}")

    def run(self, op: str, size: int, callers: int, seconds: float) -> dict[str, Any]:
        """Let ``callers`` threads move pieces for so long, each one at least; the pieces' spots, and what it took."""
        num_spots = len(self._view) // size
        own = max(1, num_spots // callers)
        moves = [self._mover.caller(op, size) for _ in range(callers)]
        took: list[list[float]] = [[] for _ in range(callers)]
        failures: list[BaseException] = []
        barrier = threading.Barrier(callers + 1)

        def work(who: int) -> None:
            move, clock = moves[who], time.perf_counter
            at, ended = who * own % num_spots * size, 0.0
            barrier.wait()
            until = clock() + seconds
            try:
                while ended < until:
                    spot_at = at + len(took[who]) % own * size
                    begun = clock()
                    move(spot_at, spot_at)
                    ended = clock()
                    took[who].append(ended - begun)
            except Exception as error:  # noqa: BLE001 - raised below, by the thread that is asked
                failures.append(error)

        threads = [threading.Thread(target=work, args=(who,)) for who in range(callers)]
        for thread in threads:
            thread.start()
        cpu_s = time.process_time()
        barrier.wait()
        begun = time.perf_counter()
        for thread in threads:
            thread.join()
        elapsed_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
        if failures:
            raise failures[0]
        return {
            "spots": sorted(
                {who * own % num_spots + n for who in range(callers) for n in range(min(own, len(took[who])))}
            ),
            "num_pieces": sum(map(len, took)),
            "elapsed_s": elapsed_s,
            "p50_us": statistics.median(value for each in took for value in each) * 1e6,
            "mover_cpu_s": cpu_s,
        }


def main() -> None:
    end = End()
    serve(int(sys.argv[1]), {name: getattr(end, name) for name in ("own", "open", "stamp", "verify", "run")})


if __name__ == "__main__":
    main()
