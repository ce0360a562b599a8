"""Conductors side by side: what is told is what counts, however slowly it is read; and who is gone is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tanghulu.auth.credentials import Credentials, TlsFiles
from tanghulu.cli import certs
from tanghulu.conductor.main import Conductor, ConductorConfig
from tanghulu.conductor.peers import group, wire
from tanghulu.conductor.peers.inbox import PeerRequests
from tanghulu.conductor.peers.outbox import MAX_BEGUN, MAX_PEERS, Begun, News, OwnRequests
from tanghulu.conductor.routing.in_flight import InFlightBlocks
from tanghulu.conductor.routing.worker_state import LoadTracker
from tanghulu.discovery.base import Instance
from tanghulu.errors import Forbidden, NodeUnavailable, PeerSilent, Unauthorized
from tanghulu.rpc import streams
from tanghulu.session.load import WorkerLoad
from tanghulu.types import BlockHash, InstanceId, Role
from tests.conductor.fake_worker import FakeWorker
from tests.discovery.memory import MemoryDiscovery, MemoryRegistry
from tests.tls_files import Authority

A, B = InstanceId("a"), InstanceId("b")
HASHES = [BlockHash(bytes([n]) * 16) for n in range(4)]


def begun(name: str, **more: object) -> Begun:
    return Begun(name, InstanceId("p"), 100, 8, HASHES, InstanceId("d"), **more)


class Ear:
    """One who decides, and counts what peers told."""

    def __init__(self) -> None:
        self.loads = {InstanceId(name): LoadTracker() for name in ("p", "d")}
        self.in_flight = InFlightBlocks()
        self.heard = PeerRequests(self.in_flight, self.loads.get)

    def queue_tokens(self) -> int:
        return self.loads[InstanceId("p")].view(InstanceId("p"), Role.PREFILL, 0).queue_tokens

    def promised(self) -> int:
        return self.loads[InstanceId("d")].view(InstanceId("d"), Role.DECODE, 0).coming_requests

    def check(self) -> None:
        self.heard.check()
        self.in_flight.check()


NAMES = st.sampled_from("abcdefgh")
STEPS = st.one_of(
    st.tuples(st.sampled_from(["began", "prefilled", "freed"]), NAMES),
    st.tuples(st.just("read"), st.sampled_from("01")),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_whoever_reads_knows_what_is_under_way(steps):
    """Two readers of different patience, and outboxes so small that they run over."""
    own, ears = OwnRequests(max_changes=3), [Ear(), Ear()]
    outboxes = [own.follow(lambda: None) for _ in ears]
    live: dict[str, bool] = {}
    for number, (what, name) in enumerate(steps):
        if what == "read":
            ears[int(name)].heard.on_news(A, own.take(outboxes[int(name)]))
        elif what == "began" and name not in live:
            live[name] = False
            own.began(begun(f"{name}{number}"))
            live[name] = number
        elif what != "began" and name in live:
            getattr(own, what)(f"{name}{live[name]}")
            if what == "freed":
                del live[name]
        own.check()
    for ear, outbox in zip(ears, outboxes, strict=True):
        ear.heard.on_news(A, own.take(outbox))
        ear.check()
        assert len(ear.heard) == len(own) == len(live)
        assert ear.promised() == len(live)
        waiting = [b for b in own.take(own.follow(lambda: None)).begun if not b.prefilled]
        assert len(ear.in_flight) == len(waiting)
        assert ear.queue_tokens() == 100 * len(waiting)
        ear.heard.forget(A)
        assert (len(ear.heard), len(ear.in_flight), ear.promised(), ear.queue_tokens()) == (0, 0, 0, 0)


def test_a_request_counts_until_it_is_freed_however_long_it_runs():
    ear = Ear()
    ear.heard.on_news(A, News(True, [begun("r")]))
    ear.heard.on_news(B, News(True, [begun("r")]))
    assert (ear.queue_tokens(), ear.promised()) == (200, 2)
    assert ear.in_flight.match(HASHES) == {"p": 4}
    for _ in range(1000):
        ear.loads[InstanceId("p")].report(WorkerLoad())
    assert ear.queue_tokens() == 0, "the worker's own reports hold it by now"
    assert (len(ear.in_flight), ear.promised()) == (2, 2)
    ear.heard.on_news(A, News(False, [], [], ["r", "unknown"]))
    assert (len(ear.in_flight), ear.promised(), ear.heard.peers) == (1, 1, [A, B])
    ear.heard.on_news(B, News(True, [begun("s", prefilled=True)]))
    assert (len(ear.in_flight), ear.promised()) == (0, 1)


def test_a_request_that_came_and_went_is_not_spoken_of():
    own = OwnRequests()
    outbox = own.follow(lambda: None)
    assert own.take(outbox) == News(True, [])
    own.began(begun("r"))
    own.prefilled("r")
    own.freed("r")
    assert not own.take(outbox)
    for _ in range(MAX_PEERS - 1):
        assert own.follow(lambda: None) is not None
    assert own.follow(lambda: None) is None


@contextlib.asynccontextmanager
async def conductor(
    discovery: MemoryDiscovery, name: str, **options: object
) -> AsyncIterator[tuple[Conductor, httpx.AsyncClient]]:
    config = ConductorConfig(**{"port": 0, "grace_s": 0.0, **options})
    made = Conductor(config, name, CollectorRegistry())
    with tempfile.TemporaryDirectory(prefix="th-peers-") as run_dir:
        async with made.running(discovery, 0, Path(run_dir)):
            attributes = {group.ATTRIBUTE: str(made.peers.address)}
            entry = Instance(InstanceId(name), Role.CONDUCTOR, made.address, attributes=attributes)
            registration = await discovery.register(entry)
            async with httpx.AsyncClient(base_url=f"http://{made.address}", timeout=60, trust_env=False) as http:
                yield made, http
            await registration.close()


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what it looks at has no hook for tests
            await asyncio.sleep(0.001)


BODY = {"model": "tiny", "prompt": "one two three four five six seven", "max_tokens": 9, "ignore_eos": True}


async def test_each_counts_the_others_requests_and_forgets_who_is_gone(tmp_path: Path):
    memory = MemoryRegistry()
    async with MemoryDiscovery(memory) as here, MemoryDiscovery(memory) as there:
        worker = FakeWorker("w", Role.BOTH, tmp_path)
        worker.hold()
        await worker.start(here)
        async with conductor(here, "one") as (one, _):
            async with conductor(there, "two") as (two, http):
                await until(lambda: two.dispatcher.registry.models and one.dispatcher.registry.models)
                await until(lambda: one.peers.num_peers == two.peers.num_peers == 1)
                asked = asyncio.create_task(http.post("/v1/completions", json=BODY))
                await until(lambda: len(one.dispatcher.peers) == 1)
                assert len(one.dispatcher.router.in_flight) == 1
                worker.step()
                await until(lambda: len(one.dispatcher.router.in_flight) == 0)
                assert len(one.dispatcher.peers) == 1, "it decodes yet"
                worker.step(8)
                assert (await asked).status_code == 200
                await until(lambda: len(one.dispatcher.peers) == 0)
                again = asyncio.create_task(http.post("/v1/completions", json=BODY))
                await until(lambda: len(one.dispatcher.peers) == 1)
                one.dispatcher.check()
            await until(lambda: len(one.dispatcher.peers) == 0 and one.peers.num_peers == 0)
            await asyncio.gather(again, return_exceptions=True)
            one.dispatcher.check()
        await worker.stop()


async def test_a_request_is_aborted_at_whichever_conductor_it_is(tmp_path: Path):
    memory = MemoryRegistry()
    async with MemoryDiscovery(memory) as here, MemoryDiscovery(memory) as there:
        worker = FakeWorker("w", Role.BOTH, tmp_path)
        worker.hold()
        await worker.start(here)
        async with conductor(here, "one") as (one, http), conductor(there, "two") as (two, other):
            await until(lambda: two.dispatcher.registry.models and one.dispatcher.registry.models)
            await until(lambda: one.peers.num_peers == two.peers.num_peers == 1)
            for order in ({"rid": "mine"}, {"abort_all": True}):
                asked = asyncio.create_task(other.post("/v1/completions", json={**BODY, "request_id": "mine"}))
                await until(lambda: two.service.calls)
                assert await one.peers.abort("mine", "somebody else") == 0
                assert (await http.post("/abort_request", json={"rid": "no such"})).json() == {"aborted": 0}
                assert (await http.post("/abort_request", json=order)).json() == {"aborted": 1}
                assert (await asked).json()["choices"][0]["finish_reason"] == "abort"
            await two.peers.close()
            assert (await http.post("/abort_request", json={"rid": "mine"})).json() == {"aborted": 0}
        await worker.stop()


async def test_a_stream_that_breaks_is_asked_for_again_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every stream ends behind its first message: each message is a snapshot then, and it comes out right."""
    streams = 0

    async def broken(*args: object) -> AsyncIterator[News]:
        nonlocal streams
        streams += 1
        async with contextlib.aclosing(follow(*args)) as stream:
            async for news in stream:
                yield news
                raise NodeUnavailable("broken off")

    follow = wire.follow
    monkeypatch.setattr(wire, "follow", broken)
    async with MemoryDiscovery(MemoryRegistry()) as discovery, conductor(discovery, "one") as (one, _):
        async with conductor(discovery, "two") as (two, _):
            two.dispatcher.own.began(begun("r"))
            await until(lambda: len(one.dispatcher.peers) == 1 and streams > 3)
            two.dispatcher.own.freed("r")
            await until(lambda: len(one.dispatcher.peers) == 0)


async def test_a_peer_that_sends_nothing_is_lost(monkeypatch: pytest.MonkeyPatch):
    """Beats come where there is no news; without them the peer is frozen."""
    async with MemoryDiscovery(MemoryRegistry()) as discovery, conductor(discovery, "one") as (one, _):
        monkeypatch.setattr(streams, "BEAT_S", 0.01)
        async with contextlib.aclosing(wire.follow(one.peers.address, Credentials())) as stream:
            assert [(await anext(stream)).snapshot for _ in range(3)] == [True, False, False]
        monkeypatch.setattr(streams, "BEAT_S", 60.0)
        monkeypatch.setattr(wire, "SILENCE_S", 0.5)
        async with contextlib.aclosing(wire.follow(one.peers.address, Credentials())) as stream:
            assert (await anext(stream)).snapshot
            with pytest.raises(PeerSilent):
                await anext(stream)


def test_a_snapshot_comes_in_messages_of_bounded_size():
    whole = News(True, [begun(str(n)) for n in range(2 * MAX_BEGUN + 1)], ["p"], ["f"])
    first, second, third = whole.parts()
    assert [each.snapshot for each in (first, second, third)] == [True, False, False]
    assert [*first.begun, *second.begun, *third.begun] == whole.begun
    assert (len(first.begun), first.freed, third.prefilled, third.freed) == (MAX_BEGUN, (), ["p"], ["f"])
    assert list(News(False, [], [], ["f"]).parts()) == [News(False, [], [], ["f"])]


async def test_a_peer_that_does_not_come_back_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    """Its registration stays; its stream does not."""
    monkeypatch.setattr(group, "FORGET_AFTER_S", 0.1)
    async with MemoryDiscovery(MemoryRegistry()) as discovery, conductor(discovery, "one") as (one, _):
        async with conductor(discovery, "two") as (two, _):
            two.dispatcher.own.began(begun("r"))
            await until(lambda: len(one.dispatcher.peers) == 1)
            await two.peers.close()
            await until(lambda: len(one.dispatcher.peers) == 0)
            assert one.peers.num_peers == 1
            two.dispatcher.own.freed("r")


async def test_with_certificates_the_streams_are_encrypted(tmp_path: Path):
    authority = Authority(tmp_path)
    cert, key = authority.sign("host")
    options = {"tls_cert": cert, "tls_key": key, "tls_ca": authority.ca, "token": "secret"}
    async with MemoryDiscovery(MemoryRegistry()) as discovery, conductor(discovery, "one", **options) as (one, _):
        async with conductor(discovery, "two", **options) as (two, _):
            two.dispatcher.own.began(begun("r"))
            await until(lambda: len(one.dispatcher.peers) == 1)
            plain = Credentials("", "secret")
            no_certificate = Credentials("", "secret", TlsFiles(ca=authority.ca))
            for credentials in (plain, no_certificate):
                with pytest.raises(NodeUnavailable):
                    await anext(wire.follow(two.peers.address, credentials))
            two.dispatcher.own.freed("r")


async def test_without_a_certificate_nothing_is_told_plainly(tmp_path: Path):
    options = {"tls_ca": Authority(tmp_path).ca, "token": "secret"}
    async with MemoryDiscovery(MemoryRegistry()) as discovery, conductor(discovery, "one", **options) as (one, _):
        assert one.peers.published_address == ""


async def test_only_conductors_are_told_where_certificates_name_roles(tmp_path: Path):
    certs.make(tmp_path, ("127.0.0.1",), 1)
    ca = str(tmp_path / "ca.pem")
    files = {role: (str(tmp_path / f"{role}.pem"), str(tmp_path / f"{role}.key")) for role in ("conductor", "worker")}
    cert, key = files["conductor"]
    options = {"tls_cert": cert, "tls_key": key, "tls_ca": ca, "token": "secret"}
    async with MemoryDiscovery(MemoryRegistry()) as discovery, conductor(discovery, "one", **options) as (one, _):
        async with conductor(discovery, "two", **options) as (two, _):
            two.dispatcher.own.began(begun("r"))
            await until(lambda: len(one.dispatcher.peers) == 1)
            worker = Credentials("", "secret", TlsFiles(*files["worker"], ca))
            with pytest.raises(Forbidden, match="requires a certificate with the role conductor"):
                await anext(wire.follow(two.peers.address, worker))
            two.dispatcher.own.freed("r")


async def test_only_who_shows_the_clusters_token_is_told(tmp_path: Path):
    async with MemoryDiscovery(MemoryRegistry()) as discovery, conductor(discovery, "one", token="secret") as (one, _):
        async with conductor(discovery, "two", token="secret") as (two, _):
            two.dispatcher.own.began(begun("r"))
            await until(lambda: len(one.dispatcher.peers) == 1)
            for token in ("", "guess"):
                with pytest.raises(Unauthorized):
                    await anext(wire.follow(two.peers.address, Credentials("", token)))
                with pytest.raises(Unauthorized):
                    await wire.abort(two.peers.address, None, "", Credentials("", token))
            two.dispatcher.own.freed("r")
