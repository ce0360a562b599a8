"""A worker's sessions behind tokens: refused at once, and ended when theirs is revoked."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tanghulu.auth.credentials import Credentials
from tanghulu.auth.derived_tokens import hash_of
from tanghulu.auth.tenants import new_token
from tanghulu.auth.tokens import TokensFile
from tanghulu.errors import Forbidden, NodeUnavailable, TanghuluError, Unauthorized
from tanghulu.rpc import authorizer, greeting
from tanghulu.rpc.authorizer import Authorizer
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Reply
from tanghulu.rpc.fast_port import FastPort
from tanghulu.rpc.fast_server import AnswerStream, FastService, Later, Peer
from tanghulu.rpc.methods import HELLO, PROTOCOL_VERSION
from tanghulu.runtime.tasks import beside
from tanghulu.session.load import WorkerLoad
from tanghulu.session.messages import SESSION, FromWorker, SessionHello, SessionWelcome, ToWorker
from tanghulu.types import InstanceId
from tests.rpc.service import until

TOKENS = {name: new_token() for name in ("cluster", "reader", "other")}


def write(path: Path, **rights: str) -> Path:
    path.touch(0o600)
    rows = (f'[[tokens]]\nname = "{n}"\nrights = ["{r}"]\nsha256 = "{hash_of(TOKENS[n])}"\n' for n, r in rights.items())
    path.write_text("\n".join(rows))
    return path


def welcome(peer: Peer, request: ToWorker, attachment: memoryview) -> AnswerStream | Later:
    stream = AnswerStream(lambda: None)
    message = FromWorker(SessionWelcome(InstanceId("worker"), 1, (), 0, WorkerLoad()))
    asyncio.get_running_loop().call_soon(stream.send, message)
    return stream


@pytest.fixture
async def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FastPort]:
    monkeypatch.setattr(authorizer, "REFRESH_S", 0.01)
    service = FastService()
    service.register(HELLO, greeting.welcome)
    service.register(SESSION, welcome)
    authorized = Authorizer(TokensFile(write(tmp_path / "tokens.toml", cluster="join", reader="read")))
    authorized.authorize(service)
    with tempfile.TemporaryDirectory(prefix="th-rpc-") as run_dir:
        mux = FastPort(service, Path(run_dir), "test")
        await mux.start("127.0.0.1", 0)
        try:
            async with beside(authorized.watch(service)):
                yield mux
        finally:
            await mux.close(0.1)


async def said(port: FastPort, token: str) -> tuple[AsyncFastConnection, list[Reply[FromWorker] | TanghuluError]]:
    """A session that shows ``token``, and what its worker says, at least once."""
    heard: list[Reply[FromWorker] | TanghuluError] = []
    connection = await AsyncFastConnection.connect(port.address)
    try:
        await greeting.show(connection, Credentials(token=token), 30)
        connection.stream(SESSION.number, ToWorker(SessionHello("x", PROTOCOL_VERSION)), FromWorker, heard.append)
        await until(lambda: bool(heard))
    except TanghuluError:
        await connection.close()
        raise
    return connection, heard


async def test_a_session_needs_a_token_of_the_cluster(port: FastPort) -> None:
    with pytest.raises(Unauthorized):
        await said(port, "wrong")
    for token, refusal in ((TOKENS["reader"], Forbidden), ("", Unauthorized)):
        connection, heard = await said(port, token)
        assert isinstance(heard[0], refusal)
        await connection.close()


async def test_a_session_ends_with_its_token(port: FastPort, tmp_path: Path) -> None:
    connection, heard = await said(port, TOKENS["cluster"])
    assert isinstance(heard[0], Reply)
    write(tmp_path / "tokens.toml", other="join")
    await until(lambda: connection.closed)
    assert isinstance(heard[-1], NodeUnavailable)
    await connection.close()
