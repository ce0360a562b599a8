"""The directory's table at a size where a single dict, or an order that is always there, would make it stand still."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

from tanghulu.store.master.directory import key_order
from tanghulu.store.master.directory.chunk_table import DirectoryTable
from tanghulu.store.master.directory.inventories import Inventories
from tanghulu.store.master.directory.key_order import KEPT_S, KeyOrder
from tanghulu.store.master.directory.listing import list_keys, snapshot
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.directory.rebuild import ALONE_S
from tanghulu.store.protocol.announcements import ChunkEntry, NodeAnnouncement, Removal, ReportPiece
from tanghulu.store.protocol.key_slots import NUM_SLOTS, range_of, slot_of
from tests.store.master.running_master import instance


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_order, "RUN_KEYS", 16)
    monkeypatch.setattr(key_order, "LEAF_KEYS", 4)
    monkeypatch.setattr(key_order, "STEP_LEAVES", 2)


def filled(num_keys: int, prefix: str = "k") -> RangeDirectories:
    """A directory whose two nodes have reported so many keys; the second has every third of them, on its SSD."""
    directory = RangeDirectories(0.0)
    entries = sorted(((f"{prefix}{n}", 1, 10, 0) for n in range(num_keys)), key=lambda entry: slot_of(entry[0]))
    for name in "ab":
        directory.node_registered(instance(name), 0.0)
    directory.tick(ALONE_S)
    say(directory, "a", report_id=1, piece=ReportPiece(0, NUM_SLOTS, entries))
    cold = [(key, version, size_bytes, 1) for key, version, size_bytes, _ in entries[::3]]
    say(directory, "b", report_id=1, piece=ReportPiece(0, NUM_SLOTS, cold))
    assert directory.is_ready
    return directory


def say(directory: RangeDirectories, name: str, **values: Any) -> None:
    directory.announce(NodeAnnouncement(name, 7, **values), 0.0)


def in_steps(directory: RangeDirectories, prefix: str, after: str = "", limit: int = 1 << 30) -> tuple[list[str], int]:
    num_steps, keys = 1, list[str]()
    while (page := list_keys(directory, prefix, after, limit)).walked_to is not None:
        assert not page.keys
        assert page.more
        num_steps += 1
        after = page.walked_to
    keys += [entry.key for entry in page.keys]
    return keys, num_steps


@pytest.mark.parametrize("seed", range(4))
def test_the_order_follows_every_change_from_its_first_run_on(small: None, seed: int) -> None:
    rng = random.Random(seed)
    parts: list[set[str]] = [set() for _ in range(16)]
    order = KeyOrder()
    order.join(parts)
    now_s = 0.0
    for _ in range(3000):
        number = rng.randrange(16)
        part = parts[number]
        match rng.randrange(8):
            case 0:
                order.extend()
            case 1:
                now_s += rng.choice([0.1, KEPT_S / 20])
                order.tick(now_s)
            case 2 | 3 if part:
                part.discard(key := rng.choice(sorted(part)))
                order.removed(number, key)
            case _:
                key = f"{rng.randrange(400):03}"
                if key not in part and hash(key) % 16 == number:
                    part.add(key)
                    order.added(number, key)
        order.check()
    while not order.extend():
        pass
    keys = sorted(key for part in parts for key in part)
    for first in ("", "123", "399", "9"):
        assert list(order.keys_from(first, inclusive=True)) == [key for key in keys if key >= first]
        assert list(order.keys_from(first, inclusive=False)) == [key for key in keys if key > first]


def test_an_order_is_made_in_steps_and_goes_when_nobody_lists() -> None:
    directory = filled(50_000)
    keys, num_steps = in_steps(directory, "k1")
    assert keys == sorted(f"k{n}" for n in range(50_000) if str(n).startswith("1"))
    assert num_steps > 4
    assert in_steps(directory, "k2", after="k27", limit=3) == (["k270", "k2700", "k27000"], 1)
    say(directory, "a", added=[ChunkEntry("k270/new", 1, 1)])
    assert in_steps(directory, "k2", after="k2700", limit=2) == (["k27000", "k27001"], 1)
    directory.check()
    assert "50001" not in in_steps(directory, "")[0]
    directory.tick(10.0)
    directory.tick(10.0 + KEPT_S)
    assert in_steps(directory, "k3")[1] > 4
    directory.check()


@pytest.mark.parametrize("seed", range(4))
def test_the_ranges_are_listed_as_one(small: None, seed: int) -> None:
    """Pages of any size over all ranges are those of one sorted list, whatever comes and goes between them."""
    rng = random.Random(seed)
    directory, keys = filled(0), set[str]()
    for _ in range(60):
        new = [f"{rng.choice('ab')}/{rng.randrange(500)}" for _ in range(rng.randrange(20))]
        old = rng.sample(sorted(keys), min(len(keys), rng.randrange(12)))
        say(directory, "a", removed=[Removal(key, 1) for key in old], added=[ChunkEntry(key, 1, 10) for key in new])
        keys = keys.difference(old).union(new)
        prefix, after = rng.choice(["", "a/", "b/4"]), rng.choice(["", "a/2", "b/40", "c"])
        wanted = sorted(key for key in keys if key.startswith(prefix) and key > after)
        limit = rng.randint(1, 40)
        assert in_steps(directory, prefix, after, limit)[0] == wanted[:limit]
        directory.check()
    assert len({range_of(key) for key in keys}) > 30


def test_what_an_order_took_goes_leaf_by_leaf(small: None) -> None:
    order = KeyOrder()
    assert order.join([{f"{n:03}" for n in range(40)}]) == 0
    assert order.join([{"x"}]) == 1
    assert not order.extend()
    assert order
    order.tick(0.0)
    order.tick(KEPT_S)
    assert not order
    order.added(0, "new")  # it will be there when somebody asks
    num_ticks = 1
    while order._waste:
        order.tick(KEPT_S)
        num_ticks += 1
    assert num_ticks > 4


def test_no_dict_grows_with_all_keys_and_none_is_looked_at_by_the_garbage_collector() -> None:
    directory = filled(100_000)
    parts = [part for table in directory._tables for part in table.parts]
    assert max(map(len, parts)) < 100
    in_steps(directory, "none")
    gc.collect()
    assert not any(map(gc.is_tracked, parts))
    assert not any(gc.is_tracked(leaf) for run in directory._order._runs for leaf in run.leaves)


def test_keys_of_one_range_lie_in_many_dicts() -> None:
    inventories = Inventories()
    table, inventory = DirectoryTable(inventories, KeyOrder()), inventories.open("n")
    table.add_report(inventory, [(f"k{n}", 1, 1, 0) for n in range(20_000)])
    assert max(map(len, table.parts)) < 1000


def test_many_holders_of_one_key() -> None:
    inventories = Inventories()
    table = DirectoryTable(inventories, KeyOrder())
    for number in range(20):
        inventory = inventories.open(f"n{number}")
        table.add(inventory, "k", (1 << 64) - 1, (1 << 44) - 1, cold=number % 4 == 3)
        inventories.check(table.check())
    found = table.find("k")
    assert found is not None
    assert (found.version, found.size_bytes, found.num_warm) == ((1 << 64) - 1, (1 << 44) - 1, 15)
    assert found.node_ids[:3] == ("n0", "n1", "n2")
    assert found.node_ids[15:] == ("n3", "n7", "n11", "n15", "n19")
    for number in range(19):
        inventories.forget_owner(f"n{number}")
    assert table.holds("k")
    assert not table.holds("x")
    inventories.begin_sweep()
    assert list(table.clean("k")) == []
    inventories.end_sweep()
    inventories.check(table.check())
    found = table.find("k")
    assert found is not None
    assert found.node_ids == ("n19",)
    inventories.forget_owner("n19")
    assert not table.holds("k")


def test_a_walk_meets_each_key_that_stays_once() -> None:
    directory = filled(3000)
    walk, seen = directory.walk(), list[str]()
    for step in range(3100):
        page, more = snapshot(directory, walk, "", 1)
        seen += {key for keys in page.values() for key in keys}
        gone = [Removal(f"k{step}", 1)]
        say(directory, "a", removed=gone, added=[ChunkEntry(f"new{step}", 1, 1)])
        say(directory, "b", removed=gone)
        if not more:
            break
    assert len(seen) == len(set(seen))
    assert {f"k{n}" for n in range(step + 1, 3000)} <= set(seen)
