"""Choice among several masters: a guess corrected by the masters' answers.

A master that does not lead names the leader (NotLeader); one that does not answer is skipped; with an ``etcd://`` the
election's key names it. All callers in a process may share one guess, so that the first to find the new leader finds
it for all. With a single master there is nothing to guess; a process that has met it waits for it while it
restarts.
"""

from __future__ import annotations

import contextlib
from random import Random

from tanghulu.discovery.etcd_client import EtcdClient, read_blocking
from tanghulu.discovery.instance_wire import instance_from_bytes
from tanghulu.errors import InvalidRequest, KeysMoved, MasterUnavailable, NotLeader, TanghuluError
from tanghulu.masters import Masters
from tanghulu.runtime.clock import Backoff
from tanghulu.types import Address

#: Pause between two attempts to find the leader, or to reach a single master again, initially and at most.
SEEK_PAUSE_S, SEEK_MOST_S = 0.05, 0.25
#: The longest wait for one of several masters before trying the next: a stopped one does not refuse.
ATTEMPT_S = 1.5
#: Seconds without a beat on a stream after which a master counts as lost: it is stalled, or its path is dead. A single
#: one gets longer, as nothing replaces it.
SILENCE_S, SILENCE_OF_ONE_S = 2.5, 4.5
_ETCD_DEADLINE_S = 1.0


def masters_prefix(namespace: str) -> bytes:
    """Return the prefix of all keys in etcd of the masters of ``namespace``."""
    return f"/tanghulu-masters/{namespace}/".encode()


def leader_key(namespace: str) -> bytes:
    """Return the key in etcd holding the leader of ``namespace``, as ``instance_wire`` encodes it, under its lease."""
    return masters_prefix(namespace) + b"leader"


def leader_in(value: bytes | None) -> Address | None:
    """Return the leader's address in the key's value; raises MasterUnavailable if it is malformed."""
    try:
        return instance_from_bytes(value).address if value else None
    except InvalidRequest as error:
        raise MasterUnavailable(f"the leader's entry in etcd is malformed: {error.message}") from error


class MasterFinder:
    """Finds the current master. Safe to share between threads: each step is one assignment."""

    def __init__(self, masters: Masters | Address | str) -> None:
        self.masters = Masters.of(masters)
        self._current: Address | None = None if self.masters.in_etcd else self.masters.addresses[0]
        #: Whether etcd, or a master that does not lead, has answered, so that the given address is right.
        self.answered = False

    @property
    def several(self) -> bool:
        """Whether there are several masters, so that the leader has to be found."""
        return self.masters.several

    @property
    def current(self) -> Address | None:
        """The master to call; None if unknown, so that it has to be looked up."""
        return self._current

    def failed(self, tried: Address, error: TanghuluError) -> None:
        """Note that ``tried`` did not answer as the leader; another caller may have noted that before."""
        if tried != self._current or not self.several:
            return
        named: Address | None = None
        if isinstance(error, NotLeader):
            self.answered = True
            with contextlib.suppress(InvalidRequest):  # it names none, or not by an address
                named = Address.parse(error.leader)
        if named is not None:
            self._current = named
        elif self.masters.in_etcd:
            self._current = None
        else:
            known = self.masters.addresses
            self._current = known[(known.index(tried) + 1) % len(known)] if tried in known else known[0]

    async def find(self) -> Address:
        """Return the master to call; raises MasterUnavailable if etcd does not answer or there is no leader yet."""
        if self._current is None:
            client = EtcdClient(self.masters.addresses, _ETCD_DEADLINE_S)
            try:
                kvs = (await client.range(leader_key(self.masters.namespace))).kvs
            finally:
                await client.close()
            self.answered = True
            self._current = leader_in(kvs[0].value if kvs else None)
        return self._known()

    def find_blocking(self) -> Address:
        """Do the same as ``find``, without an event loop."""
        if self._current is None:
            key = leader_key(self.masters.namespace)
            self._current = leader_in(read_blocking(self.masters.addresses, key, _ETCD_DEADLINE_S))
        return self._known()

    def _known(self) -> Address:
        current = self._current
        if current is None:
            raise MasterUnavailable(f"no master leads in {self.masters}; is one running with the same --etcd?")
        return current

    def __repr__(self) -> str:
        return f"MasterFinder({self.masters}, asks {self._current})"


class Seeking:
    """The attempts of one call until its deadline: timeout of the next, and the pause after a failure. Pure.

    One of several masters is always sought. A single one is waited for if the caller ``waits``; not if it answers that
    another leads, for that one is not among the caller's masters. A master that does not own the keys of the call is no
    reason to seek another leader: the caller looks for their owners.

    Example: a single master is away from 0 s to 1 s, and a call with a deadline of 5 s starts at 0.4 s. It tries at
    0.4, 0.45, 0.53, 0.71, 0.9 and 1.2 s, when it succeeds; with a deadline of 0.5 s it fails at 0.71 s.
    """

    def __init__(
        self,
        finder: MasterFinder,
        now_s: float,
        deadline_s: float,
        *,
        waits: bool = False,
        rng: Random | None = None,
    ) -> None:
        self._finder = finder
        self._until_s = now_s + deadline_s
        self._waits = waits or finder.several
        self._backoff = Backoff(SEEK_PAUSE_S, SEEK_MOST_S, rng)

    def attempt_s(self, now_s: float) -> float:
        """Return the seconds that the next attempt may take."""
        left_s = max(self._until_s - now_s, 0.0)
        return min(left_s, ATTEMPT_S) if self._finder.several else left_s

    def pause_s(self, tried: Address | None, error: TanghuluError, now_s: float) -> float | None:
        """Return the seconds until the next attempt after ``error`` from ``tried``; None to raise ``error``."""
        if tried is not None and not isinstance(error, KeysMoved):
            self._finder.failed(tried, error)
        pause_s = self._backoff.pause_s()
        leads_elsewhere = not self._finder.several and isinstance(error, NotLeader) and bool(error.leader)
        is_final = leads_elsewhere or isinstance(error, KeysMoved)
        return None if not self._waits or is_final or now_s + pause_s >= self._until_s else pause_s
