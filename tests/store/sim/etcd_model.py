"""An etcd as a pure model: keys under one prefix, leases, revisions, transactions, and what watches are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tanghulu.store.master.election.masters_view import KeySeen


class NoSuchLeaseError(Exception):
    """A key was to be attached to a lease that is over; nothing of the transaction was done."""


class EtcdModel:
    """Time is given; a lease ends when ``tick`` says so, and its keys vanish together, at one revision."""

    def __init__(self) -> None:
        self.revision = 1
        self.keys: dict[str, KeySeen] = {}
        self.history: list[KeySeen] = []  # all changes, in order
        self.leases: dict[int, float] = {}  # until when
        self._ttls: dict[int, float] = {}
        self._last_lease = 0

    # --- leases

    def grant(self, ttl_s: float, now_s: float) -> int:
        self._last_lease += 1
        self.leases[self._last_lease], self._ttls[self._last_lease] = now_s + ttl_s, ttl_s
        return self._last_lease

    def keep_alive(self, lease: int, now_s: float) -> bool:
        if lease not in self.leases:
            return False
        self.leases[lease] = now_s + self._ttls[lease]
        return True

    def revoke(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            self._change([KeySeen(each.name, 0) for each in self.keys.values() if each.lease == lease])

    def tick(self, now_s: float) -> None:
        for lease in [lease for lease, until_s in self.leases.items() if until_s <= now_s]:
            self.revoke(lease)

    def stood_still(self, seconds: float) -> None:
        """No time passed for the leases meanwhile."""
        self.leases = {lease: until_s + seconds for lease, until_s in self.leases.items()}

    # --- keys

    def transact(self, guards: Mapping[str, int], puts: Iterable[KeySeen]) -> bool:
        """Write ``puts`` if every key of ``guards`` has the revision there; 0 stands for no key."""
        puts = list(puts)
        if any(self.revision_of(name) != revision for name, revision in guards.items()):
            return False
        if any(put.lease and put.lease not in self.leases for put in puts):
            raise NoSuchLeaseError
        self._change(puts)
        return True

    def revision_of(self, name: str) -> int:
        return self.keys[name].revision if name in self.keys else 0

    def _change(self, puts: list[KeySeen]) -> None:
        if not puts:
            return
        self.revision += 1
        for put in puts:
            entry = replace(put, revision=self.revision)
            if entry.text or entry.instance is not None:
                self.keys[entry.name] = entry
            else:
                self.keys.pop(entry.name, None)
            self.history.append(entry)

    def check(self) -> None:
        revisions = [each.revision for each in self.history]
        assert revisions == sorted(revisions)
        assert all(each.lease == 0 or each.lease in self.leases for each in self.keys.values())
