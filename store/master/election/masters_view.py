"""The masters of a cluster in etcd, as seen by this master. Pure.

Under one prefix are ``leader``, ``masters/ID``, ``ranges/00`` to ``ranges/63``, ``nodes/ID``, and ``nodes`` with the
ids of all admitted nodes, which exists once a leader has admitted any. A master watches the prefix and receives the
changes in order, those of one revision together, perhaps late. All masters that have seen a revision come to the same
conclusions: each decides for itself who should own a range, without asking others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from tanghulu.discovery.base import Instance
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.range_map import RangeMap

LEADER, MASTERS, RANGES, NODES, ADMITTED = "leader", "masters/", "ranges/", "nodes/", "nodes"


def range_name(number: int) -> str:
    """Return the name below the prefix of the key of range ``number``."""
    return f"{RANGES}{number:02d}"


RANGE_NUMBERS = {range_name(number): number for number in range(NUM_RANGES)}


@dataclass(frozen=True, slots=True)
class KeySeen:
    """A key's state in etcd from ``revision`` on: ``name`` is its name below the prefix.

    The value of a range's key is the id of its owner, a ``text``, as are the ids in ``nodes``; that of any other key is
    an ``instance``. A deleted key has neither. ``lease``: the lease it is attached to.
    """

    name: str
    revision: int
    lease: int = 0
    text: str = ""
    instance: Instance | None = None


@dataclass(frozen=True, slots=True)
class RangeHolder:
    """The holder of the key of a range: the id of a master, the lease it is held under, and its term."""

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
        self._map_revision = 0  # of the last change shown in the map

    def begin(self, keys: Iterable[KeySeen], revision: int) -> None:
        """Take ``keys`` as all existing ones at ``revision``.

        The map's version then equals that of masters which have watched all the time; otherwise callers that know this
        master's version would refuse theirs, since etcd's revision also grows by changes outside the map. Only if
        something has been missed, at an unknown revision, is this revision taken; others get there with the next
        change, which follows.
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
        """Return the names of the keys shown by the map."""
        held = {name for name, number in RANGE_NUMBERS.items() if self.holders[number] is not None}
        return held | {MASTERS + name for name in self.masters} | ({LEADER} if self.leader is not None else set())

    def change(self, keys: Iterable[KeySeen]) -> None:
        """Take the changes of one revision, or of several in order; repeated ones change nothing."""
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
        """The master that should own each range; "" if no candidate should."""
        return assign(self.masters) or ("",) * NUM_RANGES

    def map(self, cluster: int) -> RangeMap:
        """Return the map of the etcd with the id ``cluster``."""
        found = [self.masters.get(holder.owner) if holder is not None else None for holder in self.holders]
        owners = tuple(None if each is None else each.address for each in found)
        return RangeMap(self._map_revision, cluster, owners, tuple(self._terms))

    def check(self) -> None:
        """Assert that every master has a lease, and that no term is later than the last seen revision."""
        assert self.masters.keys() == self.leases.keys()
        assert all(holder is None or holder.term <= self.revision for holder in self.holders)
        assert self._map_revision <= self.revision
        self.map(0).check()

    def __repr__(self) -> str:
        num_held = NUM_RANGES - self.holders.count(None)
        return f"MastersView({self.revision}, {len(self.masters)} masters, {num_held} ranges owned)"


# --- the intended owners

# The intended owner of each range of keys: a pure function of the live masters.
#
# Rendezvous hashing (HRW): every pair of a range and a master has a weight, the hash of both, and the heaviest pairs
# come first. A master takes floor(64 / n) ranges, and 64 mod n of the masters take one more, so none has two more than
# another; a range whose heaviest master is full goes to its next. Everyone with the same ids computes the same answer.
#
# Example: with the masters a, b and c two have 21 ranges and one 22. d joins: it gets 16, most of them from all three
# alike, and a few further ranges change hands among a, b and c since their shares have become smaller. d leaves: each
# range is back with its former owner.
#
# The *standby* of a range is the master that should own it if its owner were lost, so a range taken over by its standby
# need not be moved again.

#: Sets of masters whose assignments are cached: the current ones with each of them lost, and the previous ones.
_MAX_REMEMBERED = 256


def assign(ids: Iterable[str]) -> tuple[str, ...]:
    """Return the master that should own each range, of those with ``ids``; empty without any."""
    return _assign(tuple(sorted(set(ids))))


@lru_cache(_MAX_REMEMBERED)
def _assign(ids: tuple[str, ...]) -> tuple[str, ...]:
    if not ids:
        return ()
    share, num_larger = divmod(NUM_RANGES, len(ids))
    owners = [""] * NUM_RANGES
    num_owned = dict.fromkeys(ids, 0)
    pairs = [(_weight(number, each), number, each) for number in range(NUM_RANGES) for each in ids]
    for _, number, each in sorted(pairs, reverse=True):
        if owners[number]:
            continue
        is_larger = num_owned[each] == share and num_larger > 0
        if num_owned[each] < share or is_larger:
            num_larger -= is_larger
            num_owned[each] += 1
            owners[number] = each
    return tuple(owners)


def _weight(number: int, master_id: str) -> int:
    return xxh3_64_intdigest(f"{number:02d}/{master_id}".encode())
