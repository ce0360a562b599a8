"""One client process of the soak: puts, reads and removes values until its standard input ends; ``soak.py`` starts it.

    python soak_client.py SETTINGS_JSON

Every value follows from its key, so each process can tell whether what it read is right, whoever has put it. It prints
a line of JSON when it is connected, one when its client is closed (its process still lives then), and ends when the
input has. A key is put once: what was removed does not come again.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import mmap
import os
import random
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np

import tanghulu
from tanghulu import aio
from tanghulu.errors import (
    ChunkNotFound,
    DeadlineExceeded,
    NodeUnavailable,
    Overloaded,
    StoreFull,
    TanghuluError,
)
from tanghulu.store.client.logic.placement import MAX_LOCATIONS

MIB = 1 << 20
LEAST_BYTES, MOST_BYTES = 64, 8 * MIB
MAX_CLIENTS = 64
#: Of the file that all processes share: one number a client, how many names it has used; then how often a node has
#: been told to go, and how often one has come back.
COUNTERS_BYTES = 8 * (MAX_CLIENTS + 2)
RESTARTS, RETURNS = MAX_CLIENTS, MAX_CLIENTS + 1
#: What calls may say beside an answer while nodes come and go, and the store is fuller than full.
MAY_SAY = (ChunkNotFound, NodeUnavailable, StoreFull, Overloaded, DeadlineExceeded)
DEADLINE_S = 10.0
#: What a call may take beyond its deadline on a machine that does other things too.
SLACK_S = 10.0
#: How long after its end a value with a time to live may still be seen.
TTL_SLACK_S = 5.0
_HELD_PINS, _PIN_BYTES = 2, 256 << 10
#: The keys of one call while tables are filled.
_FILL_KEYS = 1024


class Values:
    """What stands under each key: a piece of the same random bytes, whose place and length follow from the key."""

    def __init__(self, seed: int) -> None:
        self._bytes = np.random.default_rng(seed).integers(0, 256, 2 * MOST_BYTES, dtype=np.uint8)

    def size_of(self, key: str) -> int:
        """From 64 B to 8 MiB, each order of magnitude as often as the other."""
        most = _PIN_BYTES if key.startswith("pinned/") else MOST_BYTES
        fraction = int.from_bytes(self._digest(key)[:4], "little") / 2**32
        return int(LEAST_BYTES * (most / LEAST_BYTES) ** fraction)

    def of(self, key: str) -> np.ndarray[Any, Any]:
        at = int.from_bytes(self._digest(key)[4:8], "little") % MOST_BYTES
        return self._bytes[at : at + self.size_of(key)]

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode(), digest_size=8).digest()


class AioCalls:
    """The asyncio client, called as if it was a blocking one: each call is run to its end."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(_connected(settings))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **more: self._loop.run_until_complete(method(*args, **more))


async def _connected(settings: dict[str, Any]) -> Any:
    return await aio.connect(settings["master"], **_options(settings)).__aenter__()


def _options(settings: dict[str, Any]) -> dict[str, Any]:
    return {"token": settings["token"], "transport": settings["transport"], "deadline_s": DEADLINE_S}


class SoakClient:
    """The steps of one thread, and what came of them."""

    def __init__(self, store: Any, settings: dict[str, Any], thread: int) -> None:
        self._store = store
        self._settings = settings
        self._number: int = settings["number"]
        self._tenant_mates: list[int] = settings["mates"]
        self._rng = random.Random(f"{settings['seed']}/{self._number}/{thread}")
        self._values = Values(settings["seed"])
        fd = os.open(settings["counters"], os.O_RDWR)
        self._counters = np.frombuffer(mmap.mmap(fd, COUNTERS_BYTES), np.uint64)
        os.close(fd)
        self._lock: threading.Lock = settings["lock"]
        self._buffer = bytearray(MOST_BYTES)
        self._mortal: deque[tuple[str, float]] = deque(maxlen=50)
        self._pinned: deque[tuple[str, int]] = deque()
        self._kept: deque[tuple[Any, str]] = deque()
        self.done: Counter[str] = Counter()
        self.said: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest_s = 0.0

    def run(self, stopping: threading.Event) -> None:
        steps = [
            (self._put, 30),
            (self._put_many, 6),
            (self._get, 30),
            (self._get_own_last, 10),
            (self._get_many, 6),
            (self._get_into, 12),
            (self._remove, 12),
            (self._put_mortal, 4),
            (self._see_mortal, 4),
            (self._pin_hard, 3),
            (self._see_pinned, 3),
        ]
        functions, weights = zip(*steps, strict=True)
        while not stopping.wait(self._rng.uniform(0, 2 * self._settings["pause_s"])):
            (step,) = self._rng.choices(functions, weights)
            try:
                step()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                self._wrong(f"{step.__name__}: {type(error).__name__}: {error}")
        self._let_go()

    # --- steps

    def _put(self) -> None:
        key = self._new_key()
        pin = self._rng.choice(["none", "none", "none", "soft"])
        replicas = self._rng.choice([1, 1, 1, 2])
        visible = self._rng.random() < 0.9
        self._call("put", key, self._values.of(key), pin=pin, replicas=replicas, visible=visible)

    def _put_many(self) -> None:
        keys = [self._new_key() for _ in range(self._rng.randint(2, 12))]
        for status in self._call("put_many", [(key, self._values.of(key)) for key in keys]) or []:
            if status.error is not None:
                self._note(status.error, f"put_many of {status.key}")

    def _get(self, key: str = "") -> None:
        key = key or self._some_key()
        chunk = self._call("get", key)
        if chunk is None:
            return
        self._compare(key, chunk.numpy())
        if self._rng.random() < 0.1:  # held on to, and seen again later
            self._kept.append((chunk, key))
            if len(self._kept) > 3:
                self._see_kept()
        elif self._rng.random() < 0.9:
            chunk.close()

    def _get_own_last(self) -> None:
        self._get(self._key(self._number, max(0, int(self._counters[self._number]) - 1)))

    def _get_many(self) -> None:
        keys = list({self._some_key() for _ in range(self._rng.randint(2, 12))})
        for key, chunk in zip(keys, self._call("get_many", keys) or [], strict=False):
            if isinstance(chunk, TanghuluError):
                self._note(chunk, f"get_many of {key}")
            else:
                self._compare(key, chunk.numpy())
                chunk.close()

    def _get_into(self) -> None:
        key = self._some_key()
        size = self._call("get_into", key, self._buffer)
        if size is not None:
            self._compare(key, np.frombuffer(self._buffer, np.uint8)[:size])

    def _remove(self) -> None:
        key = self._some_key(own=True)
        if self._call("remove", key) and self._call("exists", key):
            self._wrong(f"{key} exists after it was removed")

    def _put_mortal(self) -> None:
        key, ttl_s = self._new_key(), self._rng.uniform(1, 20)
        status = self._call("put", key, self._values.of(key), ttl_s=ttl_s)
        if status is not None and not status.existed:
            self._mortal.append((key, time.monotonic() + ttl_s))

    def _see_mortal(self) -> None:
        if self._mortal and time.monotonic() > self._mortal[0][1] + TTL_SLACK_S:
            key, _ = self._mortal.popleft()
            chunk = self._call("get", key)
            if chunk is not None:
                chunk.close()
                self._wrong(f"{key} is there {TTL_SLACK_S} s after its time to live")

    def _pin_hard(self) -> None:
        if len(self._pinned) >= _HELD_PINS:
            key, _ = self._pinned.popleft()
            self._call("remove", key)
        key = f"pinned/{self._new_key()}"
        restarts = int(self._counters[RESTARTS])
        is_whole = restarts == int(self._counters[RETURNS])
        if self._call("put", key, self._values.of(key), pin="hard") is not None and is_whole:
            self._pinned.append((key, restarts))

    def _see_pinned(self) -> None:
        """What is pinned hard stays as long as no node was restarted since."""
        if not self._pinned:
            return
        key, restarts = self._rng.choice(list(self._pinned))
        missing = self.said[ChunkNotFound.code]
        chunk = self._call("get", key)
        if chunk is not None:
            self._compare(key, chunk.numpy())
            chunk.close()
        elif self.said[ChunkNotFound.code] > missing and restarts == int(self._counters[RESTARTS]):
            self._wrong(f"{key} is pinned hard and gone")

    def _see_kept(self) -> None:
        chunk, key = self._kept.popleft()
        self._compare(key, chunk.numpy())
        chunk.close()

    def _let_go(self) -> None:
        while self._kept:
            self._see_kept()

    # --- inside

    def _call(self, name: str, *args: Any, **more: Any) -> Any:
        """What the call returned; None for an error that it may say."""
        started_s = time.monotonic()
        try:
            return getattr(self._store, name)(*args, **more)
        except TanghuluError as error:
            self._note(error, f"{name} of {str(args[0])[:60]}")
            return None
        finally:
            took_s = time.monotonic() - started_s
            self.longest_s = max(self.longest_s, took_s)
            self.done[name] += 1
            if took_s > DEADLINE_S + SLACK_S:
                self._wrong(f"{name} took {took_s:.1f} s of {DEADLINE_S}")

    def _note(self, error: TanghuluError, what: str) -> None:
        self.said[error.code] += 1
        if not isinstance(error, MAY_SAY):
            self._wrong(f"{what}: {error.code}: {error.message}")

    def _compare(self, key: str, bytes_read: np.ndarray[Any, Any]) -> None:
        if not np.array_equal(bytes_read, self._values.of(key)):
            self._wrong(f"wrong bytes of {key}: {len(bytes_read)}, {bytes(bytes_read[:16]).hex()}")

    def _wrong(self, what: str) -> None:
        if len(self.wrong) < 20:
            self.wrong.append(f"client {self._number} at {time.strftime('%H:%M:%S')}: {what}")

    def _new_key(self) -> str:
        with self._lock:
            number = int(self._counters[self._number])
            self._counters[self._number] = number + 1
        return self._key(self._number, number)

    def _some_key(self, own: bool = False) -> str:
        """A key that was put lately by a client of the same tenant, perhaps."""
        client = self._number if own else self._rng.choice(self._tenant_mates)
        newest = int(self._counters[client])
        return self._key(client, max(0, newest - 1 - int(self._rng.expovariate(1 / 20))))

    def _key(self, client: int, number: int) -> str:
        return f"soak/{client}/{number}"


def fill(store: Any, number: int) -> None:
    """Puts so many small values that the client's table of places and the master's of changes are as full as they get.

    What grows after that is no table on its way to its bound. Nobody asks for these keys again.
    """
    for first in range(0, MAX_LOCATIONS, _FILL_KEYS):
        keys = (f"fill/{number}/{first + n}" for n in range(_FILL_KEYS))
        for status in store.put_many([(key, bytes(LEAST_BYTES)) for key in keys]):
            if status.error is not None and not isinstance(status.error, MAY_SAY):
                raise status.error


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    settings["lock"] = threading.Lock()
    if settings["is_asyncio"]:
        store: Any = AioCalls(settings)
    else:
        store = tanghulu.connect(settings["master"], **_options(settings))
    if settings["fill"]:
        fill(store, settings["number"])
    clients = [SoakClient(store, settings, thread) for thread in range(settings["threads"])]
    stopping = threading.Event()
    threads = [threading.Thread(target=each.run, args=(stopping,)) for each in clients]
    for thread in threads:
        thread.start()
    _say(event="connected")
    sys.stdin.readline()
    stopping.set()
    for thread in threads:
        thread.join()
    gc.collect()
    store.close()
    _say(
        event="closed",
        done=sum((each.done for each in clients), Counter()),
        said=sum((each.said for each in clients), Counter()),
        wrong=[what for each in clients for what in each.wrong],
        longest_s=max(each.longest_s for each in clients),
    )
    sys.stdin.read()


if __name__ == "__main__":
    assert Path("/proc/self").exists(), "the soak looks at processes the way Linux shows them"
    main()
