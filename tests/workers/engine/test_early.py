"""KV that is shown, and pulled, while a prefill goes on: the decisions, by examples."""

from __future__ import annotations

import pytest

from tanghulu.hashing import TokenSequence
from tanghulu.workers.engine.block_pool import BlockPool
from tanghulu.workers.engine.exports import ExportState
from tanghulu.workers.engine.pulls import MAX_PULLS, Pulls
from tanghulu.workers.engine.step import StepPlan
from tests.workers.engine.test_scheduler import B, ident, req, runs, scheduler, step
from tests.workers.peers import export_at
from tests.workers.tiny import request

PEER = export_at("there|", 7, 0)


def named(count: int, first: int = 0) -> TokenSequence:
    return request("any", range(first, first + count * B), block_tokens=B).sequence


def hashes(count: int) -> list:
    return list(named(count).block_hashes)


def pulls(num_blocks: int = 16) -> Pulls:
    return Pulls(BlockPool(num_blocks), B)


# --- what is shown of a prefill


def test_a_prefill_is_shown_block_by_block_until_it_is_handed_over() -> None:
    core = scheduler()  # 8 tokens a step
    core.add(req("a", 20, hold_kv=True))
    shown = []
    for _ in range(3):
        step(core)
        shown += core.exports.take_changed()
    assert [export.state for export in shown] == [ExportState.GROWING, ExportState.GROWING, ExportState.COMPLETE]
    assert [(len(export.block_ids), export.num_tokens) for export in shown] == [(2, 8), (4, 16), (5, 20)]
    assert shown[2].block_ids[:4] == shown[1].block_ids
    assert shown[1].block_ids[:2] == shown[0].block_ids
    assert {export.name for export in shown} == {"a"}
    core.check()
    assert core.exports.release(ident("a"))
    assert core.pool.num_in_use == 0
    core.check()


def test_what_is_not_handed_over_is_not_shown_and_what_is_computed_at_once_is_complete() -> None:
    core = scheduler()
    core.add(req("whole", 8, hold_kv=True))
    step(core)
    assert [export.state for export in core.exports.take_changed()] == [ExportState.COMPLETE]
    core.add(req("own", 20))
    for _ in range(3):
        step(core)
    assert core.exports.take_changed() == ()


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_a_prefill_that_stops_is_shown_no_longer(how: str) -> None:
    core = scheduler(num_blocks=8, max_num_batched_tokens=4)
    core.add(req("old", [90, 91, 92], 40))
    step(core)
    core.add(req("a", 24, hold_kv=True))
    step(core)
    step(core)
    (growing,) = core.exports.take_changed()
    assert growing.state is ExportState.GROWING
    if how == "abort":
        core.abort(ident("a"))
    preempted = [name for _ in range(5) for name in step(core)[0].preempted]
    assert preempted == (["a"] if how == "preempt" else [])
    (withdrawn,) = core.exports.take_changed()
    assert withdrawn.state is ExportState.WITHDRAWN
    assert withdrawn.block_ids[: len(growing.block_ids)] == growing.block_ids
    for _ in range(5):
        step(core)
    assert core.exports.take_changed() == (), "nor when it comes back"
    core.check()
    assert core.exports.release(ident("a")), "a reader may still have been there"
    core.check()


def test_what_was_preempted_is_handed_over_beside_what_readers_still_have() -> None:
    core = scheduler(num_blocks=20)
    core.add(req("a", 20, hold_kv=True))
    step(core)
    core._preempt(core._running[0], StepPlan(8))
    for _ in range(3):
        step(core)
    withdrawn, complete = core.exports.take_changed()
    assert (withdrawn.state, complete.state) == (ExportState.WITHDRAWN, ExportState.COMPLETE)
    assert (withdrawn.name, complete.name) == ("a", "a/1")
    assert withdrawn.request_id == complete.request_id == "a"
    for export in withdrawn, complete:
        core.check()
        assert core.exports.release(export.name)
    assert core.pool.num_in_use == 0


def test_an_export_that_grows_is_not_given_back() -> None:
    core = scheduler()
    core.add(req("a", 40, hold_kv=True))
    step(core)
    with pytest.raises(AssertionError, match="a still grows"):
        core.exports.release(ident("a"))


# --- what is pulled


@pytest.mark.parametrize("ends", [("done", "drop"), ("drop", "done")])
def test_a_pull_is_forgotten_when_its_transfer_is_over_and_nobody_wants_it(ends: tuple[str, str]) -> None:
    made = pulls()
    wanted = made.begin(ident("p"), named(2), PEER, 0)
    for end in ends:
        assert (len(made), wanted.ending.is_set()) == (1, False if end == ends[0] else ends[0] == "drop")
        getattr(made, end)(ident("p"))
        made.check()
    assert (len(made), made._pool.num_in_use) == (0, 0)


def test_blocks_that_came_can_be_matched_before_the_last_one_has() -> None:
    made = pulls()
    wanted = made.begin(ident("p"), named(4), PEER, 0)
    assert (wanted.first_block, len(wanted.block_ids), wanted.num_tokens) == (0, 4, 4 * B)
    assert made._pool.num_hits(hashes(4)) == 0
    made.arrived(ident("p"), 3)
    assert made._pool.num_hits(hashes(4)) == 3
    assert made._pool.num_in_transfer == 1
    made.done(ident("p"))
    assert made._pool.num_in_use == 3
    assert made.drop(ident("p"))
    assert (made._pool.num_in_use, made._pool.num_cached) == (0, 3)
    made.check()


def test_another_pull_goes_on_from_what_an_earlier_one_has() -> None:
    made = pulls()
    made.begin(ident("from p"), named(4), PEER, 0)
    made.arrived(ident("from p"), 2)
    made.done(ident("from p"))
    wanted = made.begin(ident("from q"), named(4), PEER, 0)
    assert (wanted.first_block, len(wanted.block_ids)) == (2, 2)
    made.drop(ident("from p"))
    made.arrived(ident("from q"), 2)
    made.done(ident("from q"))
    assert made._pool.num_hits(hashes(4)) == made._pool.num_in_use == 4


def test_a_dropped_pull_keeps_its_blocks_until_its_transfer_has_ended() -> None:
    made = pulls()
    wanted = made.begin(ident("p"), named(4), PEER, 0)
    made.arrived(ident("p"), 1)
    assert made.drop(ident("p"))
    assert wanted.ending.is_set()
    assert (made._pool.num_in_use, made._pool.num_in_transfer) == (3, 3)
    made.arrived(ident("p"), 1)  # was under way
    assert made._pool.num_in_use == 2
    made.done(ident("p"))
    assert (made._pool.num_in_use, made._pool.num_cached, len(made)) == (0, 2, 0)
    assert not made.drop(ident("p"))


def test_pulls_take_only_what_is_left_over() -> None:
    made = pulls(num_blocks=6)
    assert made.begin(ident("p"), named(4), PEER, spare=3) is None
    assert made.begin(ident("p"), named(4), PEER, spare=2) is not None
    assert made.begin(ident("p"), named(1), PEER, spare=0) is None, "it is there"
    assert made.begin(ident("q"), named(4), PEER, spare=0) is None
    many = pulls(num_blocks=4 * MAX_PULLS)
    each = [named(1, first=n) for n in range(MAX_PULLS + 1)]
    begun = [many.begin(ident(f"{n}"), each[n], PEER, 0) for n in range(MAX_PULLS + 1)]
    assert [wanted is not None for wanted in begun] == [True] * MAX_PULLS + [False]


@pytest.mark.parametrize("asks", ["pull", "request"])
def test_copies_stay_the_first_to_go_when_there_is_no_room_for_who_found_them(asks: str) -> None:
    core = scheduler(num_blocks=8, can_fetch=True)
    core.pulls.begin(ident("p"), named(2), PEER, 0)
    core.pulls.arrived(ident("p"), 2)
    core.pulls.done(ident("p"))
    core.pulls.drop(ident("p"))
    core.add(req("own", range(50, 55), 1, fetch_blocks=0))
    step(core)
    core.add(req("r", [80, 81, 82]))
    core.add(req("s", [83, 84, 85]))
    step(core)
    if asks == "pull":
        assert core.pull_ahead(ident("q"), named(7), PEER) is None
    else:
        core.add(req("large", 7 * B, fetch_blocks=0))
        assert list(runs(step(core)[0])) == ["r", "s"]
    core.pool.allocate(core.pool.num_free + 2)
    assert core.pool.match(hashes(2)) == []
    assert core.pool.num_cached == 1


def test_the_request_finds_what_was_pulled_and_fetches_the_rest() -> None:
    core = scheduler(can_fetch=True, max_num_batched_tokens=32)
    made = req("a", 19, ahead=ident("p"), peer=export_at("there|", 8, 18))
    wanted = core.pull_ahead(ident("p"), made.sequence, PEER)
    assert len(wanted.block_ids) == 4
    core.pulls.arrived(ident("p"), 3)
    core.add(made)
    assert wanted.ending.is_set(), "its transfer is told to end"
    core.add(req("b", [80]))
    assert list(runs(step(core)[0])) == ["b"], "it waits for the pull's end, and holds up nobody"
    core.pulls.done(ident("p"))
    plan, _ = step(core)
    (fetch,) = plan.fetches
    assert (fetch.first_block, len(fetch.block_ids), fetch.num_tokens) == (3, 2, 18)
    core.fetch_done(ident("a"), 2)
    assert runs(step(core)[0])["a"] == (18, 1)
    assert len(core.pulls) == 0
    core.check()


def test_a_pull_gives_way_to_whoever_waits_for_room() -> None:
    core = scheduler(num_blocks=8, can_fetch=True)
    core.add(req("r", [1]))
    step(core)
    core.pull_ahead(ident("p"), req("a", 20).sequence, PEER)
    core.pulls.arrived(ident("p"), 5)
    core.pulls.done(ident("p"))
    core.add(req("huge", 30 * [9]))
    assert list(runs(step(core)[0])) == ["r"]
    assert len(core.pulls) == 1, "its end would not help"
    core.abort(ident("huge"))
    core.abort(ident("r"))
    core.add(req("large", list(range(100, 120)), fetch_blocks=0))
    assert runs(step(core)[0]) == {"large": (0, 8)}
    assert len(core.pulls) == 0
    core.check()


def test_a_request_reads_its_export_only_when_its_pull_no_longer_does() -> None:
    """Even a pull that gave way: both read under one session, and each would take the other's leases."""
    core = scheduler(can_fetch=True, max_num_batched_tokens=32)
    made = req("a", 19, ahead=ident("p"), peer=export_at("there|", 7, 18))
    core.pull_ahead(ident("p"), made.sequence, PEER)
    assert core.pulls.give_way()
    core.add(made)
    assert step(core)[0].fetches == []
    core.pulls.done(ident("p"))
    assert len(step(core)[0].fetches) == 1
    core.check()


def test_a_decode_takes_the_room_of_a_pull_before_that_of_a_request() -> None:
    core = scheduler(num_blocks=4, can_fetch=True)
    core.add(req("a", [1, 2, 3], 9))
    core.add(req("b", [4, 5, 6], 9))
    step(core)
    assert core.pull_ahead(ident("p"), req("c", list(range(50, 59))).sequence, PEER) is None, "too little is left"
    core.pulls.begin(ident("p"), named(2), PEER, 0)
    core.pulls.done(ident("p"))
    preempted = [name for _ in range(4) for name in step(core)[0].preempted]
    assert preempted == []


def test_an_aborted_request_gives_up_its_pull() -> None:
    core = scheduler(can_fetch=True)
    made = req("a", 16, ahead=ident("p"))
    wanted = core.pull_ahead(ident("p"), made.sequence, PEER)
    core.add(made)
    wanted.ending.clear()
    core.abort(ident("a"))
    assert wanted.ending.is_set()
    core.pulls.done(ident("p"))
    assert core.pool.num_in_use == 0
    core.check()
