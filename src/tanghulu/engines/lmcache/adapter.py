"""``TanghuluL2Adapter``: the plugin loaded by LMCache's server as its second level.

The class translates LMCache's keys and memory objects into the store's, and its tasks into calls in threads. Lookups
lock nothing in the store: between lookup and load a chunk may be evicted; its load then fails, as LMCache allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from tanghulu.engines.common.cache_tasks import Tasks
from tanghulu.engines.common.options import LevelOptions


class TanghuluL2Adapter(L2AdapterInterface):
    """See LMCache's interface. ``adapter_params`` as in ``LevelOptions``; raises ConfigError for others.

    Lookups, loads and stores each have threads and a descriptor; two threads of LMCache's call.
    """

    def __init__(self, adapter_params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        options = LevelOptions.parse(adapter_params)
        self._options, self._store = options, options.open_store()
        self._signals = [create_event_notifier() for _ in range(3)]
        stored, found, loaded = self._signals
        self._stores: Tasks[L2StoreResult] = Tasks("store", 1, stored.notify, options.max_pending_bytes)
        self._lookups: Tasks[Bitmap] = Tasks("lookup", 1, found.notify)
        self._loads: Tasks[Bitmap] = Tasks("load", options.threads, loaded.notify)

    def get_store_event_fd(self) -> int:
        return int(self._signals[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._signals[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._signals[2].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Put the objects; refused as a whole while more than ``save_pending_bytes`` wait."""
        sizes = [each.get_size() for each in objects]
        return self._stores.begin(lambda: self._put(keys, objects, sizes), L2StoreResult(False, 0), sum(sizes))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        return self._lookups.begin(lambda: self._find(keys), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: lookups lock nothing."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        until_s = self._store.load_until_s()
        return self._loads.begin(lambda: self._get(keys, objects, until_s), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        removed = self._store.remove(self._names(keys))
        gone = [key for key, was_there in zip(keys, removed, strict=True) if was_there]
        # Sizes are the store's business, which evicts by itself: they are not counted here.
        self._notify_keys_deleted(gone, [0] * len(gone))

    def report_status(self) -> dict[str, Any]:
        return {
            "is_healthy": self._store.is_healthy,
            "type": type(self).__name__,
            "master": self._options.master,
            "stores_under_way": self._stores.num_open,
            "stores_shed": self._stores.num_shed,
            "loads_under_way": self._loads.num_open,
            **self._store.counts,
        }

    def close(self) -> None:
        """Wait for the tasks in progress, until their deadlines at most, and close."""
        for tasks in (self._lookups, self._loads, self._stores):
            tasks.close()
        self._store.close()
        for signal in self._signals:
            signal.close()

    def _put(self, keys: Sequence[Any], objects: Sequence[Any], sizes: Sequence[int]) -> L2StoreResult:
        good = self._store.save(self._names(keys), [each.byte_array for each in objects])
        there = [key for key, stored in zip(keys, good, strict=True) if stored]
        if there:
            self._notify_keys_stored(there, [0] * len(there))
        num_bytes = sum(size for size, stored in zip(sizes, good, strict=True) if stored)
        return L2StoreResult(all(good), num_bytes)

    def _find(self, keys: Sequence[Any]) -> Bitmap:
        return _bitmap(self._store.has(self._names(keys), self._options.lookup_deadline_s))

    def _get(self, keys: Sequence[Any], objects: Sequence[Any], until_s: float) -> Bitmap:
        errors = self._store.load(self._names(keys), [each.byte_array for each in objects], until_s)
        good = [error is None for error in errors]
        self._notify_keys_accessed([key for key, loaded in zip(keys, good, strict=True) if loaded])
        return _bitmap(good)

    def _names(self, keys: Sequence[Any]) -> list[str]:
        return [key_of(key, self._options.namespace) for key in keys]


def key_of(key: Any, namespace: str) -> str:
    """Return the store's key of LMCache's ``ObjectKey``; none of its parts contains @."""
    salt = f"@{key.cache_salt}" if key.cache_salt else ""
    return f"lmcache/{namespace}/{key.chunk_hash.hex()}@{key.kv_rank:08x}@{key.object_group_id}@{key.model_name}{salt}"


def _bitmap(bits: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(bits))
    bitmap.batched_set([at for at, bit in enumerate(bits) if bit])
    return bitmap
