"""Three stores behind one small interface, as a user of each would call it from Python.

``put_from`` and ``get_into`` name pieces of memory that was registered before; a redis client has no such calls, so it
sends the piece and copies the answer. ``get`` returns what the store's plain get returns: tanghulu a Chunk (over shm a
view of the store's own memory, verified by checksum), Mooncake and redis bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

from memory import Memory


class Store(Protocol):
    """One client. Every call raises if it failed; ``peek`` shows what ``get`` returned, ``drop`` ends it."""

    def register(self, memory: Memory) -> None: ...
    def put(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> Any: ...
    def peek(self, got: Any) -> memoryview: ...
    def drop(self, got: Any) -> None: ...
    def put_from(self, key: str, piece: int) -> None: ...
    def get_into(self, key: str, piece: int) -> None: ...
    def put_many(self, keys: Sequence[str], values: Sequence[bytes]) -> None: ...
    def get_many(self, keys: Sequence[str]) -> Sequence[Any]: ...
    def put_many_from(self, keys: Sequence[str], pieces: Sequence[int]) -> None: ...
    def get_many_into(self, keys: Sequence[str], pieces: Sequence[int]) -> None: ...
    def exists(self, key: str) -> bool: ...
    def exists_many(self, keys: Sequence[str]) -> Sequence[bool]: ...
    def remove(self, keys: Sequence[str]) -> None: ...


class Failed(Exception):
    """A store said no."""


class Tanghulu:
    """``tanghulu.connect``."""

    def __init__(self, master: str, transport: str | None) -> None:
        import tanghulu

        self._client = tanghulu.connect(master, transport=transport, deadline_s=30)
        self._pieces: list[Any] = []

    def register(self, memory: Memory) -> None:
        self._pieces = [self._client.register(memory.piece(n)) for n in range(memory.num_pieces)]

    def put(self, key: str, value: bytes) -> None:
        self._client.put(key, value)

    def get(self, key: str) -> Any:
        return self._client.get(key)

    def peek(self, got: Any) -> memoryview:
        return memoryview(got.view)

    def drop(self, got: Any) -> None:
        got.close()

    def put_from(self, key: str, piece: int) -> None:
        self._client.put(key, self._pieces[piece])

    def get_into(self, key: str, piece: int) -> None:
        self._client.get_into(key, self._pieces[piece])

    def put_many(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        _all_ok(self._client.put_many(list(zip(keys, values, strict=True))))

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        return self._client.get_many(keys)

    def put_many_from(self, keys: Sequence[str], pieces: Sequence[int]) -> None:
        _all_ok(self._client.put_many([(key, self._pieces[n]) for key, n in zip(keys, pieces, strict=True)]))

    def get_many_into(self, keys: Sequence[str], pieces: Sequence[int]) -> None:
        for size in self._client.get_many_into(keys, [self._pieces[n] for n in pieces]):
            if isinstance(size, Exception):
                raise size

    def exists(self, key: str) -> bool:
        return bool(self._client.exists(key))

    def exists_many(self, keys: Sequence[str]) -> Sequence[bool]:
        return self._client.exists_many(keys)

    def remove(self, keys: Sequence[str]) -> None:
        self._client.remove_many(keys)


def _all_ok(statuses: Sequence[Any]) -> None:
    for status in statuses:
        if status.error is not None:
            raise status.error


class Mooncake:
    """``mooncake.store.MooncakeDistributedStore``, protocol tcp."""

    def __init__(self, host: str, metadata: str, master: str, segment_bytes: int, buffer_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        _zero(self._store.setup(host, metadata, segment_bytes, buffer_bytes, "tcp", "", master))
        self._addresses: list[int] = []
        self._size = 0

    def register(self, memory: Memory) -> None:
        _zero(self._store.register_buffer(memory.address, memory.num_pieces * memory.piece_bytes))
        self._size = memory.piece_bytes
        self._addresses = [memory.address + n * self._size for n in range(memory.num_pieces)]

    def put(self, key: str, value: bytes) -> None:
        _zero(self._store.put(key, value))

    def get(self, key: str) -> Any:
        got = self._store.get(key)
        if not got:  # what it answers to a key that is not there, and to any failure
            raise Failed(f"get of {key} came back empty")
        return got

    def peek(self, got: Any) -> memoryview:
        return memoryview(got)

    def drop(self, got: Any) -> None:
        pass

    def put_from(self, key: str, piece: int) -> None:
        _zero(self._store.put_from(key, self._addresses[piece], self._size))

    def get_into(self, key: str, piece: int) -> None:
        self._all_bytes([self._store.get_into(key, self._addresses[piece], self._size)])

    def put_many(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        _zero(self._store.put_batch(keys, values))

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        return self._store.get_batch(keys)

    def put_many_from(self, keys: Sequence[str], pieces: Sequence[int]) -> None:
        for code in self._store.batch_put_from(keys, [self._addresses[n] for n in pieces], [self._size] * len(keys)):
            _zero(code)

    def get_many_into(self, keys: Sequence[str], pieces: Sequence[int]) -> None:
        addresses = [self._addresses[n] for n in pieces]
        self._all_bytes(self._store.batch_get_into(keys, addresses, [self._size] * len(keys)))

    def exists(self, key: str) -> bool:
        return bool(self._store.is_exist(key) == 1)

    def exists_many(self, keys: Sequence[str]) -> Sequence[bool]:
        return [found == 1 for found in self._store.batch_is_exist(keys)]

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.remove(key, True)

    def _all_bytes(self, sizes: Sequence[int]) -> None:
        if any(size != self._size for size in sizes):
            raise Failed(f"wanted {self._size} bytes each, got {sizes}")


def _zero(code: int) -> None:
    if code != 0:
        raise Failed(f"code {code}")


class Redis:
    """``redis.Redis`` over a Unix socket, the fastest that it offers on one host."""

    def __init__(self, path: str) -> None:
        import redis

        self._client = redis.Redis(unix_socket_path=path)
        self._client.ping()
        self._memory: Memory | None = None

    def register(self, memory: Memory) -> None:
        self._memory = memory

    def put(self, key: str, value: bytes) -> None:
        self._client.set(key, value)

    def get(self, key: str) -> Any:
        got = self._client.get(key)
        if got is None:
            raise Failed(f"{key} is not there")
        return got

    def peek(self, got: Any) -> memoryview:
        return memoryview(got)

    def drop(self, got: Any) -> None:
        pass

    def put_from(self, key: str, piece: int) -> None:
        assert self._memory is not None
        self._client.set(key, self._memory.piece(piece))

    def get_into(self, key: str, piece: int) -> None:
        self._take(self.get(key), piece)

    def put_many(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._client.mset(dict(zip(keys, values, strict=True)))

    def get_many(self, keys: Sequence[str]) -> Sequence[Any]:
        return list(self._client.mget(keys))

    def put_many_from(self, keys: Sequence[str], pieces: Sequence[int]) -> None:
        assert self._memory is not None
        self.put_many(keys, [self._memory.piece(n) for n in pieces])

    def get_many_into(self, keys: Sequence[str], pieces: Sequence[int]) -> None:
        for value, piece in zip(self.get_many(keys), pieces, strict=True):
            self._take(value, piece)

    def exists(self, key: str) -> bool:
        return bool(self._client.exists(key))

    def exists_many(self, keys: Sequence[str]) -> Sequence[bool]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return [bool(found) for found in pipeline.execute()]

    def remove(self, keys: Sequence[str]) -> None:
        self._client.delete(*keys)

    def _take(self, value: bytes, piece: int) -> None:
        assert self._memory is not None
        ctypes.memmove(self._memory.address + piece * self._memory.piece_bytes, value, len(value))


STORES = {"tanghulu": Tanghulu, "mooncake": Mooncake, "redis": Redis}
