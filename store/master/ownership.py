"""The role of a master: the ranges it owns, whether it leads, and the map of all masters, as used by its calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tanghulu.discovery.base import Instance
from tanghulu.errors import KeysMoved, MasterUnavailable
from tanghulu.store.protocol.key_slots import ALL_RANGES
from tanghulu.store.protocol.messages import ProveReply
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import UNSIGNED, Signature

_WITHOUT_OWNERS = RangeMap.of_one(None)


class Ownership:
    """The role of a single master: it leads, owns all ranges, and needs no proof.

    ``EtcdOwnership`` is that of one of several, which ``shares`` the ranges with others.
    """

    shares = False

    @property
    def owned(self) -> frozenset[int]:
        """The ranges that this master serves: those on which its lease is valid. The map may name other ones."""
        return ALL_RANGES

    @property
    def map(self) -> RangeMap:
        """The latest map known to this master; of version 0 before it has seen any."""
        return _WITHOUT_OWNERS

    @property
    def signature(self) -> Signature:
        """The end of every reply: the latest version of the map, its etcd, and the renewals of this master's lease."""
        return UNSIGNED

    @property
    def leads(self) -> bool:
        """Whether this master may answer as the leader now."""
        return True

    def require_lead(self) -> None:
        """Raise NotLeader unless this master leads."""

    def refusal(self) -> MasterUnavailable:
        """Return the error for callers that request keys of other masters."""
        return KeysMoved.known_in(self.map.version)

    async def prove(self) -> ProveReply:
        """Prove that this master's lease is valid; raises NotLeader."""
        return ProveReply()

    def admitting(self, node: Instance) -> contextlib.AbstractAsyncContextManager[None]:
        """Admit ``node``, whose lease begins in the body. Raises MasterUnavailable or NotLeader."""
        return contextlib.nullcontext()

    async def keep_admitted(self, present: Callable[[frozenset[str]], frozenset[str]]) -> None:
        """Forget admitted nodes that are not ``present``, a function that selects present ones among given ids."""

    def __repr__(self) -> str:
        return "Ownership()"
