"""The cost of a hand-over, as a small pure formula that policies and replay share.

    hand-over = max(move - prefill * (1 - chunk / rest),  move of the last chunk)

KV goes to the decode worker while it is computed: behind the first chunk until the end of the last one the wire works
beside the prefill, and what is left then is at least the last chunk. So of the two the larger counts, not their sum. A
prompt of one chunk is moved behind its prefill. Example: a prompt of 8000 tokens that takes 0.864 s in chunks of 512,
whose KV takes 1 s: 0.864 * (1 - 512 / 8000) = 0.81 s of it are hidden and 0.19 s left; over a wire ten times as fast
512 / 8000 of 0.1 s.
"""

from __future__ import annotations

#: Tokens that a worker prefills at a time: its default, as it does not tell.
ASSUMED_CHUNK_TOKENS = 512


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
