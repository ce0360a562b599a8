"""All copying between nodes, decided in one place. Pure: announcements and the time in, orders out.

Four reasons (see orders): a chunk that lost a holder is *restored*; a *draining* node's chunks go elsewhere before it
is stopped; a node much emptier than the others is *filled*; a *hot* chunk, or one with a request for more holders, gets
them, and loses them when it cools. Orders are sent with the answers to announcements, because nodes announce at least
once a second anyway, and a finished copy is announced like any other chunk, so the directory stays the one truth.

The planner walks over all keys in slices while a node drains or is filled, otherwise over the keys with several wanted
replicas. Wanted replicas are those of the put; a holder that evicts its copy lowers the number, because it judged the
chunk not worth its space: only copies lost with their node are restored.

A draining node is *drained* when a complete walk found none of its chunks without another holder, and the node has been
quiet (nothing being written, everything announced) since before that walk began. One of several masters plans the
copies of its own keys, at its share of the rate, and reports a node as drained for these alone; a range that arrived
meanwhile has to be walked over first.

Worked example: replicas=2, A and B hold k, C is empty. B dies. The walk finds one holder instead of two, waits
``GRACE_S`` (B may be restarting, a put may be half-way), orders C to pull k from A; C announces k; done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from tanghulu.store.master.directory.placement import MAX_REPLICAS, PlacementCandidate, place_copy
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.replication.demand import HotKeyRates, ReplicaRequests
from tanghulu.store.master.replication.orders import Copy, CopyOrders, Reason
from tanghulu.store.protocol.announcements import DropOrder, NodeAnnouncement
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.messages import Location

#: Seconds for which a chunk must have too few holders before it is restored.
GRACE_S = 3.0
#: Keys waiting for their grace; the others are found by the next walk.
MAX_LACKING = 1 << 16
#: Seconds for which a chunk whose copy failed is not tried again.
FAILED_PAUSE_S = 2.0
MAX_FAILED = 1 << 14
#: A client that removes a chunk has long finished after that.
REMOVAL_S = 30.0
#: Time between two walks over wanted replicas.
WALK_PAUSE_S = 0.5
#: A node is filled while the others' mean fullness is at least FILL_FULL: from below half that mean to just under it.
FILL_FULL = 0.5
FILL_BELOW = 0.5
FILL_MARGIN = 0.05
#: Gets a second and holder from which a chunk is hot, below which an extra copy is dropped, and how many there may be.
HOT_RATE = 200.0
COOL_RATE = 50.0
MAX_HOT_HOLDERS = 4
MAX_EXTRA_KEYS = 16384
COOL_S = 10.0
HOT_KEYS_PERIOD_S = 1.0


class Progress(NamedTuple):
    """The progress of a draining node: chunks held by no other node, and whether it may be stopped."""

    num_unsafe: int
    drained: bool


@dataclass(slots=True)
class _Drain:
    """One draining node."""

    num_unsafe: int
    quiet_since_s: float | None = None
    drained: bool = False
    walked_unsafe: int = 0  # in the current walk
    num_begun: int = 0  # ranges that had arrived when the walk that found it drained began


@dataclass(slots=True)
class _Extra:
    """The extra copies of a hot chunk, and the time of their last change."""

    node_ids: list[str]
    changed_s: float


class CopyPlanner:
    """Decides all copying; see the module. One planner for each generation of RangeDirectories."""

    def __init__(self, directory: RangeDirectories, rate_bytes_s: float, rng: Random, now_s: float) -> None:
        self.orders = CopyOrders(rate_bytes_s)
        self.hot_keys = HotKeyRates()
        self.requests = ReplicaRequests()
        self._directory = directory
        self._rng = rng
        self._wanted: dict[str, int] = {}
        self._lacking: dict[str, float] = {}
        self._failed: dict[str, float] = {}  # key -> end of the pause after a failure
        self._removing: dict[str, float] = {}  # key -> time since which its removal has prevented a copy
        self._drains: dict[str, _Drain] = {}
        self._filling: set[str] = set()
        self._extra: dict[str, _Extra] = {}
        self._total_fullness = 0.0  # of the nodes that take chunks, as of the last check
        self._num_takers = 0
        self._keys = directory.walk()  # the remainder of the walk over all keys
        self._next_key: str | None = None  # comes before them: there was no room for its copy
        self._walk_began_s = now_s
        self._walk_num_begun = directory.num_begun
        self._wanted_walk: list[str] = []
        self._next_walk_s = now_s
        self._next_hot_keys_s = now_s

    # --- announcements of nodes

    def concerns(self, announcement: NodeAnnouncement) -> bool:
        """Return whether ``orders_for`` has anything to do for ``announcement``."""
        return bool(
            announcement.replicated
            or announcement.hot
            or announcement.failed_copies
            or announcement.quiet
            or self._drains
            or self.orders.active
            or self._directory.has_stale_holders
            or (self._wanted and (announcement.removed or announcement.deleted))
        )

    def orders_for(self, announcement: NodeAnnouncement, now_s: float) -> tuple[list[Copy], list[DropOrder]]:
        """Take an announcement's effects on copies, after the directory; return the orders for the node."""
        node_id = announcement.node_id
        self._wanted.update((key, min(wanted, MAX_REPLICAS)) for key, wanted in announcement.replicated)
        for key, version in announcement.removed:
            if not self.orders.was_ordered_to_drop(node_id, key, version):
                self._let_go(key)
        for key, version in announcement.deleted:
            self._forget(key)
            self.orders.was_ordered_to_drop(node_id, key, version)
        self._drop_removed()
        if self.orders.active:
            for entry in announcement.added:
                if node_id in self.orders.targets_of(entry.key) and self._holds(node_id, entry.key, entry.version):
                    self._copied(self.orders.done(entry.key, node_id), now_s)
            for key in announcement.failed_copies:
                self.orders.failed(key, node_id)
                if len(self._failed) < MAX_FAILED:
                    self._failed[key] = now_s + FAILED_PAUSE_S
        drain = self._drains.get(node_id)
        if drain is not None:
            drain.quiet_since_s = (drain.quiet_since_s or now_s) if announcement.quiet else None
        self.hot_keys.add(announcement.hot, now_s)
        return self.orders.take(node_id, now_s)

    def _holds(self, node_id: str, key: str, version: int) -> bool:
        found = self._directory.find(key)
        return found is not None and found.version == version and node_id in found.node_ids

    def _is_being_removed(self, key: str, found: Location, now_s: float) -> bool:
        """Return whether a client is removing the chunk, which then gets no copies; finish for a client that left.

        Otherwise a draining node that holds the chunk would never be drained.
        """
        if not self._directory.is_entombed(key, found.version):
            self._removing.pop(key, None)
            return False
        if len(self._removing) < MAX_FAILED and now_s - self._removing.setdefault(key, now_s) >= REMOVAL_S:
            del self._removing[key]
            for node_id in found.node_ids:
                self.orders.drop(node_id, DropOrder(key, found.version, removed=True))
        return True

    def _drop_removed(self) -> None:
        """Order the stale holders of removed chunks to drop them."""
        for node_id, key, version in self._directory.take_stale_holders():
            self.orders.drop(node_id, DropOrder(key, version, removed=True))

    def _let_go(self, key: str) -> None:
        wanted = self._wanted.get(key)
        if wanted is not None and wanted > 2:
            self._wanted[key] = wanted - 1
        else:
            self._forget(key)

    def _forget(self, key: str) -> None:
        self._wanted.pop(key, None)
        self._lacking.pop(key, None)

    def _copied(self, copy: Copy, now_s: float) -> None:
        if copy.reason is Reason.FILL:
            self.orders.drop(copy.source, DropOrder(copy.key, copy.version))
        elif copy.reason is Reason.HOT and (copy.key in self._extra or len(self._extra) < MAX_EXTRA_KEYS):
            extra = self._extra.setdefault(copy.key, _Extra([], now_s))
            extra.node_ids.append(copy.target)
            extra.changed_s = now_s
        elif copy.reason is Reason.DRAIN and (drain := self._drains.get(copy.source)) is not None:
            drain.num_unsafe = max(drain.num_unsafe - 1, 0)

    def ask(self, keys: Sequence[str], holders: int, for_s: float, now_s: float) -> int:
        """Have ``holders`` nodes (MAX_HOT_HOLDERS at most) hold ``keys`` for ``for_s``; return how many are known.

        Raises InvalidRequest; see ReplicaRequests.
        """
        known = [key for key, held in zip(keys, self._directory.holds(keys), strict=True) if held]
        return self.requests.ask(known, min(holders, MAX_HOT_HOLDERS), for_s, now_s)

    def progress(self, node_id: str) -> Progress:
        """Return the progress of the draining ``node_id``."""
        drain = self._drains.get(node_id)
        if drain is None:  # it has just begun
            return Progress(self._directory.num_chunks(node_id), drained=False)
        knows_all = self._directory.is_ready and drain.num_begun == self._directory.num_begun
        return Progress(drain.num_unsafe, drain.drained and knows_all)

    # --- the walks

    def walk(self, now_s: float, num_keys: int) -> None:
        """Check the next ``num_keys`` keys; called at every tick, once the directory is complete."""
        nodes = self._directory.candidates()
        self.orders.share = len(self._directory.owned) / NUM_RANGES
        self.orders.expire(now_s)
        self._failed = {key: until_s for key, until_s in self._failed.items() if now_s < until_s}
        self._notice(nodes, now_s)
        if now_s >= self._next_hot_keys_s:
            self._next_hot_keys_s = now_s + HOT_KEYS_PERIOD_S
            self._copy_hot(nodes, now_s)
            self._copy_requested(nodes, now_s)
            self._cool_down(nodes, now_s)
        if self._drains or self._filling:
            self._walk_all(nodes, now_s, num_keys)
        elif self._wanted:
            self._walk_wanted(nodes, now_s, num_keys)

    def _notice(self, nodes: dict[str, PlacementCandidate], now_s: float) -> None:
        """Detect nodes that joined, left, began or ended draining, or are much emptier than the others."""
        self.orders.forget_nodes(nodes)
        draining = {node_id for node_id, node in nodes.items() if node.draining}
        for node_id in self._drains.keys() - draining:
            del self._drains[node_id]
        for node_id in draining - self._drains.keys():
            self._drains[node_id] = _Drain(self._directory.num_chunks(node_id))
            self._begin_walk(now_s)
        takers = [node for node in nodes.values() if not node.draining]
        self._total_fullness, self._num_takers = sum(map(_fullness, takers)), len(takers)
        self._filling = {node.node_id for node in takers if self._is_to_fill(node)}

    def _is_to_fill(self, node: PlacementCandidate) -> bool:
        if self._num_takers < 2 or not node.capacity_bytes:
            return False
        mean = (self._total_fullness - _fullness(node)) / (self._num_takers - 1)  # of the others
        incoming = self.orders.incoming_bytes(node.node_id) / node.capacity_bytes
        limit = mean - FILL_MARGIN if node.node_id in self._filling else mean * FILL_BELOW
        return mean >= FILL_FULL and _fullness(node) + incoming < limit

    def _begin_walk(self, now_s: float) -> None:
        self._keys, self._next_key, self._walk_began_s = self._directory.walk(), None, now_s
        self._walk_num_begun = self._directory.num_begun
        for drain in self._drains.values():
            drain.walked_unsafe = 0

    def _walk_all(self, nodes: dict[str, PlacementCandidate], now_s: float, num_keys: int) -> None:
        for _ in range(num_keys):
            key = self._next_key or next(self._keys, None)
            if key is None:
                self._end_walk(now_s)
                return
            self._next_key = None
            found = self._directory.find(key)
            if found is None:
                continue
            if not self._examine(key, found, nodes, now_s):
                self._next_key = key
                return  # no room for a required copy: continue here next time
            safe = [node_id for node_id in found.node_ids if node_id not in self._drains]
            for node_id in found.node_ids if not safe else ():
                self._drains[node_id].walked_unsafe += 1

    def _end_walk(self, now_s: float) -> None:
        for drain in self._drains.values():
            drain.num_unsafe = drain.walked_unsafe
            was_quiet = drain.quiet_since_s is not None and drain.quiet_since_s < self._walk_began_s
            drain.num_begun = self._walk_num_begun
            drain.drained = was_quiet and not drain.num_unsafe
        self._removing = {key: since_s for key, since_s in self._removing.items() if now_s < since_s + 2 * REMOVAL_S}
        self._begin_walk(now_s)

    def _walk_wanted(self, nodes: dict[str, PlacementCandidate], now_s: float, num_keys: int) -> None:
        if not self._wanted_walk and now_s >= self._next_walk_s:
            self._wanted_walk = list(self._wanted)
            self._next_walk_s = now_s + WALK_PAUSE_S
        for _ in range(min(num_keys, len(self._wanted_walk))):
            key = self._wanted_walk.pop()
            found = self._directory.find(key)
            if found is None:
                self._forget(key)
            elif not self._examine(key, found, nodes, now_s):
                self._wanted_walk.append(key)
                return

    def _examine(self, key: str, found: Location, nodes: dict[str, PlacementCandidate], now_s: float) -> bool:
        """Order the missing copies of ``key``; False if there was no room for that now."""
        on_its_way = self.orders.targets_of(key)
        safe = {node_id for node_id in found.node_ids if node_id not in self._drains} | on_its_way
        lacks = min(self._wanted.get(key, 1), self._num_takers) - len(safe)
        if lacks <= 0:
            self._lacking.pop(key, None)
            self._fill_with(key, found, nodes, now_s)
            return True
        drains = len(found.node_ids) > len(safe - on_its_way)
        if key in self._failed or not (drains or self._lacks_long(key, now_s)):
            return True
        return self._copy(key, found, nodes, Reason.DRAIN if drains else Reason.RESTORE, now_s)

    def _lacks_long(self, key: str, now_s: float) -> bool:
        if len(self._lacking) >= MAX_LACKING and key not in self._lacking:
            return False
        return now_s - self._lacking.setdefault(key, now_s) >= GRACE_S

    def _copy(
        self, key: str, found: Location, nodes: dict[str, PlacementCandidate], reason: Reason, now_s: float
    ) -> bool:
        """Order one more copy; True also if no node could ever take it, which a later walk finds again."""
        if self._is_being_removed(key, found, now_s):
            return True
        holding = [nodes[node_id] for node_id in {*found.node_ids, *self.orders.targets_of(key)} if node_id in nodes]
        target = place_copy(list(nodes.values()), holding, found.size_bytes, self._rng)
        sources = [node_id for node_id in found.node_ids if node_id in nodes]
        if target is None or not sources:
            return True
        warm = found.node_ids[: found.num_warm]
        source = min(sources, key=lambda node_id: (node_id not in warm, self.orders.load(node_id)))
        if not (self.orders.has_room(source, now_s) and self.orders.has_room(target.node_id, now_s)):
            return False
        self.orders.order(Copy(key, found.version, found.size_bytes, source, target.node_id, reason), now_s)
        return True

    def _fill_with(self, key: str, found: Location, nodes: dict[str, PlacementCandidate], now_s: float) -> None:
        """Move the chunk to a node being filled, if one lacks it and its fullest holder is fuller."""
        if not self._filling or self.orders.targets_of(key):
            return
        sources = [nodes[n] for n in found.node_ids if n in nodes and n not in self._drains and n not in self._filling]
        targets = [nodes[n] for n in self._filling if n not in found.node_ids]
        if not sources or not targets:
            return
        source, target = max(sources, key=_fullness), min(targets, key=_fullness)
        fits = target.free_bytes - self.orders.incoming_bytes(target.node_id) >= found.size_bytes
        room = self.orders.has_room(source.node_id, now_s) and self.orders.has_room(target.node_id, now_s)
        if fits and room and self._is_to_fill(target):
            copy = Copy(key, found.version, found.size_bytes, source.node_id, target.node_id, Reason.FILL)
            self.orders.order(copy, now_s)

    # --- hot chunks

    def _copy_hot(self, nodes: dict[str, PlacementCandidate], now_s: float) -> None:
        most = min(MAX_HOT_HOLDERS, self._num_takers)
        for key in self.hot_keys.keys(now_s):
            found = self._directory.find(key)
            if found is None or self.orders.targets_of(key) or len(found.node_ids) >= most:
                continue
            is_hot = self.hot_keys.rate(key, now_s) >= HOT_RATE * len(found.node_ids)
            if is_hot and (key in self._extra or len(self._extra) < MAX_EXTRA_KEYS):
                self._copy(key, found, nodes, Reason.HOT, now_s)

    def _copy_requested(self, nodes: dict[str, PlacementCandidate], now_s: float) -> None:
        for key in self.requests.keys(now_s):
            found, wanted = self._directory.find(key), min(self.requests.wanted(key), self._num_takers)
            if found is None or self.orders.targets_of(key) or len(found.node_ids) >= wanted:
                continue
            if key not in self._failed and not self._copy(key, found, nodes, Reason.HOT, now_s):
                return  # no room for more orders now

    def _cool_down(self, nodes: dict[str, PlacementCandidate], now_s: float) -> None:
        for key, extra in list(self._extra.items()):
            found = self._directory.find(key)
            holders = found.node_ids if found is not None else ()
            extra.node_ids = [node_id for node_id in extra.node_ids if node_id in holders]
            if found is None or not extra.node_ids:
                del self._extra[key]
            elif (
                now_s >= extra.changed_s + COOL_S
                and len(holders) > max(self._wanted.get(key, 1), self.requests.wanted(key))
                and self.hot_keys.rate(key, now_s) < COOL_RATE * len(holders)
            ):
                self.orders.drop(extra.node_ids.pop(), DropOrder(key, found.version))
                extra.changed_s = now_s

    def check(self) -> None:
        """Assert that the parts are sound, and the bounds."""
        self.orders.check()
        self.hot_keys.check()
        self.requests.check()
        assert all(count > 1 for count in self._wanted.values())
        assert len(self._lacking) <= MAX_LACKING
        assert self._lacking.keys() <= self._wanted.keys()
        assert len(self._extra) <= MAX_EXTRA_KEYS
        assert len(self._failed) <= MAX_FAILED
        assert len(self._removing) <= MAX_FAILED
        assert not self._drains.keys() & self._filling

    def __repr__(self) -> str:
        return f"CopyPlanner({len(self._wanted)} wanted, {list(self._drains)} draining, {self.orders!r})"


def _fullness(node: PlacementCandidate) -> float:
    return node.used_bytes / node.capacity_bytes if node.capacity_bytes else 1.0
