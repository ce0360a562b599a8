from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.conductor.dispatch.lifecycle import (
    ENDED,
    MAX_KILLS,
    TRANSITIONS,
    AbortAt,
    DeliverTokens,
    End,
    Flight,
    FlightEvent,
    FlightState,
    Loss,
    MoveLimits,
    PickDecode,
    Release,
    Requeue,
    SubmitTo,
    next_state,
)
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.errors import InvalidRequest, NodeUnavailable, Overloaded, RequestKillsWorkers, TransferFailed
from tanghulu.hashing import TokenSequence, as_tokens, root_hash
from tanghulu.rpc.wire import Failure
from tanghulu.session.outputs import FinishReason, KvLoad, KvSource, Output
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import Fingerprint, InstanceId, RequestId

P, D = InstanceId("p"), InstanceId("d")
SOURCE = KvSource(P, "127.0.0.1:1", "", 7, 5)
GONE = NodeUnavailable("gone")
ABORTED = FinishReason.ABORTED


def make(max_new_tokens: int = 10, max_moves: int = 2, max_tokens: int = 0) -> Flight:
    request = GenerationRequest(RequestId("r"), "m", as_tokens([1, 2, 3, 4, 5]), Sampling(), StopRule(max_new_tokens))
    return Flight(request, MoveLimits(max_moves, max_tokens))


def say(flight: Flight, *tokens: int, finish: FinishReason | None = None, **more: object) -> list:
    out = flight.on_output(Output(flight.wire_id, list(tokens), finish, **more))
    flight.check()
    return out


@pytest.mark.parametrize("state", FlightState)
@pytest.mark.parametrize("event", FlightEvent)
def test_every_pair_of_state_and_event_is_in_the_table_or_asserts(state, event):
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(AssertionError, match=event.name):
            next_state(state, event)


def test_the_table_is_sound():
    assert not [pair for pair in TRANSITIONS if pair[0] in ENDED]
    reachable, edge = set(), {FlightState.QUEUED}
    while edge:
        reachable |= edge
        edge = {to for (at, _), to in TRANSITIONS.items() if at in edge} - reachable
    assert reachable == set(FlightState)
    for state in set(FlightState) - ENDED:
        assert (state, FlightEvent.ABORT) in TRANSITIONS
        assert (state, FlightEvent.GIVE_UP) in TRANSITIONS


def test_one_worker_does_the_whole():
    flight = make()
    assert flight.submit(P, P) == [SubmitTo(P, "r.1", False)]
    assert say(flight, 11, cached_tokens=4) == [DeliverTokens([11])]
    assert flight.state is FlightState.DECODING
    assert say(flight, 12) == [DeliverTokens([12])]
    done = say(flight, 13, finish=FinishReason.STOP, stop_token=13)
    assert done == [DeliverTokens([13], [], True), End(FinishReason.STOP, None, 13)]
    assert (flight.state, flight.cached_tokens, flight.generated) == (FlightState.FINISHED, 4, [11, 12, 13])


def test_loads_that_are_known_at_the_end_correct_what_was_cached():
    flight, load = make(), KvLoad("store", 2, "TRANSFER_FAILED")
    flight.submit(P, P)
    say(flight, 11, cached_tokens=4)
    say(flight, 12, finish=FinishReason.LENGTH, cached_tokens=3, loads=[load])
    assert (flight.cached_tokens, flight.loads) == (3, [load])
    moved = make()
    moved.submit(P, P)
    say(moved, 11, cached_tokens=4)
    moved.on_worker_lost(GONE, Loss.DEATH)
    moved.submit(D, D)
    say(moved, 12, finish=FinishReason.LENGTH, cached_tokens=3, loads=[load])
    assert (moved.cached_tokens, moved.loads) == (4, []), "the first worker's"


def test_kv_is_handed_over():
    flight = make()
    assert flight.submit(P, D) == [SubmitTo(P, "r.1", True)]
    assert say(flight, 11, finish=FinishReason.HANDED_OVER, source=SOURCE) == [DeliverTokens([11]), PickDecode()]
    assert flight.state is FlightState.HANDING_OVER
    assert flight.decode_at(D) == [SubmitTo(D, "r.2", False, SOURCE)]
    assert flight.all_tokens().tolist() == [1, 2, 3, 4, 5, 11]
    assert say(flight, 12) == [DeliverTokens([12])]
    assert flight.state is FlightState.DECODING
    assert say(flight, finish=FinishReason.LENGTH) == [End(FinishReason.LENGTH)]


def test_the_token_of_a_hand_over_may_come_before_it():
    flight = make()
    flight.submit(P, D)
    assert say(flight, 11) == [DeliverTokens([11])]
    assert flight.state is FlightState.PREFILLING
    assert say(flight, finish=FinishReason.HANDED_OVER, source=SOURCE) == [PickDecode()]


def test_a_hand_over_may_leave_all_tokens_to_who_decodes():
    flight = make()
    flight.submit(P, D)
    assert say(flight, finish=FinishReason.HANDED_OVER, source=SOURCE, cached_tokens=4) == [PickDecode()]
    assert flight.decode_at(D) == [SubmitTo(D, "r.2", False, SOURCE)]
    assert flight.all_tokens().tolist() == [1, 2, 3, 4, 5]
    assert say(flight, 11, cached_tokens=5) == [DeliverTokens([11])]
    assert (flight.state, flight.cached_tokens) == (FlightState.DECODING, 4)


def test_the_prefill_worker_may_decode_from_its_own_cache():
    flight = make()
    flight.submit(P, D)
    say(flight, 11, finish=FinishReason.HANDED_OVER, source=SOURCE)
    assert flight.decode_at(P) == [SubmitTo(P, "r.2", False), Release(P, 7)]


def test_a_single_token_is_not_handed_over():
    assert make(max_new_tokens=1).submit(P, D) == [SubmitTo(P, "r.1", False)]


@pytest.mark.parametrize("error", [GONE, TransferFailed("no"), None])
def test_a_failed_decode_submission_releases_the_export_and_starts_again(error):
    flight = make()
    flight.submit(P, D)
    say(flight, 11, finish=FinishReason.HANDED_OVER, source=SOURCE)
    flight.decode_at(D)
    finish = FinishReason.ERROR if error else FinishReason.ABORTED
    release, requeue = say(flight, finish=finish, failure=Failure.of(error) if error else None)
    assert release == Release(P, 7)
    assert isinstance(requeue, Requeue)
    assert (flight.state, flight.avoid) == (FlightState.QUEUED, {D})
    assert flight.submit(P, P) == [SubmitTo(P, "r.3", False)]
    assert flight.all_tokens().tolist() == [1, 2, 3, 4, 5, 11]


def test_a_hand_over_that_nobody_asked_for_is_trouble():
    flight = make()
    flight.submit(P, P)
    (requeue,) = say(flight, 11, finish=FinishReason.HANDED_OVER, source=SOURCE)
    assert isinstance(requeue, Requeue)


def test_a_hand_over_of_nothing_is_trouble():
    flight = make()
    flight.submit(P, D)
    (requeue,) = say(flight, 11, finish=FinishReason.HANDED_OVER)
    assert isinstance(requeue, Requeue)


def test_moves_are_bounded_in_a_row_and_a_token_forgives_them():
    flight = make(max_new_tokens=100, max_moves=2)
    for n in range(20):
        for _ in range(2):
            flight.submit(P, P)
            assert flight.on_worker_lost(GONE, Loss.SILENCE) == [Requeue(GONE, Loss.SILENCE)]
            flight.check()
        flight.submit(P, P)
        say(flight, 20 + n)
        assert flight.on_worker_lost(GONE, Loss.SILENCE) == [Requeue(GONE, Loss.SILENCE)]
        flight.submit(P, P)
        say(flight, 50 + n)
        flight.on_worker_lost(GONE, Loss.ORDERLY)
    for _ in range(2):
        flight.submit(P, P)
        flight.on_worker_lost(GONE, Loss.TROUBLE)
    flight.submit(P, P)
    (end,) = flight.on_worker_lost(GONE, Loss.TROUBLE)
    assert isinstance(end.error, NodeUnavailable)
    assert "moved 2 times without a new token" in end.error.message
    assert flight.state is FlightState.FAILED
    assert flight.generated[:3] == [20, 50, 21]


def test_orderly_ends_and_refusals_do_not_count():
    flight = make(max_moves=0)
    for loss in (Loss.ORDERLY, Loss.REFUSED) * 10:
        flight.submit(P, P)
        assert flight.on_worker_lost(GONE, loss) == [Requeue(GONE, loss)]
        flight.check()
    flight.submit(P, P)
    full = Overloaded("full")
    (requeue,) = say(flight, finish=FinishReason.ERROR, failure=Failure.of(full))
    assert (type(requeue.reason), requeue.loss) == (Overloaded, Loss.REFUSED)
    flight.submit(P, P)
    assert isinstance(flight.on_worker_lost(GONE, Loss.DEATH)[-1], End)


def test_a_request_under_which_worker_after_worker_dies_is_refused():
    flight = make(max_moves=100, max_new_tokens=50)
    for n in range(10):  # each brings a token: it is not the request
        flight.submit(P, P)
        say(flight, n)
        flight.on_worker_lost(GONE, Loss.DEATH)
    for _ in range(MAX_KILLS - 2):
        flight.submit(P, P)
        assert isinstance(flight.on_worker_lost(GONE, Loss.DEATH)[-1], Requeue)
    flight.submit(P, P)
    (end,) = flight.on_worker_lost(GONE, Loss.DEATH)
    assert isinstance(end.error, RequestKillsWorkers)
    assert not end.error.retryable


def test_the_one_token_of_a_prefill_forgives_nothing():
    """Each decode worker dies; the prefill's token between them is no sign that it would go on."""
    flight = make(max_moves=100, max_new_tokens=50)
    for _ in range(MAX_KILLS):
        flight.submit(P, D)
        say(flight, 11, finish=FinishReason.HANDED_OVER, source=SOURCE)
        flight.decode_at(D)
        out = flight.on_worker_lost(GONE, Loss.DEATH)
    assert isinstance(out[-1].error, RequestKillsWorkers)


def test_a_long_sequence_is_not_moved_if_so_told():
    short, long = make(max_tokens=6), make(max_tokens=6)
    for flight, num_tokens in ((short, 1), (long, 2)):
        flight.submit(P, P)
        say(flight, *range(num_tokens))
    assert short.on_worker_lost(GONE, Loss.DEATH) == [Requeue(GONE, Loss.DEATH)]
    (end,) = long.on_worker_lost(GONE, Loss.DEATH)
    assert "7 tokens" in end.error.message


def test_an_error_that_another_worker_would_not_mend_ends_it():
    flight = make()
    flight.submit(P, P)
    error = InvalidRequest("bad")
    (end,) = say(flight, finish=FinishReason.ERROR, failure=Failure.of(error))
    assert (end.reason, type(end.error), end.error.message) == (None, InvalidRequest, "bad")


def test_all_tokens_came_but_not_the_word_of_the_end():
    flight = make(max_new_tokens=2)
    flight.submit(P, P)
    say(flight, 1, 2)
    assert flight.on_worker_lost(GONE, Loss.DEATH) == [End(FinishReason.LENGTH)]


def test_abort_and_stop_string_tell_the_worker_once():
    flight = make()
    flight.submit(P, P)
    say(flight, 11)
    assert flight.on_stop_string() == [AbortAt(P, "r.1"), End(FinishReason.STOP)]
    assert flight.abort() == []
    queued = make()
    assert queued.abort() == [End(ABORTED)]
    handing = make()
    handing.submit(P, D)
    say(handing, 11, finish=FinishReason.HANDED_OVER, source=SOURCE)
    handing.decode_at(D)
    assert handing.abort() == [AbortAt(D, "r.2"), Release(P, 7), End(ABORTED)]


def test_hashes_grow_with_the_tokens():
    def empty() -> TokenSequence:
        return TokenSequence(root_hash(Fingerprint(b"f" * 16)), 4)

    flight = make()
    assert len(flight.sequence(empty).block_hashes) == 1
    flight.submit(P, P)
    say(flight, 6, 7, 8)
    expected = TokenSequence(root_hash(Fingerprint(b"f" * 16)), 4, [1, 2, 3, 4, 5, 6, 7, 8])
    assert flight.sequence(empty).block_hashes == expected.block_hashes


@given(
    st.lists(st.sampled_from(["token", "hand_over", "stop", "length", "error", "lost", "abort", "fail"]), max_size=40)
)
def test_any_history_keeps_the_invariants_and_ends_once(history):
    flight = make(max_new_tokens=100, max_moves=3)
    ends = 0
    for what in history:
        if flight.ended:
            break
        if flight.state is FlightState.QUEUED:
            flight.submit(P, D)
        ends += sum(isinstance(i, End) for i in _happen(flight, what))
        flight.check()
    assert ends == flight.ended


def _happen(flight: Flight, what: str) -> list:
    match what:
        case "hand_over":
            out = flight.on_output(Output(flight.wire_id, [9], FinishReason.HANDED_OVER, source=SOURCE))
            return out + (flight.decode_at(D) if PickDecode() in out else [])
        case "lost":
            return flight.on_worker_lost(GONE, Loss.DEATH)
        case "abort":
            return flight.abort()
        case "fail":
            return flight.fail(GONE)
        case "error":
            return flight.on_output(Output(flight.wire_id, [], FinishReason.ERROR, Failure.of(GONE)))
        case "token":
            return flight.on_output(Output(flight.wire_id, [5]))
        case _:
            return flight.on_output(Output(flight.wire_id, [5], FinishReason[what.upper()]))
