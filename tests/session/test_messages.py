"""Messages of sessions: they arrive as they were sent, and what no worker or conductor sends is an InvalidRequest."""

from __future__ import annotations

import msgspec
import pytest

from tanghulu.errors import InvalidRequest, Overloaded
from tanghulu.rpc.wire import Failure, encode, parser_of
from tanghulu.session.load import DecodeProfile, PeerRead, PrefillProfile, WorkerLoad
from tanghulu.session.messages import (
    Abort,
    FromWorker,
    PullAhead,
    ReleaseExport,
    SessionHello,
    SessionWelcome,
    StepOutput,
    Submit,
    ToWorker,
)
from tanghulu.session.outputs import (
    FinishReason,
    KvChange,
    KvSource,
    Output,
    PhaseTimes,
    PrefixHolder,
    PromptScores,
    TokenLogprobs,
)
from tanghulu.session.sampling import PromptScoring, Sampling, StopRule
from tanghulu.types import BlockHash, InstanceId, RequestId

NAME = RequestId("r.1")
SOURCE = KvSource(InstanceId("w"), "h:1", "/run/w.sock", (1 << 64) - 1, 9, "host")
SAMPLING = Sampling(seed=(1 << 64) - 1, logit_bias={3: -1.5}, num_logprobs=2, regex="a+", logprob_token_ids=(1, 2))
SUBMIT = Submit(
    NAME,
    bytes(8),
    2,
    SAMPLING,
    StopRule(4, (5,), True, 1),
    salt=b"s",
    source=SOURCE,
    priority=-3,
    holder=PrefixHolder("h:2", "", 4),
    scoring=PromptScoring(1, 3),
)
LOAD = WorkerLoad(1, 2, prefill=PrefillProfile(0.1), decode=DecodeProfile(0.2), reads=(PeerRead("h:1", 5, 0.5),))
SCORES = PromptScores(NAME, 3, bytes(8), bytes(8), bytes(16), bytes(16), b"")
STEP = StepOutput(
    [
        Output(NAME, [1, 2], logprobs=[TokenLogprobs((1, 7), (-0.5, -0.25))], phases=PhaseTimes(0.1)),
        Output(NAME, finish=FinishReason.ERROR, failure=Failure.of(Overloaded("full"))),
        Output(NAME, source=SOURCE),
        Output(NAME, [3], FinishReason.HANDED_OVER, source=SOURCE),
    ],
    7,
    (KvChange(stored=(BlockHash(b"x" * 16),)), KvChange(cleared=True)),
    LOAD,
    4,
    [SCORES],
)


@pytest.mark.parametrize(
    "message",
    [
        *map(
            ToWorker, (SessionHello("c", 1), SUBMIT, Abort(NAME), ReleaseExport(8), PullAhead(NAME, b"", b"", SOURCE))
        ),
        FromWorker(SessionWelcome(InstanceId("w"), 1, (BlockHash(b"y" * 16),), 3, LOAD, 1.0)),
        FromWorker(STEP),
    ],
)
def test_messages_arrive_as_they_were_sent(message):
    assert parser_of(type(message))(encode(message)) == message


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (ToWorker, [[9, "r"]]),
        (ToWorker, [[4, -1]]),
        (ToWorker, [[3]]),
        (FromWorker, [[2, [["r", [1 << 32]]]]]),
        (FromWorker, [[2, [["r", [1], "lost"]]]]),
        (FromWorker, [[1, "w", 1, [], 3, [], -1.0]]),
        (FromWorker, [[2, [], 0, [], None, None, [["r", 3, bytes(8), bytes(4), b"", b"", b""]]]]),
        (FromWorker, [[2, [], 0, [], None, None, [["r", 3, bytes(8), bytes(8), bytes(12), b"", b""]]]]),
        (FromWorker, [[2, [], 0, [], None, None, [["r", 3, b"", b"", b"", b"", b""]]]]),
    ],
)
def test_what_nobody_sends_is_refused(kind, changed):
    """An unknown message, numbers out of range, fields that are missing, an unknown end, tables without whole rows."""
    with pytest.raises(InvalidRequest):
        parser_of(kind)(msgspec.msgpack.encode(changed))


def test_outputs_of_several_steps_are_one():
    whole = Output(NAME, [1], cached_tokens=3, phases=PhaseTimes(0.1))
    whole.add(Output(NAME, [2], cached_tokens=3))
    assert (whole.finish, whole.phases) == (None, PhaseTimes(0.1))
    whole.add(Output(NAME, [3], FinishReason.STOP, cached_tokens=3, stop_token=3, phases=PhaseTimes(0.2)))
    assert whole == Output(NAME, [1, 2, 3], FinishReason.STOP, None, None, 3, 3, [], PhaseTimes(0.2))


def test_one_grammar_at_most():
    assert SAMPLING.grammar == ("regex", "a+")
    assert Sampling().grammar is None
    with pytest.raises(InvalidRequest, match="json_schema and regex"):
        Sampling(json_schema="{}", regex="a").validate()


@pytest.mark.parametrize(
    "wrong",
    [
        Sampling(temperature=float("nan")),
        Sampling(top_p=0.0),
        Sampling(repetition_penalty=0.0),
        StopRule(0),
        StopRule(1, min_tokens=-1),
        PromptScoring(0),
        PromptScoring(1, 21),
    ],
)
def test_what_no_request_can_mean(wrong):
    with pytest.raises(InvalidRequest):
        wrong.validate()
