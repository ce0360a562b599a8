"""SGLang's own controller and host pools around the connector, without an engine; runs in SGLang's environment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel

LAYERS, HEADS, HEAD_DIM = 6, 8, 64
PAGE_TOKENS = 8  # with float32: pages of 192 KiB
NUM_PAGES = 16
ADAPTER = {
    "backend_name": "tanghulu",
    "module_path": "tanghulu.engines.sglang.hicache",
    "class_name": "TanghuluHiCache",
}


class Device:
    """As much of a device's pool as attaching asks for."""

    device = torch.device("cpu")


class MlaDevice(MLATokenToKVPool):
    """The same of a model whose ranks all have the same KV."""

    def __init__(self) -> None:
        """Nothing is allocated."""


def host_pool(layout: str = "page_first", dtype: torch.dtype = torch.float32) -> MHATokenToKVPoolHost:
    """One of SGLang's pools of host memory, filled with noise."""
    layers = [tuple(torch.zeros(1, HEADS, HEAD_DIM, dtype=dtype) for _ in range(LAYERS)) for _ in range(2)]
    addresses = [torch.tensor([each.data_ptr() for each in part], dtype=torch.uint64) for part in layers]
    buffers = KVBuffers(
        k=layers[0], v=layers[1], k_data_ptrs=addresses[0], v_data_ptrs=addresses[1], layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE_TOKENS,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        dtype=dtype,
        device=Device.device,
    )
    sizes = {"device_capacity_tokens": 1, "host_token_capacity": NUM_PAGES * PAGE_TOKENS}
    # Else SGLang wants 10 GiB of the machine left free, which says nothing of a pool of a few MiB.
    with host_memory_budget_scope(1 << 30):
        pool = MHATokenToKVPoolHost(
            info, 1.0, 0, PAGE_TOKENS, layout, pin_memory=False, start_layer=0, end_layer=LAYERS, **sizes
        )
    pool.kv_buffer.normal_()
    return pool


@contextmanager
def attached(
    pool: Any,
    master: str,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: Any = None,
    backend: str = "dynamic",
    **extra: Any,
) -> Iterator[HiCacheController]:
    """A controller with the store behind ``pool``, its four threads running; its tensor rank is as given.

    ``backend``: one of SGLang's own, which reads ``extra`` alone.
    """
    controller = HiCacheController.__new__(HiCacheController)
    controller.tp_group = controller.attn_cp_group = controller.attn_tp_group = controller.pp_group = None
    controller.mem_pool_host = controller.storage_host_pool = pool
    controller.mem_pool_device, controller.page_size = device or Device(), pool.page_size
    controller.host_memory_mode, controller.enable_storage_metrics = "cache", True
    controller.enable_storage, controller.storage_stop_event = False, threading.Event()
    controller.prefetch_hits_sync_groups = controller.prefetch_completion_sync_groups = []
    ranks = {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": 0, "pp_size": 1}
    with ExitStack() as stack:
        stack.enter_context(get_parallel().override(**ranks, attn_dcp_size=1, attn_dcp_rank=0))
        options = {**ADAPTER, "interface_v1": 1, "master": master, **extra} if backend == "dynamic" else extra
        controller.attach_storage_backend(backend, model_name="org/model", storage_backend_extra_config=options)
        try:
            yield controller
        finally:
            controller.detach_storage_backend()


def hashes_of(controller: HiCacheController, tokens: list[int]) -> list[str]:
    """SGLang's names of the pages of a prompt."""
    operation = PrefetchOperation("names", tokens)
    backend, controller.storage_backend = controller.storage_backend, _Everything()
    try:
        return controller._storage_hit_query(operation)[0]
    finally:
        controller.storage_backend = backend


class _Everything:
    """A store that has all."""

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return len(keys)


def indices_of(pages: list[int]) -> torch.Tensor:
    """The places of the tokens of ``pages``."""
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


def save(controller: HiCacheController, tokens: list[int], pages: list[int]) -> int:
    """Back up ``pages`` as those of the prompt ``tokens``; how many tokens SGLang counts as saved."""
    operation = StorageOperation(indices_of(pages), tokens, hash_value=hashes_of(controller, tokens))
    controller._page_backup(operation)
    return operation.completed_tokens


def find(controller: HiCacheController, tokens: list[int]) -> list[str]:
    """The names of the pages of the prompt that SGLang would prefetch."""
    return controller._storage_hit_query(PrefetchOperation("find", tokens))[0]


def load(controller: HiCacheController, names: list[str], pages: list[int]) -> int:
    """Prefetch the pages of these names into ``pages``; how many SGLang counts as loaded."""
    operation = PrefetchOperation("load", [])
    operation.hash_value, operation.host_indices = names, indices_of(pages)
    return controller._page_transfer(operation)


def contents(pool: Any, page: int) -> torch.Tensor:
    """The bytes of a page, whatever the layout."""
    return pool.get_data_page(page * PAGE_TOKENS).clone()
