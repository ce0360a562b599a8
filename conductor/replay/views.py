"""The conductor's views of the simulated cluster: the same that a policy gets live, and nothing more.

In particular the length of an answer is not known: it is taken to be the mean of the answers that have ended
(``OutputEstimate``).
"""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.conductor.replay.decode import DecodeInstance
from tanghulu.conductor.replay.model import LatencyModel
from tanghulu.conductor.replay.prefill import PrefillInstance
from tanghulu.conductor.replay.trace import BLOCK_TOKENS, TraceRequest
from tanghulu.conductor.routing.policies.base import RequestView, WorkerView
from tanghulu.types import InstanceId


class ClusterView:
    """Builds views. ``in_flight``: whether blocks that are being computed count as coming."""

    def __init__(
        self,
        prefills: Sequence[PrefillInstance],
        decodes: Sequence[DecodeInstance],
        model: LatencyModel,
        in_flight: bool,
        fetch: bool,
    ) -> None:
        self.prefill_ids = {InstanceId(f"prefill-{p.index:04d}"): p.index for p in prefills}
        self.decode_ids = {InstanceId(f"decode-{d.index:04d}"): d.index for d in decodes}
        self._names = list(self.prefill_ids)
        self._prefills, self._decodes = prefills, decodes
        self._model, self._profile, self._decode_profile = model, model.profile, model.decode_profile
        self._in_flight = in_flight
        self._peer_bytes_per_s = model.nic if fetch else 0.0
        self._block_bytes = round(BLOCK_TOKENS * model.kv_token_bytes)

    def prefill_id(self, index: int) -> InstanceId:
        """The name of the prefill worker with that index."""
        return self._names[index]

    def request(self, request: TraceRequest, expected_output: float) -> RequestView:
        named = len(request.blocks)
        return RequestView(
            request.num_tokens,
            BLOCK_TOKENS,
            self._block_bytes,
            session=request.session,
            named_blocks=named,
            expected_output=expected_output,
        )

    def workers(self, now_s: float, request: TraceRequest) -> list[WorkerView]:
        """All workers, as they are for ``request``."""
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
        total = int(self._model.kv_tokens) // BLOCK_TOKENS
        return WorkerView(
            id=id,
            can_prefill=False,
            can_decode=True,
            num_requests=worker.num_jobs,
            coming_requests=worker.num_coming,
            blocks_free=max(0, total - int(worker.reserved_tokens) // BLOCK_TOKENS),
            blocks_total=total,
            decode_step_s=worker.step_length_s,
            decode_profile=self._decode_profile,
            context_tokens=int(worker.reserved_tokens),
        )
