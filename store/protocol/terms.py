"""Terms of elected masters, and which of them nodes and clients still obey. Pure."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Term(NamedTuple):
    """The ``number`` of an election, counted by the etcd with the id ``cluster``; 0: nobody was elected."""

    number: int = 0
    cluster: int = 0


NO_TERM = Term()


class TermFence:
    """Which masters a process still obeys: none whose term is over.

    Each election of a master has a term, a number that only grows (the revision at which etcd wrote the leader's key).
    Who has heard of term 9 refuses what a master of term 7 says, be it ever so alive: it stood still while it was
    deposed, its clock perhaps with it, and its successor has given its word on other things since. Terms are compared
    within one etcd only, so that an etcd that is set up anew does not lose against the memory of its forerunner. A
    master that was not elected says term 0 and is obeyed: there is only one. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self.newest = Term()
        self._lock = threading.Lock()

    def admits(self, number: int, cluster: int) -> bool:
        """Whether to obey a master of term ``number``; remembers it if it is the newest."""
        if not number or self.newest == (number, cluster):
            return True
        with self._lock:
            if cluster == self.newest.cluster and number < self.newest.number:
                return False
            self.newest = Term(number, cluster)
            return True

    def is_over(self, number: int, cluster: int) -> bool:
        """Whether a term later than ``number`` is known: what such a master accepts its successor need not know."""
        return cluster == self.newest.cluster and 0 < number < self.newest.number

    def __repr__(self) -> str:
        return f"TermFence({self.newest.number} of {self.newest.cluster:x})"
