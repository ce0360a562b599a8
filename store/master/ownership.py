"""The ranges owned by a master, and the map of all masters, as used by its calls."""

from __future__ import annotations

from typing import Protocol

from tanghulu.errors import KeysMoved, MasterUnavailable
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import Renewals

ALL_RANGES = frozenset(range(NUM_RANGES))


class RangeOwnership(Protocol):
    """The ranges owned by this master now, and its latest known map.

    A range is in ``owned`` only while this master's lease on it is valid; the map may name this master longer, or
    sooner. ``shares``: others may own ranges beside this master; otherwise there is no map, and this is the only master
    and owns all.
    """

    @property
    def shares(self) -> bool:
        """Whether several masters have a map of their ranges."""

    @property
    def owned(self) -> frozenset[int]:
        """The ranges that this master serves."""

    @property
    def map(self) -> RangeMap:
        """The latest map known to this master; of version 0 before it has seen any."""

    @property
    def renewals(self) -> Renewals:
        """The renewals of this master's lease on its ranges, as counted by callers; 0 only if they need no proof."""

    def refusal(self) -> MasterUnavailable:
        """Return the error for callers that request keys of other masters."""


class OwnsAll:
    """The ownership of a single master."""

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
