"""KV that is pulled while it is computed: whom the conductor tells what, whatever is lost."""

from __future__ import annotations

import pytest

from tanghulu.conductor.dispatch.lifecycle import (
    AbortAt,
    DeliverTokens,
    End,
    FlightState,
    Loss,
    PickDecode,
    PickPull,
    PullTo,
    Release,
    Requeue,
    SubmitTo,
)
from tanghulu.session.outputs import FinishReason, KvSource
from tanghulu.types import InstanceId
from tests.conductor.dispatch.test_lifecycle import GONE, SOURCE, D, P, make, say

Q = InstanceId("q")
EARLY = KvSource(P, "127.0.0.1:1", "", 6, 4)


def pulled(**more: int):
    """A request that P prefills while D pulls."""
    flight = make(**more)
    flight.submit(P, D)
    assert flight.on_export(EARLY) == [PickPull(EARLY)]
    assert flight.pull_at(D, EARLY) == [PullTo(D, "r.1.pull", EARLY)]
    flight.check()
    return flight


def test_who_pulled_decodes_and_goes_on_from_that():
    flight = pulled()
    assert say(flight, 11, finish=FinishReason.HANDED_OVER, source=SOURCE) == [DeliverTokens([11]), PickDecode()]
    assert flight.decode_at(D) == [SubmitTo(D, "r.2", False, SOURCE, "r.1.pull")]
    flight.check()
    assert flight.abort() == [AbortAt(D, "r.2"), Release(P, 7), End(FinishReason.ABORTED)]


def test_a_request_that_is_not_handed_over_is_not_pulled():
    flight = make()
    flight.submit(P, P)
    assert flight.on_export(EARLY) == []


def test_another_decode_worker_may_be_chosen():
    flight = pulled()
    say(flight, 11, finish=FinishReason.HANDED_OVER, source=SOURCE)
    assert flight.decode_at(Q) == [SubmitTo(Q, "r.2", False, SOURCE), AbortAt(D, "r.1.pull")]
    flight.check()


@pytest.mark.parametrize("how", ["abort", "fail", "stop"])
def test_an_end_before_the_hand_over_ends_both(how):
    flight = pulled()
    if how == "stop":
        out = say(flight, 11, finish=FinishReason.STOP, stop_token=11)
        assert out == [DeliverTokens([11], [], True), AbortAt(D, "r.1.pull"), End(FinishReason.STOP, None, 11)]
        return
    out = flight.abort() if how == "abort" else flight.fail(GONE)
    assert out[:-1] == [AbortAt(P, "r.1"), AbortAt(D, "r.1.pull")]
    flight.check()


def test_what_was_pulled_outlives_the_prefill_worker():
    """The next one's is pulled to the same place before the first pull is given up: it goes on from there."""
    flight = pulled()
    assert flight.on_worker_lost(GONE, Loss.DEATH) == [Requeue(GONE, Loss.DEATH)]
    flight.check()
    assert flight.submit(Q, D) == [SubmitTo(Q, "r.2", True)]
    assert flight.pull_at(D, EARLY) == [PullTo(D, "r.2.pull", EARLY), AbortAt(D, "r.1.pull")]
    flight.check()


def test_the_worker_that_pulled_may_compute_the_rest():
    flight = pulled()
    flight.on_worker_lost(GONE, Loss.DEATH)
    assert flight.submit(D, D) == [SubmitTo(D, "r.2", False, None, "r.1.pull")]
    flight.check()


def test_a_worker_that_does_all_ends_the_pull_elsewhere():
    flight = pulled()
    flight.on_worker_lost(GONE, Loss.DEATH)
    assert flight.submit(Q, Q) == [SubmitTo(Q, "r.2", False), AbortAt(D, "r.1.pull")]
    assert flight.state is FlightState.PREFILLING
    flight.check()


def test_a_request_that_is_given_up_ends_its_pull():
    flight = pulled(max_moves=0)
    *told, end = flight.on_worker_lost(GONE, Loss.DEATH)
    assert told == [AbortAt(D, "r.1.pull")]
    assert end.error is not None
