"""What the sequences of a call bring, as messages of the reply."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tanghulu.conductor.inference.generation import Generation, GenerationCall, TextDelta
from tanghulu.conductor.inference.preprocess import ParsedRequest
from tanghulu.conductor.routing.requests import FinishReason, TokenLogprobs
from tanghulu.conductor.tools.events import (
    TOOL_CALLS,
    AnswerEvent,
    AnswerParser,
    CallArguments,
    CallBegin,
    ContentText,
    ReasoningText,
)
from tanghulu.protos import inference_pb2 as pb


class ReplyWriter:
    """The replies of one call; a chat's text is read for reasoning and tool calls where its model has them."""

    def __init__(self, call: GenerationCall, parsed: ParsedRequest) -> None:
        self._call = call
        self._sequences = [_Sequence(generation, parsed) for generation in call.generations]
        self._is_first = True

    def write(self, deltas: list[tuple[int, TextDelta]]) -> Iterator[pb.GenerateReply]:
        """The replies that the next pieces make; none for one that brings nothing."""
        for index, delta in deltas:
            reply = self._sequences[index].reply(delta)
            if not reply.ListFields():
                continue
            reply.index = index
            if self._is_first:
                self._is_first = False
                reply.request_id, reply.model = self._call.id, self._call.model.card.model
            yield reply


class _Sequence:
    """One sequence's replies."""

    def __init__(self, generation: Generation, parsed: ParsedRequest) -> None:
        self._generation = generation
        self._parser: AnswerParser | None = parsed.new_parser() if parsed.new_parser is not None else None
        self._most_calls = math.inf if parsed.most_calls is None else parsed.most_calls
        self._has_calls = False

    def reply(self, delta: TextDelta) -> pb.GenerateReply:
        """The next reply, without what the whole call has in common; empty if there is nothing to tell."""
        reply = pb.GenerateReply(tokens=delta.tokens, logprobs=[_logprobs(one) for one in delta.logprobs])
        if self._parser is None:
            reply.text = delta.text
        else:
            events = self._parser.feed(delta.text)
            if delta.finish is not None:
                events += self._parser.finish()
            for event in events:
                self._add(event, reply)
        if delta.finish is not None:
            self._end(delta.finish, reply)
        return reply

    def _add(self, event: AnswerEvent, reply: pb.GenerateReply) -> None:
        match event:
            case ContentText(text):
                reply.text += text
            case ReasoningText(text):
                reply.reasoning += text
            case CallBegin(index, call_id, name) if index < self._most_calls:
                self._has_calls = True
                reply.tool_calls.add(index=index, id=call_id, name=name)
            case CallArguments(index, text) if index < self._most_calls:
                reply.tool_calls.add(index=index, arguments=text)

    def _end(self, finish: FinishReason, reply: pb.GenerateReply) -> None:
        generation = self._generation
        reply.finish_reason = TOOL_CALLS if self._has_calls and finish is FinishReason.STOP else finish.value
        match generation.matched:
            case str(text):
                reply.stop_text = text
            case int(token):
                reply.stop_token = token
        reply.usage.prompt_tokens = generation.num_prompt_tokens
        reply.usage.completion_tokens = generation.num_generated
        reply.usage.cached_tokens = generation.cached_tokens


def _logprobs(one: TokenLogprobs) -> pb.PositionLogprobs:
    pairs = [pb.TokenProbability(token=t, logprob=p) for t, p in zip(one.token_ids, one.logprobs, strict=True)]
    return pb.PositionLogprobs(sampled=pairs[0] if pairs else None, top=pairs[1:])
