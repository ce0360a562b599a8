"""The conductors of each pool, and the order in which they are asked.

Pure: times go in. The one with the fewest open requests is asked first. One that failed is left alone for a while that
doubles with each failure in a row, and is asked all the same where no other is left. Example: after one failure it
rests 0.5 s, after three 2 s, never more than 30 s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tanghulu.types import InstanceId

FIRST_REST_S = 0.5
MOST_REST_S = 30.0


@dataclass(slots=True, eq=False)
class Member:
    """One conductor. ``open_requests`` are forwarded to it and have not ended."""

    url: str
    open_requests: int = 0
    num_failures: int = 0
    rests_until_s: float = 0.0

    def failed(self, now_s: float) -> None:
        """Note that the conductor could not be reached, or answered that it cannot serve."""
        self.num_failures += 1
        self.rests_until_s = now_s + min(MOST_REST_S, FIRST_REST_S * 2 ** min(10, self.num_failures - 1))

    def served(self) -> None:
        self.num_failures, self.rests_until_s = 0, 0.0


class Members:
    """The conductors of one pool: fixed ones, and those that discovery finds."""

    def __init__(self, urls: Iterable[str] = ()) -> None:
        self._fixed = [Member(url) for url in urls]
        self._found: dict[InstanceId, Member] = {}

    def __len__(self) -> int:
        return len(self._fixed) + len(self._found)

    def add(self, instance: InstanceId, url: str) -> None:
        """Add a conductor that Discovery has found; a known address adds nothing."""
        known = self._found.get(instance)
        if known is None or known.url != url:
            self._found[instance] = Member(url)

    def remove(self, instance: InstanceId) -> None:
        """Remove a conductor that is gone; requests forwarded to it go on or fail by themselves."""
        self._found.pop(instance, None)

    def in_order(self, now_s: float) -> list[Member]:
        """All conductors in the order in which they should be asked; each address once."""
        by_url = {member.url: member for member in [*self._found.values(), *self._fixed]}
        return sorted(by_url.values(), key=lambda m: (max(m.rests_until_s, now_s), m.open_requests))
