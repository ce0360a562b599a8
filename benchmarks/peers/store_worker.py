"""A store's client in a process of its own: ``python store_worker.py FD``, told what to do by JSON lines.

One *run* is a loop of one operation over fresh keys, timed call by call. Values are one of NUM_VALUES random texts by
the key's number. What was read is compared with what was put outside of the time taken; giving back what a get returned
is inside of it.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jsonlines import serve
from memory import Memory
from stores import STORES, Failed, Store

NUM_VALUES = 4
SEED_OF_VALUES = 20
ENDS_BYTES = 4096


def nothing(number: int, got: Any) -> None:
    pass


class Operation(NamedTuple):
    """``call`` and ``end`` are timed, ``check`` between them is not."""

    call: Callable[[int], Any]
    check: Callable[[int, Any], None] = nothing
    end: Callable[[int, Any], None] = nothing


class Client:
    """The commands."""

    def __init__(self) -> None:
        self._store: Store
        self._memory: Memory
        self._values: list[bytes] = []
        self._kept: list[Memory] = []  # registered memory stays where it is

    def open(self, store: str, **settings: Any) -> None:
        """Connect."""
        self._store = STORES[store](**settings)

    def prepare(self, size: int, num_pieces: int, filled: bool) -> None:
        """Values of ``size`` bytes, and registered memory: with the values in it, or empty."""
        self._values = [random.Random(SEED_OF_VALUES + n).randbytes(size) for n in range(NUM_VALUES)]
        self._memory = Memory(num_pieces, size)
        self._kept.append(self._memory)
        for number in range(num_pieces if filled else 0):
            self._memory.piece(number)[:] = self._values[number % NUM_VALUES]
        self._store.register(self._memory)

    def run(self, op: str, keys: list[str], batch: int) -> dict[str, float]:
        """Do ``op`` with every key, ``batch`` keys a call; microseconds a call."""
        operation = self._operations(keys, batch)[op]
        times: list[float] = []
        cpu_s = 0.0
        clock, cpu_clock = time.perf_counter, time.process_time
        for number in range(len(keys) // batch):
            cpu = cpu_clock()
            begun = clock()
            got = operation.call(number)
            took = clock() - begun
            cpu_s += cpu_clock() - cpu
            operation.check(number, got)
            cpu = cpu_clock()
            begun = clock()
            operation.end(number, got)
            took += clock() - begun
            cpu_s += cpu_clock() - cpu
            times.append(took * 1e6)
        return {"p50_us": statistics.median(times), "mean_us": statistics.fmean(times), "max_us": max(times),
                "client_cpu_us": cpu_s / len(times) * 1e6}  # fmt: skip

    def remove(self, keys: list[str]) -> None:
        """Make room."""
        self._store.remove(keys)

    def _operations(self, keys: Sequence[str], batch: int) -> dict[str, Operation]:
        store, values, memory = self._store, self._values, self._memory
        groups = [keys[at : at + batch] for at in range(0, len(keys), batch)]
        texts = [values[n % NUM_VALUES] for n in range(batch)]
        pieces = range(batch)
        num_spots = memory.num_pieces - memory.num_pieces % NUM_VALUES

        def got_all(number: int, got: Sequence[Any]) -> None:
            for each, text in zip(got, texts, strict=True):
                if isinstance(each, Exception):
                    raise each
                _same(store.peek(each), text)

        def all_there(number: int, _: Any) -> None:
            for piece, text in zip(pieces, texts, strict=True):
                _arrived(memory.piece(piece), text)

        def found(number: int, got: Any) -> None:
            if not (got if batch == 1 else all(got)):
                raise Failed("a key that was put does not exist")

        return {
            "put": Operation(lambda n: store.put(keys[n], values[n % NUM_VALUES])),
            "get": Operation(
                lambda n: store.get(keys[n]),
                lambda n, got: _same(store.peek(got), values[n % NUM_VALUES]),
                lambda n, got: store.drop(got),
            ),
            "put_from": Operation(lambda n: store.put_from(keys[n], n % num_spots)),
            "get_into": Operation(
                lambda n: store.get_into(keys[n], n % num_spots),
                lambda n, _: _arrived(memory.piece(n % num_spots), values[n % NUM_VALUES]),
            ),
            "put_many": Operation(lambda n: store.put_many(groups[n], texts)),
            "get_many": Operation(
                lambda n: store.get_many(groups[n]), got_all, lambda n, got: [store.drop(each) for each in got] and None
            ),
            "put_many_from": Operation(lambda n: store.put_many_from(groups[n], pieces)),
            "get_many_into": Operation(lambda n: store.get_many_into(groups[n], pieces), all_there),
            "exists": Operation(lambda n: store.exists(keys[n]), found),
            "exists_many": Operation(lambda n: store.exists_many(groups[n]), found),
        }


def _same(got: memoryview, text: bytes) -> None:
    """The length and both ends; what lies between is the stores' own checksums' business."""
    ends = (slice(0, ENDS_BYTES), slice(-ENDS_BYTES, None))
    if len(got) != len(text) or any(bytes(got[end]) != text[end] for end in ends):
        raise Failed(f"{len(got)} bytes came back that are not the {len(text)} that were put")


def _arrived(piece: memoryview, text: bytes) -> None:
    """The same, and wipe the ends, so that the next read into this piece has to fill them."""
    _same(piece, text)
    piece[:ENDS_BYTES] = piece[-ENDS_BYTES:] = bytes(min(ENDS_BYTES, len(piece)))


def main() -> None:
    client = Client()
    serve(int(sys.argv[1]), {name: getattr(client, name) for name in ("open", "prepare", "run", "remove")})


if __name__ == "__main__":
    main()
