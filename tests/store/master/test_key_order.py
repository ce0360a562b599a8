"""The directory's table at a size where a single dict, or an order that is always there, would make it stand still."""

from __future__ import annotations

import gc
import random

import pytest

from tanghulu.store.master.directory import key_order
from tanghulu.store.master.directory.chunk_table import DirectoryTable, InventoryState
from tanghulu.store.master.directory.key_order import KEPT_S, KeyOrder
from tanghulu.store.master.directory.listing import list_keys, snapshot


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_order, "RUN_KEYS", 16)
    monkeypatch.setattr(key_order, "LEAF_KEYS", 4)
    monkeypatch.setattr(key_order, "STEP_LEAVES", 2)


def filled(num_keys: int) -> DirectoryTable:
    table = DirectoryTable()
    first, second = table.open_inventory("a"), table.open_inventory("b")
    table.add_report(first, [(f"k{n}", 1, 10, 0) for n in range(num_keys)])
    table.add_report(second, [(f"k{n}", 1, 10, 1) for n in range(0, num_keys, 3)])
    return table


def in_steps(table: DirectoryTable, prefix: str, after: str = "", limit: int = 1 << 30) -> tuple[list[str], int]:
    num_steps, keys = 1, list[str]()
    while (page := list_keys(table, prefix, after, limit)).walked_to is not None:
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
    order = KeyOrder(parts)
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
    table = filled(50_000)
    keys, num_steps = in_steps(table, "k1")
    assert keys == sorted(f"k{n}" for n in range(50_000) if str(n).startswith("1"))
    assert num_steps > 4
    assert in_steps(table, "k2", after="k27", limit=3) == (["k270", "k2700", "k27000"], 1)
    table.add(table.open_inventory("c"), "k270/new", 1, 1)
    assert in_steps(table, "k2", after="k2700", limit=2) == (["k27000", "k27001"], 1)
    table.check()
    assert "50001" not in in_steps(table, "")[0]
    table.tick(0.0)
    table.tick(KEPT_S)
    assert in_steps(table, "k3")[1] > 4
    table.check()


def test_what_an_order_took_goes_leaf_by_leaf(small: None) -> None:
    order = KeyOrder([{f"{n:03}" for n in range(40)}, {"x"}])
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
    table = filled(100_000)
    assert max(map(len, table._parts)) < 300
    in_steps(table, "none")
    gc.collect()
    assert not any(map(gc.is_tracked, table._parts))
    assert not any(gc.is_tracked(leaf) for run in table._order._runs for leaf in run.leaves)


def test_many_holders_of_one_key() -> None:
    table = DirectoryTable()
    inventories = [table.open_inventory(f"n{n}") for n in range(20)]
    for number, inventory in enumerate(inventories):
        table.add(inventory, "k", (1 << 64) - 1, (1 << 44) - 1, cold=number % 4 == 3)
        table.check()
    found = table.find("k")
    assert found is not None
    assert (found.version, found.size_bytes, found.num_warm) == ((1 << 64) - 1, (1 << 44) - 1, 15)
    assert found.node_ids[:3] == ("n0", "n1", "n2")
    assert found.node_ids[15:] == ("n3", "n7", "n11", "n15", "n19")
    for number in range(19):
        table.kill_inventory(inventories[number], InventoryState.GONE)
    assert table.holds(["k", "x"]) == b"\1\0"
    while table.sweep(1):
        pass
    table.check()
    found = table.find("k")
    assert found is not None
    assert found.node_ids == ("n19",)


def test_a_walk_meets_each_key_that_stays_once() -> None:
    table = filled(3000)
    walk, seen, inventory = table.walk(), list[str](), table.open_inventory("c")
    for step in range(3100):
        page, more = snapshot(table, walk, "", 1)
        seen += {key for keys in page.values() for key in keys}
        table.add(inventory, f"new{step}", 1, 1)
        table.remove("a", f"k{step}")
        table.remove("b", f"k{step}")
        if not more:
            break
    assert len(seen) == len(set(seen))
    assert {f"k{n}" for n in range(step + 1, 3000)} <= set(seen)
