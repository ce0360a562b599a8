"""gRPC's edge: typed errors to gRPC statuses and back; one way to make channels and servers.

A server counts the calls of each caller, and receives a request only when there is room for it (``RequestRoom``):
until then gRPC's flow control keeps it with its sender. For this every request is read as a stream of one message,
which is the same on the wire. A tenant has at most half of the room, and operators have their own room: nobody delays
others by calls whose message does not arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from inspect import isasyncgen
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from tanghulu.auth import certificate_roles
from tanghulu.auth.api_keys import ApiKeysFile, KeyRight
from tanghulu.auth.credentials import NO_TLS, TlsFiles, from_metadata
from tanghulu.auth.places import ANYBODY, Caller, Places, RequestRoom
from tanghulu.auth.tls import client_context
from tanghulu.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    TanghuluError,
    error_from_code,
)
from tanghulu.types import Address

_STATUS = {
    "CHUNK_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "MODEL_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "NODE_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "NODE_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "MASTER_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "NOT_LEADER": grpc.StatusCode.UNAVAILABLE,
    "MOVED": grpc.StatusCode.UNAVAILABLE,
    "DIRECTORY_INCOMPLETE": grpc.StatusCode.UNAVAILABLE,
    "STORE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "QUOTA_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "OVERLOADED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "RATE_LIMIT_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "BODIES_FULL": grpc.StatusCode.UNAVAILABLE,
    "REQUEST_KILLS_WORKERS": grpc.StatusCode.FAILED_PRECONDITION,
    "CONFLICT": grpc.StatusCode.FAILED_PRECONDITION,
    "VERSION_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
    "CHECKSUM_MISMATCH": grpc.StatusCode.DATA_LOSS,
    "LEASE_EXPIRED": grpc.StatusCode.FAILED_PRECONDITION,
    "TRANSFER_FAILED": grpc.StatusCode.UNAVAILABLE,
    "INVALID_REQUEST": grpc.StatusCode.INVALID_ARGUMENT,
    "CONTEXT_LENGTH_EXCEEDED": grpc.StatusCode.INVALID_ARGUMENT,
    "UNAUTHORIZED": grpc.StatusCode.UNAUTHENTICATED,
    "FORBIDDEN": grpc.StatusCode.PERMISSION_DENIED,
    "DEADLINE_EXCEEDED": grpc.StatusCode.DEADLINE_EXCEEDED,
}
_CODE_KEY = "tanghulu-error"
#: Bound of a status's details. gRPC's clients drop trailing metadata beyond 8 KiB; a non-ASCII byte takes 3 there.
MOST_DETAILS_BYTES = 2048
_CUT = " ... "
#: Maximum message size of any process.
MESSAGE_BYTES = 64 << 20
_PING_MS = 10_000
#: Minimum interval of pings that a server allows.
_MIN_PING_MS = 900

#: Minimum interval of resolving a peer's name; gRPC's default is 30 s.
_RESOLVE_MS = 500
#: Time limit for a client's protocol handshake, and for a connection without a call, which is then closed; the client
#: reconnects by itself for its next call.
_HANDSHAKE_MS, _IDLE_MS = 10_000, 60_000

#: Options of every gRPC server behind a ``FastPort``.
SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", _IDLE_MS),
    ("grpc.so_reuseport", 0),
    # Up to 64 KiB of a message arrive before it is requested; after that, gRPC opens the window for all of it.
    ("grpc.http2.bdp_probe", 0),
]


def channel(
    address: Address | str, ping_ms: int = _PING_MS, silence_ms: int = 2 * _PING_MS, tls: TlsFiles = NO_TLS
) -> grpc.aio.Channel:
    """Return an asyncio channel to a process's port, encrypted if ``tls`` names files. The caller closes it.

    The peer is pinged every ``ping_ms`` (at least 1000: servers disconnect more frequent callers). It is lost if
    it gives no sign of life, or does not answer a new connection, for ``silence_ms``.
    """
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", silence_ms),  # also the limit of connecting
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", ping_ms),  # a peer whose host died is silent
        ("grpc.keepalive_timeout_ms", silence_ms),
        ("grpc.http2.ping_timeout_ms", silence_ms),  # used by newer versions
        ("grpc.dns_min_time_between_resolutions_ms", _RESOLVE_MS),  # a name may point elsewhere after a lost peer
        ("grpc.http2.max_pings_without_data", 0),  # 0 means unlimited; a stream that only listens sends no data
    ]
    if tls:
        if tls.peers and certificate_roles.has_roles(tls.ca):
            (role,) = tls.peers
            name = certificate_roles.name_for(Address.parse(str(address)).host, role)
            options.append(("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(str(address), _channel_credentials(tls), options=options)
    return grpc.aio.insecure_channel(str(address), options=options)


def _channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    client_context(files)  # explains faults of the files, which gRPC does not
    ca, key, cert = (Path(path).read_bytes() if path else None for path in (files.ca, files.key, files.cert))
    return grpc.ssl_channel_credentials(ca, key, cert)


def listening_credentials(files: TlsFiles, *, mutual: bool) -> grpc.ServerCredentials:
    """Return credentials for a gRPC server with its own listener; ``mutual`` requires certificates signed by ``ca``.

    Replaced files apply to new connections.
    """
    in_use = client_context(files)  # as above

    def read() -> grpc.ServerCertificateConfiguration:
        ca, key, cert = (Path(path).read_bytes() if path else None for path in (files.ca, files.key, files.cert))
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    def replaced() -> grpc.ServerCertificateConfiguration | None:
        """Return the files if they differ from those in use; None also if they do not fit. Called by gRPC's threads."""
        nonlocal in_use
        try:
            found = client_context(files)
            if found is in_use:
                return None
            fresh = read()
        except (ConfigError, OSError):
            return None
        in_use = found
        return fresh

    return grpc.dynamic_ssl_server_credentials(read(), replaced, require_client_authentication=mutual)


def listen(server: grpc.aio.Server, where: Address, tls: TlsFiles | None, *, mutual: bool, flag: str) -> Address:
    """Have ``server`` listen at ``where``, encrypted if there is ``tls``; returns the address with its port.

    Raises ConfigError if the port, set by ``flag``, is taken.
    """
    try:
        if tls is None:
            port = server.add_insecure_port(str(where))
        else:
            port = server.add_secure_port(str(where), listening_credentials(tls, mutual=mutual))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {where}: choose another {flag}") from error
    return Address(where.host, int(port))


#: Bytes of messages of all current calls, incoming ones counted as the largest; for operators, and for all others.
MAX_REQUEST_BYTES: Final = 256 << 20
#: Seconds that a call may wait for room, and then for its message: fewer, so that turns come in time.
WAIT_S: Final = 30.0
REQUEST_S: Final = 20.0


#: A key without the right of an admin has at most one in this many of the calls.
CALLS_ONE_IN: Final = 2


class CallAdmission(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc's own types are not strict
    """Authorizes and counts calls, and receives their requests; the first interceptor of its server."""

    def __init__(
        self,
        max_calls: int,
        authorizer: CallAuthorizer | None = None,
        *,
        message_bytes: int = MESSAGE_BYTES,
        most_bytes: int = MAX_REQUEST_BYTES,
        request_s: float = REQUEST_S,
        wait_s: float = WAIT_S,
    ) -> None:
        self._max_calls, self._authorizer = max_calls, authorizer
        self._request_s, self._wait_s = request_s, wait_s
        self._calls = Places("calls", CALLS_ONE_IN)
        self._rooms = {is_operator: RequestRoom(most_bytes, message_bytes) for is_operator in (True, False)}
        self._turns: dict[Hashable, asyncio.Future[None]] = {}

    @property
    def num_held(self) -> int:
        """Number of calls whose request is arriving, or has arrived."""
        return sum(room.num_held for room in self._rooms.values())

    @property
    def num_waiting(self) -> int:
        """Number of calls waiting for room."""
        return sum(room.num_waiting for room in self._rooms.values())

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the call's handler, changed to receive its request itself, or one that rejects the call."""
        handler, caller = await continuation(handler_call_details), ANYBODY
        if handler is None:
            return handler
        if self._authorizer is not None:
            metadata = tuple(handler_call_details.invocation_metadata or ())
            try:
                caller = await self._authorizer.admit(handler_call_details.method, metadata)
            except TanghuluError as error:
                return refusal(handler, error)
        if handler.request_streaming:
            return handler

        async def unary(_: Any, context: Any) -> Any:
            return await handler.unary_unary(await self._receive(context, caller), context)

        async def stream(_: Any, context: Any) -> None:
            answers = handler.unary_stream(await self._receive(context, caller), context)
            if not isasyncgen(answers):
                await answers  # it writes on its own
                return
            async with aclosing(answers):
                async for message in answers:
                    await context.write(message)

        codec = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, *codec)
        return grpc.stream_unary_rpc_method_handler(unary, *codec)

    async def _receive(self, context: Any, caller: Caller) -> Any:
        """Receive the request, with a place and room reserved until the call ends."""
        try:
            self._calls.take(caller, self._max_calls)
        except Overloaded as error:
            await abort(context, error)
        context.add_done_callback(lambda _: self._calls.give_back(caller))
        call, room = object(), self._rooms[caller.is_operator]
        context.add_done_callback(lambda _: self._let_in(room.leave(call)))
        if not room.enter(call, caller):
            await self._wait(call, context)
        try:
            async with asyncio.timeout(self._request_s):
                request = await context.read()
        except TimeoutError:
            await abort(context, DeadlineExceeded(f"the request did not arrive within {self._request_s:g} s"))
        if request is grpc.aio.EOF:
            await abort(context, InvalidRequest("the call ended without a request"))
        self._let_in(room.came(call, request.ByteSize()))
        return request

    async def _wait(self, call: Hashable, context: Any) -> None:
        turn = self._turns[call] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except TimeoutError:
            await abort(context, Overloaded("other gRPC requests use all memory for messages; try again later"))
        finally:
            self._turns.pop(call, None)

    def _let_in(self, calls: list[Hashable]) -> None:
        for call in calls:
            turn = self._turns.get(call)
            if turn is not None and not turn.done():
                turn.set_result(None)


def guarded_server(
    max_calls: int,
    authorizer: CallAuthorizer | None,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    message_bytes: int = MESSAGE_BYTES,
) -> grpc.aio.Server:
    """Return a gRPC server with this admission, with ``options`` beside those of every server."""
    admission = CallAdmission(max_calls, authorizer, message_bytes=message_bytes)
    return grpc.aio.server(
        options=list((dict(SERVER_OPTIONS) | dict(options)).items()),
        interceptors=[admission],
        maximum_concurrent_rpcs=2 * max_calls,  # twice: a rejected call counts, too, for a moment
    )


def refusal(handler: grpc.RpcMethodHandler[Any, Any], error: TanghuluError) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that answers ``error`` in place of ``handler``, without receiving a message."""

    async def unary(request: Any, context: Any) -> Any:
        await abort(context, error)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await abort(context, error)
        yield

    # As streams, whatever the call is, so that its message is not received before it is rejected.
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream)
    return grpc.stream_unary_rpc_method_handler(unary)


def shortened(message: str, most_bytes: int = MOST_DETAILS_BYTES) -> str:
    """Shorten a long ``message`` in the middle: it quotes something long, and both ends are informative."""
    data = message.encode("utf-8", "replace")
    if len(data) <= most_bytes:
        return data.decode()
    half = (most_bytes - len(_CUT)) // 2
    return data[:half].decode("utf-8", "ignore") + _CUT + data[-half:].decode("utf-8", "ignore")


def status_of(error: TanghuluError) -> grpc.StatusCode:
    """Return the gRPC status of a typed error."""
    return _STATUS.get(error.code, grpc.StatusCode.INTERNAL)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: TanghuluError, more: tuple[tuple[str, str], ...] = ()
) -> None:
    """End a server call with the status of ``error``; its code is in the trailing metadata, beside ``more``."""
    try:
        await context.abort(
            status_of(error), shortened(error.message), trailing_metadata=((_CODE_KEY, error.code), *more)
        )
    except grpc.aio.AbortError as aborted:
        asyncio.get_running_loop().call_soon(_break_cycle, aborted)
        raise


def _break_cycle(aborted: grpc.aio.AbortError) -> None:
    """Release a rejected request: gRPC's call keeps the exception, whose traceback keeps the call and its message."""
    aborted.__traceback__ = aborted.__context__ = None


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> TanghuluError:
    """Return the typed error behind a failed call to ``peer``."""
    for key, value in error.trailing_metadata() or ():
        if key == _CODE_KEY:
            return error_from_code(str(value), error.details() or "")
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{peer} did not answer in time")
    return NodeUnavailable(f"{peer}: {error.code().name.lower()}: {error.details()}")


@asynccontextmanager
async def typed_errors(peer: str, unavailable: Callable[[str], TanghuluError] = NodeUnavailable) -> AsyncIterator[None]:
    """Convert gRPC's own errors inside the block to typed ones; ``unavailable`` makes the one for a dead peer."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        typed = from_rpc_error(error, peer)
        if type(typed) is NodeUnavailable:
            raise unavailable(typed.message) from error
        raise typed from error


class CallAuthorizer(Protocol):
    """Admits callers before their messages are received."""

    async def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Caller:
        """Return the owner of a call's place; raises a typed error for a caller who may not have one."""


class GrpcKeyAuthorizer:
    """Admits callers with an API key that has the right given by ``rights`` for the method, by its full name.

    None there accepts any key. Methods without an entry are for administrators.
    """

    def __init__(self, keys: ApiKeysFile, rights: Mapping[str, KeyRight | None]) -> None:
        self._keys, self._rights = keys, rights

    async def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Caller:
        """Return the owner of a call's place. Raises Unauthorized, Forbidden."""
        key = self._keys.table.authenticate(from_metadata(tuple(metadata)).token)
        right = self._rights.get(method, KeyRight.ADMIN)
        if right is not None:
            key.require(right, method)
        return Caller.of_key(key)
