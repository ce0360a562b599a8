"""Which masters a node still obeys: none whose term is over. Pure.

Each election of a master has a term, a number that only grows (the revision at which etcd wrote the leader's key). A
node that has heard of term 9 refuses what a master of term 7 says, be it ever so alive: it stood still while it was
deposed, and others have been promised things by its successor. Terms are compared within one etcd (``term_of``) only,
so that an etcd that is set up anew does not lose against the memory of its forerunner. A master that was not elected
says term 0 and is obeyed: there is only one.
"""

from __future__ import annotations


class Fence:
    """The newest term that a node has heard of."""

    def __init__(self) -> None:
        self.term = 0
        self.term_of = 0

    def admits(self, term: int, term_of: int) -> bool:
        """Whether to obey a master of ``term``; remembers it if it is the newest."""
        if not term:
            return True
        if term_of == self.term_of and term < self.term:
            return False
        self.term, self.term_of = term, term_of
        return True

    def __repr__(self) -> str:
        return f"Fence({self.term} of {self.term_of:x})"
