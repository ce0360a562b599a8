"""Orders to copy and to drop, by themselves: windows and rates, nodes that go, answers that get lost."""

from __future__ import annotations

import pytest

from tanghulu.rpc.wire import encode, parser_of
from tanghulu.store.master.replication.orders import MAX_OPEN, ORDER_S, Copy, CopyOrders, Reason
from tanghulu.store.protocol.announcements import DropOrder, Orders

SIZE = 1000


def test_orders_keep_to_their_window_and_rate() -> None:
    orders = CopyOrders(rate_bytes_s=10_000.0)
    now_s, moved = 0.0, 0
    for _ in range(100):
        now_s += 0.1
        while orders.has_room("a", now_s) and orders.has_room("b", now_s):
            orders.order(Copy(f"k{moved}", 7, SIZE, "a", "b", Reason.FILL), now_s)
            moved += 1
        orders.check()
        copies, _ = orders.take("b", now_s)
        for copy in copies:
            assert orders.done(copy.key, "b") == copy
    assert 100 <= moved <= 111, "10 kB/s for 10 s, and one second's worth ahead"
    orders = CopyOrders(rate_bytes_s=1e12)
    while orders.has_room("b", 0.0):
        orders.order(Copy(f"k{moved}", 7, SIZE, "a", "b", Reason.DRAIN), 0.0)
        moved += 1
    assert orders.load("b") == MAX_OPEN
    orders.expire(ORDER_S)
    assert orders.load("b") == 0
    assert not orders.active
    assert orders.take("b", ORDER_S) == ([], []), "what ran out is not given out"
    orders.check()


def test_an_owner_of_a_part_of_the_keys_orders_at_its_share_of_the_rate() -> None:
    orders = CopyOrders(1000.0)
    orders.share = 0.25
    orders.order(Copy("k0", 1, 500, "a", "b", Reason.DRAIN), 0.0)
    assert not orders.has_room("a", 0.5), "125 of the 250 that are owed"
    assert orders.has_room("a", 1.1)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_orders_of_a_node_that_is_gone_are_closed(gone: str) -> None:
    orders = CopyOrders(1e9)
    orders.order(Copy("k", 7, SIZE, "a", "b", Reason.DRAIN), 0.0)
    orders.drop("a", DropOrder("x", 1))
    orders.forget_nodes({"a", "b"} - {gone})
    assert orders.targets_of("k") == frozenset()
    orders.check()


def test_two_versions_of_a_key_are_dropped_each() -> None:
    orders = CopyOrders(1e9)
    for version in (1, 2):
        orders.drop("a", DropOrder("x", version))
    assert orders.take("a", 0.0)[1] == [DropOrder("x", 1), DropOrder("x", 2)]
    assert not orders.was_ordered_to_drop("a", "x", 3)
    assert orders.was_ordered_to_drop("a", "x", 2)
    assert orders.was_ordered_to_drop("a", "x", 1)
    assert not orders.active


def test_an_order_says_whether_the_chunk_was_removed() -> None:
    orders = CopyOrders(1e9)
    for removed in (False, True):
        orders.drop("a", DropOrder("x", 1, removed))
    drops = orders.take("a", 0.0)[1]
    told = parser_of(Orders)(encode(Orders(drops=drops)))
    assert told.drops == [("x", 1, False), ("x", 1, True)]
    assert orders.was_ordered_to_drop("a", "x", 1)
    assert not orders.active, "one removal answers both"


def test_a_drop_whose_answer_may_be_lost_is_told_again() -> None:
    orders = CopyOrders(1e9)
    for key in ("heard", "lost"):
        orders.drop("a", DropOrder(key, 7))
    orders.drop("b", DropOrder("another's", 7))
    assert orders.take("a", 0.0) == ([], [DropOrder("heard", 7), DropOrder("lost", 7)])
    assert orders.take("b", 0.0) == ([], [DropOrder("another's", 7)])
    assert orders.was_ordered_to_drop("a", "heard", 7)
    assert orders.take("a", 1.0) == ([], []), "while the connection stands answers arrive"
    orders.repeat_drops("a")
    assert orders.take("b", 1.0) == ([], [])
    assert orders.take("a", 1.0) == ([], [DropOrder("lost", 7)])
    orders.expire(1.0 + ORDER_S)
    orders.repeat_drops("a")
    assert orders.take("a", 2.0 + ORDER_S) == ([], []), "the node holds nothing of it, and will never say so"
    assert not orders.active
    orders.check()
