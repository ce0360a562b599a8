"""The expected length of answers: a decaying mean of those that have ended.

Pure. Nobody knows a request's output before its end, so load that lies in the future (who will still decode when a
prefill ends) is estimated with this.
"""

from __future__ import annotations

#: Expected output while no answer has ended, in tokens; and the weight of one more answer in the mean.
FIRST_EXPECTED_OUTPUT = 256.0
_WEIGHT = 0.02


class OutputEstimate:
    """Expected output of a request, in tokens."""

    def __init__(self) -> None:
        self.tokens = FIRST_EXPECTED_OUTPUT

    def ended(self, num_tokens: int) -> None:
        """Count an answer of ``num_tokens`` that has ended."""
        self.tokens += _WEIGHT * (num_tokens - self.tokens)
