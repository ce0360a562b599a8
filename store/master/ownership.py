"""The ranges that a master owns, and the map of all masters, as its calls see them."""

from __future__ import annotations

from typing import Protocol

from tanghulu.errors import KeysMoved, MasterUnavailable
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import Renewals

ALL_RANGES = frozenset(range(NUM_RANGES))


class RangeOwnership(Protocol):
    """Which ranges this master owns now, and the map as far as it knows it.

    A range is in ``owned`` only while this master's lease on it lives; the map may name this master longer, or sooner.
    ``shares``: others may own ranges beside this master; else there is no map, and it is the only one and owns all.
    """

    @property
    def shares(self) -> bool:
        """Whether several masters have a map of their ranges."""

    @property
    def owned(self) -> frozenset[int]:
        """The ranges that this master answers for."""

    @property
    def map(self) -> RangeMap:
        """The latest map that this master knows; of version 0 before it has seen any."""

    @property
    def renewals(self) -> Renewals:
        """Of this master's lease on its ranges, as callers count them; 0 only if they need no proof."""

    def refusal(self) -> MasterUnavailable:
        """The error for callers that ask for keys of others."""


class OwnsAll:
    """The ownership of an only master."""

    def __init__(self) -> None:
        self.shares = False
        self.owned = ALL_RANGES
        self.map = RangeMap.of_one(None)
        self.renewals = Renewals()

    def refusal(self) -> MasterUnavailable:
        """Refuse a caller; there is none."""
        return KeysMoved.known_in(0)

    def __repr__(self) -> str:
        return "OwnsAll()"
