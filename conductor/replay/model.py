"""The latency model of replay: times of prefill, a decode step and a transfer. Defaults: LLaMA3-70B on 8 x A800.

    prefill(n, p) = t0 + A (n - p) + B (n^2 - p^2), never below loading p over PCIe
                    A = 22 l d^2 / G,  B = 4 l d / G,  G = flops * mfu          (Mooncake, FAST'25, table 1)
    decode step   = c + d * batch + e * context tokens
    transfer(p)   = p * kv_bytes / nic, to a decode worker alongside the prefill (conductor/routing/policies/base.py)

With l = 80 layers of d = 8192 and half of 8 x 312 TFLOP/s, A is 95 us a token and B 2.1 ns a pair: a cold prompt of
8192 tokens takes 0.02 + 0.78 + 0.14 = 0.94 s. A token's KV has 80 * 2 * 8192 / 8 * 2 = 328 kB.

`Job` is one request on its way through the simulated cluster, with its outcome.
"""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.conductor.replay.trace import BLOCK_TOKENS, TraceRequest
from tanghulu.conductor.routing.policies.base import hand_over_s, hidden_s
from tanghulu.session.load import DecodeProfile, PrefillProfile


@dataclass(slots=True, eq=False)
class Job:
    """One request; filled in as it proceeds. Times are virtual seconds; ``ready_s``: arrival of the fetched blocks.

    ``slowness``: real over expected prefill time. ``queued_tokens`` are the tokens the conductor counts as waiting for
    it, ``hit_tokens`` those actually reused. ``failed`` occurs only in a live replay.
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
        """Number of tokens after the first one."""
        return self.request.output_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """The constants. ``nic``, ``ssd`` and ``h2d`` are bytes/s, ``t0``, ``c``, ``d``, ``e`` seconds, ``gflops`` FLOP/s.

    ``chunk_tokens``: most tokens of a step, for workers of both phases; ``block_tokens``: tokens of a trace's block.
    """

    layers: int = 80
    dim: int = 8192
    gqa: int = 8
    gflops: float = 8 * 312e12
    mfu: float = 0.5
    t0: float = 0.02
    h2d: float = 128e9
    nic: float = 70e9
    ssd: float = 5e9
    c: float = 0.020
    d: float = 1e-4
    e: float = 2.9e-8
    kv_tokens: float = 1.4e6
    max_batch: int = 512
    chunk_tokens: int = 512
    block_tokens: int = BLOCK_TOKENS

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of one token's KV: keys and values of all layers, two bytes each."""
        return self.layers * 2 * self.dim / self.gqa * 2

    @property
    def profile(self) -> PrefillProfile:
        speed = self.gflops * self.mfu
        token_s, pair_s = 22 * self.layers * self.dim**2 / speed, 4 * self.layers * self.dim / speed
        return PrefillProfile(self.t0, token_s, pair_s, self.kv_token_bytes / self.h2d)

    @property
    def decode_profile(self) -> DecodeProfile:
        return DecodeProfile(self.c, self.d, self.e)

    def step_s(self, batch: int, context_tokens: float) -> float:
        """Return seconds of one decode step of ``batch`` sequences; 0 without any."""
        return self.decode_profile.seconds(batch, context_tokens)

    def transfer_s(self, num_blocks: int) -> float:
        """Return seconds to move blocks of a trace over one NIC."""
        return num_blocks * self.block_tokens * self.kv_token_bytes / self.nic

    def load_s(self, num_blocks: int) -> float:
        """Return seconds to read blocks of a trace from an SSD."""
        return num_blocks * self.block_tokens * self.kv_token_bytes / self.ssd

    def hand_over_s(self, num_tokens: int, hit_tokens: int, prefill_s: float, held_tokens: int = 0) -> float:
        """Return seconds left of the move to the decode worker when prefill ends: KV follows it chunk by chunk.

        ``held_tokens`` are at the decode worker already.
        """
        behind_s = hidden_s(prefill_s, num_tokens - hit_tokens)
        return hand_over_s(max(0, num_tokens - held_tokens), self.kv_token_bytes / self.nic, behind_s)
