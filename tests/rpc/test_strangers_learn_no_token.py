"""Whoever is found by discovery, or named by a peer, is shown a token that is of use at its address alone."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tanghulu.auth.credentials import Credentials
from tanghulu.auth.derived_tokens import derive, is_token
from tanghulu.cli import drain
from tanghulu.conductor.dispatch.worker_session import WorkerSession
from tanghulu.conductor.peers import wire
from tanghulu.conductor.peers.group import ATTRIBUTE
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.discovery.masters import MasterFinder
from tanghulu.errors import MasterUnavailable, TanghuluError, Unauthorized
from tanghulu.masters import Masters
from tanghulu.rpc.fast_port import FastPort
from tanghulu.rpc.fast_server import FastService, Peer
from tanghulu.rpc.methods import HELLO, HelloReply, HelloRequest
from tanghulu.runtime.clock import SystemClock
from tanghulu.store.client.drivers.connections import NodeSessions, Target
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.client.settings import Settings
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.types import Address, Role
from tanghulu.workers.kv.peer_links import PeerLinks
from tests.store.master.running_master import instance

SECRET = "tgh_an-operators-own"
OWN = Credentials("", SECRET)


class Stranger:
    """A process that keeps every token that it is shown, and refuses all of them."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def hello(self, peer: Peer, request: HelloRequest, attachment: memoryview) -> HelloReply:
        self.shown.append(request.token)
        raise Unauthorized("go away")


@pytest.fixture
def stranger() -> Stranger:
    return Stranger()


@pytest.fixture
async def address(stranger: Stranger) -> AsyncIterator[Address]:
    service = FastService()
    service.register(HELLO, stranger.hello)
    with tempfile.TemporaryDirectory(prefix="th-rpc-") as run_dir:
        mux = FastPort(service, Path(run_dir), "test")
        await mux.start("127.0.0.1", 0)
        try:
            yield mux.address
        finally:
            await mux.close(0.1)


async def _describe(address: Address) -> None:
    session = WorkerSession(address, "c", OWN)
    try:
        await session.describe()
    finally:
        await session.close()


async def _connect(address: Address) -> None:
    session = WorkerSession(address, "c", OWN)
    try:
        await session.connect()
    finally:
        await session.close()


async def _follow(address: Address) -> None:
    async for _ in wire.follow(address, OWN):
        pass


async def _abort(address: Address) -> None:
    await wire.abort(address, None, "", OWN)


async def _drain(address: Address) -> None:
    masters = Masters.parse("127.0.0.1:1").showing(OWN)
    await drain._end(replace(instance("w", Role.DECODE), address=address), masters)


async def _drain_conductor(address: Address) -> None:
    masters = Masters.parse("127.0.0.1:1").showing(OWN)
    await drain._end(instance("c", Role.CONDUCTOR, attributes={ATTRIBUTE: str(address)}), masters)


async def _read_kv(address: Address) -> None:
    engine = TransferEngine(transports=("tcp",), host_id="h")
    links = PeerLinks(engine, "w", SystemClock(), OWN)
    try:
        await asyncio.to_thread(links.open_apart, f"{address}")
    finally:
        links.close()
        engine.close()


async def _look_for_leader(address: Address) -> None:
    """A master that was named by another."""
    finder = MasterFinder(Masters.parse("127.0.0.1:1,127.0.0.1:2").showing(OWN))
    finder._current = address
    async with MasterDiscovery(finder.masters, finder=finder) as discovery:
        with suppress(MasterUnavailable):
            await discovery.look()


CALLS = (_describe, _connect, _follow, _abort, _drain, _drain_conductor, _read_kv, _look_for_leader)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_a_stranger_is_shown_nothing_of_use_elsewhere(
    stranger: Stranger, address: Address, call: Callable[[Address], Awaitable[None]]
) -> None:
    with suppress(TanghuluError):
        await call(address)
    assert set(stranger.shown) == {derive(SECRET, str(address))}
    assert is_token(SECRET, stranger.shown[0], [str(address)])
    assert not is_token(SECRET, stranger.shown[0], [str(Address("127.0.0.1", 1))])


async def test_a_master_that_somebody_has_typed_is_shown_the_token(stranger: Stranger, address: Address) -> None:
    async with MasterDiscovery(Masters((address,)).showing(OWN)) as discovery:
        with suppress(TanghuluError):
            await discovery.look()
    assert set(stranger.shown) == {SECRET}


@pytest.mark.parametrize("unix_path", [None, "/run/node.sock"])
def test_a_store_node_is_not_shown_the_clients_token(unix_path: str | None) -> None:
    context = cast(Context, SimpleNamespace(leases=SimpleNamespace(held=lambda peer: ())))
    settings, at = Settings(master=Masters.parse("h:1").showing(OWN)), Address("10.0.0.7", 7410)
    call = NodeSessions(settings, context).hello(PeerId("n"), Target(at, unix_path))
    assert call.request.token == derive(SECRET, f"10.0.0.7:7410|{unix_path}" if unix_path else "10.0.0.7:7410")
