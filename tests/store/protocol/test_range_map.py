"""The map of the masters: what it says of ranges, which of two is the later, and how it travels."""

from __future__ import annotations

import pytest

from tanghulu.auth.tenants import Identity, Right
from tanghulu.errors import InvalidRequest, KeysMoved, error_from_code
from tanghulu.rpc.wire import encode, parser_of
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tanghulu.store.protocol.messages import MastersReply, MastersRequest
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.types import Address

A, B = Address("10.0.0.1", 7400), Address("10.0.0.2", 7400)
HALVES = RangeMap(42, 7, (A,) * 32 + (B,) * 32, (40,) * 32 + (42,) * 32)


def test_owners_and_terms() -> None:
    HALVES.check()
    assert HALVES.owner_of(31) == A
    assert HALVES.owner_of(32) == B
    assert HALVES.term_of(31) == 40
    assert HALVES.term_of(32) == 42
    assert HALVES.ranges_of(A) == frozenset(range(32))


def test_an_only_master_owns_everything_in_term_0() -> None:
    alone = RangeMap.of_one(A)
    alone.check()
    assert alone.version == alone.cluster == 0
    assert alone.ranges_of(A) == frozenset(range(NUM_RANGES))
    assert not alone.moved(alone)


def test_a_range_moves_with_its_owner_or_its_term() -> None:
    vacant = RangeMap(50, 7, (None, *HALVES.owners[1:]), HALVES.terms)
    again = RangeMap(57, 7, HALVES.owners, (57, *HALVES.terms[1:]))
    assert vacant.moved(HALVES) == again.moved(HALVES) == again.moved(vacant) == {0}
    assert HALVES.moved(HALVES) == frozenset()


def test_the_later_map_of_one_etcd_replaces_the_earlier_and_that_of_another_etcd_any() -> None:
    later = RangeMap(43, 7, HALVES.owners, HALVES.terms)
    elsewhere = RangeMap(1, 8, (A,) * NUM_RANGES, (1,) * NUM_RANGES)
    assert HALVES.replaces(None)
    assert later.replaces(HALVES)
    assert elsewhere.replaces(later)
    assert not HALVES.replaces(later)
    assert not HALVES.replaces(HALVES)
    assert elsewhere.moved(HALVES) == frozenset(range(NUM_RANGES))


def told(known: RangeMap, request: MastersRequest) -> MastersReply:
    return parser_of(MastersReply)(encode(MastersReply.of(known, request)))


def test_the_map_travels_with_vacant_ranges_and_is_not_sent_twice() -> None:
    vacant = RangeMap(50, 7, (None, *HALVES.owners[1:]), HALVES.terms)
    assert told(vacant, MastersRequest()).map == told(vacant, MastersRequest(42, 7)).map == vacant
    unchanged = told(vacant, MastersRequest(50, 7))
    assert unchanged.map is None
    assert unchanged.version == 50
    assert told(vacant, MastersRequest(900, 8)).map == vacant, "what another etcd counted says nothing"


@pytest.mark.parametrize(
    "reply",
    [
        MastersReply(5, 7, ["a:1"], bytes(NUM_RANGES - 1), [1] * NUM_RANGES),
        MastersReply(5, 7, ["a:1"], bytes(NUM_RANGES), [1] * (NUM_RANGES - 1)),
        MastersReply(5, 7, ["a:1"], bytes([1]) * NUM_RANGES, [1] * NUM_RANGES),
        MastersReply(5, 7, [f"a:{n}" for n in range(65)], bytes(NUM_RANGES), [1] * NUM_RANGES),
    ],
)
def test_a_map_that_is_none_is_refused(reply: MastersReply) -> None:
    with pytest.raises(InvalidRequest):
        parser_of(MastersReply)(encode(reply))


def test_moved_tells_the_version_across_the_wire() -> None:
    error = error_from_code("MOVED", KeysMoved.known_in(57).message)
    assert isinstance(error, KeysMoved)
    assert error.version == 57
    assert KeysMoved("something else").version == 0


def test_tenants_are_told_what_stands_in_front_of_their_keys() -> None:
    reply = MastersReply.of(HALVES, MastersRequest())
    rule = methods.MASTERS.rule
    assert rule is not None
    assert rule.answer(Identity("o", frozenset(Right)), reply).key_scope == ""
    identity = Identity("token", frozenset({Right.READ}), "acme")
    assert rule.answer(identity, reply).key_scope == identity.scope != ""
    assert rule.answer(identity, reply).map == HALVES
