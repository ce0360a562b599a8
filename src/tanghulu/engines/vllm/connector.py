"""``TanghuluConnector``: saves vLLM's KV cache blocks in the store, and loads the prefixes that it holds.

vLLM builds it twice: in the scheduler's process, where it queries the store and orders loads and saves, and in each
rank, which performs them. This file translates between vLLM's calls (``KVConnectorBase_V1``, 0.32) and
``engines.common``, where the decisions are. docs/engines/vllm.md explains its use. Importing it starts nothing, as
vLLM's API server imports it, too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger

from tanghulu.engines.common.names import block_keys
from tanghulu.engines.common.options import ConnectorOptions
from tanghulu.engines.common.requests import REPORT_LOADS, Loaded, LoadJob, PendingSaves, RequestBook, SaveJob
from tanghulu.engines.common.transfers import NUM_SAVE_THREADS, BlockMemory, Ended, PrefixLookup, Transfers, Wait
from tanghulu.engines.vllm.cache_memory import memory_of
from tanghulu.engines.vllm.facts import fingerprint_of, refuse_what_cannot_work
from tanghulu.store.client.block_store import BlockStore
from tanghulu.types import ChunkKey, Fingerprint

if TYPE_CHECKING:
    import torch

# A child of vLLM's logger: others are not shown by default.
_log = init_logger("vllm.tanghulu")

#: The part of a block that the scheduler looks up: once rank 0 has saved, the others have or will have.
FIRST_RANK = 0
CONNECT_DEADLINE_S = 1.0
#: While no request computes, vLLM steps without work until loads and saves have ended. A rank waits this long for an
#: end (and so does a request arriving meanwhile), because such steps would otherwise take half a core.
IDLE_WAIT_S = 0.005


@dataclass
class StepOrders(KVConnectorMetadata):
    """Orders of the scheduler to every rank, with each step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    #: Nothing is computed, and no request waits for this step.
    idle: bool = False


@dataclass
class SavesEnded(KVConnectorWorkerMetadata):
    """Report of the ranks to the scheduler: the number of ranks that ended each job."""

    jobs: Counter[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SavesEnded:
        """Sum the reports of the ranks of one step."""
        assert isinstance(other, SavesEnded)
        return SavesEnded(self.jobs + other.jobs)


class TanghuluConnector(KVConnectorBase_V1):
    """vLLM's interface to the store; see ``SchedulerSide`` and ``RankSide``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_what_cannot_work(vllm_config, kv_cache_config)
        options = ConnectorOptions.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        fingerprint = fingerprint_of(vllm_config, kv_cache_config, options.namespace)
        store = options.open_store(CONNECT_DEADLINE_S)
        self._side: SchedulerSide | RankSide
        if role == KVConnectorRole.SCHEDULER:
            _log.info("tanghulu: blocks are kept at %s as kv/%s/...", options.master, fingerprint[:8].hex())
            self.scheduler = self._side = SchedulerSide(vllm_config, kv_cache_config, options, fingerprint, store)
        else:
            rank, num_blocks = vllm_config.parallel_config.rank, kv_cache_config.num_blocks
            self.rank = self._side = RankSide(rank, num_blocks, options, fingerprint, store)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # unsaved blocks are computed again

    def shutdown(self) -> None:
        """End the transfers and close the client."""
        self._side.close()

    # --- in the scheduler's process

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Register the pool whose blocks are pinned while they are saved."""
        self.scheduler.pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        """Add the request."""
        self.scheduler.book.arrive(request.request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens that can be loaded after the computed ones; loads are always asynchronous."""
        num_tokens = self.scheduler.num_to_load(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load into the allocated blocks."""
        (block_ids,) = blocks.get_block_ids()
        book = self.scheduler.book
        book.allocate(request.request_id, num_external_tokens, request.block_hashes, block_ids)
        self.scheduler.lookup.forget(request.request_id)
        self.scheduler.requests[request.request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """Return the ordered loads, and saves of the blocks that this step fills."""
        return self.scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the ranks' reports of loads and saves."""
        bad = connector_output.invalid_block_ids or set()
        for request_id in connector_output.finished_recving or ():
            self.scheduler.book.load_ended(request_id, bad)
        ended = connector_output.kv_connector_worker_meta
        if isinstance(ended, SavesEnded):
            self.scheduler.saves_ended(ended.jobs)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Drop the request; its blocks may be freed at once, as those being saved are pinned."""
        loaded = self.scheduler.leave(request.request_id)
        reports = loaded is not None and REPORT_LOADS in (request.kv_transfer_params or {})
        return False, {REPORT_LOADS: loaded} if reports else None

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping, as unacknowledged saves would stay pinned while it is idle."""
        return bool(self.scheduler.book.saves)

    # --- in a rank

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the cache's memory."""
        self.rank.take_memory(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the orders of a step. What still uses the blocks to load is queued on the GPU, and the step is not."""
        super().bind_connector_metadata(connector_metadata)
        self.rank.before_step = self.rank.memory.mark() if self._orders().loads else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of this step."""
        for job in self._orders().loads:
            assert self.rank.before_step is not None
            self.rank.transfers.load(job, self.rank.before_step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM schedules a request after its load, so no layer of a step has one to wait for.

        Loads in layers would have to be vLLM's synchronous ones, within a step. They could hide the copy: for 29k
        tokens of an 8B model (3.9 GB) 72 ms at 54 GB/s, .045 of computing them. But the step's other requests, whose
        tokens now come meanwhile, would wait for the store and the copy, and CUDA graphs would end at every layer.
        """

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are saved when all layers have been computed."""

    def wait_for_save(self) -> None:
        """Start the saves of this step, without waiting: they wait for its computation, and the blocks are pinned."""
        if saves := self._orders().saves:
            computed = self.rank.memory.mark()
            for job in saves:
                self.rank.transfers.save(job, computed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads ended, successfully or not, including aborted ones; vLLM waits for each."""
        self.rank.collect(IDLE_WAIT_S if self._orders().idle else 0.0)
        return None, self.rank.ended.loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that those loads failed to fill."""
        return self.rank.ended.bad_block_ids

    def build_connector_worker_meta(self) -> SavesEnded | None:
        """Return the ended saves."""
        return SavesEnded(self.rank.ended.saved) if self.rank.ended.saved else None

    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        return orders


class SchedulerSide:
    """The scheduler process's part: the book of requests, and lookups in the store."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        options: ConnectorOptions,
        fingerprint: Fingerprint,
        store: BlockStore,
    ) -> None:
        (group,) = kv_cache_config.kv_cache_groups
        role = vllm_config.kv_transfer_config.kv_role
        block_bytes = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        saves = PendingSaves(vllm_config.parallel_config.world_size, block_bytes, options.max_pending_bytes)
        self.book = RequestBook(group.kv_cache_spec.block_size, saves, options.min_blocks)
        self.lookup = PrefixLookup(store, options.lookup_deadline_ms / 1000)
        self.requests: dict[str, Any] = {}  # computing requests: vLLM's own objects, whose hashes grow
        self.pool: Any = None
        self._store, self._fingerprint = store, fingerprint
        self._loads = role in ("kv_consumer", "kv_both")
        self._save = options.save if role in ("kv_producer", "kv_both") else "none"
        self._may_wait = vllm_config.parallel_config.data_parallel_size == 1  # others step when this engine does

    def num_to_load(self, request: Any, num_computed_tokens: int) -> int:
        """Return the stored tokens after the computed ones, as far as the request may load them."""
        wanted = self._loads and not request.skip_reading_prefix_cache
        if not self.book.may_load(request.request_id, request.num_preemptions) or not wanted:
            return 0
        keys = self._keys(request.block_hashes)
        num_stored = self.lookup.num_stored(request.request_id, keys)
        return self.book.match(request.request_id, request.num_tokens, num_computed_tokens, num_stored)

    def orders(self, output: Any) -> StepOrders:
        """Return this step's loads, and saves of the blocks that it fills, which are pinned from here on."""
        orders = StepOrders(self.book.take_loads())
        orders.idle = self._may_wait and not output.total_num_scheduled_tokens and not self.book.computes
        if self._save == "none":
            return orders
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            (block_ids,) = output.kv_connector_block_state.get_block_ids(request_id)
            num_tokens = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
            if self._save == "prompt":
                num_tokens = min(num_tokens, request.num_prompt_tokens)
            job = self.book.computed(request_id, num_tokens, request.block_hashes, block_ids)
            if job is not None:
                self.pool.touch([self.pool.blocks[block.block_id] for block in job.blocks])
                orders.saves.append(job)
        return orders

    def saves_ended(self, jobs: Counter[int]) -> None:
        """Unpin what every rank has saved. Last blocks first: vLLM then evicts them before the preceding prefix."""
        for job_id, num_ranks in jobs.items():
            freed = self.book.saves.acknowledge(job_id, num_ranks)
            self.pool.free_blocks([self.pool.blocks[block_id] for block_id in reversed(freed)])

    def leave(self, request_id: str) -> Loaded | None:
        """Drop an ended request; return what was loaded for it."""
        self.requests.pop(request_id, None)
        self.lookup.forget(request_id)
        return self.book.leave(request_id)

    def close(self) -> None:
        _log.info("tanghulu: calls of the store: %s", dict(self._store.counts))
        self._store.close()

    def _keys(self, hashes: list[bytes]) -> list[ChunkKey]:
        return block_keys(self._fingerprint, hashes, FIRST_RANK)


class RankSide:
    """A rank's part: the cache's memory, and its transfers."""

    def __init__(
        self, rank: int, num_blocks: int, options: ConnectorOptions, fingerprint: Fingerprint, store: BlockStore
    ) -> None:
        self._number, self._num_blocks = rank, num_blocks
        self._options, self._fingerprint, self._store = options, fingerprint, store
        self._memory: BlockMemory | None = None
        self._transfers: Transfers | None = None
        self.ended = Ended()
        #: Of a step with loads: the wait for what was queued before it.
        self.before_step: Wait | None = None

    @property
    def memory(self) -> BlockMemory:
        assert self._memory is not None, "no memory was registered"
        return self._memory

    @property
    def transfers(self) -> Transfers:
        assert self._transfers is not None, "no memory was registered"
        return self._transfers

    def take_memory(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start with the cache's layers."""
        self._memory = memory_of(
            kv_caches,
            self._num_blocks,
            lambda hashes: block_keys(self._fingerprint, hashes, self._number),
            self._options.threads + NUM_SAVE_THREADS,
        )
        self._transfers = Transfers(self._store, self._memory, self._options)

    def collect(self, wait_s: float) -> None:
        """Collect what has ended since the previous step, or wait for the next end."""
        self.ended = self._transfers.take_ended(wait_s) if self._transfers is not None else Ended()

    def close(self) -> None:
        if self._transfers is not None:
            _log.info("tanghulu: moved by rank %d: %s", self._number, {**self._store.counts, **self._transfers.seconds})
            self._transfers.close()
        self._store.close()
        if self._memory is not None:
            self._memory.close()
