"""A request's story in virtual time: its parts lie end to end, whatever happens, and each phase has its share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.conductor.stories.origin import Origin, Trace
from tanghulu.conductor.stories.story import Phase, RequestStatus, Story, VisitEnd
from tanghulu.session.outputs import PhaseTimes
from tanghulu.types import InstanceId

A, B = InstanceId("a"), InstanceId("b")
ORIGIN = Origin("mine", Trace("1" * 32, "2" * 16), 1.0, 1.25)


def begun(origin: Origin | None = ORIGIN) -> Story:
    return Story("id", "cmpl-1", "m", 7, 2.0, origin)


def adds_up(story: Story, now_s: float = 0.0) -> dict[Phase, float]:
    story.check()
    phases = story.phases(now_s)
    assert sum(phases.values()) == pytest.approx(story.seconds(now_s))
    return {phase: round(seconds, 6) for phase, seconds in phases.items()}


def test_a_request_that_one_worker_serves():
    story = begun()
    story.routed(3.0)
    story.sent(A, 3.5)
    story.report(5.5, PhaseTimes(queue_s=0.25, kv_load_s=0.5, prefill_s=0.75))
    story.report(6.0)
    story.report(7.5, PhaseTimes(0.25, 0.5, 0.75, 0.125, 1.875))
    story.ended(RequestStatus.SERVED, 7.5)
    story.taken(7.75)
    story.over(8.0)
    assert adds_up(story) == {
        Phase.RECEIVE: 0.25,
        Phase.TOKENISE: 0.75,
        Phase.QUEUE: 1.0,
        Phase.ROUTE: 0.5,
        Phase.TRANSIT: 0.5,
        Phase.WORKER_QUEUE: 0.25,
        Phase.KV_LOAD: 0.5,
        Phase.PREFILL: 0.75,
        Phase.KV_STORE: 0.125,
        Phase.DECODE: 1.875,
        Phase.DETOKENISE: 0.25,
        Phase.SEND: 0.25,
    }
    assert (story.seconds(), story.status) == (7.0, RequestStatus.SERVED)


def test_a_hand_over_holds_the_second_workers_waiting_and_loading():
    story = begun(None)
    story.sent(A, 2.0)
    story.report(4.0, PhaseTimes(queue_s=0.5, prefill_s=1.5))
    story.handed_over(4.0)
    story.sent(B, 4.25)
    story.report(8.25, PhaseTimes(queue_s=0.5, kv_load_s=1.0, prefill_s=0.25, kv_store_s=0.25, decode_s=2.0))
    story.ended(RequestStatus.SERVED, 8.25)
    story.taken(8.25)
    story.over(8.25)
    assert adds_up(story) == {
        Phase.WORKER_QUEUE: 0.5,
        Phase.PREFILL: 1.5,
        Phase.HAND_OVER: 1.75,
        Phase.KV_STORE: 0.25,
        Phase.DECODE: 2.25,
    }
    assert [(v["worker"], v["left"], v["seconds"]) for v in story.summary()["workers"]] == [
        ("a", "handed_over", 2.0),
        ("b", "ended", 4.0),
    ]
    assert story.summary()["workers"][1]["phases"] == {"hand_over": 1.5, "decode": 2.25, "kv_store": 0.25}


def test_a_request_that_moves_shows_each_worker():
    story = begun(None)
    story.sent(A, 2.0)
    story.report(3.0, PhaseTimes(prefill_s=1.0))
    story.report(4.0)
    story.lost(6.0)  # its last token had come at 4
    story.routed(6.5)
    story.sent(B, 7.0)
    story.lost(7.5)  # refused
    story.routed(8.0)
    story.sent(A, 8.0)
    story.report(9.0, PhaseTimes(kv_load_s=0.5, prefill_s=0.5))
    story.report(10.0, PhaseTimes(kv_load_s=0.5, prefill_s=0.5, decode_s=1.0))
    story.ended(RequestStatus.SERVED, 10.0)
    story.taken(10.0)
    story.over(10.0)
    assert adds_up(story) == {
        Phase.PREFILL: 1.5,
        Phase.DECODE: 2.0,
        Phase.UNREPORTED: 2.5,
        Phase.QUEUE: 1.0,
        Phase.ROUTE: 0.5,
        Phase.KV_LOAD: 0.5,
    }
    assert [visit.how for visit in story.visits] == [VisitEnd.LOST, VisitEnd.LOST, VisitEnd.ENDED]


def test_a_refused_one_has_been_nowhere():
    story = begun()
    story.ended(RequestStatus.REFUSED, 2.5, "overloaded")
    story.over(3.0)
    phases = adds_up(story)
    assert phases == {Phase.RECEIVE: 0.25, Phase.TOKENISE: 0.75, Phase.QUEUE: 0.5, Phase.SEND: 0.5}
    assert (story.summary()["status"], story.summary()["error"]) == ("refused", "overloaded")


@pytest.mark.parametrize("tokens", [0, 3])
def test_an_aborted_one_was_at_a_worker_that_did_not_say_what_it_did(tokens):
    story = begun(None)
    story.sent(A, 2.0)
    for number in range(tokens):
        story.report(3.0 + number)
    story.ended(RequestStatus.ABORTED, 8.0)
    story.over(8.0)
    assert adds_up(story) == ({Phase.PREFILL: 1.0, Phase.DECODE: 5.0} if tokens else {Phase.UNREPORTED: 6.0})


def test_what_a_client_did_not_wait_for_was_not_served():
    story = begun(None)
    story.sent(A, 2.0)
    story.report(3.0)
    story.ended(RequestStatus.SERVED, 3.0)
    story.over(4.0)
    assert story.status is RequestStatus.ABORTED


def test_a_worker_that_tells_more_than_has_passed_is_scaled_down():
    story = begun(None)
    story.sent(A, 2.0)
    story.report(3.0, PhaseTimes(queue_s=30.0, prefill_s=10.0))
    story.ended(RequestStatus.SERVED, 3.0)
    assert adds_up(story) == {Phase.WORKER_QUEUE: 0.75, Phase.PREFILL: 0.25}


def test_one_under_way_says_where_it_is():
    story = begun(None)
    assert adds_up(story, 5.0) == {Phase.QUEUE: 3.0}
    story.sent(A, 5.0)
    assert adds_up(story, 6.0) == {Phase.QUEUE: 3.0, Phase.UNREPORTED: 1.0}
    story.report(6.0)
    assert story.summary(7.0)["status"] == "under_way"
    assert story.summary(7.0)["workers"] == [{"worker": "a", "left": "under_way", "seconds": 2.0, "phases": {}}]


SECONDS = st.floats(0, 10)
TOLD = st.none() | st.builds(PhaseTimes, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)


@given(st.data())
def test_parts_lie_end_to_end_whatever_happens(data):
    now_s = 2.0

    def later() -> float:
        nonlocal now_s
        now_s += data.draw(SECONDS)
        return now_s

    story = begun(data.draw(st.sampled_from([None, ORIGIN])))
    for _ in range(data.draw(st.integers(0, 5))):
        if data.draw(st.booleans()):
            story.routed(later())
        story.sent(A, later())
        for _ in range(data.draw(st.integers(0, 3))):
            story.report(later(), data.draw(TOLD))
        for event in data.draw(st.sampled_from([["lost"], ["handed_over"], ["handed_over", "lost"]])):
            getattr(story, event)(later())
        adds_up(story, later())
    if data.draw(st.booleans()):
        story.sent(B, later())
        story.report(later(), data.draw(TOLD))
    story.ended(data.draw(st.sampled_from(RequestStatus)), later())
    if data.draw(st.booleans()):
        story.taken(later())
    story.over(later())
    adds_up(story)
    assert story.seconds() == pytest.approx(now_s - story.began_s)
    assert story.is_over
