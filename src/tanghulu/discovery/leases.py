"""Instances under leases, as a plain table: events and a time in, changes out. Pure.

The master keeps one of these. A lease is a secret number and a deadline; a new registration of the same instance id
replaces the old one, whose lease becomes void.

While its lease lives, an instance keeps its role and its owner, the token with which it registered ("" without
tokens): another token can neither replace nor renew nor end it. So nobody takes the place of a live process.
"""

from __future__ import annotations

import heapq
import secrets
from collections import Counter
from dataclasses import dataclass

from tanghulu.discovery.base import WAIT_FOR_LEASE, EventKind, Instance, InstanceEvent, require_same_role
from tanghulu.errors import Conflict, InvalidRequest, Overloaded
from tanghulu.types import Role

MAX_INSTANCES = 1 << 14
MIN_TTL_S = 0.05
MAX_TTL_S = 3600.0


@dataclass(slots=True)
class InstanceLease:
    """A registered instance, and the time until which it is considered alive."""

    lease_id: int
    instance: Instance
    owner: str
    ttl_s: float
    expires_s: float
    wake_s: float  # its time in the table's heap; renewals move only expires_s


class LeaseTable:
    """The registered instances. Changes are queued in order until ``take_events``."""

    def __init__(self) -> None:
        self._leases: dict[str, InstanceLease] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; stale entries are dropped when popped
        self._events: list[InstanceEvent] = []
        self.num_by_role: Counter[Role] = Counter()

    def __len__(self) -> int:
        """Number of live instances."""
        return len(self._leases)

    def holds(self, instance_id: str) -> bool:
        """Return whether that instance has an unexpired lease."""
        return instance_id in self._leases

    def instances(self) -> list[Instance]:
        """Return all live instances, by id."""
        return [self._leases[key].instance for key in sorted(self._leases)]

    def register(self, instance: Instance, ttl_s: float, now_s: float, owner: str = "") -> int:
        """Add or replace ``instance``; returns the lease id. Raises InvalidRequest, Conflict or Overloaded."""
        if not instance.id:
            raise InvalidRequest("an instance with an empty id cannot register; give it one")
        if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
            raise InvalidRequest(f"a lease of {ttl_s:g} s is not within {MIN_TTL_S:g}..{MAX_TTL_S:g} s")
        before = self._leases.get(instance.id)
        if before is None and len(self._leases) >= MAX_INSTANCES:
            raise Overloaded(f"{MAX_INSTANCES} instances are registered, the most allowed; stop some of them")
        if before is not None:
            require_same_role(before.instance, instance)
            if before.owner != owner:
                raise Conflict(f"instance {instance.id!r} was registered with another token; {WAIT_FOR_LEASE}")
        lease_id = secrets.randbits(63) | 1
        expires_s = now_s + ttl_s
        wake_s = expires_s if before is None else min(before.wake_s, expires_s)
        if before is None or wake_s < before.wake_s:
            heapq.heappush(self._deadlines, (wake_s, instance.id))
        self._leases[instance.id] = InstanceLease(lease_id, instance, owner, ttl_s, expires_s, wake_s)
        if before is not None:
            self.num_by_role[before.instance.role] -= 1
        self.num_by_role[instance.role] += 1
        if before is None or before.instance != instance:
            self._events.append(InstanceEvent(EventKind.PUT, instance))
        return lease_id

    def keep_alive(self, instance_id: str, lease_id: int, now_s: float, owner: str = "") -> bool:
        """Renew a lease; return False if it is not (or no longer) in this table, or belongs to another owner."""
        if self._find(instance_id, lease_id, owner) is None:
            return False
        self.prolong(instance_id, now_s)
        return True

    def prolong(self, instance_id: str, now_s: float) -> None:
        """Prolong the lease of an instance that proved alive in another way than by renewing."""
        lease = self._leases.get(instance_id)
        if lease is not None:
            lease.expires_s = max(lease.expires_s, now_s + lease.ttl_s)

    def shorten(self, instance_id: str, until_s: float) -> None:
        """Have the lease end at ``until_s`` unless it is renewed before, or would end sooner."""
        lease = self._leases.get(instance_id)
        if lease is not None and until_s < lease.expires_s:
            lease.expires_s = until_s
            if until_s < lease.wake_s:
                lease.wake_s = until_s
                heapq.heappush(self._deadlines, (until_s, instance_id))

    def deregister(self, instance_id: str, lease_id: int, owner: str = "") -> bool:
        """End a lease now; return False if it is not in this table, or belongs to another owner."""
        lease = self._find(instance_id, lease_id, owner)
        if lease is None:
            return False
        self._delete(lease)
        return True

    def _find(self, instance_id: str, lease_id: int, owner: str) -> InstanceLease | None:
        lease = self._leases.get(instance_id)
        return lease if lease is not None and (lease.lease_id, lease.owner) == (lease_id, owner) else None

    def expire(self, now_s: float) -> list[Instance]:
        """End every lease whose deadline has passed; returns their instances."""
        expired: list[Instance] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            wake_s, instance_id = heapq.heappop(self._deadlines)
            lease = self._leases.get(instance_id)
            if lease is None or lease.wake_s != wake_s:  # belongs to an ended lease
                continue
            if lease.expires_s > now_s:  # renewed since then
                lease.wake_s = lease.expires_s
                heapq.heappush(self._deadlines, (lease.expires_s, instance_id))
                continue
            self._delete(lease)
            expired.append(lease.instance)
        return expired

    def forgive(self, seconds: float) -> None:
        """Postpone all deadlines: the owner of this table was stalled, and renewals may wait in its sockets."""
        for lease in self._leases.values():
            lease.expires_s += seconds

    def take_events(self) -> list[InstanceEvent]:
        """Return the changes since the last call."""
        events, self._events = self._events, []
        return events

    def _delete(self, lease: InstanceLease) -> None:
        del self._leases[lease.instance.id]
        self.num_by_role[lease.instance.role] -= 1
        self._events.append(InstanceEvent(EventKind.DELETE, lease.instance))

    def check(self) -> None:
        """Assert that every lease has its id's key, a number, and a wake-up not after its deadline."""
        for key, lease in self._leases.items():
            assert lease.instance.id == key
            assert lease.lease_id > 0
            assert lease.wake_s <= lease.expires_s
            assert (lease.wake_s, key) in self._deadlines
        assert +self.num_by_role == Counter(lease.instance.role for lease in self._leases.values())
        assert len({lease.lease_id for lease in self._leases.values()}) == len(self._leases)

    def __repr__(self) -> str:
        return f"LeaseTable({len(self._leases)} instances)"
