"""The costs of prefill and decode on one worker, as small pure formulas that policies and replay share.

    prefill(n, p) = max(fixed + token * (n - p) + pair * (n^2 - p^2),  load * p)

n prompt tokens of which p are reused; the square is attention, the second arm the time to load the reused KV to the
GPU. (Mooncake, FAST'25, section 4.1 predicts prefill time from length and prefix in the same way.) Example: token
1e-4 s, pair 1e-9 s, n = 8000: 0.8 + 0.064 = 0.864 s cold, and with p = 4000 reused 0.4 + 0.048 = 0.448 s.

    hand-over = max(move - prefill * (1 - chunk / rest),  move of the last chunk)

KV goes to the decode worker while it is computed: behind the first chunk until the end of the last one the wire works
beside the prefill, and what is left then is at least the last chunk. So of the two the larger counts, not their sum. A
prompt of one chunk is moved behind its prefill. Example: the cold prompt above in chunks of 512, whose KV takes 1 s:
0.864 * (1 - 512 / 8000) = 0.81 s of it are hidden and 0.19 s left; over a wire ten times as fast 512 / 8000 of 0.1 s.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Tokens that a worker prefills at a time: its default, as it does not tell.
ASSUMED_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """Seconds of a prefill. ``load_s`` is the time to load one reused token's KV; all are >= 0."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    load_s: float = 0.0

    @classmethod
    def of_speed(cls, tokens_per_s: float) -> PrefillProfile:
        return cls(token_s=1 / tokens_per_s)

    def seconds(self, num_tokens: int, hit_tokens: int) -> float:
        """Time to prefill ``num_tokens`` of which ``hit_tokens`` are reused; the last token is always computed."""
        hit = hit_tokens if hit_tokens < num_tokens else num_tokens - 1
        pairs = num_tokens * num_tokens - hit * hit
        compute_s = self.fixed_s + self.token_s * (num_tokens - hit) + self.pair_s * pairs
        load_s = self.load_s * hit
        return compute_s if compute_s > load_s else load_s

    def queue_seconds(self, num_prompts: int, num_tokens: int, num_pairs: int) -> float:
        """Time to compute ``num_tokens`` of several prompts, with ``num_pairs`` the sum of their n^2 - p^2."""
        return self.fixed_s * num_prompts + self.token_s * num_tokens + self.pair_s * num_pairs


@dataclass(frozen=True, slots=True)
class DecodeProfile:
    """Seconds of a decode step: a fixed part, and what each sequence and each token of context adds."""

    fixed_s: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, batch: float, context_tokens: float) -> float:
        """One step of ``batch`` sequences with ``context_tokens`` in all; 0 without any."""
        return self.fixed_s + self.sequence_s * batch + self.token_s * context_tokens if batch else 0.0


def hidden_s(prefill_s: float, rest_tokens: int) -> float:
    """Seconds of a prefill of ``rest_tokens`` during which its KV moves on already."""
    return prefill_s * (1 - ASSUMED_CHUNK_TOKENS / rest_tokens) if rest_tokens > ASSUMED_CHUNK_TOKENS else 0.0


def hand_over_s(num_tokens: int, token_s: float, behind_s: float) -> float:
    """Seconds from the end of a prefill until the KV of ``num_tokens`` is there, of which each moves in ``token_s``.

    ``behind_s`` is what `hidden_s` says of the prefill.
    """
    left_s = num_tokens * token_s - behind_s
    last_s = min(num_tokens, ASSUMED_CHUNK_TOKENS) * token_s
    return left_s if left_s > last_s else last_s
