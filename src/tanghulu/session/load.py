"""A worker's reported load and speed: the costs of its steps as pure formulas.

    prefill(n, p) = max(fixed + token * (n - p) + pair * (n^2 - p^2),  load * p)

n prompt tokens of which p are reused; the square is attention, the second arm the time to load the reused KV to the
GPU. (Mooncake, FAST'25, section 4.1 predicts prefill time from length and prefix in the same way.) Example: token
1e-4 s, pair 1e-9 s, n = 8000: 0.8 + 0.064 = 0.864 s cold, and with p = 4000 reused 0.4 + 0.048 = 0.448 s.
"""

from __future__ import annotations

import math

from tanghulu.rpc.wire import U32, U64, FastMessage

#: Seconds after which the weight of the past in a `BusyShare` has fallen to 37 %.
SHARE_S = 10.0


class PrefillProfile(FastMessage, frozen=True):
    """Seconds of a prefill. ``load_s`` is the time to load one reused token's KV; all are >= 0."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    load_s: float = 0.0

    @classmethod
    def of_speed(cls, tokens_per_s: float) -> PrefillProfile:
        return cls(token_s=1 / tokens_per_s)

    def seconds(self, num_tokens: int, hit_tokens: int) -> float:
        """Return the time to prefill ``num_tokens``, reusing ``hit_tokens``; the last token is always computed."""
        hit = hit_tokens if hit_tokens < num_tokens else num_tokens - 1
        pairs = num_tokens * num_tokens - hit * hit
        compute_s = self.fixed_s + self.token_s * (num_tokens - hit) + self.pair_s * pairs
        load_s = self.load_s * hit
        return compute_s if compute_s > load_s else load_s

    def queue_seconds(self, num_prompts: int, num_tokens: int, num_pairs: int) -> float:
        """Return the time to compute ``num_tokens`` of several prompts; ``num_pairs`` is the sum of their n^2 - p^2."""
        return self.fixed_s * num_prompts + self.token_s * num_tokens + self.pair_s * num_pairs


class DecodeProfile(FastMessage, frozen=True):
    """Seconds of a decode step: a fixed part, and the additions of each sequence and each token of context."""

    fixed_s: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, batch: float, context_tokens: float) -> float:
        """Return the seconds of one step of ``batch`` sequences with ``context_tokens`` in all; 0 without any."""
        return self.fixed_s + self.sequence_s * batch + self.token_s * context_tokens if batch else 0.0


class PeerRead(FastMessage, frozen=True):
    """KV read from the worker at ``address``, in total."""

    address: str
    num_bytes: U64
    seconds: float


class WorkerLoad(FastMessage, frozen=True):
    """A worker's own report; speeds are 0 until it has measured them.

    ``blocks_free`` are free or evictable. ``reads`` are those since its last report. ``peer_bytes_per_s`` is 0 if it
    cannot load KV from other workers; ``prefill`` and ``decode`` are fitted to its steps, None until there were enough.
    ``prefill_pairs_waiting`` is the cost of ``prefill_tokens_waiting`` in attention: the sum of n^2 - p^2 for n tokens
    of which p are computed. ``max_num_seqs`` is its maximum number of requests in one step; 0 if unknown.
    ``prefill_share`` is the share of recent time (the last 10 s weigh most) spent in steps that computed prompts.
    """

    num_running: U32 = 0
    num_waiting: U32 = 0
    blocks_total: U32 = 0
    blocks_free: U32 = 0
    prefill_tokens_waiting: U64 = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    store_bytes_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    prefill: PrefillProfile | None = None
    decode: DecodeProfile | None = None
    reads: tuple[PeerRead, ...] = ()
    prefill_pairs_waiting: U64 = 0
    max_num_seqs: U32 = 0
    prefill_share: float = 0.0


class BusyShare:
    """Share of time spent on something, over a past that fades with ``SHARE_S``.

    Example: busy for 10 s after a long rest, then idle: 0.63, and 0.23 another 10 s later.
    """

    def __init__(self) -> None:
        self._share = self._at_s = 0.0

    def add(self, seconds: float, now_s: float) -> None:
        """Note ``seconds`` of it that end at ``now_s``."""
        self._share = self.at(max(now_s - seconds, self._at_s))
        self._at_s = now_s
        kept = math.exp(-seconds / SHARE_S)
        self._share = self._share * kept + 1 - kept

    def at(self, now_s: float) -> float:
        """Return the share at ``now_s``, with nothing noted since the last `add`."""
        return self._share * math.exp((self._at_s - now_s) / SHARE_S)
