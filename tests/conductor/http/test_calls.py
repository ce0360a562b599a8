"""A call's sequences, read by one reader: what came together leaves together, and a failure behind what came first."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from tanghulu.conductor.dispatch.lifecycle import DeliverTokens, End
from tanghulu.conductor.dispatch.token_stream import Arrivals, TokenStream
from tanghulu.conductor.http.answers import Choice, ChoicesAnswer
from tanghulu.conductor.http.openai_format import ChunkWriter
from tanghulu.conductor.inference.generation import AnswerReader, GenerationCall, TextRules
from tanghulu.conductor.stories.story import Story
from tanghulu.conductor.text.detokenizer import DetokenizerFactory
from tanghulu.conductor.tools.reasoning import PlainAnswer
from tanghulu.errors import NodeUnavailable
from tanghulu.session.outputs import FinishReason
from tanghulu.session.sampling import StopRule
from tests.conductor.fake_worker import TOKENIZER

IDS = TOKENIZER.encode("abcdef").ids
ENDED = End(FinishReason.LENGTH)
_NO_RULES = TextRules()


class _Dispatcher:
    """Streams that are written by hand; a stop string ends its stream at once, as the real one does."""

    def __init__(self) -> None:
        self.streams: dict[str, TokenStream] = {}

    def submit(self, request, model, arrivals: Arrivals, name: str) -> TokenStream:
        story = Story(request.id, name, "tiny", 1, 0.0)
        stream = self.streams[request.id] = TokenStream(arrivals, story)
        return stream

    def finish_at_stop_string(self, request_id: str) -> None:
        self.streams[request_id].end(End(FinishReason.STOP))


@pytest.fixture
def dispatcher():
    return _Dispatcher()


def _call(dispatcher: _Dispatcher, num_choices: int = 1, rules: TextRules = _NO_RULES) -> GenerationCall:
    card = SimpleNamespace(model="tiny")
    model = SimpleNamespace(card=card, detokenizers=DetokenizerFactory(TOKENIZER, True))
    call = GenerationCall("call", model, num_choices)
    for choice in range(num_choices):
        request = SimpleNamespace(id=str(choice), prompt=[1], stop=StopRule(10))
        call.begin(dispatcher, request, rules, str(choice), ())
    return call


async def _read(call: GenerationCall):
    async with asyncio.timeout(30):
        return await call.read()


async def test_tokens_that_came_together_are_an_event_each(dispatcher):
    call = _call(dispatcher)
    stream = ChoicesAnswer(call, ChunkWriter(call, True, False), [Choice(AnswerReader(PlainAnswer()))])
    dispatcher.streams["0"].deliver(DeliverTokens(IDS[:2]))
    dispatcher.streams["0"].deliver(DeliverTokens(IDS[2:3]))
    dispatcher.streams["0"].end(ENDED)
    ((index, delta),) = await _read(call)
    events = stream.take(index, delta).decode().split("\n\n")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if event]
    assert [choice["delta"].get("content") for choice in choices] == ["", "a", "b", "c", None]
    assert choices[-1]["finish_reason"] == "length"
    assert call.ended


async def test_choices_are_read_together_in_the_order_of_their_coming(dispatcher):
    call = _call(dispatcher, 3)
    waiting = asyncio.create_task(_read(call))
    await asyncio.sleep(0)
    for choice in ("2", "0"):
        dispatcher.streams[choice].deliver(DeliverTokens(IDS[:1]))
    assert [(index, delta.text) for index, delta in await waiting] == [(2, "a"), (0, "a")]
    for choice in ("0", "1", "2"):
        dispatcher.streams[choice].end(ENDED)
    assert [index for index, _ in await _read(call)] == [0, 1, 2]
    assert call.ended


async def test_a_failure_is_told_behind_what_came_before_it(dispatcher):
    call = _call(dispatcher, 2)
    dispatcher.streams["1"].deliver(DeliverTokens(IDS[:2]))
    dispatcher.streams["0"].end(End(None, NodeUnavailable("gone")))
    dispatcher.streams["1"].end(End(None, NodeUnavailable("gone, too")))
    assert [(index, delta.text) for index, delta in await _read(call)] == [(1, "ab")]
    with pytest.raises(NodeUnavailable, match="gone"):
        await _read(call)
    assert not call.ended


async def test_what_comes_behind_a_stop_string_is_not_shown(dispatcher):
    call = _call(dispatcher, 2, TextRules(("c",)))
    dispatcher.streams["0"].deliver(DeliverTokens(IDS))
    ((_, delta),) = await _read(call)
    assert (delta.text, delta.finish, call.generations[0].num_generated) == ("ab", FinishReason.STOP, 3)
    assert await _read(call) == [], "the dispatcher's own end of it"
    dispatcher.streams["1"].end(ENDED)
    assert [index for index, _ in await _read(call)] == [1]
    assert call.ended
