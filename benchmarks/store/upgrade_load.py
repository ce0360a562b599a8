"""The load of one client process during an upgrade; it runs from any checkout, so it imports the client alone.

    PYTHONPATH=CHECKOUT/src python -P benchmarks/store/upgrade_load.py --master ADDRESS --name a --directory DIRECTORY

puts, gets, asks and removes in several threads over shm and tcp until its standard input ends, and then prints one
JSON object: how many calls of each kind it made, those that failed, and those that took long. A value is made from its
key, so everybody knows what belongs under it. Keys that are kept stand in a file of ``--directory`` for the other
clients, which read them too; the others are removed by the thread that put them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tanghulu

SMALLEST, LARGEST = 10, 5 << 20
DEADLINE_S = 30.0
#: Calls that took at least so long are told.
LONG_S = 1.0
#: Bytes that each thread keeps in the store at most: for good, and before it removes the oldest.
KEPT_BYTES, CHURNED_BYTES = 4 << 20, 12 << 20
_PATTERN = random.Random(5).randbytes(LARGEST)


def value_of(key: str) -> bytes:
    """What stands under ``key``, which ends with its size."""
    size = int(key.rpartition("/")[2])
    head = key.encode()[:size]
    return head + _PATTERN[len(head) : size]


class Load(threading.Thread):
    """One thread of calls, one after the other."""

    def __init__(self, client: Any, name: str, directory: Path, seed: int) -> None:
        super().__init__(name=name)
        self.done: Counter[str] = Counter()
        self.failures: list[tuple[float, str, str]] = []
        self.long: list[tuple[float, str, float]] = []
        self.ended = threading.Event()
        self._client, self._directory = client, directory
        self._rng = random.Random(seed)
        self._file = (directory / name).open("a")
        self._kept_bytes = self._num = 0
        self._own: deque[str] = deque()

    def run(self) -> None:
        calls = (self._put, self._put, self._put_many, self._get, self._get, self._get_many, self._exists, self._again)
        while not self.ended.is_set():
            call = self._rng.choice(calls)
            self._perform(call.__name__.lstrip("_"), call)
            time.sleep(self._rng.random() * 0.02)
        self._file.close()

    def _perform(self, name: str, call: Callable[[], None]) -> None:
        began_s = time.time()
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a failed request, and is told
            self.failures.append((began_s, name, f"{type(error).__name__}: {error}"))
        self.done[name] += 1
        took_s = time.time() - began_s
        if took_s >= LONG_S:
            self.long.append((began_s, name, round(took_s, 2)))

    def _new(self) -> str:
        self._num += 1
        size = round(SMALLEST * (LARGEST / SMALLEST) ** self._rng.random())
        return f"upgrade/{self.name}/{self._num}/{size}"

    def _options(self) -> dict[str, Any]:
        return {"replicas": self._rng.choice((1, 2, 2))}

    def _put(self) -> None:
        key = self._new()
        _expect(self._client.put(key, value_of(key), **self._options()).ok, f"put of {key}")
        self._note(key)

    def _put_many(self) -> None:
        keys = [self._new() for _ in range(self._rng.randint(2, 6))]
        outcomes = self._client.put_many([(key, value_of(key)) for key in keys], **self._options())
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome.error is None:
                self._note(key)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error

    def _again(self) -> None:
        """A put of what is there is a hit, but while a master learns what old nodes hold, it may be stored again."""
        for key in self._known(1):
            self.done["stored again"] += not self._client.put(key, value_of(key), replicas=2).existed

    def _get(self) -> None:
        for key in self._known(1):
            with self._client.get(key) as chunk:
                _expect(chunk.bytes() == value_of(key), f"wrong bytes of {key}")

    def _get_many(self) -> None:
        keys = self._known(5)
        for key, outcome in zip(keys, self._client.get_many(keys), strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            with outcome as chunk:
                _expect(chunk.bytes() == value_of(key), f"wrong bytes of {key}")

    def _exists(self) -> None:
        keys = self._known(5)
        held = self._client.exists_many([*keys, "upgrade/nobody"])
        _expect(held == [True] * len(keys) + [False], f"exists says {held} of {keys} and one that nobody has put")

    def _known(self, most: int) -> list[str]:
        """Keys that must be there: of this thread, or kept by another."""
        other = self._rng.choice(list(self._directory.iterdir()))
        kept = other.read_text().split("\n")[:-1] if other.stat().st_size else []
        known = kept if kept and self._rng.random() < 0.5 else list(self._own)
        return self._rng.sample(known, min(most, len(known)))

    def _note(self, key: str) -> None:
        """``key`` was put: keep it, or remove those that have been there longest."""
        size = int(key.rpartition("/")[2])
        if self._kept_bytes + size <= KEPT_BYTES and self._rng.random() < 0.3:
            self._kept_bytes += size
            self._file.write(key + "\n")
            self._file.flush()
            return
        self._own.append(key)
        while sum(int(each.rpartition("/")[2]) for each in self._own) > CHURNED_BYTES:
            self._perform("remove", lambda: _expect(self._client.remove(self._own.popleft()), "there was none"))


def _expect(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--master", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2, help="for each of shm and tcp")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    clients = [tanghulu.connect(arguments.master, transport=each, deadline_s=DEADLINE_S) for each in ("shm", "tcp")]
    loads = [
        Load(client, f"{arguments.name}-{number}-{index}", arguments.directory, hash((arguments.seed, number, index)))
        for number, client in enumerate(clients)
        for index in range(arguments.threads)
    ]
    for load in loads:
        load.start()
    print("ready", flush=True)
    sys.stdin.read()
    for load in loads:
        load.ended.set()
    for load in loads:
        load.join()
    for client in clients:
        client.close()
    done = sum((load.done for load in loads), Counter())
    failures = [each for load in loads for each in load.failures]
    print(json.dumps({"calls": done, "failures": failures, "long": [each for load in loads for each in load.long]}))


if __name__ == "__main__":
    main()
