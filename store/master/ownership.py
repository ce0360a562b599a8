"""What a master asks of whoever decides which ranges it owns: the map, and its own part of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from tanghulu.discovery.base import Instance
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
        """What callers are told who ask for keys that this master does not own."""


class AdmittedIds(Protocol):
    """The nodes that leaders have let in, as etcd has them."""

    @property
    def ids(self) -> frozenset[str]:
        """Their ids."""

    async def keep(self, present: Callable[[], frozenset[str]]) -> None:
        """Forget those that are not ``present`` when it is their turn; the next call makes good what is left."""


class LeaderRole(Protocol):
    """What a master asks of whoever decides whether it leads: it alone lets nodes in, places and tells who is there."""

    @property
    def admitted(self) -> AdmittedIds:
        """The nodes that leaders have let in."""

    @property
    def leads(self) -> bool:
        """Whether this master may answer as the leader now."""

    @property
    def term(self) -> int:
        """The term in which this master leads, or led last."""

    @property
    def ttl_s(self) -> float:
        """How long a renewal keeps the lease."""

    def require(self) -> None:
        """Raise NotLeader unless this master leads."""

    def admitting(self, node: Instance) -> AbstractAsyncContextManager[None]:
        """Admit ``node``, which the body lets in. Raises MasterUnavailable or NotLeader."""

    async def prove(self) -> int:
        """Wait for a renewal that is asked for after this call; how many were asked for before. Raises NotLeader."""


class OwnsAll:
    """The ownership of a master that has no others at work beside it."""

    def __init__(self) -> None:
        self.shares = False
        self.owned = ALL_RANGES
        self.map = RangeMap.of_one(None)
        self.renewals = Renewals()

    def refusal(self) -> MasterUnavailable:
        """See RangeOwnership; nobody is refused."""
        return KeysMoved.known_in(0)

    def __repr__(self) -> str:
        return "OwnsAll()"
