"""Whoever has any TLS file says its first byte, and its token, through TLS; a certificate of its own is not needed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tanghulu.auth.credentials import Credentials, TlsFiles
from tanghulu.cli import drain
from tanghulu.conductor.dispatch.worker_session import WorkerSession
from tanghulu.conductor.peers import wire
from tanghulu.discovery.base import Instance
from tanghulu.errors import TanghuluError
from tanghulu.masters import Masters
from tanghulu.runtime.clock import SystemClock
from tanghulu.store.client.client import connect
from tanghulu.transfer_engine.engine import TransferEngine
from tanghulu.types import Address, InstanceId, Role
from tanghulu.workers.kv.peer_links import PeerLinks
from tests.tls_files import Authority

#: The first byte of a TLS record that begins a handshake.
HANDSHAKE = b"\x16"


class Tap:
    """A port that notes the first byte of each connection and hangs up."""

    def __init__(self) -> None:
        self.first_bytes: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._server.getsockname())
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._server.accept()
                with sock:
                    sock.settimeout(10)
                    self.first_bytes.append(sock.recv(1))

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        self._server.close()


@pytest.fixture
def tap() -> Iterator[Tap]:
    made = Tap()
    yield made
    made.close()


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials("", "secret", TlsFiles(ca=Authority(tmp_path_factory.mktemp("tls")).ca))


async def describe(address: Address, shown: Credentials) -> None:
    session = WorkerSession(address, "conductor", shown)
    try:
        await session.describe()
    finally:
        await session.close()


async def submit(address: Address, shown: Credentials) -> None:
    session = WorkerSession(address, "conductor", shown)
    try:
        await session.connect()
    finally:
        await session.close()


async def follow(address: Address, shown: Credentials) -> None:
    async for _ in wire.follow(address, shown):
        pass


async def abort(address: Address, shown: Credentials) -> None:
    await wire.abort(address, "request", "", shown)


async def end(address: Address, shown: Credentials) -> None:
    worker = Instance(InstanceId("w"), Role.DECODE, address)
    await drain._end(worker, Masters((address,), credentials=shown))


async def read_kv(address: Address, shown: Credentials) -> None:
    def use() -> None:
        with TransferEngine(host_id="here") as engine:
            links = PeerLinks(engine, "reader", SystemClock(), shown)
            with contextlib.closing(links):
                links.use(str(address), lambda link: None)

    await asyncio.to_thread(use)


async def ask_the_store(address: Address, shown: Credentials) -> None:
    def use() -> None:
        with connect(str(address), token=shown.token, tls_ca=shown.tls.ca, deadline_s=2) as store:
            store.nodes()

    await asyncio.to_thread(use)


@pytest.mark.parametrize("dial", [describe, submit, follow, abort, end, read_kv, ask_the_store])
async def test_an_authority_is_enough_for_tls(
    tap: Tap,
    credentials: Credentials,
    dial: Callable[[Address, Credentials], Coroutine[Any, Any, None]],
) -> None:
    with contextlib.suppress(TanghuluError, TimeoutError):
        await asyncio.wait_for(dial(tap.address, credentials), 10)
    assert tap.first_bytes
    assert set(tap.first_bytes) == {HANDSHAKE}
