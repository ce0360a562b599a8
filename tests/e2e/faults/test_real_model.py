"""Faults under requests to the real model: two moments, each fault, and texts equal to the undisturbed ones.

In float32, where a text does not depend on what is computed beside it. What the matrix of mock workers does at each
moment of a request is done here at two: before a worker has accepted anything, and in the middle of the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from tests.e2e.faults.asking import KINDS, Answer, Ask, objection_to_error, objection_to_whole
from tests.e2e.faults.parts import FAULTS, Worker
from tests.e2e.faults.standing import Client, Standing, connected, undisturbed, until

#: Room for all at once.
ENGINE = ("--model", "smollm2", "--dtype", "float32", "--kv-memory", "512MiB", "--debug", "checks=true")
REAL = tuple(replace(kind, model="smollm2", max_tokens=96) for kind in KINDS)
#: While an engine is held, 24 prompts are computed elsewhere, which takes long on a busy machine; that is no hang.
WORKER_TIMEOUT_S = 60
GATHERED_S = 240.0
ATTEMPTS = 3
CELLS = [
    pytest.param(moment, fault, id=f"{moment}-{fault}") for moment in ("before accept", "decode") for fault in FAULTS
]

pytestmark = [pytest.mark.slow, pytest.mark.by_hand, pytest.mark.e2e, pytest.mark.needs_model]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    cluster = Standing(tmp_path_factory.mktemp("real"), ENGINE, timeout_s=WORKER_TIMEOUT_S)
    with cluster.running:
        yield cluster


@pytest.fixture(scope="module")
def wanted(standing: Standing) -> dict[Ask, Answer]:
    """The undisturbed answers."""
    return undisturbed(standing, REAL)


@pytest.fixture
async def client(standing: Standing) -> AsyncIterator[Client]:
    async with connected(standing) as client:
        yield client


class MomentMissed(Exception):
    """A request had ended, moved or given up before all were there."""


class Cell:
    """All kinds of requests at one moment of the real engine, under one fault."""

    def __init__(self, client: Client, moment: str, fault: str, salt: str) -> None:
        self.client, self.moment, self.fault, self.salt = client, moment, fault, salt
        places = {"prefill": client.cluster.prefill[0], "decode": client.cluster.decode[0]}
        self.victim: Worker = places["decode" if moment == "decode" else "prefill"]
        self.routing = {f"{role}_worker": worker.id for role, worker in places.items()}
        self.asked: dict[tuple[int, Ask], asyncio.Task[Answer]] = {}
        self.is_broken = False

    async def bring(self) -> None:
        """Bring the requests to the moment, and hold them there."""
        if self.moment == "before accept":
            self.victim.path.hold_back()
        else:
            self.victim.hang()  # so that all begin together
        for limit in self.client.cluster.conductors:
            for one in REAL:
                self.asked[limit, one] = asyncio.create_task(
                    self.client.ask(limit, one, salt=self.salt, routing=self.routing)
                )
        if self.moment == "before accept":
            await until(lambda: self._all_in("prefilling"), what=f"all were sent to {self.victim}")
            return
        await until(lambda: self._all_in("handing_over"), GATHERED_S, f"all were handed over to {self.victim}")
        self.victim.let_go()
        await until(lambda: self._all_in("decoding"), GATHERED_S, f"all go on at {self.victim}")
        self.victim.hang()
        if not await self._all_in("decoding"):
            raise MomentMissed("some had moved")

    async def _all_in(self, state: str) -> bool:
        ended = [task.result() for task in self.asked.values() if task.done()]
        if ended:
            raise MomentMissed(f"{len(ended)} had ended before all were {state}, like {ended[0]}")
        requests = await self.client.requests()
        there = [r for r in requests if (r["state"], r["worker"]) == (state, self.victim.id)]
        return len(there) >= len(self.asked)

    async def strike(self) -> None:
        """Break the worker, and let go what was held for the moment."""
        self.is_broken = True
        self.victim.suffer(self.fault)
        if self.fault != "hung engine":
            self.victim.let_go()

    async def answers(self) -> dict[tuple[int, Ask], Answer]:
        return dict(zip(self.asked, await asyncio.wait_for(asyncio.gather(*self.asked.values()), 400), strict=True))

    async def mend(self) -> None:
        """Put the worker right again, by a new process where the old one ended or hangs."""
        for task in self.asked.values():
            task.cancel()
        if self.is_broken:
            await asyncio.to_thread(self.victim.recover, self.fault)
        else:
            self.victim.path.heal()
            self.victim.let_go()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("moment", "fault"), CELLS)
async def test_the_real_model_goes_on(client: Client, wanted: dict[Ask, Answer], moment: str, fault: str) -> None:
    missed = []
    for attempt in range(ATTEMPTS):
        cell = Cell(client, moment, fault, salt=f"{moment} {fault} {attempt}")
        try:
            await cell.bring()
            break
        except MomentMissed as error:
            missed.append(str(error))
            await cell.mend()
            await until(client.is_whole, what="all workers are connected again")
    else:
        raise AssertionError(f"the moment was missed each time: {missed}")
    try:
        await cell.strike()
        answers = await cell.answers()
    finally:
        await cell.mend()
    for (limit, one), answer in answers.items():
        objections = [objection_to_error] if not limit else []
        objections += [objection_to_whole] if limit or fault == "SIGTERM" else []
        found = [objection(one, answer, wanted[one]) for objection in objections]
        assert "" in found, f"limit {limit}: {found[-1]}"
