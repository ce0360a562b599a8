"""The memory of vLLM's cache, on a CPU or a GPU, as the source and target of transfers.

Needs torch and nothing of vLLM. In the store a block is its layers' bytes side by side, in the order of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from tanghulu.engines.common.requests import Block
from tanghulu.engines.common.transfers import BlockMemory, HostMemory, Wait, num_leading
from tanghulu.errors import ConfigError
from tanghulu.store.client.block_store import BlockStore
from tanghulu.transfer_engine.gpu.mover import BlockMover
from tanghulu.transfer_engine.gpu.staging import MIB, DeviceBlocks, DeviceCopier, StagingRing, make_copier
from tanghulu.types import ChunkKey

#: Bytes of a ring of pinned memory, which has at least two blocks. The mover uses no more of it in a shareable call.
_RING_BYTES = 8 * MIB
#: Further threads, with a ring each, that share in loads and saves: one thread copies at a fraction of the link's rate.
_NUM_HELPERS = 4

Keys = Callable[[Sequence[bytes]], list[ChunkKey]]


def memory_of(kv_caches: Mapping[str, torch.Tensor], num_blocks: int, keys: Keys, num_threads: int) -> BlockMemory:
    """Return the memory of the cache's layers; ``num_threads`` transfers of a GPU's blocks may run at once.

    Raises ConfigError for layers on several devices, or whose blocks are scattered.
    """
    parts = [part for name, cache in kv_caches.items() for part in parts_of_blocks(name, cache, num_blocks)]
    devices = sorted({str(part.device) for part in parts})
    if len(devices) != 1:
        raise ConfigError(f"the cache's layers are on {', '.join(devices)}; this connector needs one device per rank")
    if parts[0].device.type == "cpu":
        arrays = [part.numpy() for part in parts]
        return HostMemory(keys, lambda block_id: [array[block_id] for array in arrays])
    device = parts[0].device
    return DeviceMemory(
        keys, parts, num_threads, lambda: make_copier(device, settled=True), partial(record_event, device)
    )


def parts_of_blocks(name: str, cache: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """Return a layer's memory as tensors uint8 [blocks, bytes]: one, or one for each plane of the outermost dimension.

    vLLM shows a layer as [blocks, heads, tokens, content] over memory in the order of its layout, in which a block is
    one run of memory (LBNHC, LBHNC, BLNHC, BLHNC) or one for each head (LHBNC, BHLNC). With planes of K and V, [2,
    blocks, …], it is one for each. Raises ConfigError for anything else.
    """
    by_block = cache.transpose(0, 1) if cache.shape[:2] == (2, num_blocks) else cache
    if by_block.shape[0] == num_blocks and cache.dim() > 2:
        by_block = by_block.permute(0, *sorted(range(1, cache.dim()), key=by_block.stride, reverse=True))
        for planes in ((by_block,), by_block.unbind(1)):
            if planes[0][0].is_contiguous():
                return [plane.flatten(1).view(torch.uint8) for plane in planes]
    raise ConfigError(
        f"layer {name} has shape {tuple(cache.shape)} and strides {cache.stride()}, where each of {num_blocks} blocks "
        "must be contiguous; set VLLM_KV_CACHE_LAYOUT=LBNHC, and --block-size to what the attention backend does not "
        "split"
    )


def record_event(device: torch.device) -> Wait:
    """Record an event behind all that is queued on the current stream of ``device``; return the wait for it."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))

    def wait() -> None:
        with torch.cuda.device(device):  # a new thread's is the first GPU, which is another rank's
            event.synchronize()

    return wait


class DeviceMemory(BlockMemory):
    """Blocks on a GPU, which pass through rings of pinned memory; `parts_of_blocks` makes ``parts``.

    The rings' copies have streams of their own, which wait for no computation (``make_copier``): each transfer waits
    for its event (``record``) in its own thread.
    """

    def __init__(
        self,
        keys: Keys,
        parts: Sequence[torch.Tensor],
        num_threads: int,
        make_copier: Callable[[], DeviceCopier],
        record: Callable[[], Wait],
    ) -> None:
        super().__init__(keys)
        blocks = DeviceBlocks(parts)
        ring_bytes = max(_RING_BYTES, 2 * blocks.block_bytes)
        rings = [StagingRing(parts[0].device, ring_bytes, make_copier()) for _ in range(num_threads + _NUM_HELPERS)]
        self._mover = BlockMover(blocks, rings[:num_threads], rings[num_threads:])
        self._record = record

    def mark(self) -> Wait:
        return self._record()

    def load(self, store: BlockStore, blocks: Sequence[Block], until_s: float, wait: Wait) -> int:
        keys = self.keys_of(blocks)

        def move(at: int, buffers: Sequence[memoryview]) -> int:
            errors = store.load(keys[at : at + len(buffers)], buffers, until_s)
            wait()  # after reading the store, which needs no block
            return num_leading(errors)

        return self._mover.fill([each.block_id for each in blocks], move, shareable=True)

    def save(self, store: BlockStore, blocks: Sequence[Block], wait: Wait) -> None:
        keys = self.keys_of(blocks)
        wait()
        self._mover.drain(
            [each.block_id for each in blocks],
            lambda at, buffers: num_leading(store.write(keys[at : at + len(buffers)], buffers)),
            shareable=True,
        )

    def close(self) -> None:
        self._mover.close()
