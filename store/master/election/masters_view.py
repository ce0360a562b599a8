"""The masters of a cluster in etcd, as far as this master has seen them. Pure.

Under one prefix lie ``leader``, ``masters/ID``, ``ranges/00`` to ``ranges/63``, ``nodes/ID``, and ``nodes`` with the
ids of all admitted nodes, which is there as soon as a leader has admitted any. A master watches the prefix and receives
the changes in their order, those of one revision together, perhaps late. All masters that have seen a revision come to
the same conclusions: each decides for itself who should own a range, and asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tanghulu.discovery.base import Instance
from tanghulu.store.master.election.assignment import assign, standbys
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.range_map import RangeMap

LEADER, MASTERS, RANGES, NODES, ADMITTED = "leader", "masters/", "ranges/", "nodes/", "nodes"


def range_name(number: int) -> str:
    """The name below the prefix of the key of range ``number``."""
    return f"{RANGES}{number:02d}"


RANGE_NUMBERS = {range_name(number): number for number in range(NUM_RANGES)}


@dataclass(frozen=True, slots=True)
class KeySeen:
    """A key as etcd has had it from ``revision`` on: ``name`` is what follows the prefix.

    The value of a range's key is the id of its owner, a ``text``, as are the ids in ``nodes``; that of any other key is
    an ``instance``. A key that is gone has neither. ``lease``: the lease that it is attached to.
    """

    name: str
    revision: int
    lease: int = 0
    text: str = ""
    instance: Instance | None = None


@dataclass(frozen=True, slots=True)
class RangeHolder:
    """The holder of the key of a range: the id of a master, the lease that it is held under, and its term."""

    owner: str
    lease: int
    term: int


class MastersView:
    """The keys below the prefix at ``revision``."""

    def __init__(self) -> None:
        self.revision = 0
        self.leader: Instance | None = None
        self.leader_lease = 0  # that the leader's key is attached to
        self.leader_term = 0  # at which it was written; of the last leader while there is none
        self.masters: dict[str, Instance] = {}
        self.leases: dict[str, int] = {}  # of each of the masters
        self.nodes: dict[str, Instance] = {}
        #: Ids of the admitted nodes; None: no leader has written any.
        self.admitted: frozenset[str] | None = None
        self.holders: list[RangeHolder | None] = [None] * NUM_RANGES
        self._terms = [0] * NUM_RANGES  # the last one of each range
        self._map_revision = 0  # of the last change that the map tells of

    def begin(self, keys: Iterable[KeySeen], revision: int) -> None:
        """Take ``keys`` for all that there were at ``revision``.

        The map's version is then what it is for those who have watched all the time, or callers that know this master's
        would refuse theirs: etcd's revision also grows by what the map does not tell. Only where something has gone
        unseen, at a revision that nobody tells, is it taken; others get there with the next change, which follows.
        """
        assert revision >= self.revision, "etcd's revisions only grow"
        keys = list(keys)
        mapped = {key.name: key.revision for key in keys if not key.name.startswith(ADMITTED)}
        version = revision if self._mapped_names() - mapped.keys() else max(mapped.values(), default=0)
        self._map_revision = max(self._map_revision, version)
        self.leader, self.masters, self.leases, self.nodes = None, {}, {}, {}
        self.leader_lease, self.admitted = 0, None
        self.holders = [None] * NUM_RANGES
        self.revision = revision
        for key in keys:
            self._take(key)

    def _mapped_names(self) -> set[str]:
        """The names of the keys that the map tells of."""
        held = {name for name, number in RANGE_NUMBERS.items() if self.holders[number] is not None}
        return held | {MASTERS + name for name in self.masters} | ({LEADER} if self.leader is not None else set())

    def change(self, keys: Iterable[KeySeen]) -> None:
        """Take the changes of one revision, or of several in order; those that were told before change nothing."""
        for key in keys:
            if key.revision >= self.revision:
                self.revision = key.revision
                if not key.name.startswith(ADMITTED):
                    self._map_revision = key.revision
                self._take(key)

    def _take(self, key: KeySeen) -> None:
        kind, _, name = key.name.partition("/")
        instance = key.instance
        if key.name in RANGE_NUMBERS:
            number = RANGE_NUMBERS[key.name]
            self.holders[number] = RangeHolder(key.text, key.lease, key.revision) if key.text else None
            self._terms[number] = key.revision if key.text else self._terms[number]
        elif key.name == LEADER:
            self.leader, self.leader_lease = instance, key.lease if instance is not None else 0
            self.leader_term = key.revision if instance is not None else self.leader_term
        elif kind == "masters" and instance is not None:
            self.masters[name], self.leases[name] = instance, key.lease
        elif kind == "masters":
            self.masters.pop(name, None)
            self.leases.pop(name, None)
        elif key.name == ADMITTED:
            self.admitted = frozenset(key.text.split())
        elif kind == "nodes" and instance is not None:
            self.nodes[name] = instance
        elif kind == "nodes":
            self.nodes.pop(name, None)

    # --- what follows

    @property
    def wanted(self) -> tuple[str, ...]:
        """The master that should own each range; "" if none of those that can should."""
        return assign(self.masters) or ("",) * NUM_RANGES

    @property
    def standbys(self) -> tuple[str, ...]:
        """The standby of each range, "" if it has none, when each is owned by the master that should own it."""
        return standbys(self.masters, self.wanted)

    def map(self, cluster: int) -> RangeMap:
        """The map of the etcd with the id ``cluster``."""
        found = [self.masters.get(holder.owner) if holder is not None else None for holder in self.holders]
        owners = tuple(None if each is None else each.address for each in found)
        return RangeMap(self._map_revision, cluster, owners, tuple(self._terms))

    def check(self) -> None:
        """Assert that every master has a lease, and that no term is later than what has been seen."""
        assert self.masters.keys() == self.leases.keys()
        assert all(holder is None or holder.term <= self.revision for holder in self.holders)
        assert self._map_revision <= self.revision
        self.map(0).check()

    def __repr__(self) -> str:
        num_held = NUM_RANGES - self.holders.count(None)
        return f"MastersView({self.revision}, {len(self.masters)} masters, {num_held} ranges owned)"
