"""The output of a call's sequences, as messages of the reply."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from tanghulu.conductor.inference.generation import Generation, GenerationCall, ScoredToken, TextDelta, scored_tokens
from tanghulu.conductor.inference.preprocess import ParsedRequest
from tanghulu.conductor.tools.events import AnswerEvent, CallArguments, CallBegin, ContentText, ReasoningText
from tanghulu.protos import inference_pb2 as pb
from tanghulu.session.outputs import FinishReason, TokenLogprobs

#: Tokens of a prompt in one reply: with 20 log probabilities each, 100 kB and a few milliseconds.
PIECE_TOKENS: Final = 256


class ReplyWriter:
    """The replies of one call; the text of a chat is parsed for reasoning and tool calls if its model has them.

    With ``echo`` each sequence begins with its prompt.
    """

    def __init__(self, call: GenerationCall, parsed: ParsedRequest, echo: bool) -> None:
        self._call = call
        self._sequences = [
            _Sequence(generation, parsed, _PromptPieces(generation, echo, rules.skip_special_tokens))
            for generation, rules in zip(call.generations, parsed.rules, strict=True)
        ]
        self._is_first = True

    def write(self, deltas: list[tuple[int, TextDelta]]) -> Iterator[pb.GenerateReply]:
        """Yield the replies made from the next pieces; none for a piece without content."""
        for index, delta in deltas:
            for reply in self._sequences[index].replies(delta):
                reply.index = index
                if self._is_first:
                    self._is_first = False
                    reply.request_id, reply.model = self._call.id, self._call.model.card.model
                yield reply


class _Sequence:
    """One sequence's replies."""

    def __init__(self, generation: Generation, parsed: ParsedRequest, prompt: _PromptPieces) -> None:
        self._generation, self._prompt = generation, prompt
        self._reader = parsed.new_reader()
        self._has_begun = False

    def replies(self, delta: TextDelta) -> Iterator[pb.GenerateReply]:
        """Yield the next replies, without the fields common to the whole call; none if there is nothing to report."""
        if not self._has_begun:
            self._has_begun = True
            yield from (pb.GenerateReply(prompt=piece) for piece in self._prompt.pieces())
        reply = self._reply(delta)
        if reply.ListFields():
            yield reply

    def _reply(self, delta: TextDelta) -> pb.GenerateReply:
        reply = pb.GenerateReply(tokens=delta.tokens, logprobs=[_logprobs(one) for one in delta.logprobs])
        for event in self._reader.take(delta):
            _add(event, reply)
        if delta.finish is not None:
            self._end(delta.finish, reply)
        return reply

    def _end(self, finish: FinishReason, reply: pb.GenerateReply) -> None:
        generation = self._generation
        reply.finish_reason = self._reader.reason(finish)
        match generation.matched:
            case str(text):
                reply.stop_text = text
            case int(token):
                reply.stop_token = token
        reply.usage.prompt_tokens = generation.num_prompt_tokens
        reply.usage.completion_tokens = generation.num_generated
        reply.usage.cached_tokens = generation.cached_tokens


def _add(event: AnswerEvent, reply: pb.GenerateReply) -> None:
    match event:
        case ContentText(text):
            reply.text += text
        case ReasoningText(text):
            reply.reasoning += text
        case CallBegin(index, call_id, name):
            reply.tool_calls.add(index=index, id=call_id, name=name)
        case CallArguments(index, text):
            reply.tool_calls.add(index=index, arguments=text)


class _PromptPieces:
    """A sequence's repeated prompt: its tokens, with ``echo`` their text, and the log probabilities."""

    def __init__(self, generation: Generation, echo: bool, skip_special_tokens: bool) -> None:
        self._generation, self._echo, self._skip_special_tokens = generation, echo, skip_special_tokens

    def pieces(self) -> Iterator[pb.PromptPiece]:
        """Yield the whole prompt; built as it is taken, once the log probabilities are known."""
        request = self._generation.request
        if not self._echo and request.scoring is None:
            return
        tokens = request.prompt.tolist()
        detokenizer = self._generation.model.detokenizers.new(skip_special_tokens=self._skip_special_tokens)
        scored = scored_tokens(tokens, self._generation.prompt_scores)
        for start in range(0, len(tokens), PIECE_TOKENS):
            ids = tokens[start : start + PIECE_TOKENS]
            piece = pb.PromptPiece(tokens=ids)
            if self._echo:
                piece.text = detokenizer.feed(ids)
                if start + len(ids) == len(tokens):
                    piece.text += detokenizer.flush()
            if request.scoring is not None:
                first = [] if start else [pb.PositionLogprobs()]
                piece.logprobs.extend(first)
                piece.logprobs.extend(_prompt_logprobs(one) for one in itertools.islice(scored, len(ids) - len(first)))
            yield piece


def _prompt_logprobs(one: ScoredToken) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        sampled=pb.TokenProbability(token=one.token, logprob=one.logprob),
        top=[pb.TokenProbability(token=token, logprob=logprob) for token, logprob in one.top],
        rank=one.rank,
    )


def _logprobs(one: TokenLogprobs) -> pb.PositionLogprobs:
    pairs = [pb.TokenProbability(token=t, logprob=p) for t, p in zip(one.token_ids, one.logprobs, strict=True)]
    return pb.PositionLogprobs(sampled=pairs[0] if pairs else None, top=pairs[1:])
