"""TanghuluConnector with the blocks of a CPU's cache on the way of a GPU's: through rings, with late copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tanghulu.engines.vllm import connector
from tanghulu.engines.vllm.cache_memory import DeviceMemory, Keys, parts_of_blocks
from tests.transfer_engine.gpu.late_copier import LateCopier


def memory_of(kv_caches: Mapping[str, torch.Tensor], num_blocks: int, keys: Keys, num_threads: int) -> DeviceMemory:
    parts = [part for name, cache in kv_caches.items() for part in parts_of_blocks(name, cache, num_blocks)]
    return DeviceMemory(keys, parts, num_threads, LateCopier, lambda: lambda: None)


class RingedConnector(connector.TanghuluConnector):
    """The same under another name; a process that imports it has no other."""


connector.memory_of = memory_of
