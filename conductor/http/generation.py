"""One sequence as text: the dispatcher's tokens through detokenizer and stop strings.

Owns the text side of a sequence and tells the dispatcher when a stop string ends it. `GenerationCall` groups the
sequences of one client request (n choices, lists of prompts), which live and die together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from tanghulu.conductor.dispatch.dispatcher import Dispatcher
from tanghulu.conductor.dispatch.token_stream import Delta
from tanghulu.conductor.routing.requests import FinishReason, GenerationRequest, TokenLogprobs
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.conductor.text.stop_regex import PatternMatcher, StopPattern
from tanghulu.conductor.text.stop_strings import StopMatcher
from tanghulu.runtime.tasks import cancelled


@dataclass(frozen=True, slots=True)
class TextRules:
    """What a sequence's text ends at, and how it is shown. ``keep_stop``: what ends it belongs to the text.

    With ``stop_patterns`` the stop strings are among them.
    """

    stop_strings: tuple[str, ...] = ()
    stop_patterns: tuple[StopPattern, ...] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True

    def new_matcher(self) -> StopMatcher | PatternMatcher | None:
        """What looks for the end of one sequence's text; None where only tokens end it."""
        if self.stop_patterns:
            return PatternMatcher(self.stop_patterns, self.keep_stop)
        return StopMatcher(self.stop_strings, self.keep_stop) if self.stop_strings else None


@dataclass(slots=True)
class TextDelta:
    """The next piece of a sequence: text (may be empty), its tokens' log probabilities, and how it ended if it did."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None


class Generation:
    """One sequence under way. ``matched``: the stop string or stop token that ended it; ``name``: its client's name.

    ``markers`` are the special tokens that its text shows.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: GenerationRequest,
        model: ServedModel,
        rules: TextRules,
        name: str,
        markers: Sequence[str] = (),
    ) -> None:
        self.request = request
        self.name = name
        self.model = model
        self.num_generated = 0
        self.ended = False
        self.matched: str | int | None = None
        self._dispatcher = dispatcher
        self._detokenizer = model.detokenizers.new(markers, skip_special_tokens=rules.skip_special_tokens)
        self._stops = rules.new_matcher()
        self._keep_stop = rules.keep_stop
        self._stream = dispatcher.submit(request, model)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that no worker computed; known when the sequence has ended."""
        return self._stream.cached_tokens

    async def read(self) -> TextDelta:
        """The next piece; the one with ``finish`` is the last. Raises the typed error of a request that failed."""
        delta = await self._stream.read()
        shown = self._plain(delta) if self._stops is None else self._until_stop(delta, self._stops)
        self.ended = shown.finish is not None
        return shown

    def abort(self) -> None:
        """End the sequence on demand; a read that waits gets a last delta."""
        self._dispatcher.abort(self.request.id)

    def _plain(self, delta: Delta) -> TextDelta:
        self.num_generated += len(delta.tokens)
        shown = delta.tokens[:-1] if delta.ends_in_stop_token and not self._keep_stop else delta.tokens
        text = self._detokenizer.feed(shown)
        if delta.finish is not None:
            text += self._detokenizer.flush()
            self.matched = delta.stop_token
        return TextDelta(text, delta.tokens, delta.logprobs, delta.finish)

    def _until_stop(self, delta: Delta, stops: StopMatcher | PatternMatcher) -> TextDelta:
        """Go on token by token, so that the count does not depend on how the tokens were bundled."""
        text = ""
        last = len(delta.tokens) - 1
        for position, token in enumerate(delta.tokens):
            self.num_generated += 1
            if self._keep_stop or not (delta.ends_in_stop_token and position == last):
                piece = self._detokenizer.feed((token,))
                text += stops.feed(piece) if self.num_generated >= self.request.stop.min_tokens else piece
            if stops.matched is not None:
                return self._stopped(delta, text, position + 1, stops.matched)
        if delta.finish is not None:
            text += stops.feed(self._detokenizer.flush())
            text += stops.flush()
            self.matched = stops.matched if stops.matched is not None else delta.stop_token
        return TextDelta(text, delta.tokens, delta.logprobs, FinishReason.STOP if stops.matched else delta.finish)

    def _stopped(self, delta: Delta, text: str, num_tokens: int, matched: str) -> TextDelta:
        self.matched = matched
        self._dispatcher.finish_at_stop_string(self.request.id)
        return TextDelta(text, delta.tokens[:num_tokens], delta.logprobs[:num_tokens], FinishReason.STOP)


class GenerationCall:
    """The sequences of one client request, ``num_choices`` for each of its prompts."""

    def __init__(self, call_id: str, model: ServedModel, num_choices: int) -> None:
        self.id = call_id
        self.model = model
        self.generations: list[Generation] = []
        self.num_choices = num_choices

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum(g.num_prompt_tokens for g in self.generations[:: self.num_choices])

    @property
    def num_generated(self) -> int:
        return sum(g.num_generated for g in self.generations)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, of each prompt's first choice."""
        return sum(g.cached_tokens for g in self.generations[:: self.num_choices])

    def abort(self) -> None:
        for generation in self.generations:
            generation.abort()

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield (index, delta) of all sequences as they come. Raises the first error, and ends all, as on close."""
        try:
            if len(self.generations) == 1:
                async for delta in _read_all(self.generations[0]):
                    yield 0, delta
            else:
                async for pair in self._merged():
                    yield pair
        finally:
            self.abort()

    async def _merged(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        async def read(index: int, generation: Generation) -> None:
            async for delta in _read_all(generation):
                arrived.put_nowait((index, delta))

        arrived: asyncio.Queue[tuple[int, TextDelta]] = asyncio.Queue()
        readers = [asyncio.create_task(read(i, g)) for i, g in enumerate(self.generations)]
        everything = asyncio.gather(*readers)
        everything.add_done_callback(lambda _: arrived.put_nowait((-1, TextDelta("", []))))
        try:
            while (pair := await arrived.get())[0] >= 0:
                yield pair
            await everything
        finally:
            await cancelled(*readers)
            await asyncio.gather(everything, return_exceptions=True)


async def _read_all(generation: Generation) -> AsyncGenerator[TextDelta, None]:
    while True:
        delta = await generation.read()
        yield delta
        if delta.finish is not None:
            return
