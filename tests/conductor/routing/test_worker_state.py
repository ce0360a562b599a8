"""A worker's view is kept while nothing changes, and never outlives a change."""

from dataclasses import replace

import pytest

from tanghulu.conductor.dispatch.router import with_both_phases
from tanghulu.conductor.routing.expected_output import (
    FIRST_EXPECTED_OUTPUT,
    MIN_ANSWERS,
    MOST_PREFIXES,
    ExpectedBlocks,
    OutputEstimate,
)
from tanghulu.conductor.routing.policies.base import RequestView
from tanghulu.conductor.routing.policies.registry import make_policy
from tanghulu.conductor.routing.worker_state import LoadTracker
from tanghulu.session.load import PrefillProfile, WorkerLoad
from tanghulu.types import InstanceId, Role

WORKER = InstanceId("w")


def _view(tracker: LoadTracker, hit_blocks: int = 0):
    return tracker.view(WORKER, Role.PREFILL, hit_blocks)


def test_a_view_is_made_once_a_change():
    tracker = LoadTracker()
    tracker.report(WorkerLoad(blocks_free=9))
    view = _view(tracker)
    assert _view(tracker) is view
    assert _view(tracker, 3) == replace(view, hit_blocks=3)
    assert _view(tracker) is view
    assert tracker.view(WORKER, Role.BOTH, 0).can_decode
    tracker.sent("r", 100, 2)
    assert (_view(tracker).queue_tokens, _view(tracker).blocks_free) == (100, 7)
    tracker.on_report("r")
    assert _view(tracker) == view
    tracker.sent("r", 100, 2)
    tracker.report(WorkerLoad(blocks_free=5))
    assert _view(tracker).blocks_free == 3
    tracker.report(WorkerLoad(blocks_free=5))
    assert _view(tracker).blocks_free == 5
    tracker.reset(WorkerLoad(blocks_free=1))
    assert _view(tracker).blocks_free == 1
    tracker.check()


def test_blocks_of_requests_under_way_are_active():
    """What the dynamo policy weighs: what is in use, and what was sent or promised but is not reported yet."""
    tracker = LoadTracker()
    tracker.report(WorkerLoad(blocks_total=100, blocks_free=70))
    tracker.sent("r", 10, 5)
    tracker.reserve_decode("q", 8)
    assert _view(tracker).active_blocks == 43
    busy, idle = replace(_view(tracker), id=InstanceId("a")), replace(_view(tracker), active_blocks=0)
    assert make_policy("dynamo").choose(RequestView(640, 64, 1024), with_both_phases([busy, idle])).prefill == WORKER


def test_an_answer_is_expected_to_be_as_long_as_those_to_prompts_that_begin_alike():
    output = OutputEstimate()
    assert output.of(["all"]) == FIRST_EXPECTED_OUTPUT
    for number in range(3 * MIN_ANSWERS):
        output.ended(300, ["all", "chat", f"{number} asks", f"{number} goes on"])
        output.ended(20, ["all", "tool", f"call {number}"])
    assert output.of(["all", "tool", "another call"]) == output.of(["all", "tool"]) == 20
    assert output.of(["all", "chat", "asks", "goes on"]) == 300
    assert 100 < output.of(["all", "something else"]) < 220
    assert output.of(["alone"]) == output.of([]) == output.tokens
    output.ended(1, ["all", "chat", "asks"])
    assert 290 < output.of(["all", "chat"]) < 300, "they may change"


def test_few_prefixes_are_remembered():
    output = OutputEstimate()
    for number in range(MOST_PREFIXES + 100):
        output.ended(5, [number])
    for _ in range(MIN_ANSWERS):
        output.ended(5, [0])
    assert len(output) == MOST_PREFIXES
    assert output.of([0]) == 5


def test_blocks_that_answers_will_fill_are_not_free_and_decay_as_tokens_come():
    tracker, expected = LoadTracker(), ExpectedBlocks()
    tracker.report(WorkerLoad(blocks_total=100, blocks_free=70))
    seen = []
    for wire_id, num_tokens in (("long", 256.0), ("short", 10), ("none", 0)):
        expected.begin(wire_id, tracker, 64, num_tokens)
        seen.append(_view(tracker).blocks_free)
        expected.check()
    assert seen == [66, 65, 65]
    assert _view(tracker).active_blocks == 30, "they are not in use"
    for num_tokens, free in ((1, 65), (63, 66), (100, 67), (100, 69), (500, 69)):
        expected.came("long", num_tokens)
        assert _view(tracker).blocks_free == free
        expected.check()
    expected.came("unknown", 5)
    for wire_id in ("long", "short", "none", "short"):
        expected.end(wire_id)
    assert (len(expected), tracker.expected_blocks, _view(tracker).blocks_free) == (0, 0, 70)
    tracker.check()


def test_the_worker_whose_answers_will_fill_it_is_not_asked_to_decode():
    request = RequestView(64 * 60, 64, 1 << 20)
    views, expected = [], ExpectedBlocks()
    for name, num_answers in (("filling", 4), ("empty", 0)):
        tracker = LoadTracker()
        tracker.report(WorkerLoad(blocks_total=100, blocks_free=70, num_running=1, peer_bytes_per_s=1e9))
        for number in range(num_answers):
            expected.begin(f"{name} {number}", tracker, 64, 256.0)
        views.append(tracker.view(InstanceId(name), Role.BOTH, 0))
    assert make_policy("ttft-min").choose(request, views).decode == "empty"


def _burst(num_requests: int, known: WorkerLoad, cached_by: str) -> dict[str, int]:
    """Route requests that arrive at once, before any worker reports again; the number that each of three gets."""
    policy = make_policy("ttft-min")
    request = RequestView(1235, 64, 1 << 18, most_output=40)
    trackers = {name: LoadTracker() for name in "abc"}
    for tracker in trackers.values():
        tracker.report(known)
    taken = dict.fromkeys(trackers, 0)
    for number in range(num_requests):
        hits = {name: 19 for name, count in taken.items() if count or name == cached_by}
        shown = [t.view(InstanceId(name), Role.BOTH, hits.get(name, 0)) for name, t in trackers.items()]
        decision = policy.choose(request, shown)
        trackers[decision.decode].sent(str(number), 19, 20)
        taken[decision.decode] += 1
    return taken


@pytest.mark.parametrize("decode_step_s", [0.0, 0.05])  # a worker that has not decoded yet does not know its steps
def test_a_burst_behind_one_cached_prefix_is_spread(decode_step_s: float):
    known = WorkerLoad(
        blocks_total=4000,
        blocks_free=4000,
        prefill_tokens_per_s=500,
        decode_step_s=decode_step_s,
        peer_bytes_per_s=1e9,
        max_num_seqs=32,
    )
    taken = _burst(36, known, "a")
    assert max(taken.values()) < 32
    assert min(taken.values()) > 0


def test_a_full_batch_is_charged_the_wait_for_a_seat():
    full = LoadTracker()
    full.report(WorkerLoad(num_running=8, num_waiting=2, blocks_free=100, decode_step_s=0.02, max_num_seqs=8))
    assert _view(full).seat_s == pytest.approx(3 / 8 * 0.02)  # the third to wait for one of 8 seats
    for load in (WorkerLoad(num_running=7, max_num_seqs=8), WorkerLoad(num_running=9)):
        full.report(load)
        assert _view(full).seat_s == 0


@pytest.mark.parametrize(("seats", "chosen"), [(8, "idle"), (0, "full")])
def test_an_idle_worker_is_chosen_over_the_holder_of_the_prefix_if_that_has_no_seat(seats: int, chosen: str):
    request = RequestView(960, 64, 1 << 18, mean_output=8000, most_output=1)
    known = {"blocks_free": 100, "prefill_tokens_per_s": 1000.0, "decode_step_s": 0.001, "max_num_seqs": seats}
    full, idle = LoadTracker(), LoadTracker()
    full.report(WorkerLoad(num_running=8, num_waiting=8, **known))
    idle.report(WorkerLoad(prefill_tokens_waiting=30, **known))
    views = [full.view(InstanceId("full"), Role.BOTH, 15), idle.view(InstanceId("idle"), Role.BOTH, 0)]
    policy = make_policy("ttft-min")
    assert policy.choose(request, views).prefill == chosen
    assert policy.choose_decode(request, views) == chosen


@pytest.mark.parametrize("fitted", [PrefillProfile(fixed_s=0.2), PrefillProfile(pair_s=1e-6), PrefillProfile()])
def test_a_fit_without_time_for_single_tokens(fitted):
    """Measurements of whole prompts may find their time in the fixed part, or in pairs of tokens."""
    tracker = LoadTracker()
    tracker.report(WorkerLoad(num_running=4, blocks_total=9, blocks_free=9, decode_step_s=0.02, prefill=fitted))
    view = tracker.view(WORKER, Role.BOTH, 0)
    assert view.slowdown < 10 or fitted == PrefillProfile()
