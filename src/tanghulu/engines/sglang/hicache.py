"""``TanghuluHiCache``: the class loaded by SGLang's ``--hicache-storage-backend dynamic``.

The class translates SGLang's pages into keys and memory, and its three generations of calls into those of the store.
They come from threads of its controller, one for queries, one for loads and one for saves, and each ends within a
deadline; any failure of the store is a miss. docs/engines/sglang.md explains its use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from prometheus_client import Counter, Gauge
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from tanghulu.engines.common.names import facts_of_model
from tanghulu.engines.common.options import StoreOptions
from tanghulu.engines.sglang.hits import HitPolicy, PoolPages, leading, usable_prefix
from tanghulu.engines.sglang.pools import KV, PagePool, memory_of
from tanghulu.errors import ConfigError

#: Transfers remembered until SGLang collects them.
_MAX_TRANSFERS = 1024
_RANK = ("tp_rank", "pp_rank")
_CALLS = Counter(
    "tanghulu_hicache_outcomes",
    "lookups, loads and saves of SGLang's pages that failed as a whole, and keys by what came of them",
    ("outcome", *_RANK),
)
_OPEN = Gauge(
    "tanghulu_hicache_store_open",
    "1 while the store is used, 0 while it is left alone because it did not answer",
    _RANK,
    multiprocess_mode="mostrecent",
)


class Rates:
    """The pages of the last transfers, and their rates in GB/s; the oldest are dropped if never collected."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transfers: deque[tuple[int, float]] = deque(maxlen=_MAX_TRANSFERS)

    def add(self, num_pages: int, num_bytes: int, seconds: float) -> None:
        """Note a transfer; one that moved nothing has no rate."""
        if num_pages and seconds > 0:
            with self._lock:
                self._transfers.append((num_pages, num_bytes / seconds / 1e9))

    def take(self) -> tuple[list[int], list[float]]:
        """Return the pages and the rates since the last call."""
        with self._lock:
            taken, self._transfers = self._transfers, deque(maxlen=_MAX_TRANSFERS)
        return [num_pages for num_pages, _ in taken], [rate for _, rate in taken]


class StoreMetrics:
    """Exports one rank's counts to this process's Prometheus registry, which SGLang's /metrics includes."""

    def __init__(self, tp_rank: int, pp_rank: int) -> None:
        self._rank = (str(tp_rank), str(pp_rank))
        self._shown: Counts[str] = Counts()

    def show(self, counts: Mapping[str, int], is_open: bool) -> None:
        """Add the counts since the last call."""
        for outcome, total in list(counts.items()):
            _CALLS.labels(outcome, *self._rank).inc(total - self._shown[outcome])
            self._shown[outcome] = total
        _OPEN.labels(*self._rank).set(is_open)


_log = logging.getLogger(__name__)

#: SGLang's own arguments that change the bytes of its cache without appearing in any pool.
_ARGUMENTS = (
    *("kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args"),
    *("speculative_draft_model_path", "speculative_draft_model_revision"),
)
#: Keys read by SGLang itself from the same table.
SGLANGS_OWN = frozenset(
    {
        *("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "file_storage_path"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"),
        "hicache_storage_pass_prefix_keys",
    }
)


@dataclass(frozen=True, kw_only=True)
class HiCacheOptions(StoreOptions):
    """See docs/engines/sglang.md; the names are those of the keys beside SGLang's own."""

    lookup_deadline_s: float = 1.0

    @classmethod
    def of_sglang(cls, extra_config: Mapping[str, Any]) -> Self:
        """Return our part of the table; raises ConfigError naming an unknown key, or the fault of a value."""
        options = cls.parse({name: value for name, value in extra_config.items() if name not in SGLANGS_OWN})
        if not extra_config.get("interface_v1"):
            _log.warning(
                'tanghulu: SGLang copies every page once more; to avoid that, add "interface_v1": 1 to '
                "--hicache-storage-backend-extra-config"
            )
        return options


class TanghuluHiCache(HiCacheStorage):
    """See SGLang's interface. ``storage_config.extra_config`` as in ``HiCacheOptions``; raises ConfigError."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        options = HiCacheOptions.of_sglang(storage_config.extra_config or {})
        self._config, self._options = storage_config, options
        # Pages that are copied have their bytes in another order than pages moved in place.
        copied = not (storage_config.extra_config or {}).get("interface_v1")
        self._facts: dict[str, Any] = {"engine": "sglang", "namespace": options.namespace, "copied": copied}
        self._pools: dict[str, PagePool] = {}
        self._store = options.open_store()
        self._loads, self._saves = Rates(), Rates()
        self._metrics: StoreMetrics | None = None
        if storage_config.enable_storage_metrics:
            self._metrics = StoreMetrics(storage_config.tp_rank, storage_config.pp_rank)

    # --- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the pool of the prompt's pages; raises ConfigError if they cannot be accessed in place."""
        super().register_mem_pool_host(mem_pool_host)
        tag = getattr(mem_pool_host, "storage_format_tag", None)
        self._facts |= self._facts_of_server(self._config.model_name, tag)
        pool = self._take(KV, mem_pool_host)
        _log.info(
            "tanghulu: pages are kept at %s as %s..., %d bytes", self._options.master, pool.prefix, pool.page_bytes
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a further pool of a hybrid model, or the first one again by its name."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._take(_text(host_pool_name), host_pool)

    def _take(self, name: str, host_pool: Any) -> PagePool:
        pool = self._pools[name] = PagePool(name, host_pool, self._config, self._facts)
        return pool

    def _facts_of_server(self, model_name: str | None, tag: str | None) -> dict[str, Any]:
        arguments = _server_arguments()
        model = arguments.get("model_path") or (model_name or "").removesuffix(f"-{tag}")
        if not model and not self._options.namespace:
            raise ConfigError(
                'SGLang reports no model; add "namespace": "<model>" to --hicache-storage-backend-extra-config'
            )
        facts = {name: str(arguments[name]) for name in _ARGUMENTS if arguments.get(name)}
        return {"arguments": facts, **facts_of_model(model, arguments.get("revision"))}

    # --- zero copy

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return the number of leading pages that are stored."""
        pool = self._pools[KV]
        return leading(self._has(pool.keys(keys))) if pool.has_memory else len(keys)

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill the pages at ``host_indices``; returns for each whether it has all its bytes."""
        return self._move_pages(self._pools[KV], keys, host_indices, loads=True)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Put the pages at ``host_indices``; returns for each whether it is now in the store, visible to all."""
        return self._move_pages(self._pools[KV], keys, host_indices, loads=False)

    # --- the pools of hybrid models

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return the length of the prefix stored in all pools, with one query."""
        pool, transfers = self._pools[KV], list(pool_transfers or ())
        names = [pool.keys(keys) if pool.has_memory else []]
        policies = [HitPolicy.of(transfer.hit_policy) for transfer in transfers]
        for transfer, policy in zip(transfers, policies, strict=True):
            beside = self._pools.get(_text(transfer.name))
            pages = group_keys(keys, transfer) if policy is HitPolicy.BLOCK_GROUPS else keys
            names.append(beside.keys(pages) if beside is not None else [])
        there = iter(self._has([name for part in names for name in part]))
        kv, *others = [[next(there) for _ in part] for part in names]
        num_kv_pages = leading(kv) if pool.has_memory else len(keys)
        beside_kv = [
            PoolPages(
                _text(transfer.name),
                policy,
                found or [False] * len(keys),
                max(1, len(transfer.keys or ())),
                getattr(transfer, "block_pages", 0),
                getattr(transfer, "group_pages", 0) or 1,
            )
            for transfer, policy, found in zip(transfers, policies, others, strict=True)
        ]
        prefix = usable_prefix(num_kv_pages, beside_kv)
        hits = {PoolName.KV: num_kv_pages, **{each.name: prefix.pools[_text(each.name)] for each in transfers}}
        nonzero = {name: num_pages for name, num_pages in hits.items() if num_pages}
        return PoolTransferResult(prefix.num_pages, nonzero, prefix.restorable)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Do the same as ``batch_get_v1`` for several pools."""
        return {each.name: self._move_in(each, loads=True) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Do the same as ``batch_set_v1`` for several pools."""
        return {each.name: self._move_in(each, loads=False) for each in transfers}

    # --- one page or tensor at a time, copied by SGLang; without "interface_v1"

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Read each page into its tensor; None for a missing page."""
        if target_locations is None or any(each is None for each in target_locations):
            return [None] * len(keys)
        good = self._move(self._pools[KV], keys, [[memory_of(each)] for each in target_locations], loads=True)
        return [target if loaded else None for target, loaded in zip(target_locations, good, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Put each tensor; returns whether all are stored now."""
        if values is None:
            return False
        whole = [each.contiguous() for each in values]
        return all(self._move(self._pools[KV], keys, [[memory_of(each)] for each in whole], loads=False))

    # --- life

    def clear(self) -> None:
        """Remove the pages of servers with this one's fingerprint, and no others."""
        for prefix in {pool.prefix for pool in list(self._pools.values())}:
            if not self._store.remove_below(prefix):
                _log.warning("tanghulu: the store did not remove all pages below %s; clear the cache again", prefix)

    def get_stats(self) -> Any:
        """Return what was moved since the last call, in the form of SGLang's metrics; called if metrics are enabled."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        if self._metrics is not None:
            self._metrics.show(self._store.counts, self._store.is_healthy)
        (load_pages, load_rates), (save_pages, save_rates) = self._loads.take(), self._saves.take()
        return StorageMetrics(load_pages, save_pages, load_rates, save_rates)

    def close(self) -> None:
        """Close the client; calls in progress end with misses."""
        self._store.close()

    # --- the store

    def _move_in(self, transfer: Any, *, loads: bool) -> list[bool]:
        keys, pool = list(transfer.keys or ()), self._pools.get(_text(transfer.name))
        if pool is None:
            _log.error(
                "tanghulu: SGLang has not registered its pool %s, so its pages are not moved", _text(transfer.name)
            )
            return [False] * len(keys)
        return self._move_pages(pool, keys, transfer.host_indices, loads=loads)

    def _move_pages(self, pool: PagePool, keys: Sequence[str], indices: Any, *, loads: bool) -> list[bool]:
        if not pool.has_memory or not keys or not (loads or pool.is_writer):
            return [True] * len(keys)  # of those to save, another rank puts the same bytes
        buffers = pool.buffers(indices, len(keys))
        return [False] * len(keys) if buffers is None else self._move(pool, keys, buffers, loads=loads)

    def _move(self, pool: PagePool, keys: Sequence[str], buffers: Sequence[Any], *, loads: bool) -> list[bool]:
        """Load or save the pages; return for each whether it was."""
        began_s, names = time.monotonic(), pool.keys(keys)
        if loads:
            rates, good = self._loads, [error is None for error in self._store.load(names, buffers)]
        else:
            rates, good = self._saves, self._store.save(names, buffers)
        rates.add(sum(good), sum(good) * pool.page_bytes, time.monotonic() - began_s)
        return good

    def _has(self, keys: Sequence[str]) -> list[bool]:
        return self._store.has(keys, self._options.lookup_deadline_s)


def group_keys(keys: Sequence[str], transfer: Any) -> list[str]:
    """Return the pages that hold a second form of the prompt's blocks, group by group.

    SGLang may name them (``transfer.keys``); else they have the names of the last pages of each block.
    """
    if transfer.keys:
        return list(transfer.keys)
    block, group = transfer.block_pages, transfer.group_pages
    if not 0 < group <= block:
        return []
    return [key for end in range(block, len(keys) + 1, block) for key in keys[end - group : end]]


def _text(name: Any) -> str:
    """Return a pool's name: SGLang's are members of an Enum, whose values are text."""
    return str(getattr(name, "value", name))


def _server_arguments() -> dict[str, Any]:
    """Return SGLang's own arguments, if a server runs in this process."""
    try:
        from sglang.srt.runtime_context import get_server_args

        arguments = get_server_args()
    except (ImportError, RuntimeError, ValueError):
        return {}
    names = ("model_path", "revision", *_ARGUMENTS)
    return {name: getattr(arguments, name, None) for name in names}
