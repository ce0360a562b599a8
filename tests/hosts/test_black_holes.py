"""Paths between two hosts that swallow everything, without a reset or a message: answers come all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.e2e.faults.asking import KINDS, Answer, Ask, ask, objection_to_whole
from tests.e2e.faults.standing import until
from tests.hosts.cluster import SpreadCluster

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(600)]


async def ask_all(cluster: SpreadCluster, salt: str) -> dict[Ask, Answer]:
    """The answers to one request of every kind, all at once."""
    async with httpx.AsyncClient(timeout=300, trust_env=False) as http:
        answers = await asyncio.gather(*(ask(http, cluster.conductor.url, one, salt=salt) for one in KINDS))
    return dict(zip(KINDS, answers, strict=True))


@asynccontextmanager
async def parted(cluster: SpreadCluster, one: str, other: str) -> AsyncIterator[None]:
    """Inside the block nothing arrives between two hosts."""
    await asyncio.to_thread(cluster.lan.part, one, other)
    try:
        yield
    finally:
        await asyncio.to_thread(cluster.lan.join, one, other)


def objections(wanted: dict[Ask, Answer], answers: dict[Ask, Answer]) -> list[str]:
    found = (objection_to_whole(one, answer, wanted[one]) for one, answer in answers.items())
    return [objection for objection in found if objection]


async def connected(cluster: SpreadCluster) -> set[str]:
    """The workers that the conductor may send requests to."""
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        info = (await http.get(f"{cluster.conductor.url}/server_info")).json()
    return {worker["id"] for worker in info["workers"] if worker["connected"]}


def test_between_prefill_and_decode(cluster: SpreadCluster) -> None:
    """The KV, and what is stored there, is out of reach: it is computed once more, and found again when all is well."""

    async def work() -> None:
        wanted = await ask_all(cluster, "before")
        async with parted(cluster, "left", "right"):
            assert not objections(wanted, await ask_all(cluster, "parted"))
            assert "did not answer a moment ago" in cluster.decode.log_path.read_text(), "one waited for all"

        async def handed_over() -> bool:
            name = "tanghulu_worker_prefix_tokens_total"
            before = await cluster.metric(cluster.decode, name, source="peer")
            assert not objections(wanted, await ask_all(cluster, f"healed {before}"))
            return await cluster.metric(cluster.decode, name, source="peer") > before

        await until(handed_over, what="KV is handed over again")

    cluster.run(work())


@pytest.mark.by_hand
@pytest.mark.parametrize("side", ["left", "right"])
def test_between_the_conductor_and_a_worker(cluster: SpreadCluster, side: str) -> None:
    """The other worker does both phases, until this one is back."""

    async def work() -> None:
        lost = cluster.prefill if side == "left" else cluster.decode
        wanted = await ask_all(cluster, f"before {side}")
        async with parted(cluster, "head", side):
            assert not objections(wanted, await ask_all(cluster, f"parted {side}"))

            async def gone() -> bool:
                return lost.id not in await connected(cluster)

            await until(gone, what="the conductor has given it up")
            assert not objections(wanted, await ask_all(cluster, f"without {side}"))
        await cluster.whole()
        assert not objections(wanted, await ask_all(cluster, f"healed {side}"))

    cluster.run(work())
