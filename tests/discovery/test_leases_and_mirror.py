"""The pure parts in virtual time."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tanghulu.discovery import leases as lease_module
from tanghulu.discovery.base import EventKind, InstanceEvent
from tanghulu.discovery.instance_wire import instance_from_bytes, instance_to_bytes
from tanghulu.discovery.leases import LeaseTable
from tanghulu.discovery.mirror import InstanceMirror
from tanghulu.errors import Conflict, InvalidRequest, MasterUnavailable, Overloaded
from tanghulu.types import Role
from tests.discovery.memory import MemoryDiscovery, MemoryRegistry
from tests.store.master.running_master import instance
from tests.virtual.clock import ManualClock

PUT, DELETE, SYNCED = EventKind.PUT, EventKind.DELETE, EventKind.SYNCED


def kinds(events: list[InstanceEvent]) -> list[tuple[EventKind, str]]:
    return [(event.kind, event.instance.id if event.instance else "") for event in events]


def test_a_lease_ends_when_nobody_renews_it() -> None:
    table = LeaseTable()
    lease = table.register(instance(), 3.0, now_s=0.0)
    assert table.keep_alive("n1", lease, 2.0)
    assert table.expire(3.0) == []
    assert table.expire(4.9) == []
    assert table.expire(5.0) == [instance()]
    assert not table.keep_alive("n1", lease, 5.0)
    assert kinds(table.take_events()) == [(PUT, "n1"), (DELETE, "n1")]


def test_a_new_registration_voids_the_old_lease() -> None:
    table = LeaseTable()
    old = table.register(instance(generation=1), 1.0, 0.0)
    new = table.register(instance(generation=2), 5.0, 0.5)
    assert not table.keep_alive("n1", old, 0.6)
    assert not table.deregister("n1", old)
    assert table.expire(2.0) == []
    assert table.deregister("n1", new)
    assert kinds(table.take_events()) == [(PUT, "n1"), (PUT, "n1"), (DELETE, "n1")]


def test_nobody_takes_the_place_of_a_living_instance() -> None:
    table = LeaseTable()
    lease = table.register(instance(), 3.0, 0.0, "mine")
    with pytest.raises(Conflict, match="another token"):
        table.register(instance(generation=2), 3.0, 1.0, "theirs")
    with pytest.raises(Conflict, match="is a node and cannot register as a decode"):
        table.register(instance(role=Role.DECODE), 3.0, 1.0, "mine")
    assert not table.keep_alive("n1", lease, 1.0, "theirs")
    assert not table.deregister("n1", lease, "theirs")
    again = table.register(instance(generation=2), 3.0, 1.0, "mine")
    assert again != lease
    assert not table.deregister("n1", lease, "mine")
    assert table.expire(4.0) == [instance(generation=2)]
    table.register(instance(role=Role.DECODE), 3.0, 4.0, "theirs")
    assert kinds(table.take_events()) == [(PUT, "n1"), (PUT, "n1"), (DELETE, "n1"), (PUT, "n1")]
    table.check()


def test_lease_ids_cannot_be_guessed() -> None:
    table = LeaseTable()
    ids = [table.register(instance(str(number)), 1.0, 0.0) for number in range(64)]
    assert min(ids) > 1 << 32
    assert len({ids[number + 1] - ids[number] for number in range(63)}) == 63


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"id": "n" * 257}, "id of an instance has 257 bytes; at most 256"),
        ({"namespace": "ü" * 200}, "namespace of an instance has 400 bytes"),
        ({"unix_path": "/" * 300}, "unix_path"),
        ({"attributes": {"a": "b" * 5000}}, "attributes of an instance has 5001 bytes; at most 4096"),
        ({"attributes": {"a" * 20_000_000: ""}}, "an instance has"),
        ({"metrics_address": "http://h:1"}, "metrics_address"),
        ({"metrics_address": "h:1/latest/meta-data/?x="}, "metrics_address"),
        ({"metrics_address": "me@h:1"}, "metrics_address"),
    ],
)
def test_an_instance_is_within_bounds(changes, said) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        instance_from_bytes(instance_to_bytes(replace(instance(), **changes)))


def test_a_shorter_lease_takes_effect() -> None:
    table = LeaseTable()
    table.register(instance(), 60.0, 0.0)
    table.register(instance(), 1.0, 0.0)
    assert table.expire(1.0) == [instance()]
    table.check()


def test_registering_the_same_again_tells_nobody() -> None:
    table = LeaseTable()
    for _ in range(100):
        table.register(instance(), 1.0, 0.0)
    assert kinds(table.take_events()) == [(PUT, "n1")]
    assert len(table._deadlines) == 1


def test_a_master_that_stood_still_forgives() -> None:
    table = LeaseTable()
    table.register(instance(), 1.0, 0.0)
    table.forgive(10.0)
    assert table.expire(10.5) == []
    assert table.expire(11.0) == [instance()]


def test_a_renewal_behind_a_standstill_ends_no_lease_sooner() -> None:
    table = LeaseTable()
    lease_id = table.register(instance(), 1.0, 0.0)
    table.forgive(10.0)
    assert table.expire(2.0) == []  # looked at again at 11
    assert table.keep_alive("n1", lease_id, 3.0)
    table.check()
    assert table.expire(10.9) == []
    assert table.expire(11.0) == [instance()]


def test_bounds(monkeypatch) -> None:
    table = LeaseTable()
    for ttl_s in (0.0, -1.0, 1e9):
        with pytest.raises(InvalidRequest, match="lease of"):
            table.register(instance(), ttl_s, 0.0)
    with pytest.raises(InvalidRequest, match="empty id"):
        table.register(instance(""), 1.0, 0.0)
    monkeypatch.setattr(lease_module, "MAX_INSTANCES", 1)
    table.register(instance("a"), 1.0, 0.0)
    table.register(instance("a", generation=8), 1.0, 0.0)
    with pytest.raises(Overloaded):
        table.register(instance("b"), 1.0, 0.0)


class LeaseMachine(RuleBasedStateMachine):
    """Against a dict of deadlines that is searched in full."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now_s = 0.0
        self.model: dict[str, tuple[int, float, float]] = {}
        self.roles: dict[str, Role] = {}
        self.watched: set[str] = set()

    @rule(name=st.sampled_from("abc"), ttl_s=st.sampled_from([0.5, 1.0, 3.0]), role=st.sampled_from(list(Role)))
    def register(self, name, ttl_s, role) -> None:
        if name in self.model and self.roles[name] is not role:
            with pytest.raises(Conflict):
                self.table.register(instance(name, role), ttl_s, self.now_s)
            return
        self.roles[name] = role
        self.model[name] = (self.table.register(instance(name, role), ttl_s, self.now_s), self.now_s + ttl_s, ttl_s)

    @rule(name=st.sampled_from("abc"), stale=st.booleans())
    def keep_alive(self, name, stale) -> None:
        lease_id, _, ttl_s = self.model.get(name, (0, 0.0, 0.0))
        assert self.table.keep_alive(name, lease_id - stale, self.now_s) == (name in self.model and not stale)
        if name in self.model and not stale:
            self.model[name] = (lease_id, self.now_s + ttl_s, ttl_s)

    @rule(name=st.sampled_from("abc"))
    def deregister(self, name) -> None:
        assert self.table.deregister(name, self.model.get(name, (0, 0.0))[0]) == (name in self.model)
        self.model.pop(name, None)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 4.0]))
    def expire(self, seconds) -> None:
        self.now_s += seconds
        gone = {name for name, (_, at_s, _) in self.model.items() if at_s <= self.now_s}
        assert {i.id for i in self.table.expire(self.now_s)} == gone
        for name in gone:
            del self.model[name]

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        for event in self.table.take_events():
            assert event.instance is not None
            (self.watched.add if event.kind is PUT else self.watched.remove)(event.instance.id)
        assert self.watched == set(self.model) == {i.id for i in self.table.instances()}


LeaseMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase


def test_a_restarted_source_tells_only_differences() -> None:
    mirror = InstanceMirror(grace_s=3.0)
    mirror.begin()
    assert kinds(mirror.put(instance("a")) + mirror.put(instance("b")) + mirror.put(instance("c"))) == [
        (PUT, "a"),
        (PUT, "b"),
        (PUT, "c"),
    ]
    assert kinds(mirror.synced(0.0)) == [(SYNCED, "")]
    mirror.begin()  # another master, that knows only b yet, and b has changed
    assert kinds(mirror.put(instance("b", generation=8))) == [(PUT, "b")]
    assert mirror.synced(10.0) == []
    assert mirror.put(instance("a")) == []  # it registered again, unchanged
    assert mirror.expire(12.9) == []
    assert kinds(mirror.expire(13.0)) == [(DELETE, "c")]
    assert mirror.expire(100.0) == []
    mirror.check()


def test_doubts_do_not_outlive_another_interruption() -> None:
    mirror = InstanceMirror(grace_s=3.0)
    mirror.begin()
    mirror.put(instance("a"))
    mirror.synced(0.0)
    mirror.begin()
    mirror.synced(1.0)
    mirror.begin()
    assert mirror.expire(100.0) == []
    assert mirror.synced(100.0) == []
    assert kinds(mirror.delete("a")) == [(DELETE, "a")]
    assert mirror.delete("a") == []


async def test_memory_in_virtual_time() -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    living, dying, watching = MemoryDiscovery(registry), MemoryDiscovery(registry), MemoryDiscovery(registry)
    await living.register(instance("living"), ttl_s=3.0)
    await dying.register(instance("dying"), ttl_s=3.0)
    stream = watching.watch()
    assert kinds([await anext(stream) for _ in range(3)]) == [(PUT, "dying"), (PUT, "living"), (SYNCED, "")]
    clock.advance(100.0)
    registry.tick()
    dying.crash()
    clock.advance(2.9)
    registry.tick()
    assert len(registry.attach()[0]) == 2
    clock.advance(0.1)
    registry.tick()
    assert kinds([await anext(stream)]) == [(DELETE, "dying")]
    with pytest.raises(MasterUnavailable):
        await dying.register(instance("dying"))
    registry.check()
    await stream.aclose()


def test_a_shortened_lease_ends_early_unless_there_is_a_sign_of_life():
    table = LeaseTable()
    for name in ("a", "b", "c"):
        table.register(instance(name), 3.0, 0.0)
        table.shorten(name, 1.0)
        table.check()
    table.shorten("a", 2.0)
    table.prolong("b", 0.5)
    table.prolong("nobody", 0.5)
    assert [each.id for each in table.expire(1.0)] == ["a", "c"]
    table.check()
    assert table.expire(3.4) == []
    assert [each.id for each in table.expire(3.5)] == ["b"]
    table.check()
