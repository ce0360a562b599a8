"""Paths between two hosts that swallow everything, without a reset or a message: answers come all the same."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.asking import KINDS, Answer, Ask, ask, objection_to_whole
from tests.e2e.faults.standing import until
from tests.hosts.cluster import SpreadCluster
from tests.hosts.lan import Host

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(600)]

#: Watches the etcd and the master of its arguments; what it has to say, logs included, is a line each.
_WATCHER = """
import asyncio, sys
from tanghulu.discovery.etcd import EtcdDiscovery
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.types import Address

async def watch(discovery):
    async with discovery:
        async for event in discovery.watch():
            print(type(discovery).__name__, event.kind.name, flush=True)

async def main():
    etcd, master = map(Address.parse, sys.argv[1:])
    await asyncio.gather(watch(EtcdDiscovery(etcd)), watch(MasterDiscovery(master)))

asyncio.run(main())
"""


@contextmanager
def watcher(host: Host, output: Path, *addresses: str) -> Iterator[None]:
    """A process on ``host`` that watches etcd and a master, and writes what it hears to ``output``."""
    with output.open("wb") as out, subprocess.Popen(
        (*host.inside, sys.executable, "-u", "-c", _WATCHER, *addresses), stdout=out, stderr=out
    ) as popen:  # fmt: skip
        try:
            yield
        finally:
            popen.terminate()


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


def test_between_watchers_and_what_they_watch(cluster: SpreadCluster, tmp_path: Path) -> None:
    """Nothing is told to a watcher that has no news; it finds out by itself that it would not hear of any."""
    output = tmp_path / "watcher.log"

    async def says(*words: str) -> None:
        await until(lambda: all(word in output.read_text() for word in words), 20, what=" and ".join(words))

    async def work() -> None:
        await says("EtcdDiscovery SYNCED", "MasterDiscovery SYNCED")
        async with parted(cluster, "head", "left"):
            await says("discovery.etcd_unavailable", "discovery.watch_interrupted")
        await cluster.whole()

    with watcher(cluster.lan.hosts["left"], output, cluster.etcd.address, cluster.master.address):
        cluster.run(work())
