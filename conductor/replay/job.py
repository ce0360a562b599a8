"""One request on its way through the simulated cluster, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.conductor.replay.trace import TraceRequest


@dataclass(slots=True, eq=False)
class Job:
    """Filled in as it goes. Times are virtual seconds; ``ready_s``: when fetched blocks have arrived.

    ``slowness``: real over expected prefill time. ``queued_tokens`` is what the conductor counts as waiting for it,
    ``hit_tokens`` what was really reused. ``failed`` happens in a live replay alone.
    """

    request: TraceRequest
    number: int
    slowness: float = 1.0
    prefill: int = -1
    decode: int = -1
    fetch_blocks: int = 0
    ready_s: float = 0.0
    estimate_s: float = 0.0
    queued_tokens: int = 0
    expected_tokens: float = 0.0
    hit_tokens: int = 0
    begin_s: float = 0.0
    prefill_s: float = 0.0
    planned_s: float = 0.0
    ttft_s: float | None = None
    first_s: float = 0.0
    join_s: float = 0.0
    join_step: float = 0.0
    tbt_s: float = 0.0
    worst_tbt_s: float = 0.0
    rejected: bool = False
    failed: bool = False

    @property
    def num_decode_steps(self) -> int:
        """Tokens behind the first one."""
        return self.request.output_tokens - 1
