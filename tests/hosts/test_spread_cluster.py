"""What sharing a machine hides: addresses, paths, names and pids that mean something on one host only."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.asking import KINDS, ask
from tests.e2e.faults.standing import until
from tests.hosts.cluster import HostedPart, SpreadCluster

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 16
PROMPT_TOKENS = 40 * BLOCK


def test_each_is_known_by_the_address_of_its_host(cluster: SpreadCluster) -> None:
    """Although each listens on a wildcard, and the name of its host leads to the loopback, as on Debian."""
    told = json.loads(cluster.lan.hosts["right"].tanghulu("status", "--master", cluster.finder, "--json"))
    instances = {one["id"]: one for one in told["parts"]}
    assert {part.id if part is not cluster.master else "master": part.address for part in cluster.parts} == {
        name: one["address"] for name, one in instances.items()
    }
    assert {one["health"] for one in instances.values()} == {"up"}, "its metrics are reached from another host"


def test_every_api_answers(cluster: SpreadCluster) -> None:
    async def work() -> None:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
            answers = await asyncio.gather(*(ask(http, cluster.conductor.url, one) for one in KINDS))
        for one, answer in zip(KINDS, answers, strict=True):
            assert answer.finishes == ["length"], (one, answer)
            assert answer.usage["completion_tokens"] == one.max_tokens
            assert answer.num_done == one.stream

    cluster.run(work())


async def complete(cluster: SpreadCluster, prompt: str) -> str:
    """The answer to ``prompt``."""
    body = {"model": "mock", "prompt": prompt, "max_tokens": 20, "seed": 1}
    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
        reply = await http.post(f"{cluster.conductor.url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def prompt(name: str) -> str:
    return name.ljust(PROMPT_TOKENS, ".")


async def loaded(cluster: SpreadCluster, source: str) -> float:
    """Tokens that the decode worker did not compute."""
    return await cluster.metric(cluster.decode, "tanghulu_worker_prefix_tokens_total", source=source)


def test_kv_is_handed_over_between_hosts(cluster: SpreadCluster) -> None:
    """Both workers' sockets have the same paths, each on its own host."""

    async def work() -> None:
        failures = "tanghulu_worker_fetch_failures_total"
        before, failed = await loaded(cluster, "peer"), await cluster.metric(cluster.decode, failures)
        await complete(cluster, prompt("handed over"))
        assert await loaded(cluster, "peer") - before == PROMPT_TOKENS
        assert await cluster.metric(cluster.decode, failures) == failed

    cluster.run(work())


def test_the_command_line_works_from_every_host(cluster: SpreadCluster) -> None:
    at = ("--master", cluster.finder)
    head, left, right = cluster.lan.hosts.values()
    left.run("sh", "-c", "echo spread > /tmp/value")
    left.tanghulu("store", "put", "one-key", "/tmp/value", *at)
    assert right.tanghulu("store", "get", "one-key", *at) == "spread\n"
    assert "one-key" in head.tanghulu("store", "ls", *at)
    assert cluster.nodes[0].id in head.tanghulu("store", "stat", "one-key", *at), "a put goes to the node of its host"


def test_what_left_stored_right_reads(cluster: SpreadCluster) -> None:
    """Its worker is drained from another host; who is left computes only what nobody has stored."""

    async def work() -> None:
        text = await complete(cluster, prompt("stored"))
        await until(lambda: stored(cluster.prefill), what="the chunks are written")
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            assert (await http.post(f"{cluster.conductor.url}/flush_cache")).status_code == 200
        await asyncio.to_thread(drain, cluster.prefill)
        assert await asyncio.to_thread(cluster.prefill.wait_ended) == 0, cluster.prefill.log()
        before = await loaded(cluster, "store")
        assert await complete(cluster, prompt("stored")) == text
        assert await loaded(cluster, "store") - before >= PROMPT_TOKENS - BLOCK
        await asyncio.to_thread(cluster.prefill.start)
        await cluster.whole()

    async def stored(worker: HostedPart) -> bool:
        return not await cluster.metric(worker, "tanghulu_worker_store_pending_blocks")

    def drain(worker: HostedPart) -> None:
        cluster.lan.hosts["right"].tanghulu("drain", worker.address, "--master", cluster.finder)

    cluster.run(work())


def test_a_node_is_drained_from_another_host(cluster: SpreadCluster) -> None:
    at = ("--master", cluster.finder)
    left, _ = cluster.nodes
    cluster.run(complete(cluster, prompt("drained")))
    host = cluster.lan.hosts["right"]
    assert "safe to stop" in host.tanghulu("store", "drain", left.id, *at), "right has a copy of each chunk"
    host.tanghulu("store", "undrain", left.id, *at)


def test_nothing_of_a_host_is_in_sight_of_another(cluster: SpreadCluster, tmp_path: Path) -> None:
    """So that the tests above show what they say."""
    assert not Path("/tmp/run/worker").exists()
    for host in cluster.lan.hosts.values():
        assert host.run("hostname").strip() == host.name
        assert not host.run("ls", "/dev/shm")
    assert cluster.lan.hosts["left"].run("ls", "/tmp/run").split() == ["node", "worker"]
    assert cluster.lan.hosts["head"].run("ls", "/tmp/run").split() == ["conductor", "master"]
