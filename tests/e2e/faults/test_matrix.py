"""Every fault at every moment, under requests of every API, with moves and without: what their clients get.

A cell brings all kinds of requests to one worker, by the routing that they ask for, and to one moment there; the worker
is then broken in one way. Those of the conductor that moves requests must end as if nothing had been; those of the
other, which never does, by an honest error, except where nothing of theirs was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.faults.asking import KINDS, Answer, Ask, objection_to_error, objection_to_whole
from tests.e2e.faults.parts import FAULTS, Worker
from tests.e2e.faults.standing import MOVES, Client, Standing, connected, undisturbed, until


@dataclass(frozen=True)
class Moment:
    """``at``: the role of the worker where the requests gather, and are in ``state``; ``breaks``: which one breaks."""

    name: str
    at: str
    state: str
    held: str = ""
    breaks: str = ""

    @property
    def breaks_at(self) -> str:
        return self.breaks or self.at


MOMENTS = (
    Moment("before accept", "prefill", "prefilling"),
    Moment("queue", "prefill", "prefilling"),
    Moment("prefill", "prefill", "prefilling", held="prefill"),
    Moment("hand-over", "decode", "handing_over"),
    Moment("hand-over's holder", "decode", "handing_over", breaks="prefill"),
    Moment("decode", "decode", "handing_over", held="decode"),
)
#: To bring requests to a moment: a gate that is closed for too long, on a busy machine, counts as a hang.
ATTEMPTS = 3
#: In the quick suite: faults that are noticed at once.
QUICK = {("before accept", "cut"), ("decode", "SIGKILL")}
CELLS = [
    pytest.param(moment, fault, id=f"{moment.name}-{fault}", marks=[pytest.mark.slow][(moment.name, fault) in QUICK :])
    for moment in MOMENTS
    for fault in FAULTS
]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    cluster = Standing(tmp_path_factory.mktemp("faults"))
    with cluster.running:
        yield cluster


@pytest.fixture(scope="module")
def wanted(standing: Standing) -> dict[Ask, Answer]:
    """The undisturbed answers."""
    answers = undisturbed(standing)
    assert all(len(answer.text) == one.max_tokens for one, answer in answers.items()), "a letter is a token"
    return answers


@pytest.fixture
async def client(standing: Standing) -> AsyncIterator[Client]:
    async with connected(standing) as client:
        yield client


class MomentMissed(Exception):
    """The machine was so busy that a request had moved, or given up, before all were there."""


class Cell:
    """All kinds of requests at one moment under one fault."""

    def __init__(self, client: Client, moment: Moment, fault: str, salt: str) -> None:
        self.client, self.moment, self.fault, self.salt = client, moment, fault, salt
        cluster = client.cluster
        places = {"prefill": cluster.prefill[0], "decode": cluster.decode[0]}
        self.gate: Worker = places[moment.at]
        self.victim: Worker = places[moment.breaks_at]
        self.routing = {f"{role}_worker": worker.id for role, worker in places.items()}
        self.asked: dict[tuple[int, Ask], asyncio.Task[Answer]] = {}
        self.first: asyncio.Task[Answer] | None = None
        self.is_broken = False

    async def bring(self) -> None:
        """Bring the requests to the moment."""
        if self.moment.name == "before accept":
            self.gate.path.hold_back()
        else:
            self.gate.hold("step")
            self.first = asyncio.create_task(self._ask(MOVES, Ask("/generate", False, True, number=99, max_tokens=2)))
            await until(lambda: self.gate.is_held("step"), what="the gate is closed")
        for limit in self.client.cluster.conductors:
            for one in KINDS:
                self.asked[limit, one] = asyncio.create_task(self._ask(limit, one))
        await until(self._all_there, what=f"all are {self.moment.state} at {self.gate}")
        if self.moment.held:
            self.gate.release()
            self.gate.hold(self.moment.held)
            await until(lambda: self.gate.is_held(self.moment.held), what=f"held in {self.moment.held}")

    async def _ask(self, limit: int, one: Ask) -> Answer:
        return await self.client.ask(limit, one, salt=self.salt, routing=self.routing)

    async def _all_there(self) -> bool:
        if any(task.done() for task in self.asked.values()):
            raise MomentMissed
        requests = await self.client.requests()
        there = [r for r in requests if (r["state"], r["worker"]) == (self.moment.state, self.gate.id)]
        return len(there) >= len(self.asked)

    async def strike(self) -> None:
        """Break the worker, and let go what was held for the moment."""
        self.is_broken = True
        self.victim.suffer(self.fault)
        self.gate.release()

    async def answers(self) -> dict[tuple[int, Ask], Answer]:
        found = await asyncio.wait_for(asyncio.gather(*self.asked.values()), 90)
        if self.first is not None:
            assert (await self.first).finishes == ["length"]
        return dict(zip(self.asked, found, strict=True))

    async def mend(self) -> None:
        """Put the worker right again, by a new process where the old one ended or hangs."""
        for task in (*self.asked.values(), *([self.first] if self.first is not None else [])):
            task.cancel()
        for worker in (self.gate, self.victim):
            worker.release()
            worker.path.heal()
        if self.is_broken:
            await asyncio.to_thread(self.victim.recover, self.fault)


@pytest.mark.parametrize(("moment", "fault"), CELLS)
async def test_what_clients_get(client: Client, wanted: dict[Ask, Answer], moment: Moment, fault: str) -> None:
    for attempt in range(ATTEMPTS):
        cell = Cell(client, moment, fault, salt=f"{moment.name} {fault} {attempt}")
        try:
            await cell.bring()
            break
        except MomentMissed:
            await cell.mend()
            await until(client.is_whole, what="all workers are connected again")
    else:
        raise AssertionError(f"the moment was missed {ATTEMPTS} times")
    try:
        await cell.strike()
        answers = await cell.answers()
    finally:
        await cell.mend()
    # An orderly end is no loss; and who holds the KV of a request that was handed over may go, as the store has it.
    may_end_well = fault == "SIGTERM" or moment.breaks
    for (limit, one), answer in answers.items():
        objections = [objection_to_error] if not limit else []
        objections += [objection_to_whole] if limit or may_end_well else []
        found = [objection(one, answer, wanted[one]) for objection in objections]
        assert "" in found, f"limit {limit}: {found[-1]}"


async def test_nothing_is_left_at_the_workers(client: Client) -> None:
    """Blocks come back, exports that nobody fetched after their time, too."""

    async def in_use() -> float:
        return sum([await client.metric(worker, "tanghulu_worker_blocks_in_use") for worker in client.cluster.workers])

    async def none_is() -> bool:
        return await in_use() == 0

    await until(none_is, what="all blocks are free")
