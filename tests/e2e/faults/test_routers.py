"""A router in front of two conductors: what its clients get when one of them, or the router itself, breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.asking import KINDS, Answer, Ask, ask, objection_to_whole
from tests.e2e.faults.parts import Part, Together, Worker
from tests.e2e.faults.standing import FAST, until

pytestmark = pytest.mark.slow

POOLS = """
[[pool]]
name = "only"
[prefill]
ttft_s = [1.0]
prompt_tokens = [4096]
pools = [["only"]]
[decode]
tbt_s = [0.05]
context_tokens = [8192]
pools = [["only"]]
"""


class Routed:
    """A master, a worker that does both phases, two conductors, and the router of their pool."""

    def __init__(self, folder: Path) -> None:
        pools = folder / "pools.toml"
        pools.write_text(POOLS)
        self.master = Part(folder, "master", "master")
        at = ("--master", self.master.address)
        here = (*at, "--namespace", "only")
        self.worker = Worker(folder, "worker", "worker", *here, *FAST)
        self.conductors = [Part(folder, f"conductor-{i}", "conductor", *here, "--notice-s", "0") for i in range(2)]
        self.router = Part(folder, "router", "router", *at, "--pools", str(pools), "--silence-timeout-s", "4")
        self.running = Together(self.master, self.worker, *self.conductors, self.router)
        self.wanted: dict[Ask, Answer] = {}

    async def pools(self, http: httpx.AsyncClient) -> list[dict[str, object]]:
        """The conductors as the router knows them."""
        found: list[dict[str, object]] = (await http.get(f"{self.router.url}/pools")).json()["only"]
        return found

    async def are_whole(self, http: httpx.AsyncClient) -> bool:
        """Whether the router knows both conductors, both have the worker, and nothing is under way."""
        known = [each["url"] for each in await self.pools(http)]
        states = [(await http.get(f"{each.url}/server_info")).json() for each in self.conductors]
        connected = all(any(worker["connected"] for worker in state["workers"]) for state in states)
        return len(known) == 2 and connected and not any(state["num_requests"] for state in states)

    @asynccontextmanager
    async def in_mid_answer(self, http: httpx.AsyncClient, salt: str) -> AsyncIterator[list[asyncio.Task[Answer]]]:
        """All kinds of requests, in the middle of their answers inside the block; they go on behind it."""
        self.worker.hold("decode")
        tasks = [asyncio.create_task(ask(http, self.router.url, one, salt=salt)) for one in KINDS]
        try:
            await until(lambda: self.worker.is_held("decode"), what="held in the middle of an answer")

            async def spread() -> bool:
                return all(each["open_requests"] == len(KINDS) // 2 for each in await self.pools(http))

            await until(spread, what="both conductors have half of them")
            yield tasks
        finally:
            self.worker.release()


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    cluster = Routed(tmp_path_factory.mktemp("routed"))
    with cluster.running:
        yield cluster


@pytest.fixture
async def http(routed: Routed) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as client:
        await until(lambda: routed.are_whole(client), what="router, conductors and worker know each other")
        if not routed.wanted:
            routed.wanted = await all_kinds(routed, client, "")
            assert all(answer.finishes == ["length"] for answer in routed.wanted.values()), routed.wanted
        yield client


async def all_kinds(routed: Routed, http: httpx.AsyncClient, salt: str) -> dict[Ask, Answer]:
    """The answers to one request of every kind, all at once."""
    answers = await asyncio.gather(*(ask(http, routed.router.url, one, salt=salt) for one in KINDS))
    return dict(zip(KINDS, answers, strict=True))


async def require_whole(routed: Routed, http: httpx.AsyncClient, salt: str) -> None:
    for one, answer in (await all_kinds(routed, http, salt)).items():
        assert not objection_to_whole(one, answer, routed.wanted[one])


def require_whole_or_ended(routed: Routed, answers: list[Answer]) -> None:
    """A stream that had begun at the lost conductor ends with an error; all else is as if nothing had been."""
    num_ended = 0
    for one, answer in zip(KINDS, answers, strict=True):
        wanted = routed.wanted[one]
        if one.stream and answer.errors:
            num_ended += 1
            assert (answer.status, len(answer.errors), answer.num_done, answer.finishes) == (200, 1, 1, []), answer
            assert wanted.text.startswith(answer.text)
        else:
            assert not objection_to_whole(one, answer, wanted)
    assert num_ended < len(KINDS) // 2, "those of the other conductor go on"


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
async def test_a_conductor_that_is_lost(routed: Routed, http: httpx.AsyncClient, fault: str) -> None:
    lost = routed.conductors[0]
    async with routed.in_mid_answer(http, fault) as tasks:
        (lost.kill if fault == "SIGKILL" else lost.stop)()
    try:
        require_whole_or_ended(routed, await asyncio.gather(*tasks))
        await require_whole(routed, http, f"{fault} without it")
    finally:
        if fault == "SIGSTOP":
            lost.go_on()
        else:
            await asyncio.to_thread(lost.wait_ended)
            await asyncio.to_thread(lost.start)
    await until(lambda: routed.are_whole(http), what="it is back, and has nothing under way")
    await require_whole(routed, http, f"{fault} behind it")


async def test_the_router_itself(routed: Routed, http: httpx.AsyncClient) -> None:
    """Its clients' connections break; what it had forwarded ends, and another router at its port serves at once."""
    async with routed.in_mid_answer(http, "router") as tasks:
        routed.router.kill()
        assert all(answer.cut for answer in await asyncio.gather(*tasks))
    await asyncio.to_thread(routed.router.wait_ended)
    await asyncio.to_thread(routed.router.start)
    await until(lambda: routed.are_whole(http), what="the conductors have nothing under way")
    await require_whole(routed, http, "behind it")


async def test_without_a_master_the_conductors_that_it_knows_are_asked(routed: Routed, http: httpx.AsyncClient) -> None:
    routed.master.kill()
    try:
        await require_whole(routed, http, "without a master")
    finally:
        await asyncio.to_thread(routed.master.wait_ended)
        await asyncio.to_thread(routed.master.start)
    await until(lambda: routed.are_whole(http), what="all are known again")
