"""SGLang 0.5.23's interface of third levels, as recorded: names, signatures, fields, and nothing behind them.

``install`` puts it where the connector imports it from, so that its unit tests need no SGLang. That the recording is
right is tested in SGLang's environment (test_controller.py).
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

STORAGE = "sglang.srt.mem_cache.hicache_storage"
METRICS = "sglang.srt.observability.metrics_collector"


class PoolName(str, Enum):  # noqa: UP042 - as SGLang has it: their hashes are those of their names
    """Some of the names."""

    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    DRAFT = "draft"


class PoolHitPolicy(str, Enum):  # noqa: UP042
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: PoolName | None = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[Any, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HiCacheStorage:
    """What backends inherit from."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if not hasattr(self, "registered_pools"):
            self.registered_pools: dict[Any, Any] = {}
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self) -> None: ...

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any: ...

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any: ...

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any: ...

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any: ...

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any: ...

    def get(self, key: Any, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    def set(self, key: Any, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    def exists(self, key: Any) -> Any: ...

    def batch_exists(self, keys: Any, extra_info: Any = None) -> Any: ...

    def clear(self) -> None: ...

    def get_stats(self) -> Any: ...


RECORDED = {
    STORAGE: (HiCacheStorage, HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult),
    METRICS: (StorageMetrics,),
}


def install() -> list[str]:
    """Put the interface into ``sys.modules``; the names of the modules that were made."""
    made = []
    for name, kinds in RECORDED.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            part = ".".join(parts[:end])
            if part not in sys.modules:
                sys.modules[part] = ModuleType(part)
                made.append(part)
        for kind in kinds:
            setattr(sys.modules[name], kind.__name__, kind)
    return made


def differences(recorded: type, real: type) -> list[str]:
    """Where ``recorded`` says something of ``real`` that is not so."""
    found = []
    if issubclass(recorded, Enum):
        return [each.name for each in recorded if real.__members__.get(each.name) != each.value]
    if hasattr(recorded, "__dataclass_fields__"):
        ours, theirs = (list(kind.__dataclass_fields__) for kind in (recorded, real))
        found += [] if ours == theirs else [f"fields {ours} are {theirs}"]
    methods = {name for name, each in vars(recorded).items() if inspect.isfunction(each) and not name.startswith("_")}
    for name in sorted(methods):
        ours, theirs = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (recorded, real))
        found += [] if ours == theirs else [f"{name}{ours} is {theirs}"]
    return found
