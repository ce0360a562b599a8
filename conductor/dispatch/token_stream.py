"""The tokens of one sequence on their way from the dispatcher to the request's handler.

A single reader. Tokens that arrive while the reader is busy (a slow client) are merged; their number is bounded by the
request's max_new_tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tanghulu.conductor.dispatch.lifecycle import DeliverTokens, End
from tanghulu.conductor.routing.requests import FinishReason, TokenLogprobs


@dataclass(slots=True)
class Delta:
    """The tokens since the last read. ``finish`` is set with the last; ``ends_in_stop_token`` as in DeliverTokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ends_in_stop_token: bool = False
    finish: FinishReason | None = None
    stop_token: int | None = None


class TokenStream:
    """Written by the dispatcher, read by the request's handler."""

    def __init__(self) -> None:
        self.cached_tokens = 0
        self._delta = Delta()
        self._end: End | None = None
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, tokens: DeliverTokens) -> None:
        self._delta.tokens.extend(tokens.tokens)
        self._delta.logprobs.extend(tokens.logprobs)
        self._delta.ends_in_stop_token = tokens.ends_in_stop_token
        self._wake()

    def end(self, end: End) -> None:
        self._end = end
        self._wake()

    async def read(self) -> Delta:
        """Wait for tokens that came since the last read. Raises the typed error of a request that failed.

        Must not be called again after a delta with ``finish``.
        """
        while not self._delta.tokens and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delta, self._delta = self._delta, Delta()
        if self._end is not None:
            if not delta.tokens and self._end.error is not None:
                raise self._end.error
            delta.finish, delta.stop_token = self._end.reason, self._end.stop_token
        return delta

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
