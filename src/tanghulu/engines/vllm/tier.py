"""``TanghuluTier``: the store as a secondary tier of vLLM's native offloading.

vLLM builds it in the scheduler's process, where it sees host memory only: vLLM copies between that and its cache, on
any device and for any model, and recomputes what a load has lost. This file translates between vLLM's calls
(``SecondaryTierManager``, 0.32) and ``tier_jobs``; docs/engines/vllm.md explains its use. Importing it starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tanghulu.engines.common.options import LevelOptions
from tanghulu.engines.vllm.facts import fingerprint_of_tier
from tanghulu.engines.vllm.tier_jobs import Promotions, TierJobs
from tanghulu.store.client.block_store import BlockStore
from tanghulu.types import BlockHash, ChunkKey, Fingerprint, kv_chunk_key

# A child of vLLM's logger: others are not shown by default.
_log = init_logger("vllm.tanghulu")


class TanghuluTier(SecondaryTierManager):
    """See vLLM's interface. Further arguments as in ``LevelOptions``; raises ConfigError for others."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        parsed = LevelOptions.parse(options)
        row_bytes = self.block_size_bytes
        device = current_platform.device_type
        self._fingerprint = fingerprint_of_tier(offloading_spec.config, row_bytes, device, parsed.namespace)
        self._store = parsed.open_store()
        _log.info("tanghulu: chunks are kept at %s as kv/%s/...", parsed.master, self._fingerprint[:8].hex())
        self._jobs = TierJobs(self._store, primary_kv_view.cast("B"), row_bytes, parsed)
        self._lookups = Lookups(self._store, self._fingerprint, parsed.lookup_deadline_s)
        self._promotions = Promotions(len(primary_kv_view))
        self._loading: dict[int, tuple[OffloadKey, ...]] = {}  # the keys of each unfinished load

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._promotions.begin(req_context.req_id)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether the store has a chunk, and `Promotions` offers it; RETRY until the store has answered."""
        if not self._promotions.allows(req_context.req_id, key):
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        if not found:
            return LookupResult.MISS
        self._promotions.offer(req_context.req_id, key)
        return LookupResult.HIT

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send the lookups of this step, whose loads vLLM has submitted before."""
        self._promotions.end_step([*context.new_req_ids, *context.preempted_req_ids])
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._promotions.end(req_context.req_id)
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = keys_of(self._fingerprint, list(job_metadata.keys))
        self._jobs.store(job_metadata.job_id, keys, job_metadata.chunk_ids.tolist())

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._loading[job_metadata.job_id] = tuple(job_metadata.keys)
        self._promotions.load(job_metadata.req_context.req_id, job_metadata.keys)
        keys = keys_of(self._fingerprint, self._loading[job_metadata.job_id])
        self._jobs.load(job_metadata.job_id, keys, job_metadata.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the ended jobs. Chunks lost by a load count as missing from now on, or vLLM would retry for ever."""
        results = []
        for job in self._jobs.take_ended():
            keys = self._loading.pop(job.job_id, ())
            pairs = zip(keys, job.good, strict=True) if keys else ()
            loaded = [key for key, good in pairs if good]
            self._lookups.mark_miss(set(keys) - set(loaded))
            results.append(JobResult(job.job_id, all(job.good), loaded or None, job.took_s, job.moved_bytes))
        return results

    def drain_jobs(self) -> None:
        """Return when nothing accesses vLLM's memory any more, at the jobs' deadlines at the latest."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """Cancel what is in progress: vLLM gives its scheduler's process only some seconds to end."""
        self._jobs.close()
        self._lookups.shutdown()
        _log.info(
            "tanghulu: outcomes of the tier's calls: %s, stores shed: %d", dict(self._store.counts), self._jobs.num_shed
        )


class Lookups(AsyncLookupManager):
    """vLLM's lookup thread, which calls with one request's keys at a time."""

    def __init__(self, store: BlockStore, fingerprint: Fingerprint, deadline_s: float) -> None:
        self._store, self._fingerprint, self._deadline_s = store, fingerprint, deadline_s
        super().__init__(tier_type="tanghulu")

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Return which chunks are stored; none if the store does not answer in time."""
        return self._store.has(keys_of(self._fingerprint, keys), self._deadline_s)


def keys_of(fingerprint: Fingerprint, keys: Sequence[OffloadKey]) -> list[ChunkKey]:
    """Return the store's key of each chunk; its part is the group of layers."""
    return [
        kv_chunk_key(fingerprint, BlockHash(get_offload_block_hash(key)), get_offload_group_idx(key)) for key in keys
    ]
