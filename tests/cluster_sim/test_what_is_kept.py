"""What conductor and workers keep of requests that have ended: nothing beyond tables that are full at their bounds.

Counted are objects that can be reached from the conductor's dispatcher and the workers' engines and sessions, in
virtual time: bytes say what allocators do, and full caches and histories look like leaks until they are full. The
book of stories, which keeps the last thousand requests, is left out.
"""

from __future__ import annotations

import asyncio
import gc
import types
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from tanghulu.conductor.explain import fates
from tanghulu.conductor.inference.generation import GenerationCall, TextRules
from tanghulu.conductor.routing import expected_output
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.conductor.stories.book import StoryBook
from tanghulu.eviction import reuse
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import RequestId, Role
from tests.cluster_sim import conductor as sim_conductor
from tests.cluster_sim import text
from tests.cluster_sim.client import _Reading
from tests.cluster_sim.plan import Plan
from tests.cluster_sim.world import World

NUM_PROMPT, NUM_NEW = 40, 12
NUM_WARM, NUM_MORE = 60, 60
AT_ONCE = 10
#: Of these the bounded tables of what was evicted, and the simulated network, keep some more each time.
_ATOMS = {"builtins.float", "builtins.int", "builtins.str", "builtins.bytes", "builtins.tuple"}
_NOT_FOLLOWED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.FrameType,
    types.CodeType,
    World,
    asyncio.AbstractEventLoop,
    StoryBook,
)


def reachable(*roots: object) -> Counter[str]:
    """How many objects of each type can be reached from ``roots``, classes, functions and the world aside."""
    seen, left, counts = {id(root) for root in roots}, list(roots), Counter[str]()
    while left:
        each = left.pop()
        counts[f"{type(each).__module__}.{type(each).__qualname__}"] += 1
        for inner in gc.get_referents(each):
            if id(inner) not in seen and not isinstance(inner, _NOT_FOLLOWED):
                seen.add(id(inner))
                left.append(inner)
    return counts


class Counting(World):
    """Requests of different prompts, AT_ONCE at a time; ``kept`` is what can be reached after each half of them."""

    def __init__(self, roles: tuple[Role, ...]) -> None:
        super().__init__(1, Plan(roles, faults=(), num_blocks=60, has_store=False, checks=False))
        self.kept: list[Counter[str]] = []

    async def _live(self) -> None:
        await self._begin()
        ticking = asyncio.create_task(self._tick_on())
        rng, number = Random(1), 0
        for count in (NUM_WARM, NUM_MORE):
            for _ in range(count // AT_ONCE):
                await asyncio.gather(*(self._ask(number + n, rng) for n in range(AT_ONCE)))
                number += AT_ONCE
            await asyncio.sleep(120)
            gc.collect()
            self.kept.append(reachable(self.conductors[0].dispatcher, *self.workers))
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)

    async def _tick_on(self) -> None:
        while True:
            await self._tick([])

    async def _ask(self, number: int, rng: Random) -> None:
        conductor = self.conductors[0]
        prompt = np.array([rng.choice(text.LETTERS) for _ in range(NUM_PROMPT)], dtype=np.uint32)
        stop, greedy = StopRule(NUM_NEW, ignore_eos=True), Sampling(temperature=0.0)
        request = GenerationRequest(RequestId(f"r{number}"), text.NAME, prompt, greedy, stop, client=f"c{number % 7}")
        asked = text.Asked(request, TextRules())
        model: Any = conductor.dispatcher.registry.find_model(text.NAME)
        reading = _Reading(asked, GenerationCall(asked.request.id, model, 1))
        conductor.run(reading.call.begin, conductor.dispatcher, request, asked.rules, request.id, ())
        while not reading.call.ended:
            reading.take(await reading.call.read())
        reading.check_end()


@pytest.mark.slow
def test_as_many_requests_again_leave_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MIN_GHOSTS", 16)  # so that they are full soon
    monkeypatch.setattr(reuse, "MAX_PAIRS", 8)
    monkeypatch.setattr(expected_output, "MOST_PREFIXES", 16)
    monkeypatch.setattr(sim_conductor, "EXPLAIN_BYTES", 60_000)
    monkeypatch.setattr(fates, "MAX_REMOVED", 64)
    world = Counting((Role.PREFILL, Role.DECODE))
    world.run()
    warm, end = world.kept
    grown = {name: (warm[name], end[name]) for name in end.keys() - _ATOMS if end[name] - warm[name] >= NUM_MORE // 10}
    assert not grown
