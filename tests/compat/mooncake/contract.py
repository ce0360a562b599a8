"""The contract of ``mooncake.store``, as cases that run on any implementation of it.

Imports nothing but the standard library: as a program it runs in the environment of the original (or of an engine),
sets a store up by the JSON of its first argument, and prints the outcome of each case as JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BIG = 3 << 20


class Memory:
    """Registered memory of a caller: ``source`` has 0, 1, 2, …, ``target`` is for reads."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._arrays = [(ctypes.c_uint8 * BIG)(), (ctypes.c_uint8 * BIG)()]
        self.source, self.target = map(ctypes.addressof, self._arrays)
        self._arrays[0][:256] = list(range(256))
        for array in self._arrays:
            assert store.register_buffer(ctypes.addressof(array), BIG) == 0

    def read(self, count: int) -> list[int]:
        return self._arrays[1][:count]

    def close(self) -> None:
        for array in self._arrays:
            assert self.store.unregister_buffer(ctypes.addressof(array)) == 0


@dataclass(frozen=True)
class Case:
    """``run`` on a store; ``original``: what the original answers where ours differs on purpose."""

    name: str
    run: Callable[[Any, Memory, str], Any]
    expected: Any
    original: Any = field(default=None)


def _raises(call: Callable[[], Any]) -> str:
    try:
        return repr(call())
    except Exception as error:  # noqa: BLE001 - its kind is the outcome
        return type(error).__name__


def _handle(store: Any, key: str) -> list[Any]:
    assert store.put(key, b"abc") == 0
    handle = store.get_buffer(key)
    view = memoryview(handle)
    view[0] = 122
    return [handle.size(), len(handle), view.format, view.readonly, bytes(handle).decode(), handle.ptr() > 0]


def _multi(store: Any, m: Memory, key: str, room: list[int]) -> list[Any]:
    put = store.batch_put_from_multi_buffers([key], [[m.source + 10, m.source + 100]], [[4, 6]])
    at = [m.target + sum(room[:index]) for index in range(len(room))]
    return [put, store.batch_get_into_multi_buffers([key], [at], [room])]


def _replicas(store: Any, key: str) -> list[Any]:
    store.put(key, b"12345")
    (found,) = store.get_replica_desc(key)
    place = found.get_memory_descriptor().buffer_descriptor
    kinds = [found.is_memory_replica(), found.is_disk_replica(), found.is_local_disk_replica()]
    batch = store.batch_get_replica_desc([key, key + "-missing"])
    return [kinds, place.size, bool(place.transport_endpoint), sorted(batch) == [key], "COMPLETE" in str(found.status)]


def _ranges(store: Any, m: Memory, key: str) -> list[Any]:
    store.put_from(key, m.source, 100)
    began = store.batch_get_session_start([key, key + "-missing"])
    got = store.batch_get_into_multi_buffer_ranges([key], [[m.target, m.target + 2]], [[2, 3]], [[50, 10]])
    ended = store.batch_get_session_end([key])
    return [began, got, ended, m.read(5)]


def _upserts(s: Any, m: Memory, k: str) -> list[Any]:
    codes = [s.upsert(k, b"one"), s.upsert(k, b"two"), s.upsert_parts(k + "p", b"a", b"b")]
    codes += [s.upsert_batch([k + "b"], [b"x"]), s.upsert_from(k + "f", m.source, 5)]
    return [codes, s.batch_upsert_from([k + "g"], [m.source], [6]), s.get(k).decode(), s.get_size(k + "g")]


def _overlaps(s: Any, m: Memory) -> list[int]:
    register, source = s.register_buffer, m.source
    return [register(source, BIG), register(source + 5, 10), register(1 << 20, 0), s.unregister_buffer(source + 1)]


def _matching(s: Any, k: str) -> list[Any]:
    s.put_batch([f"{k}-{n}" for n in (1, 2, 33)], [b"a", b"b", b"c"])
    return [s.remove_by_regex(f"^{k}-[0-9]$", True), s.batch_is_exist([f"{k}-1", f"{k}-2", f"{k}-33"])]


CASES = (
    Case("put", lambda s, m, k: s.put(k, b"value"), 0),
    Case("put of an existing key", lambda s, m, k: [s.put(k, b"a"), s.put(k, b"bb"), s.get(k).decode()], [0, 0, "a"]),
    Case("put of nothing", lambda s, m, k: [s.put(k, b""), s.is_exist(k)], [-600, 0]),
    Case("put of text", lambda s, m, k: _raises(lambda: s.put(k, "text")), "TypeError"),
    Case("put of a bytearray", lambda s, m, k: [s.put(k, bytearray(b"xy")), s.get(k).decode()], [0, "xy"]),
    Case("put under bytes", lambda s, m, k: [s.put(k.encode(), b"xy"), s.get(k).decode()], [0, "xy"]),
    Case("put_parts", lambda s, m, k: [s.put_parts(k, b"a", b"bc"), s.get(k).decode()], [0, "abc"]),
    Case("put_batch", lambda s, m, k: [s.put_batch([k, k + "2"], [b"a", b"b"]), s.get(k + "2").decode()], [0, "b"]),
    Case("put_batch of unequal lists", lambda s, m, k: s.put_batch([k, k + "2"], [b"a"]), -600),
    Case("get of a missing key", lambda s, m, k: s.get(k).decode(), ""),
    Case(
        "get_batch",
        lambda s, m, k: [s.put(k, b"a"), [each.decode() for each in s.get_batch([k, k + "no"])]],
        [0, ["a", ""]],
    ),
    Case("a long key", lambda s, m, k: [s.put(k + "y" * 2000, b"a"), s.get(k + "y" * 2000).decode()], [0, "a"]),
    Case("get_buffer", lambda s, m, k: _handle(s, k), [3, 3, "b", False, "zbc", True]),
    Case("get_buffer of a missing key", lambda s, m, k: s.get_buffer(k), None),
    Case(
        "batch_get_buffer",
        lambda s, m, k: [s.put(k, b"a"), [each and each.size() for each in s.batch_get_buffer([k, k + "no"])]],
        [0, [1, None]],
    ),
    Case("is_exist", lambda s, m, k: [s.put(k, b"a"), s.is_exist(k), s.is_exist(k + "no")], [0, 1, 0]),
    Case("is_exist by name", lambda s, m, k: _raises(lambda: s.is_exist(key=k)), "TypeError"),
    Case(
        "batch_is_exist",
        lambda s, m, k: [s.put(k, b"a"), s.batch_is_exist([k + "no", k]), s.batch_is_exist([])],
        [0, [0, 1], []],
    ),
    Case("get_size", lambda s, m, k: [s.put(k, b"abcd"), s.get_size(k), s.get_size(k + "no")], [0, 4, -704]),
    Case("register_buffer again, overlapping, empty, unknown", lambda s, m, k: _overlaps(s, m), [-600] * 4),
    Case("put_from", lambda s, m, k: [s.put_from(k, m.source + 65, 3), s.get(k).decode()], [0, "ABC"]),
    Case(
        "put_from of an existing key", lambda s, m, k: [s.put_from(k, m.source, 3), s.put_from(k, m.source, 4)], [0, 0]
    ),
    Case(
        "batch_put_from", lambda s, m, k: s.batch_put_from([k, k + "2"], [m.source, m.source + 7], [7, BIG - 7]), [0, 0]
    ),
    Case(
        "batch_put_from of unequal lists", lambda s, m, k: s.batch_put_from([k, k + "2"], [m.source], [7]), [-600, -600]
    ),
    Case(
        "get_into",
        lambda s, m, k: [s.put_from(k, m.source, 9), s.get_into(k, m.target, 9), m.read(9)],
        [0, 9, list(range(9))],
    ),
    Case(
        "get_into of a larger buffer", lambda s, m, k: [s.put_from(k, m.source, 9), s.get_into(k, m.target, 50)], [0, 9]
    ),
    Case(
        "get_into of a smaller buffer",
        lambda s, m, k: [s.put_from(k, m.source, 9), s.get_into(k, m.target, 8)],
        [0, -600],
    ),
    Case("get_into of a missing key", lambda s, m, k: s.get_into(k, m.target, 8), -704),
    Case(
        "batch_get_into",
        lambda s, m, k: [s.put_from(k, m.source, BIG), s.batch_get_into([k, k + "no"], [m.target, m.source], [BIG, 1])],
        [0, [BIG, -704]],
    ),
    Case(
        "multi buffers",
        lambda s, m, k: [_multi(s, m, k, [7, 3]), m.read(10)],
        [[[0], [10]], [10, 11, 12, 13, 100, 101, 102, 103, 104, 105]],
    ),
    Case("multi buffers that are too small", lambda s, m, k: _multi(s, m, k, [7, 2]), [[0], [-600]]),
    Case("multi buffers that are too large", lambda s, m, k: _multi(s, m, k, [7, 4]), [[0], [-800]]),
    Case(
        "multi buffers of a missing key",
        lambda s, m, k: s.batch_get_into_multi_buffers([k], [[m.target]], [[1]]),
        [-704],
    ),
    Case("ranges in a session", lambda s, m, k: _ranges(s, m, k), [[0, -704], [5], 0, [50, 51, 10, 11, 12]]),
    Case("upserts", lambda s, m, k: _upserts(s, m, k), [[0, 0, 0, 0, 0], [0], "two", 6]),
    Case("remove", lambda s, m, k: [s.put(k, b"a"), s.remove(k), s.remove(k), s.is_exist(k)], [0, 0, -704, 0]),
    Case(
        "remove of a value read just now",
        lambda s, m, k: [s.put(k, b"a"), s.get(k).decode(), s.remove(k)],
        [0, "a", 0],
        [0, "a", -706],
    ),
    Case("remove by force", lambda s, m, k: [s.put(k, b"a"), s.get(k).decode(), s.remove(k, True)], [0, "a", 0]),
    Case("batch_remove", lambda s, m, k: [s.put(k, b"a"), s.batch_remove([k, k + "no"])], [0, [0, -704]]),
    Case("remove_by_regex", lambda s, m, k: _matching(s, k), [2, [0, 0, 1]]),
    Case("remove_by_regex of a bad one", lambda s, m, k: s.remove_by_regex("("), -600),
    Case("replicas", lambda s, m, k: _replicas(s, k), [[True, False, False], 5, True, True, True]),
    Case("replicas of a missing key", lambda s, m, k: list(s.get_replica_desc(k)), []),
    Case("health_check", lambda s, m, k: s.health_check(), 0),
    Case("remove_all by force", lambda s, m, k: [s.put(k, b"a"), s.remove_all(True) > 0, s.is_exist(k)], [0, True, 0]),
)


def outcome(case: Case, number: int, store: Any, memory: Memory) -> Any:
    """What ``case`` comes to on ``store``, as JSON has it."""
    return json.loads(json.dumps(case.run(store, memory, f"case-{number}")))


def main() -> None:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup(**json.loads(sys.argv[1])) == 0
    memory = Memory(store)
    outcomes = [outcome(case, number, store, memory) for number, case in enumerate(CASES)]
    memory.close()
    print("\n" + json.dumps(outcomes), flush=True)
    store.close()


if __name__ == "__main__":
    main()
