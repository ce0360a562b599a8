from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tanghulu.fair_turns import MAX_CLIENTS, FairTurns


def serve(turns: FairTurns, waiting: list[tuple[float, str]], count: int) -> list[str]:
    waiting.sort(key=lambda item: item[0])
    served = [waiting.pop(0) for _ in range(count)]
    for turn, _ in served:
        turns.served(turn)
    return [client for _, client in served]


def test_one_item_of_another_waits_for_one_turn():
    turns = FairTurns()
    waiting = [(turns.take("a"), "a") for _ in range(600)]
    assert serve(turns, waiting, 20) == ["a"] * 20
    waiting.append((turns.take("b"), "b"))
    assert serve(turns, waiting, 2) == ["b", "a"]
    assert serve(turns, waiting, 579) == ["a"] * 579


def test_weights():
    turns = FairTurns()
    waiting = [(turns.take("a", 2.0), "a") for _ in range(60)] + [(turns.take("b"), "b") for _ in range(60)]
    assert serve(turns, waiting, 60).count("a") == 40


def test_nobody_saves_up_turns():
    turns = FairTurns()
    serve(turns, [(turns.take("a"), "a") for _ in range(100)], 100)
    waiting = [(turns.take("b"), "b") for _ in range(10)] + [(turns.take("a"), "a") for _ in range(10)]
    assert serve(turns, waiting, 10).count("a") in (4, 5)


def test_clients_that_come_once_are_forgotten():
    turns = FairTurns()
    first = turns.take("often")
    for number in range(2 * MAX_CLIENTS):
        turns.served(turns.take(str(number)))
        turns.take("often")
    assert turns.take("often") == first + 2 * MAX_CLIENTS + 1
    assert len(turns._next) == MAX_CLIENTS


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_turns_of_a_client_grow_and_none_lies_before_what_is_served(history):
    turns, last, served = FairTurns(), dict[str, float](), 0.0
    for client, serves in history:
        turn = turns.take(client)
        assert turn >= served
        assert turn > last.get(client, -1.0)
        last[client] = turn
        if serves:
            turns.served(turn)
            served = max(served, turn)
