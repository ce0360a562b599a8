"""Pauses between the attempts of one caller, spread so that many callers do not try at the same moments. Pure."""

from __future__ import annotations

import secrets
from random import Random


class Backoff:
    """Pauses of about ``first_s``, twice that, and so on up to about ``most_s``, each spread by a half either way.

    Example: 0.05 to 1 s gives 0.04, 0.12, 0.17, 0.55, 0.7, 1.3, 0.6, ...
    """

    def __init__(self, first_s: float, most_s: float, rng: Random | None = None) -> None:
        assert 0 < first_s <= most_s
        self._next_s, self._most_s = first_s, most_s
        self._rng = rng or Random(secrets.randbits(64))

    def pause_s(self) -> float:
        """Return the pause before the next attempt."""
        mean_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        return mean_s * self._rng.uniform(0.5, 1.5)

    def __repr__(self) -> str:
        return f"Backoff(next about {self._next_s:g} s)"
