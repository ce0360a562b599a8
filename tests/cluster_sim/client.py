"""A simulated client: asks, reads, compares what it gets with what it must get, hangs up now and then."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass
from random import Random
from typing import Any

from tanghulu.conductor.inference.generation import GenerationCall, TextDelta
from tanghulu.errors import (
    DeadlineExceeded,
    NodeUnavailable,
    Overloaded,
    RequestKillsWorkers,
    TanghuluError,
)
from tanghulu.session.outputs import FinishReason
from tests.cluster_sim import text
from tests.cluster_sim.conductor import SimConductor
from tests.cluster_sim.text import Asked

#: What a client may be told where a life has limits.
_HONEST = (NodeUnavailable, Overloaded, DeadlineExceeded, RequestKillsWorkers)
#: How late a deadline may be kept.
_SLACK_S = 0.2
_RETRY_S = 0.1


@dataclass(frozen=True)
class _Patience:
    """Of a client that hangs up: with so many tokens, or when it has waited so long for the next."""

    num_tokens: int
    wait_s: float


class SimClient:
    """One client, which asks one thing after the other until the world ends."""

    def __init__(self, number: int, world: Any, rng: Random) -> None:
        self.name = f"client-{number}"
        self._world, self._rng = world, rng

    async def live(self) -> None:
        world, rng = self._world, self._rng
        while not world.closing:
            await asyncio.sleep(rng.expovariate(1 / world.plan.pause_s))
            asked = text.ask(rng, world.next_number(), world.shared, self.name)
            patience = None
            if rng.random() < world.plan.hang_ups:
                patience = _Patience(rng.choice((1, 5, text.MAX_NEW)), rng.choice((0.01, 0.03, 0.3)))
            world.counts["asked"] += 1
            for attempt in itertools.count(1):  # each is a request of its own to the conductor that gets it
                if await self._ask(asked.named(f"{asked.request.id}-{attempt}"), patience):
                    break
                world.counts["asked again"] += 1

    async def _ask(self, asked: Asked, patience: _Patience | None) -> bool:
        """Ask once; False if the conductor died, or was not there."""
        conductor = self._world.some_conductor(self._rng)
        if conductor is None:
            await asyncio.sleep(_RETRY_S)
            return False
        dispatcher = conductor.dispatcher
        try:
            model = dispatcher.registry.find_model(text.NAME)
        except NodeUnavailable:  # no worker has registered with it yet
            await asyncio.sleep(_RETRY_S)
            return False
        reading = _Reading(asked, GenerationCall(asked.request.id, model, 1))
        began_s = self._world.loop.time()
        arguments = (dispatcher, asked.request, asked.rules, asked.request.id, ())
        try:
            conductor.run(reading.call.begin, *arguments)
            whole = await self._read(reading, conductor, patience)
        except TanghuluError as error:
            self._check_error(asked, error)
            whole = True
        if whole and self._world.plan.timeout_s:
            waited_s = self._world.loop.time() - began_s
            assert waited_s <= self._world.plan.timeout_s + _SLACK_S, f"{asked.request.id} ended after {waited_s:.1f} s"
        return whole

    async def _read(self, reading: _Reading, conductor: SimConductor, patience: _Patience | None) -> bool:
        gone = asyncio.ensure_future(conductor.gone.wait())
        try:
            while not reading.call.ended:
                if patience is not None and len(reading.tokens) >= patience.num_tokens:
                    return await self._hang_up(reading, conductor)
                came = asyncio.ensure_future(reading.call.read())
                wait_s = patience.wait_s if patience is not None else None
                await asyncio.wait({came, gone}, return_when=asyncio.FIRST_COMPLETED, timeout=wait_s)
                if not came.done():
                    came.cancel()
                    await asyncio.wait({came})
                if not conductor.alive:  # what its death did to its requests never came to the client
                    _ = came.cancelled() or came.exception()
                    return False
                if came.cancelled():  # has waited long enough
                    return await self._hang_up(reading, conductor)
                reading.take(came.result())
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone
        reading.check_end()
        self._world.counts[reading.finish.value] += 1
        return True

    async def _hang_up(self, reading: _Reading, conductor: SimConductor) -> bool:
        conductor.run(reading.call.abort)
        self._world.counts["hung up"] += 1
        return True

    def _check_error(self, asked: Asked, error: TanghuluError) -> None:
        world = self._world
        world.counts[error.code.lower()] += 1
        what = f"{asked.request.id} failed: {error.code}: {error.message}"
        if isinstance(error, RequestKillsWorkers):
            assert world.counts["kill"] + world.counts["silent"] + world.num_breaks >= 3, what
            return
        assert not world.plan.calm, what
        assert not world.plan.patient, what
        assert isinstance(error, _HONEST), what


class _Reading:
    """What has come of one answer; wrong tokens are found as they come."""

    def __init__(self, asked: Asked, call: GenerationCall) -> None:
        self.asked, self.call = asked, call
        self.tokens: list[int] = []
        self.text = ""
        self.finish: FinishReason | None = None

    def take(self, deltas: list[tuple[int, TextDelta]]) -> None:
        """Add what was read. A failed request raises at a later read."""
        name, right = self.asked.request.id, self.asked.answer
        for _, delta in deltas:
            assert self.finish is None, f"{name} went on behind its end"
            self.tokens += delta.tokens
            self.text += delta.text
            self.finish = delta.finish
            wanted = right.tokens[: len(self.tokens)]
            assert self.tokens == wanted, f"{name} got the tokens {self.tokens}, not {wanted}"
            assert right.text.startswith(self.text), f"{name} got the text {self.text!r} of {right.text!r}"

    def check_end(self) -> None:
        """The answer is whole."""
        name, right, generation = self.asked.request.id, self.asked.answer, self.call.generations[0]
        assert self.finish is right.finish, f"{name} ended by {self.finish}, not {right.finish}"
        assert self.tokens == right.tokens, f"{name} ended with {len(self.tokens)} tokens of {len(right.tokens)}"
        assert self.text == right.text, f"{name} ended with {self.text!r}, not {right.text!r}"
        assert generation.num_generated == len(right.tokens), f"{name} counts {generation.num_generated} tokens"
        assert generation.num_prompt_tokens == len(self.asked.request.prompt)
        assert 0 <= generation.cached_tokens < generation.num_prompt_tokens + len(right.tokens)
