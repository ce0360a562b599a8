"""Who waits for which keys: any sequence keeps the books, and the bounds hold."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.errors import Overloaded
from tanghulu.store.master.directory import waiters as waits
from tanghulu.store.master.directory.waiters import WaitBoard, WaitingCall


def test_the_example_of_the_module() -> None:
    board = WaitBoard()
    first = board.join("c1", ["a", "b"], 10.0)
    second = board.join("c2", ["b"], 10.0)
    assert board.stored(["x"]) == []
    assert board.stored(["b"]) == [second]
    board.check()
    assert board.stored(["a", "b"]) == [first]
    assert len(board) == 0
    board.check()


def test_time_and_leaving_end_a_wait() -> None:
    board = WaitBoard()
    early, late = board.join("c", ["a"], 1.0), board.join("c", ["a", "b"], 2.0)
    gone = board.join("other", ["b"], 3.0)
    assert board.expire(0.5) == []
    assert board.expire(1.0) == [early]
    assert board.leave("other") == [gone]
    assert board.leave("other") == []
    board.check()
    assert board.clear() == [late]
    assert board.stored(["a", "b"]) == []
    board.check()


def test_the_bounds_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MAX_WAITERS_PER_OWNER", 2)
    monkeypatch.setattr(waits, "MAX_WAITERS", 3)
    monkeypatch.setattr(waits, "MAX_KEYS", 5)
    board = WaitBoard()
    board.join("c", ["a"], 1.0)
    board.join("c", ["a"], 1.0)
    with pytest.raises(Overloaded, match="2 calls of this connection"):
        board.join("c", ["a"], 1.0)
    with pytest.raises(Overloaded, match="for 2 keys"):
        board.join("d", "bcde", 1.0)
    board.join("d", "bcd", 1.0)
    with pytest.raises(Overloaded, match="3 calls wait"):
        board.join("e", ["a"], 1.0)
    board.check()


def test_a_tenant_has_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MAX_WAITERS", 8)
    monkeypatch.setattr(waits, "MAX_KEYS", 40)
    board = WaitBoard()
    for number in range(2):
        board.join(f"c{number}", ["@acme/a"], 1.0)
    with pytest.raises(Overloaded, match="2 calls of tenant 'acme'"):
        board.join("c2", ["@acme/a"], 1.0)
    many = [f"@other/{number}" for number in range(11)]
    with pytest.raises(Overloaded, match="0 calls of tenant 'other'"):
        board.join("c3", many, 1.0)
    board.join("c3", many[:10], 1.0)
    for number in range(5):
        board.join(f"d{number}", ["a"], 1.0)
    board.check()
    board.stored(["@acme/a"])
    board.join("c2", ["@acme/a"], 1.0)
    board.check()


class Owner:
    """A connection."""


def test_callers_that_come_and_go_leave_nothing() -> None:
    """While another waits: neither their keys nor they themselves stay until their time would have been up."""
    board, owners = WaitBoard(), weakref.WeakSet[Owner]()
    idle = board.join("idle", ["x"], 30.0)
    for _ in range(1000):
        owner = Owner()
        owners.add(owner)
        board.join(owner, ["a", "b"], 30.0)
        (gone,) = board.leave(owner)
        assert not gone.missing
        board.check()
    del gone
    assert len(owners) < 100
    assert board.expire(30.0) == [idle]


STEP = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 2), st.sets(st.sampled_from("abcde"), min_size=1), st.integers(1, 9)),
    st.tuples(st.just("stored"), st.sets(st.sampled_from("abcde"))),
    st.tuples(st.just("expire"), st.integers(0, 10)),
    st.tuples(st.just("leave"), st.integers(0, 2)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(STEP, max_size=40))
def test_any_sequence(steps: list[tuple[object, ...]]) -> None:
    """Against a model: a waiter is over exactly once, when its last key is seen, its time is up or its owner leaves."""
    board = WaitBoard()
    model: dict[WaitingCall, tuple[int, set[str], int]] = {}
    for step in steps:
        if step[0] == "join":
            _, owner, keys, until = step
            assert isinstance(keys, set)
            model[board.join(owner, keys, until)] = (owner, set(keys), until)  # type: ignore[arg-type,assignment]
            over, wanted = [], set()
        elif step[0] == "stored":
            assert isinstance(step[1], set)
            for _, missing, _ in model.values():
                missing -= step[1]
            over, wanted = board.stored(step[1]), {w for w, (_, missing, _) in model.items() if not missing}
        elif step[0] == "expire":
            over, wanted = board.expire(step[1]), {w for w, (_, _, until) in model.items() if until <= step[1]}  # type: ignore[arg-type,operator]
        else:
            over, wanted = board.leave(step[1]), {w for w, (owner, _, _) in model.items() if owner == step[1]}
        assert set(over) == wanted
        assert len(over) == len(wanted)
        for waiter in over:
            del model[waiter]
        board.check()
        assert len(board) == len(model)
