"""The default policy: the prefill worker with the least estimated TTFT, the decode worker where KV and room are.

    TTFT = queued tokens / prefill speed + fetch + rest / prefill speed
    fetch: the blocks that the store has and the worker has not, over the store's bandwidth; only where it pays

(Mooncake, FAST'25, algorithm 1, without its SLO check.) Example: 6400 tokens in blocks of 64, 2 MiB a block, 10 000
tokens/s. Worker A is idle and holds 20 blocks: (6400 - 1280) / 10 000 = 0.51 s. Worker B holds 90 but has 8000 tokens
in its queue: 0.8 + 0.064 = 0.86 s. With all 100 blocks in the store at 2 GB/s A fetches 80 blocks in 0.08 s and
computes one token: 0.08 s. A it is.

Decode: moving the KV that a worker lacks, plus what every running sequence adds to everybody's step, plus a fine where
its free blocks do not suffice. The worker that prefills moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.conductor.policies.base import (
    Candidate,
    Decision,
    RequestView,
    WorkerView,
    best,
    decoders,
    prefillers,
)
from tanghulu.types import InstanceId

#: Speeds of a worker that has not measured its own yet.
ASSUMED_PREFILL_TOKENS_PER_S = 2000.0
ASSUMED_STORE_BYTES_PER_S = 1e9
ASSUMED_DECODE_STEP_S = 0.02
#: A sequence more in a batch slows its step by this share (attention and sampling; weights are read once anyway).
STEP_SHARE_OF_A_SEQUENCE = 1 / 16
#: A decode choice is judged over so many coming tokens.
JUDGED_TOKENS = 64
#: Seconds: what waiting or preemption for lack of blocks is taken to cost.
NO_ROOM_FINE_S = 1000.0


class TtftMin:
    """Least estimated time to the first token."""

    name = "ttft-min"

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """The best pair; the decode worker is chosen once the prefill worker is known."""
        prefills = [self._prefill(request, w) for w in prefillers(workers)]
        prefill = best(prefills)
        if prefill is None:
            return None
        decodes = [self._decode(request, w, w.id == prefill.worker) for w in decoders(workers)]
        decode = best(decodes)
        if decode is None:
            return None
        return Decision(prefill.worker, decode.worker, (*prefills, *decodes))

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        """The decode worker of least cost, none of which prefilled."""
        choice = best([self._decode(request, w, False) for w in decoders(workers)])
        return choice.worker if choice else None

    def _prefill(self, request: RequestView, worker: WorkerView) -> Candidate:
        speed = worker.prefill_tokens_per_s or ASSUMED_PREFILL_TOKENS_PER_S
        bandwidth = worker.store_bytes_per_s or ASSUMED_STORE_BYTES_PER_S
        queue_s = worker.queue_tokens / speed
        own_s = _rest(request, worker.hit_blocks) / speed
        fetch_blocks = max(0, request.store_hit_blocks - worker.hit_blocks)
        fetch_s = fetch_blocks * request.block_bytes / bandwidth
        fetched_s = _rest(request, request.store_hit_blocks) / speed
        pays = fetch_blocks > 0 and fetch_s + fetched_s < own_s
        if not pays:
            fetch_s, fetched_s = 0.0, own_s
        step_s = worker.decode_step_s if worker.num_requests else 0.0
        room_s = 0.0 if worker.blocks_free >= request.num_blocks - worker.hit_blocks else NO_ROOM_FINE_S
        terms = (
            ("queue_s", queue_s),
            ("fetch_s", fetch_s),
            ("compute_s", fetched_s),
            ("step_s", step_s),
            ("no_room_s", room_s),
            ("hit_blocks", float(worker.hit_blocks)),
        )
        return Candidate(worker.id, "prefill", queue_s + fetch_s + fetched_s + step_s + room_s, terms)

    def _decode(self, request: RequestView, worker: WorkerView, prefilled_here: bool) -> Candidate:
        missing = 0 if prefilled_here else max(0, request.num_blocks - worker.hit_blocks)
        move_s = missing * request.block_bytes / (worker.store_bytes_per_s or ASSUMED_STORE_BYTES_PER_S)
        step_s = worker.decode_step_s or ASSUMED_DECODE_STEP_S
        company_s = JUDGED_TOKENS * step_s * STEP_SHARE_OF_A_SEQUENCE * worker.num_requests
        needed = max(0, request.num_blocks - worker.hit_blocks)
        room_s = 0.0 if worker.blocks_free >= needed else NO_ROOM_FINE_S
        terms = (("move_s", move_s), ("company_s", company_s), ("no_room_s", room_s))
        return Candidate(worker.id, "decode", move_s + company_s + room_s, terms)


def _rest(request: RequestView, hit_blocks: int) -> int:
    """Tokens left to compute behind ``hit_blocks``; the last one is always computed."""
    return max(1, request.num_tokens - hit_blocks * request.block_tokens)
