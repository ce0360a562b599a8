"""vLLM's native offloading where there is no GPU: copies between its cache and its host memory, both here.

vLLM's ``TieringOffloadingSpec`` refuses CPUs, as its copies are CUDA's. All else is vLLM's own: which chunks are kept,
evicted, promoted and cascaded, and how a row of host memory is laid out. Tests and benchmarks name it by
``"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.vllm.cpu_offloading"``.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuCopies(OffloadingWorker):
    """Copies at once; chunks of one block."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region, self._finished = region, list[TransferResult]()
        self._layers = []
        for each in kv_caches.tensors:
            cache = each.tensor.view(-1, each.page_size_bytes)
            self._layers.append((cache, region.create_next_worker_view(each.page_size_bytes)))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, rows in self._layers:
            rows[dst_spec.block_ids] = cache[src_spec.block_ids]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for cache, rows in self._layers:
            cache[dst_spec.block_ids] = rows[src_spec.block_ids]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: all copies were made when they were submitted."""

    def shutdown(self) -> None:
        self._layers.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's, with ``CpuCopies``."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1, "chunks are blocks here"
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopies(kv_caches, region)
        return self._worker
