"""Places and strangers by themselves: shares, the reserve, and who makes way."""

from __future__ import annotations

import random

import pytest

from tanghulu.auth.places import ANYBODY, Caller, Places, Strangers
from tanghulu.auth.tenants import Identity, Right
from tanghulu.errors import Overloaded

TENANT = Caller.of(Identity("t", frozenset({Right.WRITE}), "acme"))
OTHER = Caller.of(Identity("o", frozenset({Right.READ})))
OPERATOR = Caller.of(Identity("w", frozenset({Right.JOIN})))


def taken(places: Places, caller: Caller, most: int) -> int:
    """The places that ``caller`` gets before it is refused."""
    for number in range(most + 1):
        try:
            places.take(caller, most)
        except Overloaded:
            return number
    raise AssertionError("more than there are")


def test_a_tenant_has_a_share_and_operators_a_reserve() -> None:
    places = Places("calls", one_in=2, most_share=4)
    assert taken(places, TENANT, 16) == 4
    with pytest.raises(Overloaded, match="tenant acme has 4 calls here"):
        places.take(Caller.of(Identity("second", frozenset({Right.WRITE}), "acme")), 16)
    assert taken(places, OTHER, 16) == 10
    assert taken(places, OPERATOR, 16) == 2
    places.check()
    places.give_back(TENANT)
    assert taken(places, TENANT, 16) == 1
    places.give_back(OPERATOR)
    assert taken(places, OTHER, 16) == 0
    assert taken(places, OPERATOR, 16) == 1
    places.check()


def test_without_tokens_everybody_has_all_places() -> None:
    assert taken(Places("calls", one_in=4), ANYBODY, 5) == 5


def test_the_oldest_of_the_address_with_most_strangers_makes_way() -> None:
    strangers: Strangers[str] = Strangers()
    for name in ("honest", "a1", "a2", "a3"):
        strangers.enter(name, name[0])
    assert strangers.make_way(4) is None
    assert [strangers.make_way(2) for _ in range(2)] == ["a1", "a2"]
    assert "honest" in strangers
    strangers.check()


def test_strangers_come_and_go() -> None:
    rng, strangers = random.Random(1), Strangers[int]()
    known: dict[int, None] = {}
    for number in range(1000):
        strangers.enter(number, str(rng.randrange(4)))
        known[number] = None
        gone = strangers.make_way(20) if rng.random() < 0.7 else rng.choice(list(known))
        if gone is not None:
            strangers.leave(gone)
            del known[gone]
        strangers.check()
        assert len(strangers) == len(known)
