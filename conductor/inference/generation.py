"""One sequence as text: the dispatcher's tokens through detokenizer and stop strings.

Owns the text side of a sequence and notifies the dispatcher when a stop string ends it. `GenerationCall` groups the
sequences of one client request (n choices, lists of prompts), which share one lifetime.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tanghulu.conductor.dispatch.dispatcher import Dispatcher
from tanghulu.conductor.dispatch.token_stream import Arrivals, Delta, TokenStream
from tanghulu.conductor.routing.requests import GenerationRequest, PromptLogprobs
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.conductor.text.stop_regex import PatternMatcher, StopPattern
from tanghulu.conductor.text.stop_strings import StopMatcher
from tanghulu.conductor.tools.events import TOOL_CALLS, AnswerEvent, AnswerParser, CallBegin, ContentText, ReasoningText
from tanghulu.conductor.tools.reasoning import PlainAnswer
from tanghulu.errors import TanghuluError
from tanghulu.session.outputs import FinishReason, TokenLogprobs

_MANY_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class TextRules:
    """Stop conditions and display options of a sequence's text. ``keep_stop``: the stop string is part of the text.

    ``stop_patterns``, if set, include the stop strings. ``hides_output``: no new tokens were requested; the one that a
    worker generates anyway is neither shown nor counted.
    """

    stop_strings: tuple[str, ...] = ()
    stop_patterns: tuple[StopPattern, ...] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True
    hides_output: bool = False

    def new_matcher(self) -> StopMatcher | PatternMatcher | None:
        """Return a matcher for the end of one sequence's text; None if only tokens end it."""
        if self.stop_patterns:
            return PatternMatcher(self.stop_patterns, self.keep_stop)
        return StopMatcher(self.stop_strings, self.keep_stop) if self.stop_strings else None


@dataclass(slots=True)
class TextDelta:
    """The next piece of a sequence: its tokens' texts (may be empty) and log probabilities, and its end if reached.

    ``pieces`` has the text of each token with visible text.
    """

    pieces: list[str]
    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Generation:
    """One sequence in progress. ``matched``: the stop string or token that ended it; ``name``: the client's name.

    ``markers`` are the special tokens shown in its text.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: GenerationRequest,
        model: ServedModel,
        rules: TextRules,
        name: str,
        markers: Sequence[str],
        arrivals: Arrivals,
    ) -> None:
        self.request = request
        self.model = model
        self.name = name
        self.num_generated = 0
        self.ended = False
        self.matched: str | int | None = None
        self._dispatcher = dispatcher
        self._detokenizer = model.detokenizers.new(markers, skip_special_tokens=rules.skip_special_tokens)
        self._stops = rules.new_matcher()
        self._keep_stop = rules.keep_stop
        self._hides_output = rules.hides_output
        self.stream = dispatcher.submit(request, model, arrivals, name)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def prompt_scores(self) -> Sequence[PromptLogprobs]:
        """Requested log probabilities of the prompt itself; available once the first piece has been read."""
        return self.stream.scores

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens not computed by any worker; available once the sequence has ended."""
        return self.stream.cached_tokens

    @property
    def explanation(self) -> dict[str, Any] | None:
        """The explanation of cache misses, once the sequence has ended; None if it was not requested."""
        explained, audience = self.stream.story.explanation, self.request.explain
        return explained.shown(audience) if explained is not None and audience is not None else None

    def take(self) -> TextDelta:
        """Return the output since the last call; the last one has ``finish``. Raises the error of a failed request."""
        delta = self.stream.take()
        if self._hides_output:
            delta = Delta(finish=FinishReason.LENGTH if delta.finish is FinishReason.STOP else delta.finish)
        shown = self._plain(delta) if self._stops is None else self._until_stop(delta, self._stops)
        self.ended = shown.finish is not None
        if self.ended:
            self.stream.story.taken(time.monotonic())
        return shown

    def abort(self) -> None:
        """End the sequence on demand; the call's reader gets a last delta."""
        self._dispatcher.abort(self.request.id)

    def _plain(self, delta: Delta) -> TextDelta:
        self.num_generated += len(delta.tokens)
        shown = delta.tokens[:-1] if delta.ends_in_stop_token and not self._keep_stop else delta.tokens
        feed = self._detokenizer.feed
        pieces = [text for token in shown if (text := feed((token,)))]
        if delta.finish is not None:
            if rest := self._detokenizer.flush():
                pieces.append(rest)
            self.matched = delta.stop_token
        return TextDelta(pieces, delta.tokens, delta.logprobs, delta.finish)

    def _until_stop(self, delta: Delta, stops: StopMatcher | PatternMatcher) -> TextDelta:
        """Proceed token by token, so that the count does not depend on how the tokens were bundled."""
        pieces: list[str] = []
        last = len(delta.tokens) - 1
        for position, token in enumerate(delta.tokens):
            self.num_generated += 1
            if self._keep_stop or not (delta.ends_in_stop_token and position == last):
                piece = self._detokenizer.feed((token,))
                pieces.append(stops.feed(piece) if self.num_generated >= self.request.stop.min_tokens else piece)
            if stops.matched is not None:
                return self._stopped(delta, pieces, position + 1, stops.matched)
        if delta.finish is not None:
            pieces += [stops.feed(self._detokenizer.flush()), stops.flush()]
            self.matched = stops.matched if stops.matched is not None else delta.stop_token
        finish = FinishReason.STOP if stops.matched else delta.finish
        return TextDelta(list(filter(None, pieces)), delta.tokens, delta.logprobs, finish)

    def _stopped(self, delta: Delta, pieces: list[str], num_tokens: int, matched: str) -> TextDelta:
        self.matched = matched
        self._dispatcher.finish_at_stop_string(self.request.id)
        shown = list(filter(None, pieces))
        return TextDelta(shown, delta.tokens[:num_tokens], delta.logprobs[:num_tokens], FinishReason.STOP)


class GenerationCall:
    """The sequences of one client request, ``num_choices`` for each of its prompts."""

    def __init__(self, call_id: str, model: ServedModel, num_choices: int) -> None:
        self.id = call_id
        self.model = model
        self.generations: list[Generation] = []
        self.num_choices = num_choices
        self._arrivals = Arrivals()
        self._indices: dict[TokenStream, int] = {}

    def begin(
        self, dispatcher: Dispatcher, request: GenerationRequest, rules: TextRules, name: str, markers: Sequence[str]
    ) -> None:
        """Begin the next sequence, named ``name``. Raises as `Dispatcher.submit` does."""
        begun = Generation(dispatcher, request, self.model, rules, name, markers, self._arrivals)
        self._indices[begun.stream] = len(self.generations)
        self.generations.append(begun)

    @property
    def ended(self) -> bool:
        """Whether the last delta of every sequence has been read."""
        return all(generation.ended for generation in self.generations)

    @property
    def client(self) -> str:
        """Owner of the call, as recorded in its sequences."""
        return self.generations[0].request.client if self.generations else ""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once regardless of its number of choices."""
        return sum(g.num_prompt_tokens for g in self.generations[:: self.num_choices])

    @property
    def num_generated(self) -> int:
        return sum(g.num_generated for g in self.generations)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, summed over each prompt's first choice."""
        return sum(g.cached_tokens for g in self.generations[:: self.num_choices])

    @property
    def is_explained(self) -> bool:
        """Whether an explanation of cache misses was requested."""
        return bool(self.generations) and self.generations[0].request.explain is not None

    @property
    def explanation(self) -> dict[str, Any]:
        """The fields that explain cache misses, once the call has ended: of the prompt, or a list of several."""
        shown = [g.explanation for g in self.generations[:: self.num_choices]] if self.is_explained else []
        return {"cache_explanation": shown[0] if len(shown) == 1 else shown} if shown else {}

    @property
    def shows_scores(self) -> bool:
        """Whether log probabilities of prompts are included, thousands at a time."""
        return any(generation.request.scoring is not None for generation in self.generations)

    @property
    def shows_much(self) -> bool:
        """Whether the answer is large enough to be serialised in a thread."""
        shows_logprobs = any(each.request.sampling.num_logprobs is not None for each in self.generations)
        return shows_logprobs or self.shows_scores or self.num_generated > _MANY_TOKENS

    def abort(self) -> None:
        for generation in self.generations:
            generation.abort()

    async def read_all(self, keep: Callable[[int, TextDelta], object]) -> None:
        """Pass (index, delta) of all output to ``keep``. Raises as ``read`` does."""
        while not self.ended:
            for index, delta in await self.read():
                keep(index, delta)

    async def read(self) -> list[tuple[int, TextDelta]]:
        """Return (index, delta) of the sequences with new output, maybe none; waits for the first.

        Raises the error of a failed sequence after all its output. Must not be called when all have ended.
        """
        streams = await self._arrivals.wait()
        taken: list[tuple[int, TextDelta]] = []
        for position, stream in enumerate(streams):
            index = self._indices[stream]
            generation = self.generations[index]
            if generation.ended:  # at a stop string; the dispatcher already knows
                continue
            try:
                taken.append((index, generation.take()))
            except TanghuluError:
                if not taken:
                    raise
                for left in streams[position:]:
                    self._arrivals.came(left)
                break
        return taken


class AnswerReader:
    """One sequence's text as parts of an answer: content, reasoning and calls; calls after ``most_calls`` are omitted.

    The parser works where the text is assembled, so moves of the request between workers do not matter.
    """

    def __init__(self, parser: AnswerParser, most_calls: int | None = None) -> None:
        #: Whether the answer is text alone.
        self.is_plain = isinstance(parser, PlainAnswer)
        self._parser = parser
        self._most_calls = math.inf if most_calls is None else most_calls
        self._has_calls = False

    def take(self, delta: TextDelta) -> list[AnswerEvent]:
        """Return the parts in the next piece of text."""
        events = self._parser.feed(delta.text)
        if delta.finish is not None:
            events += self._parser.finish()
        kept = [e for e in events if isinstance(e, ContentText | ReasoningText) or e.index < self._most_calls]
        self._has_calls = self._has_calls or any(isinstance(each, CallBegin) for each in kept)
        return kept

    def reason(self, finish: FinishReason) -> str:
        """Return the name of ``finish`` in the APIs' answers."""
        return TOOL_CALLS if self._has_calls and finish is FinishReason.STOP else finish.value


#: Rows converted to Python numbers at a time.
_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token of a prompt: its log probability and rank, and the most likely tokens there as (id, logprob).

    ``requested`` are the log probabilities of the tokens requested by id, in order.
    """

    position: int
    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    requested: list[float]


def scored_tokens(prompt: Sequence[int], parts: Sequence[PromptLogprobs]) -> Iterator[ScoredToken]:
    """Yield the tokens of ``prompt`` covered by ``parts``, in order; built as they are taken."""
    for part in parts:
        for start in range(0, len(part.logprobs), _ROWS):
            yield from _rows(prompt, part, slice(start, start + _ROWS))


def _rows(prompt: Sequence[int], part: PromptLogprobs, chosen: slice) -> Iterator[ScoredToken]:
    rows = zip(
        part.logprobs[chosen].tolist(),
        part.ranks[chosen].tolist(),
        part.top_ids[chosen].tolist(),
        part.top_logprobs[chosen].tolist(),
        part.named_logprobs[chosen].tolist(),
        strict=True,
    )
    for position, (logprob, rank, ids, values, requested) in enumerate(rows, part.position + chosen.start):
        top = list(zip(ids, values, strict=True))
        yield ScoredToken(position, int(prompt[position]), logprob, rank, top, requested)
