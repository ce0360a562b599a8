"""A certificate of one role does not make a process of another, whatever carries the connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import httpx
import pytest
import uvloop

from tanghulu.auth import certificate_roles
from tanghulu.auth.certificate_roles import CLIENT, MASTER, NODE, WORKER
from tanghulu.auth.credentials import TlsFiles
from tanghulu.auth.tls import HTTP1, ServerTls, client_context
from tanghulu.cli import certs
from tanghulu.errors import Unauthorized
from tanghulu.rpc import grpc_edge
from tanghulu.rpc.dialling import dial
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.transfer_engine.core.paths import Path as TransferPath
from tanghulu.transfer_engine.core.segment import Endpoint
from tanghulu.transfer_engine.transports.tcp.sockets import KernelNetwork
from tanghulu.types import Address
from tests.tls_files import Authority


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certs")
    certs.make(made, ("127.0.0.1", "localhost", "::1"), 1)
    return made


def files(folder: Path, role: str = "") -> TlsFiles:
    own = (str(folder / f"{role}.pem"), str(folder / f"{role}.key")) if role else ("", "")
    return TlsFiles(*own, str(folder / "ca.pem"))


@contextlib.contextmanager
def listening(shown: TlsFiles) -> Iterator[Address]:
    """A TLS port that shows a certificate and hangs up."""
    context = ServerTls(shown, mutual=False, protocol=HTTP1).context
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = server.accept()
                    with contextlib.suppress(OSError), sock, context.wrap_socket(sock, server_side=True) as peer:
                        peer.settimeout(10)
                        if peer.recv(1000).startswith(b"GET"):
                            peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address(*server.getsockname())
        server.shutdown(socket.SHUT_RDWR)
        thread.join(30)


@pytest.mark.parametrize("own", ["", CLIENT])
def test_a_worker_is_no_master(folder: Path, own: str) -> None:
    wanted = files(folder, own)
    with listening(files(folder, WORKER)) as address:
        dial(address, None, tls=wanted.to(WORKER)).close()
        dial(address, None, tls=wanted.to(MASTER, WORKER)).close()
        dial(address, None, tls=wanted).close()
        with pytest.raises(Unauthorized, match="certificate of a worker; a master is expected"):
            dial(address, None, tls=wanted.to(MASTER))


@pytest.mark.parametrize("host", [certs.ANY_HOST, "other.example"])
async def test_a_certificate_for_any_host_holds_for_its_role(tmp_path: Path, host: str) -> None:
    certs.make(tmp_path, (host,), 1)
    wanted, server = files(tmp_path), grpc.aio.server()
    with listening(files(tmp_path, WORKER)) as address:
        with pytest.raises(Unauthorized):
            dial(address, None, tls=wanted.to(MASTER))
        if host == certs.ANY_HOST:
            dial(address, None, tls=wanted.to(WORKER)).close()
        else:
            with pytest.raises(Unauthorized, match=r"at another host than 127\.0\.0\.1"):
                dial(address, None, tls=wanted.to(WORKER))
        with pytest.raises(Unauthorized):  # where no role is expected, the host is
            dial(address, None, tls=wanted)
    tls = files(tmp_path, WORKER)
    address = grpc_edge.listen(server, Address("127.0.0.1", 0), tls, mutual=False, flag="--port")
    await server.start()
    try:
        for role, reaches in ((WORKER, host == certs.ANY_HOST), (MASTER, False)):
            async with grpc_edge.channel(address, tls=wanted.to(role)) as channel:
                call = channel.unary_unary("/no/method")(b"", timeout=5.0)
                code = await call.code()
                assert (code is grpc.StatusCode.UNIMPLEMENTED) == reaches, (role, code)
    finally:
        await server.stop(0)


def test_on_both_event_loops(folder: Path) -> None:
    async def connect(address: Address, role: str) -> None:
        await (await AsyncFastConnection.connect(address, tls=files(folder).to(role))).close()

    with listening(files(folder, WORKER)) as address:
        for make_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
            with asyncio.Runner(loop_factory=make_loop) as runner:
                runner.run(connect(address, WORKER))
                with pytest.raises(Unauthorized, match="a master is expected here"):
                    runner.run(connect(address, MASTER))


def test_over_http(folder: Path) -> None:
    async def get(url: str, context: ssl.SSLContext) -> None:
        async with httpx.AsyncClient(verify=context, trust_env=False) as http:
            await http.get(url)

    with listening(files(folder, WORKER)) as address:
        for role, refused in ((WORKER, False), (MASTER, True)):
            context, url = client_context(files(folder).to(role)), f"https://{address}/"
            with pytest.raises(httpx.ConnectError) if refused else contextlib.nullcontext():
                httpx.get(url, verify=context, trust_env=False)
            with pytest.raises((httpx.ConnectError, ssl.SSLError)) if refused else contextlib.nullcontext():
                asyncio.run(get(url, context))


def test_data_connections(folder: Path) -> None:
    with listening(files(folder, WORKER)) as address:
        for role, refused in ((WORKER, False), (NODE, True)):
            path = TransferPath(Endpoint("tcp", str(address)), "", 0, 0)
            sock = KernelNetwork(files(folder).to(role)).connect(path, address)
            with contextlib.closing(sock), pytest.raises(ssl.SSLError) if refused else contextlib.nullcontext():
                while True:
                    try:
                        sock.sendmsg((b"GET",), (), 0)
                        break
                    except (BlockingIOError, OSError) as error:
                        if isinstance(error, ssl.SSLError):
                            raise


@contextlib.asynccontextmanager
async def grpc_server(shown: TlsFiles) -> AsyncIterator[Address]:
    server = grpc.aio.server()
    address = grpc_edge.listen(server, Address("127.0.0.1", 0), shown, mutual=False, flag="--port")
    await server.start()
    yield address
    await server.stop(None)


async def is_reached(address: Address, tls: TlsFiles) -> bool:
    channel = grpc_edge.channel(address, tls=tls)
    try:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_unary("/none/none")(b"", timeout=20)
        return error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await channel.close()


async def test_over_grpc(folder: Path) -> None:
    async with grpc_server(files(folder, WORKER)) as address:
        assert await is_reached(address, files(folder, CLIENT).to(WORKER))
        assert await is_reached(address, files(folder))
        assert not await is_reached(address, files(folder).to(MASTER))
        assert not await is_reached(address, files(folder, CLIENT).to(MASTER))


async def test_an_operator_s_own_authority_names_no_roles(folder: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    shown = TlsFiles(*authority.sign("host"), authority.ca)
    with listening(shown) as address:
        dial(address, None, tls=shown.to(MASTER)).close()
        wanted = TlsFiles(str(folder / "client.pem"), str(folder / "client.key"), authority.ca, (MASTER,))
        with pytest.raises(Unauthorized, match="without a role"):
            dial(address, None, tls=wanted)
    async with grpc_server(shown) as address:
        assert await is_reached(address, shown.to(MASTER))


def test_a_role_that_an_operator_s_authority_names_counts(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    names = f"subjectAltName=IP:127.0.0.1,URI:{certificate_roles.URI}worker"
    with listening(TlsFiles(*authority.sign("w", names), authority.ca)) as address:
        dial(address, None, tls=TlsFiles(ca=authority.ca).to(WORKER)).close()
        with pytest.raises(Unauthorized, match="a master is expected"):
            dial(address, None, tls=TlsFiles(ca=authority.ca).to(MASTER))
