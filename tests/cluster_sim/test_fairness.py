"""One client's hundreds beside another's single request, in virtual time: how long the single one waits.

The very classes that serve: the conductor's queue and dispatcher, sessions, the workers' schedulers. A request's own
time is what it takes in a cluster that does nothing else. What it takes longer is its wait: for its turn, and for the
others in each step.
"""

from __future__ import annotations

import asyncio
from random import Random

import numpy as np
import pytest

from tanghulu.conductor.inference.generation import GenerationCall, TextRules
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import RequestId, Role
from tests.cluster_sim import text
from tests.cluster_sim.client import _Reading
from tests.cluster_sim.plan import Plan
from tests.cluster_sim.world import World

NUM_OF_THE_OTHER = 600
NUM_PROMPT, NUM_NEW = 40, 40
#: So often the single one comes, a little later in the others' turns each time.
NUM_SINGLE = 3
ALONE = (Role.BOTH,)
SPLIT = (Role.PREFILL, Role.DECODE)


class Beside(World):
    """A client has sent hundreds, and another one request after the other. ``waits`` are in its own times."""

    def __init__(self, roles: tuple[Role, ...], max_in_flight: int) -> None:
        calm = Plan(roles, faults=(), num_blocks=400, max_in_flight=max_in_flight, has_store=False, checks=False)
        super().__init__(1, calm)
        self.num_left = 0
        self.waits: list[float] = []

    async def _live(self) -> None:
        await self._begin()
        rng = Random(1)
        ticking = asyncio.create_task(self._tick_on())
        own_s = await self._ask(_asked("alone", "one", rng))
        others = [asyncio.create_task(self._ask(_asked(f"other-{n}", "many", rng))) for n in range(NUM_OF_THE_OTHER)]
        for number in range(NUM_SINGLE):
            await asyncio.sleep(1.1)
            took_s = await self._ask(_asked(f"single-{number}", "one", rng))
            self.waits.append((took_s - own_s) / own_s)
        self.num_left = sum(not task.done() for task in others)
        for task in (ticking, *others):
            task.cancel()
        await asyncio.gather(ticking, *others, return_exceptions=True)

    async def _tick_on(self) -> None:
        while True:
            await self._tick([])

    async def _ask(self, asked: text.Asked) -> float:
        """The seconds from the request to the end of its answer."""
        conductor = self.conductors[0]
        dispatcher, began_s = conductor.dispatcher, self.loop.time()
        model = dispatcher.registry.find_model(text.NAME)
        reading = _Reading(asked, GenerationCall(asked.request.id, model, 1))
        conductor.run(reading.call.begin, dispatcher, asked.request, asked.rules, asked.request.id, ())
        while not reading.call.ended:
            reading.take(await reading.call.read())
        reading.check_end()
        return self.loop.time() - began_s


def _asked(name: str, client: str, rng: Random) -> text.Asked:
    prompt = np.array([rng.choice(text.LETTERS) for _ in range(NUM_PROMPT)], dtype=np.uint32)
    stop = StopRule(NUM_NEW, ignore_eos=True)
    greedy = Sampling(temperature=0.0)
    return text.Asked(GenerationRequest(RequestId(name), text.NAME, prompt, greedy, stop, client=client), TextRules())


@pytest.mark.slow
@pytest.mark.parametrize("roles", [ALONE, SPLIT], ids=["both", "split"])
@pytest.mark.parametrize("max_in_flight", [1024, 16], ids=["wait at the workers", "wait at the conductor"])
def test_a_single_request_waits_at_most_twice_its_own_time(roles: tuple[Role, ...], max_in_flight: int) -> None:
    world = Beside(roles, max_in_flight)
    world.run()
    print(f"waits, in own times: {[round(wait, 2) for wait in world.waits]}; {world.num_left} of the other's left")
    assert world.num_left > NUM_OF_THE_OTHER / 2, "the others wait on"
    assert max(world.waits) <= 2.0
