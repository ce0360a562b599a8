"""The table that says which master is asked for which keys, and how their answers become one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from tanghulu.errors import InvalidRequest, KeysMoved, MasterUnavailable
from tanghulu.rpc.fast_client import Call, Reply
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import MASTER, PeerId, owner_peer
from tanghulu.store.client.logic.key_owners import KeyOwners, SplitCall
from tanghulu.store.client.logic.master_calls import admitted
from tanghulu.store.client.logic.placement import NodeTable
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.directory_messages import (
    KeyInfo,
    ListKeysReply,
    ListKeysRequest,
    ReplicateReply,
    ReplicateRequest,
    WaitReply,
    WaitRequest,
)
from tanghulu.store.protocol.key_slots import NUM_RANGES, range_of
from tanghulu.store.protocol.messages import (
    LocateReply,
    LocateRequest,
    Location,
    MastersReply,
    MastersRequest,
    ProveReply,
)
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import Renewals, Signature, Term
from tanghulu.types import Address
from tests.virtual.clock import ManualClock

A, B = Address("10.0.0.1", 7400), Address("10.0.0.2", 7400)
PEER_A, PEER_B = owner_peer(A), owner_peer(B)
HALVES = KeyOwners(RangeMap(42, 7, (A,) * 32 + (B,) * 32, (40,) * 32 + (42,) * 32))
ALL_A = KeyOwners(RangeMap(50, 7, (A,) * 64, (40,) * 32 + (50,) * 32))
KEYS = [f"k{n}" for n in range(40)]
OF_A = [n for n, key in enumerate(KEYS) if range_of(key) < 32]
OF_B = [n for n, key in enumerate(KEYS) if range_of(key) >= 32]


def answer(message: Any, version: int = 42, cluster: int = 7) -> Reply[Any]:
    message = structs.replace(message, signature=Signature(Term(version, cluster)))
    return Reply(message, memoryview(b""))


def location(key: str) -> Location:
    return Location(range_of(key), 1, (f"node-of-{key}",), 1)


def located(call: Call[Any], **how: Any) -> Reply[Any]:
    """What a master answers that holds every key."""
    if call.request.count_only:
        return answer(LocateReply(False, (), bytes(range_of(key) % 2 for key in call.request.keys)), **how)
    return answer(LocateReply(False, [location(key) for key in call.request.keys]), **how)


def test_keys_go_to_their_owners_in_their_order_and_come_back_by_position() -> None:
    for count_only in (False, True):
        split = SplitCall(methods.LOCATE.call(LocateRequest(KEYS, count_only)))
        calls = split.calls(HALVES)
        assert {peer: call.request.keys for peer, call in calls} == {
            PEER_A: [KEYS[n] for n in OF_A],
            PEER_B: [KEYS[n] for n in OF_B],
        }
        assert split.answered([located(call) for _, call in calls], HALVES) is None
        joined = split.reply().message
        if count_only:
            assert joined.existence == [range_of(key) % 2 == 1 for key in KEYS]
        else:
            assert list(joined.locations) == [location(key) for key in KEYS]


def test_keys_of_one_owner_are_one_call_and_its_answer_is_the_answer() -> None:
    split = SplitCall(call := methods.LOCATE.call(LocateRequest([KEYS[n] for n in OF_A], False)))
    assert split.calls(HALVES) == [(PEER_A, call)]
    reply = located(call)
    assert split.answered([reply], HALVES) is None
    assert split.reply().message is reply.message


def test_an_only_master_is_asked_for_everything() -> None:
    split = SplitCall(call := methods.LOCATE.call(LocateRequest(KEYS, False)))
    assert split.calls(None) == [(MASTER, call)]
    assert split.answered([located(call, version=0, cluster=0)], None) is None
    assert list(split.reply().message.locations) == [location(key) for key in KEYS]


def test_a_tenants_keys_are_counted_as_the_masters_name_them() -> None:
    scoped = KeyOwners(HALVES.map, "blue/")
    (peer, _), *_ = SplitCall(methods.LOCATE.call(LocateRequest(["k"], False))).calls(scoped)
    assert peer == (PEER_A if range_of("blue/k") < 32 else PEER_B)
    by_peer = dict(SplitCall(methods.LOCATE.call(LocateRequest(KEYS, False))).calls(scoped))
    assert by_peer[PEER_A].request.keys == [key for key in KEYS if range_of("blue/" + key) < 32]


def test_one_incomplete_part_makes_the_whole_incomplete() -> None:
    split = SplitCall(methods.LOCATE.call(LocateRequest(KEYS, False)))
    (_, of_a), (_, of_b) = split.calls(HALVES)
    unsure = answer(LocateReply(True, [None] * len(of_b.request.keys)))
    assert split.answered([located(of_a), unsure], HALVES) is None
    joined = split.reply().message
    assert joined.incomplete
    assert [joined.locations[n] for n in OF_B] == [None] * len(OF_B)
    assert [joined.locations[n] for n in OF_A] == [location(KEYS[n]) for n in OF_A]


def test_only_what_was_not_answered_is_asked_again_by_the_next_map() -> None:
    split = SplitCall(methods.LOCATE.call(LocateRequest(KEYS, False)))
    (_, of_a), (_, of_b) = split.calls(HALVES)
    assert isinstance(split.answered([located(of_a), KeysMoved.known_in(50)], HALVES), KeysMoved)
    assert split.informant == PEER_B, "who knows a later map than the caller"
    ((peer, again),) = split.calls(ALL_A)
    assert (peer, again.request.keys) == (PEER_A, of_b.request.keys)
    assert split.answered([located(again, version=50)], ALL_A) is None
    assert list(split.reply().message.locations) == [location(key) for key in KEYS]


@pytest.mark.parametrize(
    ("version", "cluster", "owners", "why"),
    [
        (41, 7, HALVES, "it was made before the last term of a range of B began"),
        (42, 8, HALVES, "another etcd counted"),
        (0, 0, HALVES, "a master that was not elected"),
        (49, 7, ALL_A, "the map names another owner meanwhile"),
        (42, 7, None, "everything is another master's meanwhile"),
    ],
)
def test_an_answer_that_the_map_does_not_bear_out_is_none(
    version: int, cluster: int, owners: KeyOwners | None, why: str
) -> None:
    split = SplitCall(methods.LOCATE.call(LocateRequest([KEYS[n] for n in OF_B], False)))
    ((_, call),) = split.calls(HALVES)
    failure = split.answered([located(call, version=version, cluster=cluster)], owners)
    assert isinstance(failure, MasterUnavailable), why


def test_what_nobody_owns_waits_and_is_a_typed_error() -> None:
    half = KeyOwners(RangeMap(43, 7, (A,) * 32 + (None,) * 32, HALVES.map.terms))
    split = SplitCall(methods.LOCATE.call(LocateRequest(KEYS, False)))
    ((peer, call),) = split.calls(half)
    assert peer == PEER_A
    assert isinstance(split.answered([located(call, version=43)], half), MasterUnavailable)
    assert [peer for peer, _ in split.calls(ALL_A)] == [PEER_A], "the rest alone"
    assert split.calls(ALL_A)[0][1].request.keys == [KEYS[n] for n in OF_B]


def test_other_errors_are_the_callers() -> None:
    split = SplitCall(methods.LOCATE.call(LocateRequest(KEYS, False)))
    split.calls(HALVES)
    with pytest.raises(InvalidRequest):
        split.answered([KeysMoved.known_in(50), InvalidRequest("no")], HALVES)


def test_a_wait_is_split_with_its_deadline_and_joined_by_position() -> None:
    split = SplitCall(methods.WAIT.call(WaitRequest(keys=KEYS, deadline_ms=700)))
    calls = split.calls(HALVES)
    assert {call.request.deadline_ms for _, call in calls} == {700}
    replies = [answer(WaitReply(found=bytes([peer == PEER_B] * len(call.request.keys)))) for peer, call in calls]
    assert split.answered(replies, HALVES) is None
    assert list(split.reply().message.found) == [n in OF_B for n in range(len(KEYS))]


def test_what_is_to_be_replicated_is_summed() -> None:
    split = SplitCall(methods.REPLICATE.call(ReplicateRequest(keys=KEYS, holders=3, for_s=5.0)))
    calls = split.calls(HALVES)
    assert {(call.request.holders, call.request.for_s) for _, call in calls} == {(3, 5.0)}
    replies = [answer(ReplicateReply(num_taken=len(call.request.keys))) for _, call in calls]
    assert split.answered(replies, HALVES) is None
    assert split.reply().message.num_taken == len(KEYS)


def page_of(call: Call[Any], keys: list[str]) -> Reply[Any]:
    """What a master lists that has ``keys``, of which only those in the ranges that were asked for count."""
    wanted = sorted(k for k in keys if call.request.ranges >> range_of(k) & 1 and k > call.request.after)
    page = wanted[: call.request.limit]
    infos = [KeyInfo(key, 0, 0, ()) for key in page]
    return answer(ListKeysReply(keys=infos, more=len(wanted) > len(page)))


def list_all(keys_of: dict[PeerId, list[str]], limit: int) -> list[list[str]]:
    pages: list[list[str]] = []
    after, more = "", True
    while more:
        split = SplitCall(methods.LIST_KEYS.call(ListKeysRequest("", after, limit)))
        calls = split.calls(HALVES)
        assert sum(call.request.ranges for _, call in calls) == (1 << NUM_RANGES) - 1, "every range is asked for once"
        assert split.answered([page_of(call, keys_of[peer]) for peer, call in calls], HALVES) is None
        page = split.reply().message
        keys, more = page.keys, page.more
        pages.append([info.key for info in keys])
        after = pages[-1][-1] if keys else after
    return pages


@pytest.mark.parametrize("limit", [1, 3, 7, 39, 40, 41])
def test_pages_of_all_owners_are_merged_in_order_and_nothing_is_left_out(limit: int) -> None:
    pages = list_all({PEER_A: KEYS, PEER_B: KEYS}, limit)
    assert [key for page in pages for key in page] == sorted(KEYS)
    assert all(len(page) <= limit for page in pages)


def test_pages_of_owners_that_have_much_and_little() -> None:
    pages = list_all({PEER_A: [KEYS[n] for n in OF_A], PEER_B: []}, 3)
    assert [key for page in pages for key in page] == sorted(KEYS[n] for n in OF_A)


def test_each_owner_proves_its_own_lease() -> None:
    clock = ManualClock()
    context = Context("here", "", clock, NodeTable("here"))
    assert context.take_masters(MastersReply.of(HALVES.map, MastersRequest()))
    signature = Signature(Term(42, 7), Renewals(5, 5).packed)
    reply = Reply(LocateReply(False, (), b"", signature), memoryview(b""))

    def is_accepted(peer: PeerId) -> bool:
        return context.masters.proofs_of(peer).accepts(signature, clock.now_s())

    for peer in (PEER_A, PEER_B):
        assert admitted(context, reply, 0.0, peer) is reply
        assert not is_accepted(peer)
    proof = ProveReply(Signature(Term(42, 7), Renewals(6, 6).packed), 5, 2000)
    context.masters.proofs_of(PEER_A).record(proof.signature.term, 0.0, proof.renewals, proof.ttl_ms / 1000)
    assert is_accepted(PEER_A)
    assert not is_accepted(PEER_B)
    assert not is_accepted(MASTER), "nor is the leader's"
    clock.advance(2.0)
    assert not is_accepted(PEER_A)


def test_a_map_that_names_a_master_no_more_has_its_connections_closed() -> None:
    context = Context("here", "", ManualClock(), NodeTable("here"))
    assert context.take_masters(MastersReply.of(HALVES.map, MastersRequest()))
    assert not context.take_masters(MastersReply.of(HALVES.map, MastersRequest(42, 7))), "unchanged"
    assert context.is_known(PEER_A)
    assert context.is_known(PEER_B)
    assert context.take_masters(MastersReply.of(ALL_A.map, MastersRequest(42, 7)))
    assert context.departed == {PEER_B}
    assert not context.is_known(PEER_B)
    assert not context.take_masters(MastersReply.of(HALVES.map, MastersRequest())), "an older one"
    assert context.take_masters(MastersReply.of(RangeMap.of_one(None), MastersRequest(50, 7)))
    assert context.masters.owners is None, "one master owns everything, as before"
