"""The whole process against a real master: registration, mirror of the directory, orderly end; and many at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from tanghulu.auth.certificate_roles import CONDUCTOR
from tanghulu.auth.credentials import Credentials
from tanghulu.conductor import main as conductor_main
from tanghulu.conductor.main import COMMAND, ConductorConfig
from tanghulu.discovery.base import Instance
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import ConfigError, Unauthorized
from tanghulu.hashing import TokenSequence, root_hash
from tanghulu.rpc import greeting
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.methods import END, EndRequest
from tanghulu.runtime.process import Process, SupervisorLine, own_address
from tanghulu.store.master import main as master_main
from tanghulu.store.master.main import MasterConfig
from tanghulu.store.protocol.announcements import ChunkEntry, NodeAnnouncement, ReportPiece
from tanghulu.store.protocol.key_slots import NUM_SLOTS
from tanghulu.store.protocol.methods import ANNOUNCE
from tanghulu.types import Address, InstanceId, Role, kv_chunk_key
from tests.conductor.fake_worker import FINGERPRINT, TOKENIZER, FakeWorker
from tests.store.master.running_master import asking

TEXT = "Hello, wörld! "
LONG = {"model": "tiny", "prompt": "a long prompt", "max_tokens": 40, "ignore_eos": True}
LONG_TEXT = TOKENIZER.decode((TOKENIZER.encode(TEXT).ids * 4)[:40])


class _Process(Process):
    """A process inside the test's own."""

    async def started(self) -> Address:
        self.found: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        return await self.found

    def ready(self, instance_id: str, address: Address, busy: Any = None) -> None:
        self.found.set_result(address)


@contextlib.asynccontextmanager
async def _serving(
    serve: Any, role: Role, config: Any, run_dir: Path, generation: int = 7
) -> AsyncIterator[tuple[_Process, Address]]:
    os.mkdir(run_dir)
    status = SupervisorLine(-1, lambda: None)
    process = _Process(role, config, run_dir, status, CollectorRegistry(), "127.0.0.1:1", generation + len(role.value))
    started = asyncio.create_task(process.started())
    await asyncio.sleep(0)
    serving = asyncio.create_task(serve(process, config))
    await asyncio.wait({started, serving}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        started.cancel()
        serving.result()
    try:
        yield process, await started
    finally:
        process.stopping.set()
        await serving


@contextlib.asynccontextmanager
async def _cluster(
    tmp_path: Path, **options: Any
) -> AsyncIterator[tuple[_Process, httpx.AsyncClient, MasterDiscovery]]:
    master_config = MasterConfig(port=0, rebuild_s=0.0)
    async with _serving(master_main.serve, Role.MASTER, master_config, tmp_path / "m") as (_, master):
        config = ConductorConfig(**{"port": 0, "master": master, "notice_s": 0.0, **options})
        async with MasterDiscovery(master) as discovery:
            async with _serving(conductor_main.serve, Role.CONDUCTOR, config, tmp_path / "c") as (process, address):
                async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60, trust_env=False) as http:
                    yield process, http, discovery


@contextlib.asynccontextmanager
async def _worker(discovery: MasterDiscovery, http: httpx.AsyncClient, run_dir: Path) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker("w", Role.BOTH, run_dir)
    await worker.start(discovery)
    await _until_ready(http)
    try:
        yield worker
    finally:
        await worker.stop()


async def _until_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while (await http.get("/ready")).status_code != 200:
            pass


async def test_it_registers_serves_and_mirrors_the_store(tmp_path):
    async with _cluster(tmp_path) as (process, http, discovery), _worker(discovery, http, tmp_path):
        async for event in discovery.watch(Role.CONDUCTOR):
            assert event.instance is not None
            assert event.instance.id == process.instance_id(event.instance.address.port)
            break
        answer = (await http.post("/v1/completions", json=LONG)).json()
        assert answer["choices"][0]["text"] == LONG_TEXT
        prompt = "a prompt of which the store has two blocks"
        await _announce(discovery, prompt, num_blocks=2)
        async with asyncio.timeout(30):
            while (await http.post("/route", json={"prompt": prompt})).json()["hit_blocks"]["store"] != 2:
                pass


async def test_on_all_addresses_it_registers_one_that_others_can_reach(tmp_path):
    async with _cluster(tmp_path, host="0.0.0.0") as (_, http, discovery):
        async for event in discovery.watch(Role.CONDUCTOR):
            assert event.instance is not None
            assert event.instance.address.host == own_address()
            break
        assert (await http.get("/live")).status_code == 200


async def _announce(discovery: MasterDiscovery, prompt: str, num_blocks: int) -> None:
    node = Instance(InstanceId("node-1"), Role.NODE, Address("127.0.0.1", 9), generation=5)
    await discovery.register(node)
    hashes = TokenSequence(root_hash(FINGERPRINT), 4, TOKENIZER.encode(prompt).ids).block_hashes
    keys = [kv_chunk_key(FINGERPRINT, h) for h in hashes[:num_blocks]]
    async with asking(discovery.address) as ask:
        await ask(ANNOUNCE, NodeAnnouncement("node-1", 5, report_id=1, piece=ReportPiece(0, NUM_SLOTS)))
        await ask(ANNOUNCE, NodeAnnouncement("node-1", 5, [ChunkEntry(key, 1, 9) for key in keys]))


async def test_at_the_end_requests_under_way_are_finished(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        process, http, discovery = await stack.enter_async_context(_cluster(tmp_path, grace_s=10.0))
        worker = await stack.enter_async_context(_worker(discovery, http, tmp_path))
        worker.hold()
        asked = asyncio.create_task(http.post("/v1/completions", json=LONG))
        await worker.until(lambda: worker.num_running == 1)
        process.stopping.set()
        async with asyncio.timeout(30):
            with contextlib.suppress(httpx.HTTPError):
                while True:
                    async with httpx.AsyncClient(trust_env=False) as fresh:
                        await fresh.get(f"{http.base_url}/ready")
        worker.release()
        assert (await asked).json()["choices"][0]["text"] == LONG_TEXT


async def test_what_is_not_finished_within_the_grace_period_is_told_so(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        process, http, discovery = await stack.enter_async_context(_cluster(tmp_path, grace_s=0.0))
        worker = await stack.enter_async_context(_worker(discovery, http, tmp_path))
        worker.hold()
        asked = asyncio.create_task(http.post("/v1/completions", json=LONG))
        await worker.until(lambda: worker.num_running == 1)
        process.stopping.set()
        response = await asked
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
        await worker.until(lambda: worker.aborts or not worker.num_running)


async def test_it_says_so_before_it_ends_and_serves_meanwhile(tmp_path):
    """First /ready says no, while requests are served; each answer closes its connection."""
    async with contextlib.AsyncExitStack() as stack:
        process, http, discovery = await stack.enter_async_context(_cluster(tmp_path, notice_s=0.7))
        await stack.enter_async_context(_worker(discovery, http, tmp_path))
        assert "connection" not in (await http.get("/live")).headers
        process.stopping.set()
        async with asyncio.timeout(30):
            while (await http.get("/ready")).status_code != 503:
                pass
        answer = await http.post("/v1/completions", json=LONG)
        assert answer.json()["choices"][0]["text"] == LONG_TEXT
        assert answer.headers["connection"] == "close"


async def test_an_administrator_can_have_it_end(tmp_path):
    async with _cluster(tmp_path, token="secret") as (process, _, discovery):
        async for event in discovery.watch(Role.CONDUCTOR):
            assert event.instance is not None
            address = Address.parse(event.instance.attributes["peers"])
            break
        with pytest.raises(Unauthorized):
            await greeting.connect(address, Credentials("", "wrong"), CONDUCTOR, 10.0)
        connection = await AsyncFastConnection.connect(address)
        with pytest.raises(Unauthorized):
            await connection.call(END.number, EndRequest(), END.reply)
        await connection.close()
        assert not process.stopping.is_set()
        connection = await greeting.connect(address, Credentials("", "secret"), CONDUCTOR, 10.0)
        reply = (await connection.call(END.number, EndRequest(), END.reply)).message
        await connection.close()
        assert (reply.num_requests, reply.grace_s) == (0, 10.0)
        assert process.stopping.is_set()


async def test_a_successor_takes_the_port_over(tmp_path):
    """Both accept for a while; at no time is a connection refused."""
    shared = {"reuse_port": True, "notice_s": 0.3}
    async with contextlib.AsyncExitStack() as stack:
        process, http, discovery = await stack.enter_async_context(_cluster(tmp_path, **shared))
        await stack.enter_async_context(_worker(discovery, http, tmp_path))
        port = http.base_url.port
        config = ConductorConfig(port=port, master=discovery.address, **shared)
        async with _serving(conductor_main.serve, Role.CONDUCTOR, config, tmp_path / "c2", generation=99):
            await _until_ready(http)
            process.stopping.set()
            in_a_row = 0
            async with asyncio.timeout(30):
                while in_a_row < 30:  # the old one is gone, and nobody was refused
                    async with httpx.AsyncClient(trust_env=False, timeout=60) as fresh:
                        ready = (await fresh.get(f"{http.base_url}/ready")).status_code == 200
                        in_a_row = in_a_row + 1 if ready else 0
                    await asyncio.sleep(0.01)


async def test_a_taken_port_is_named(tmp_path):
    async with _cluster(tmp_path) as (_, http, discovery):
        config = ConductorConfig(port=http.base_url.port, master=discovery.address)
        with pytest.raises(ConfigError, match="choose another --port"):
            async with _serving(conductor_main.serve, Role.CONDUCTOR, config, tmp_path / "c2"):
                pass


def test_options_are_checked():
    for options in ({"max_in_flight": 0}, {"queue_timeout_s": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(options)).replace("_", "-")):
            ConductorConfig(**options)
    result = CliRunner().invoke(COMMAND, ["--policy", "nosuch"])
    assert result.exit_code == 2
    assert "round-robin" in result.output


async def test_many_at_once_over_dying_workers_all_get_the_whole_text(cluster):
    chance = random.Random(7)
    roles = [Role.PREFILL, Role.DECODE, Role.BOTH, Role.DECODE]
    workers = [await cluster.add(role) for role in roles]
    workers[1].die_after_tokens = 100
    workers[2].die_after_tokens = 150

    async def ask(number: int) -> str:
        prompt = "".join(chance.choices("abcdef ", k=chance.randrange(1, 60)))
        response = await cluster.http.post(
            "/v1/completions", json={**LONG, "prompt": prompt, "stop": f"never {number}"}
        )
        assert response.status_code == 200, response.text
        body = response.json()
        assert body["usage"]["completion_tokens"] == 40
        return body["choices"][0]["text"]

    asked = [asyncio.create_task(ask(number)) for number in range(40)]
    quitters = chance.sample(asked, 5)
    await cluster.until(lambda: sum(w.num_emitted for w in workers) > 50)
    for quitter in quitters:
        quitter.cancel()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    texts = [a for a in answers if not isinstance(a, asyncio.CancelledError)]
    assert texts == [LONG_TEXT] * len(texts)
    assert len(texts) >= 35
    await cluster.until(lambda: cluster.dispatcher.num_requests == 0)
    cluster.dispatcher.check()
