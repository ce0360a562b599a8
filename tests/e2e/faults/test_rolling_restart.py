"""Every process of a deployment is restarted in turn under load, and no client notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.asking import Answer, Ask, ask, objection_to_whole
from tests.e2e.faults.chaos import Leftovers
from tests.e2e.faults.load import Load
from tests.e2e.faults.parts import Part
from tests.e2e.faults.pool import Pool
from tests.e2e.faults.standing import until

#: By how much the mock is faster than its timing, and as long as the longest answer may take on a busy machine: a
#: conductor ends its answers before itself. The long ones take more than five minutes.
PACES = [pytest.param((5.0, 120.0), id="short"), pytest.param((0.4, 900.0), id="long", marks=pytest.mark.by_hand)]
_LONGEST_S = max(grace_s for param in PACES for _, grace_s in param.values) + 60
LONG = Ask("/v1/chat/completions", stream=True, greedy=True, number=77, max_tokens=1500)


@pytest.fixture(params=PACES)
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pool]:
    speedup, grace_s = request.param
    with Pool(tmp_path, speedup, grace_s) as pool:
        yield pool


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=300, trust_env=False) as http:
        yield http


@pytest.mark.slow
@pytest.mark.timeout(2400)
async def test_nobody_notices(pool: Pool, http: httpx.AsyncClient) -> None:
    """Streams under way outlive their workers, and end at the conductor that they began at.

    The four are under way through all restarts.
    """
    leftovers = Leftovers(pool, http)
    await leftovers.idle()
    load = Load(lambda: pool.conductors, num_clients=12)
    await load.begin()
    try:
        before = [asyncio.create_task(ask_long(pool.conductors[n % 2], http)) for n in range(4)]
        for part in [*pool.masters, *pool.nodes, *pool.workers]:
            part.terminate()
            assert await asyncio.to_thread(part.wait_ended) == 0, part.log()
            await asyncio.to_thread(part.start)
            await leftovers.all_connected()
        for number in range(2):
            await replace_conductor(pool, number)
        answers = await asyncio.gather(*before)
    except BaseException:  # the clients end first; raised on
        await load.abandon()
        raise
    await load.end()
    assert not load.lost, load.lost
    assert set(load.counts) == {"answered"}, f"some had to be sent again: {load.counts}"
    assert [objection_to_whole(LONG, answer, answers[0]) for answer in answers] == [""] * 4
    assert answers[0].usage["completion_tokens"] == LONG.max_tokens == len(answers[0].text)
    await leftovers.idle()


async def ask_long(conductor: Part, http: httpx.AsyncClient) -> Answer:
    return await ask(http, conductor.url, LONG)


async def replace_conductor(pool: Pool, number: int) -> None:
    """Start a successor on the port of a conductor, then end that one."""
    old = pool.conductors[number]
    successor = pool.conductor(f"{old.name}-successor", old.port)
    pool.adopt(successor)
    await asyncio.to_thread(successor.start)
    pool.conductors[number] = successor
    await until(lambda: "worker.connected" in successor.log_path.read_text(), what="the successor has its workers")
    old.terminate()
    assert await asyncio.to_thread(old.wait_ended, _LONGEST_S) == 0, old.log()
