"""A cluster with two tenants, and callers of every kind: nobody's, a wrong token's, each tenant's, an operator's.

``answer`` functions make one call and say in a comparable form what came back, so that calls of different callers, and
calls that name somebody's resource or none, can be held beside each other.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import httpx
import psutil
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

import tanghulu
from tanghulu.auth.api_keys import new_key
from tanghulu.auth.credentials import NO_TLS, Credentials, TlsFiles
from tanghulu.auth.derived_tokens import hash_of
from tanghulu.auth.tenants import new_token
from tanghulu.auth.tls import client_context
from tanghulu.cli import keys
from tanghulu.cli.secure import SecureFiles, prepare
from tanghulu.errors import TanghuluError
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.methods import HELLO, Method
from tanghulu.store.client import Client
from tanghulu.store.client.logic import messages
from tanghulu.store.protocol.messages import Welcome
from tanghulu.transfer_engine.core.config import EngineConfig
from tanghulu.transfer_engine.core.segment import SegmentDescriptor, SessionKey
from tanghulu.transfer_engine.core.slices import Opcode
from tanghulu.transfer_engine.engine import TransferEngine, TransferRequest
from tanghulu.types import Address
from tests.e2e.cluster import START_DEADLINE_S, LiveCluster, eventually, running_cluster
from tests.free_ports import free_port

#: Stands in everything that belongs to tenant acme and that nobody else may learn of.
MARK = "strictly-acme"
KEY, VALUE = f"{MARK}-key", f"{MARK}-value".encode() * 4096
PROMPT = f"{MARK}-prompt " * 40
#: A name that nothing has; as long as those that something has.
_POOLS = """[[pool]]
name = "all"
urls = ["{url}"]
[prefill]
ttft_s = [1.0]
prompt_tokens = [131072]
pools = [["all"]]
[decode]
tbt_s = [0.05]
context_tokens = [131072]
pools = [["all"]]
"""
STRANGERS = ("stranger", "unknown", "mallory")
DEADLINE_S = 20.0

#: The outcome of a call: its status, and the whole answer.
Answer: TypeAlias = tuple[str, str]
Metadata: TypeAlias = tuple[tuple[str, str], ...]


@dataclass
class Caller:
    """Somebody who calls. ``token`` for processes and ``key`` for HTTP; "" shows none."""

    name: str
    token: str = ""
    key: str = ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return Credentials(token=self.token).metadata

    def headers(self, secret: str) -> dict[str, str]:
        return {"authorization": f"Bearer {secret}"} if secret else {}


@dataclass
class World:
    """A running cluster and what it was started with."""

    cluster: LiveCluster
    files: SecureFiles
    tls: TlsFiles
    callers: dict[str, Caller]
    service: str = ""
    service_grpc: str = ""
    pool_router: str = ""
    victims: dict[str, str] = field(default_factory=dict)
    #: The memory of a node and of a worker, as somebody who may greet them knows it.
    segments: dict[str, SegmentDescriptor] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def processes(self, *roles: str) -> list[dict[str, Any]]:
        return [entry for entry in self.cluster.entries() if entry["role"] in roles]

    def address(self, role: str) -> str:
        if role == "peers":  # conductors among themselves
            return f"127.0.0.1:{self.peer_port}"
        if role == "node" and self.victims:
            return self.victims["node address"]
        return str(self.processes(role)[0]["address"])

    def unix_path(self, role: str) -> str:
        """The Unix socket of the fast lane beside ``address``."""
        with self.store("operator") as operator:
            return next(each.unix_path for each in operator.nodes() if each.address == self.address(role))

    def url(self, address: str) -> str:
        plain = address.partition("://")[2] or address
        return f"{'https' if self.tls else 'http'}://{plain}"

    def store(self, caller: str) -> Client:
        """A client of the store. It is the caller's own process: over TCP."""
        tls = {"tls_ca": self.tls.ca, "tls_cert": self.tls.cert, "tls_key": self.tls.key} if self.tls else {}
        token = self.callers[caller].token
        return self.stack.enter_context(tanghulu.connect(self.cluster.master, token=token, transport="tcp", **tls))

    def channel(self, address: str) -> grpc.Channel:
        if not self.tls:
            return grpc.insecure_channel(address)
        ca, key, cert = (Path(p).read_bytes() for p in (self.tls.ca, self.tls.key, self.tls.cert))
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert))

    def connection(self, address: str) -> FastConnection:
        return FastConnection(Address.parse(address), tls=self.tls)

    def greeted(self, caller: str, address: str) -> tuple[FastConnection, Welcome]:
        """A connection with a session at a node or a worker."""
        connection = self.connection(address)
        call = messages.hello(
            f"isolation-{caller}", Credentials(token=self.callers[caller].token), "elsewhere", False, ()
        )
        try:
            return connection, messages.welcome(connection.call(call.method, call.request, call.reply_type))
        except TanghuluError:
            connection.close()
            raise

    @property
    def peer_port(self) -> int:
        """The port of conductors among themselves, which no list names."""
        (conductor,) = self.processes("conductor")
        known = {int(conductor[name].rpartition(":")[2]) for name in ("address", "metrics_address")}
        known.add(self.grpc_port)
        process = psutil.Process(conductor["pid"])
        listening = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        (port,) = listening - known
        return port

    grpc_port: int = 0
    gateway_port: int = 0
    gateway_grpc: int = 0


# --- calls


def fast(world: World, caller: Caller, address: str, method: Method[Any, Any], request: Any) -> Answer:
    """One call on the fast lane, behind a HELLO if there is a token."""
    connection = world.connection(address)
    try:
        if caller.token:
            call = messages.hello(f"isolation-{caller.name}", Credentials(token=caller.token), "elsewhere", False, ())
            greeting = connection.call(HELLO.number, call.request, bytes, deadline_s=DEADLINE_S)
            if method is HELLO:
                return "ok", str(greeting.message)
        reply = connection.call(method.number, request, method.reply, deadline_s=DEADLINE_S)
        return "ok", f"{reply.message} {bytes(reply.attachment)!r}"
    except TanghuluError as error:
        return error.code, error.message
    finally:
        connection.close()


def unix(world: World, caller: Caller, role: str, method: Method[Any, Any], request: Any) -> Answer:
    """One call on the fast lane's Unix socket, as programs of the same user on the same host can make it."""
    path = world.unix_path(role)
    connection = FastConnection(Address.parse(world.address(role)), path)
    try:
        if caller.token:
            shown = Credentials(token=caller.token)
            call = messages.hello(f"isolation-{caller.name}", shown, "elsewhere", False, ())
            connection.call(call.method, call.request, call.reply_type, deadline_s=DEADLINE_S)
        reply = connection.call(method.number, request, method.reply, deadline_s=DEADLINE_S)
        return "ok", str(reply.message)
    except TanghuluError as error:
        return error.code, error.message
    finally:
        connection.close()


def data(world: World, caller: Caller, role: str, session_id: int, lease_id: int) -> Answer:
    """A read over the port of transfers, in a session of somebody's, and under somebody's lease.

    A caller without a session of its own (``session_id`` other than 0) knows no secret and tries one.
    """
    segment = world.segments[role]
    with contextlib.ExitStack() as stack:
        session = SessionKey(session_id, bytes(range(16)))
        if not session_id:
            try:
                connection, welcome = world.greeted(caller.name, world.address(role))
            except TanghuluError as error:
                return error.code, error.message
            stack.callback(connection.close)
            session = welcome.session
        engine = TransferEngine(transports=["tcp"], host_id="elsewhere", config=EngineConfig(tls=world.tls))
        stack.callback(engine.close)
        try:
            remote = engine.open_segment(segment, session)
            into = bytearray(16)
            engine.transfer([TransferRequest(Opcode.READ, into, remote, 0, 16, 0, lease_id)], DEADLINE_S)
        except TanghuluError as error:
            return error.code, error.message
        return "ok", repr(into)


def rpc(world: World, shown: Metadata, address: str, method: MethodDescriptor, request: Message) -> Answer:
    """One gRPC call; of a stream what comes within a moment."""
    streams, path = method.server_streaming, f"/{method.containing_service.full_name}/{method.name}"
    told: list[str] = []
    with world.channel(address) as channel:
        kind = channel.unary_stream if streams else channel.unary_unary
        reply = GetMessageClass(method.output_type).FromString
        call = kind(path, request_serializer=type(request).SerializeToString, response_deserializer=reply)
        try:
            answer = call(request, timeout=2.0 if streams else DEADLINE_S, metadata=shown)
            told.extend(map(str, answer if streams else [answer]))
        except grpc.RpcError as error:
            if not streams or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                return error.code().name, error.details() or ""
        return "OK", "".join(told)


def http(world: World, url: str, method: str, path: str, headers: dict[str, str], body: Any = None) -> Answer:
    """One HTTP request; of an answer without an end the beginning."""
    verify = client_context(world.tls) if world.tls else False
    content = {"content": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
    with httpx.Client(base_url=world.url(url), verify=verify, trust_env=False, timeout=DEADLINE_S) as client:
        with client.stream(method, path, headers=headers, **content) as answer:
            text = b""
            if answer.headers.get("content-type", "").startswith("text/event-stream") and "events" in path:
                text = next(answer.iter_raw(), b"")
            else:
                text = answer.read()
        return str(answer.status_code), text.decode(errors="replace")


# --- the cluster


def _add_tenants(files: SecureFiles) -> dict[str, Caller]:
    """Two tenants with a token and a key each, beside what a cluster has."""
    read = lambda name: (files.folder / name).read_text().strip()  # noqa: E731
    callers = {
        "stranger": Caller("stranger"),
        "unknown": Caller("unknown", new_token(), new_key()),
        "operator": Caller("operator", read("operator.token"), read("api.key")),
        "cluster": Caller("cluster", read("cluster.token")),
    }
    lines = []
    for tenant in ("acme", "mallory"):
        callers[tenant] = Caller(tenant, new_token(), new_key())
        lines.append(f'[[tokens]]\nname = "{tenant}-app"\ntenant = "{tenant}"\nrights = ["read", "write"]')
        lines.append(f'sha256 = "{hash_of(callers[tenant].token)}"\n')
        keys.add(files.folder / "keys.toml", f"{tenant}-chat", callers[tenant].key, ("inference",), tenant)
    with (files.folder / "tokens.toml").open("a") as file:
        file.write("\n" + "\n".join(lines))
    return callers


@contextlib.contextmanager
def running_world(folder: Path, *, tls: bool, env: dict[str, str] | None = None) -> Iterator[World]:
    """A cluster with tokens and API keys, encrypted or not; with a gateway, a routing service and a router of pools."""
    files = prepare(folder / "state" / "secure", ("127.0.0.1",))
    callers = _add_tenants(files)
    certs = files.folder / "certs"
    shown = TlsFiles(str(certs / "client.pem"), str(certs / "client.key"), str(certs / "ca.pem")) if tls else NO_TLS
    grpc_port, gateway_port, gateway_grpc = free_port(), free_port(), free_port()
    flags = [
        "--engine",
        "mock",
        "--debug",
        "mock_speedup=1000",
        "--node-memory",
        "64MiB",
        "--nodes",
        "2",
        "--grpc-port",
        str(grpc_port),
    ]
    flags += ["--store-http-port", str(gateway_port), "--store-grpc-port", str(gateway_grpc)]
    settings = {
        "TANGHULU_TRANSPORTS": "tcp",
        "TANGHULU_TOKENS": str(files.folder / "tokens.toml"),
        "TANGHULU_TOKEN": f"@{files.folder / 'cluster.token'}",
        "TANGHULU_API_KEYS": str(files.folder / "keys.toml"),
        "TANGHULU_REQUIRE_TOKEN": "true",
    }
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("TANGHULU_TRANSPORTS", "tcp")
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        if tls:
            flags.append("--secure")
        else:
            for name, value in settings.items():
                patch.setenv(name, value)
        cluster = stack.enter_context(running_cluster(folder / "state", *flags))
        ports = {"grpc_port": grpc_port, "gateway_port": gateway_port, "gateway_grpc": gateway_grpc}
        world = World(cluster, files, shown, callers, **ports)
        stack.enter_context(world.stack)
        _start_routers(world, stack, folder)
        yield world


def _start_routers(world: World, stack: contextlib.ExitStack, folder: Path) -> None:
    """A routing service, and a router in front of the cluster's conductor."""
    service_port, service_grpc, pool_port = free_port(), free_port(), free_port()
    conductor = world.url(world.address("conductor"))
    pools = folder / "pools.toml"
    pools.write_text(_POOLS.format(url=conductor))
    tls = world.files.options("conductor")[:6] if world.tls else []
    common = ["--discovery", "none", *tls, "--api-keys", str(world.files.folder / "keys.toml")]
    for flags in (
        ["--port", str(service_port), "--grpc-port", str(service_grpc), *common],
        ["--port", str(pool_port), "--pools", str(pools), *common],
    ):
        log = stack.enter_context((folder / f"router-{flags[1]}.log").open("wb"))
        process = subprocess.Popen([sys.executable, "-m", "tanghulu", "router", *flags], stdout=log, stderr=log)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
    world.service, world.pool_router = f"127.0.0.1:{service_port}", f"127.0.0.1:{pool_port}"
    world.service_grpc = f"127.0.0.1:{service_grpc}"
    for address in (world.service, world.pool_router):
        log = folder / f"router-{address.rpartition(':')[2]}.log"
        eventually(partial(_is_live, world, address), START_DEADLINE_S, f"{address} answers: {log.read_text()}")


def _is_live(world: World, address: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return http(world, address, "GET", "/live", {})[0] == "200"
    return False


def tree_of(world: World) -> list[psutil.Process]:
    """All processes of the cluster."""
    parent = psutil.Process(world.cluster.process.pid)
    return [parent, *parent.children(recursive=True)]
