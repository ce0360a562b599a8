"""The map of a cluster's masters: the owner of each range of keys, and its term. Pure.

A key's range (see ``key_slots``) has one owner, which alone serves its keys. A range that changes hands gets a new
term, the revision of etcd at which its new owner wrote it, so terms of one range only grow. The version of a map is the
revision up to which its sender has seen all changes: of two maps of one etcd the one with the higher version is the
later. Maps of different etcds cannot be compared: a newly created one does not lose against its predecessor's.

Example: master A owns the ranges 0 to 31 in term 40, B the others in term 42, and the map has version 42. A is drained:
B writes the ranges 0 to 31 anew at revision 57. An answer of A for a key of range 5, made at version 50, is refused by
every process that has map 57: its owner is B, and the range's term, 57, is above 50.
"""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.terms import Term
from tanghulu.types import Address


@dataclass(frozen=True, slots=True)
class RangeMap:
    """The owner of each range, None if it has none now, and the owner's term. ``cluster`` is the id of the etcd.

    Version 0, of cluster 0, is the map of a master that was not elected and owns everything.
    """

    version: int
    cluster: int
    owners: tuple[Address | None, ...]
    terms: tuple[int, ...]

    @classmethod
    def of_one(cls, owner: Address | None) -> RangeMap:
        """Return the map of a single master; None: it uses any address known to its callers."""
        return cls(0, 0, (owner,) * NUM_RANGES, (0,) * NUM_RANGES)

    @property
    def newest_term(self) -> Term:
        """The version as a term: no range has a later one."""
        return Term(self.version, self.cluster)

    def owner_of(self, number: int) -> Address | None:
        """Return the owner of that range; None: it has none now, and ``term_of`` is that of its last owner."""
        return self.owners[number]

    def term_of(self, number: int) -> int:
        """Return the term in which that range is owned."""
        return self.terms[number]

    def ranges_of(self, owner: Address) -> frozenset[int]:
        """Return the ranges owned by ``owner``."""
        return frozenset(number for number, each in enumerate(self.owners) if each == owner)

    def moved(self, before: RangeMap) -> frozenset[int]:
        """Return the ranges with another owner than ``before``, or the same one in another term."""
        if self.cluster != before.cluster:
            return frozenset(range(NUM_RANGES))
        pairs = zip(self.owners, self.terms, before.owners, before.terms, strict=True)
        return frozenset(n for n, (owner, term, was, then) in enumerate(pairs) if owner != was or term != then)

    def replaces(self, known: RangeMap | None) -> bool:
        """Return whether a holder of the map ``known`` should use this one instead."""
        return known is None or self.cluster != known.cluster or self.version > known.version

    def check(self) -> None:
        """Assert that every range has an entry, and that no term is later than the map."""
        assert len(self.owners) == len(self.terms) == NUM_RANGES
        assert all(0 <= term <= self.version for term in self.terms)

    def __repr__(self) -> str:
        owners = {owner: len(self.ranges_of(owner)) for owner in self.owners if owner is not None}
        shares = ", ".join(f"{owner}: {num_ranges}" for owner, num_ranges in owners.items())
        return f"RangeMap({self.version} of {self.cluster:x}, {shares or 'no owner'})"
