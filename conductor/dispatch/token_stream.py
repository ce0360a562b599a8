"""Tokens of one call's sequences on their way from the dispatcher to the call's handler.

A single reader waits for all sequences of the call at once. Tokens that arrive while it is busy (a slow client) are
merged; their number is bounded by the request's max_new_tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tanghulu.conductor.dispatch.lifecycle import DeliverTokens, End
from tanghulu.conductor.routing.requests import PromptLogprobs
from tanghulu.conductor.stories.story import Story
from tanghulu.session.outputs import FinishReason, TokenLogprobs


@dataclass(slots=True)
class Delta:
    """Tokens since the last read. ``finish`` is set with the last; ``ends_in_stop_token`` as in DeliverTokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ends_in_stop_token: bool = False
    finish: FinishReason | None = None
    stop_token: int | None = None


class Arrivals:
    """Streams of one call with something to take, awaited by one reader."""

    def __init__(self) -> None:
        self._streams: dict[TokenStream, None] = {}
        self._waiter: asyncio.Future[None] | None = None

    def came(self, stream: TokenStream) -> None:
        self._streams[stream] = None
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> list[TokenStream]:
        """Return the streams to take from, in the order in which data arrived; waits for the first."""
        while not self._streams:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        streams = list(self._streams)
        self._streams.clear()
        return streams


class TokenStream:
    """Written by the dispatcher, which signals ``arrivals`` when there is data to take. ``story``: the request's."""

    def __init__(self, arrivals: Arrivals, story: Story) -> None:
        self.story = story
        self.cached_tokens = 0
        self._arrivals = arrivals
        self.scores: list[PromptLogprobs] = []
        self._delta = Delta()
        self._end: End | None = None

    def deliver(self, tokens: DeliverTokens) -> None:
        self._delta.tokens.extend(tokens.tokens)
        self._delta.logprobs.extend(tokens.logprobs)
        self._delta.ends_in_stop_token = tokens.ends_in_stop_token
        self._arrivals.came(self)

    def deliver_scores(self, scores: PromptLogprobs) -> None:
        """Keep log probabilities of the prompt; all arrive before the first token."""
        self.scores.append(scores)

    def end(self, end: End) -> None:
        self._end = end
        self._arrivals.came(self)

    def take(self) -> Delta:
        """Return the tokens since the last call. Raises the typed error of a failed request.

        Must not be called again after a delta with ``finish``.
        """
        delta, self._delta = self._delta, Delta()
        if self._end is None:
            return delta
        if self._end.error is not None:
            if not delta.tokens:
                raise self._end.error
            self._arrivals.came(self)
        delta.finish, delta.stop_token = self._end.reason, self._end.stop_token
        return delta
