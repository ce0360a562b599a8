"""Masters that share the ranges of keys on a real etcd: real nodes and clients, owners that are lost under load."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from random import Random

import pytest

import tanghulu
from tanghulu.errors import ChunkNotFound, DeadlineExceeded, MasterUnavailable, TanghuluError
from tanghulu.store.client import Client
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tests.store.cluster import Process, eventually
from tests.store.elected_cluster import ElectedCluster
from tests.store.fault_tools import Background

pytestmark = pytest.mark.slow
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def sharing() -> Iterator[ElectedCluster]:
    with ElectedCluster(3, 2) as cluster:
        yield cluster


def shares(cluster: ElectedCluster) -> list[int]:
    """How many ranges each living master owns and knows all of, in order; -1: not all yet."""
    living = [each for each in cluster.masters if each.alive]
    known = [each.metric("tanghulu_master_rebuilding") == 0 for each in living]
    owned = [int(each.metric("tanghulu_master_owned_ranges")) for each in living]
    return sorted(number if is_known else -1 for number, is_known in zip(owned, known, strict=True))


def are_even(cluster: ElectedCluster) -> bool:
    found = shares(cluster)
    return sum(found) == NUM_RANGES and found[0] >= NUM_RANGES // len(found)


class Load:
    """Puts, gets and removes of one client; remembers what was acknowledged, and what was answered falsely."""

    def __init__(self, address: str, name: str) -> None:
        self.client: Client = tanghulu.connect(address, deadline_s=DEADLINE_S)
        self.fresh: Client = tanghulu.connect(address, deadline_s=DEADLINE_S)
        self.name = name
        self.held: list[str] = []
        self.removed: list[str] = []
        self.wrong: list[str] = []
        self.errors: list[TanghuluError] = []
        self.num_calls = 0
        self._rng = Random(name)
        self._lock = threading.Lock()

    def step(self) -> None:
        """One put, and a look by another client at some of what was acknowledged."""
        self.num_calls += 1
        key = f"{self.name}/{self.num_calls}"
        try:
            self.client.put(key, value(key))
            with self._lock:
                self.held.append(key)
            if self.num_calls % 20 == 0:
                victim = self.held.pop(self._rng.randrange(len(self.held)))
                self.client.remove(victim)
                self.removed.append(victim)
            self.look()
        except (MasterUnavailable, DeadlineExceeded) as error:
            self.errors.append(error)

    def look(self) -> None:
        keys = self._rng.sample(self.held, min(len(self.held), 50))
        told = self.fresh.exists_many(keys)
        self.wrong += [f"{key} is missing" for key, there in zip(keys, told, strict=True) if not there]
        key = self._rng.choice(keys)
        self.fresh._driver.context.locations.forget(key)
        try:
            with self.fresh.get(key) as chunk:
                if chunk.bytes() != value(key):
                    self.wrong.append(f"{key} is another value")
        except ChunkNotFound:
            self.wrong.append(f"{key} is not found")

    def check(self) -> None:
        """All that was acknowledged is there, and nothing that was removed."""
        assert not self.wrong, self.wrong[:5]
        assert not self.errors, self.errors[:5]
        assert all(self.fresh.exists_many(self.held))
        assert not any(self.fresh.exists_many(self.removed))
        listed = [info.key for info in self.fresh.list_keys(f"{self.name}/")]
        assert sorted(listed) == sorted(self.held)
        for key in self.held:
            with self.fresh.get(key) as chunk:
                assert chunk.bytes() == value(key)

    def close(self) -> None:
        self.client.close()
        self.fresh.close()


def value(key: str) -> bytes:
    return key.encode() * 50


def lose(cluster: ElectedCluster, victim: Process, how: Callable[[ElectedCluster, Process], None]) -> None:
    eventually(lambda: are_even(cluster))
    how(cluster, victim)
    eventually(lambda: are_even(cluster))


def kill(cluster: ElectedCluster, victim: Process) -> None:
    victim.kill()
    eventually(lambda: are_even(cluster))
    cluster.replace(victim)


def stop_and_continue(cluster: ElectedCluster, victim: Process) -> None:
    """An owner stands still until the others own everything, then wakes and must not be believed."""
    others = [each for each in cluster.masters if each is not victim]
    victim.popen.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: sum(each.metric("tanghulu_master_owned_ranges") for each in others) == NUM_RANGES)
    finally:
        victim.popen.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("how", [kill, stop_and_continue])
@pytest.mark.parametrize("of", ["leader", "another"])
def test_owners_are_lost_under_load_and_nothing_is_falsely_missing(
    sharing: ElectedCluster, how: Callable[[ElectedCluster, Process], None], of: str
) -> None:
    eventually(lambda: are_even(sharing))
    leader = sharing.leader()
    victim = leader if of == "leader" else next(each for each in sharing.masters if each is not leader)
    loads = [Load(sharing.address, f"{how.__name__}-{of}-{index}") for index in range(2)]
    try:
        with Background(loads[0].step) as first, Background(loads[1].step) as second:
            eventually(lambda: min(len(each.held) for each in loads) > 50)
            lose(sharing, victim, how)
            before = [len(each.held) for each in loads]
            eventually(lambda: all(len(each.held) > n + 50 for each, n in zip(loads, before, strict=True)))
        assert not first.errors + second.errors
        for each in loads:
            each.check()
    finally:
        for each in loads:
            each.close()
