"""Views of simulated workers for a policy: the same as of live ones, and nothing more."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from tanghulu.conductor.replay.decode import DecodeInstance
from tanghulu.conductor.replay.model import LatencyModel
from tanghulu.conductor.replay.prefill import PrefillInstance
from tanghulu.conductor.replay.trace import TraceRequest
from tanghulu.conductor.replay.whole import WholeInstance
from tanghulu.conductor.routing.policies.base import RequestView, WorkerView
from tanghulu.types import InstanceId


class ClusterView(abc.ABC):
    """Builds views. ``in_flight``: whether blocks being computed count as coming."""

    def __init__(
        self, prefill: Sequence[InstanceId], decode: Sequence[InstanceId], model: LatencyModel, fetch: bool
    ) -> None:
        self.prefill_ids = {id: index for index, id in enumerate(prefill)}
        self.decode_ids = {id: index for index, id in enumerate(decode)}
        self._names = prefill
        self._model = model
        self._peer_bytes_per_s = model.nic if fetch else 0.0
        self._block_bytes = round(model.block_tokens * model.kv_token_bytes)

    def prefill_id(self, index: int) -> InstanceId:
        """Return the name of the prefill worker with that index."""
        return self._names[index]

    def request(self, request: TraceRequest, mean_output: float, expected_output: float) -> RequestView:
        named = len(request.blocks)
        return RequestView(
            request.num_tokens,
            self._model.block_tokens,
            self._block_bytes,
            session=request.session,
            named_blocks=named,
            mean_output=mean_output,
            expected_output=expected_output,
        )

    @abc.abstractmethod
    def workers(self, now_s: float, request: TraceRequest) -> list[WorkerView]:
        """Return all workers, as seen by ``request``."""


class PairView(ClusterView):
    """Prefill workers, then decode workers."""

    def __init__(
        self,
        prefills: Sequence[PrefillInstance],
        decodes: Sequence[DecodeInstance],
        model: LatencyModel,
        in_flight: bool,
        fetch: bool,
    ) -> None:
        super().__init__(_ids("prefill", len(prefills)), _ids("decode", len(decodes)), model, fetch)
        self._prefills, self._decodes, self._in_flight = prefills, decodes, in_flight
        self._profile, self._decode_profile = model.profile, model.decode_profile

    def workers(self, now_s: float, request: TraceRequest) -> list[WorkerView]:
        prefills = zip(self.prefill_ids, self._prefills, strict=True)
        decodes = zip(self.decode_ids, self._decodes, strict=True)
        return [self._prefill(id, p, now_s, request) for id, p in prefills] + [self._decode(id, d) for id, d in decodes]

    def _prefill(self, id: InstanceId, worker: PrefillInstance, now_s: float, request: TraceRequest) -> WorkerView:
        blocks, coming = request.blocks, worker.coming
        hit_blocks = worker.cache.leading(blocks)
        return WorkerView(
            id=id,
            can_prefill=True,
            can_decode=False,
            queue_tokens=worker.waiting_tokens,
            num_requests=worker.num_jobs,
            blocks_free=worker.cache.capacity_blocks,
            blocks_total=worker.cache.capacity_blocks,
            hit_blocks=hit_blocks,
            coming_blocks=worker.match(blocks, hit_blocks) if self._in_flight else 0,
            active_blocks=len(coming),
            active_hit_blocks=sum(1 for block in blocks if block in coming),
            queue_s=worker.waiting_s(now_s),
            profile=self._profile,
            peer_bytes_per_s=self._peer_bytes_per_s,
            send_wait_s=worker.send_free_s - now_s,
            receive_wait_s=worker.receive_free_s - now_s,
        )

    def _decode(self, id: InstanceId, worker: DecodeInstance) -> WorkerView:
        total = int(self._model.kv_tokens) // self._model.block_tokens
        return WorkerView(
            id=id,
            can_prefill=False,
            can_decode=True,
            num_requests=worker.num_jobs,
            coming_requests=worker.num_coming,
            blocks_free=max(0, total - int(worker.reserved_tokens) // self._model.block_tokens),
            blocks_total=total,
            decode_step_s=worker.step_length_s,
            decode_profile=self._decode_profile,
            context_tokens=int(worker.reserved_tokens),
        )


class WholeView(ClusterView):
    """Workers of both phases. Their profile is what a worker fits to its steps: it contains the steps' fixed part."""

    def __init__(self, workers: Sequence[WholeInstance], model: LatencyModel, in_flight: bool, fetch: bool) -> None:
        ids = _ids("worker", len(workers))
        super().__init__(ids, ids, model, fetch)
        self._workers, self._in_flight = workers, in_flight

    def workers(self, now_s: float, request: TraceRequest) -> list[WorkerView]:
        return [self._worker(id, w, now_s, request) for id, w in zip(self.prefill_ids, self._workers, strict=True)]

    def _worker(self, id: InstanceId, worker: WholeInstance, now_s: float, request: TraceRequest) -> WorkerView:
        blocks, coming = request.blocks, worker.coming
        hit_blocks = worker.cache.leading(blocks)
        total = int(self._model.kv_tokens) // self._model.block_tokens
        reserved = int(worker.reserved_tokens)
        return WorkerView(
            id=id,
            can_prefill=True,
            can_decode=True,
            queue_tokens=worker.waiting_tokens,
            num_requests=worker.num_jobs,
            coming_requests=worker.num_coming,
            blocks_free=max(0, total - reserved // self._model.block_tokens),
            blocks_total=total,
            hit_blocks=hit_blocks,
            coming_blocks=worker.match(blocks, hit_blocks) if self._in_flight else 0,
            active_blocks=reserved // self._model.block_tokens,
            active_hit_blocks=sum(1 for block in blocks if block in coming),
            queue_s=worker.waiting_s(now_s),
            profile=worker.prefill_profile,
            decode_profile=worker.decode_profile,
            decode_step_s=worker.step_length_s,
            peer_bytes_per_s=self._peer_bytes_per_s,
            send_wait_s=worker.send_free_s - now_s,
            receive_wait_s=worker.receive_free_s - now_s,
            context_tokens=reserved,
            max_num_seqs=self._model.max_batch,
            num_waiting=len(worker.queue),
            prefill_share=worker.prefilling.at(now_s),
        )


def _ids(role: str, count: int) -> list[InstanceId]:
    return [InstanceId(f"{role}-{index:04d}") for index in range(count)]
