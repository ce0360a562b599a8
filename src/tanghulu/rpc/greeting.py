"""HELLO of callers that state their version, and present credentials if they have any: no session, no memory."""

from __future__ import annotations

import asyncio

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import DeadlineExceeded
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Call, FastConnection
from tanghulu.rpc.fast_server import Peer
from tanghulu.rpc.methods import HELLO, PROTOCOL_VERSION, HelloReply, HelloRequest, require_version
from tanghulu.runtime.tasks import undo_on_error
from tanghulu.types import Address


async def show(connection: AsyncFastConnection, credentials: Credentials, deadline_s: float) -> None:
    """Greet a peer that requires it for the credentials alone, if there are any; raises Unauthorized."""
    if credentials.shown:
        await greet(connection, credentials, deadline_s)


async def connect(address: Address, credentials: Credentials, role: str, deadline_s: float) -> AsyncFastConnection:
    """Open a connection to the process of ``role`` at ``address``, over TCP, and greet it.

    Raises NodeUnavailable, DeadlineExceeded, Unauthorized, or VersionMismatch.
    """
    try:
        async with asyncio.timeout(deadline_s):
            connection = await AsyncFastConnection.connect(address, tls=credentials.tls.to(role))
            with undo_on_error(connection.abort):
                await greet(connection, credentials, deadline_s)
    except TimeoutError:
        raise DeadlineExceeded(f"{address} did not answer within {deadline_s:g} s") from None
    return connection


async def greet(connection: AsyncFastConnection, credentials: Credentials, deadline_s: float) -> None:
    """Greet the process at the other end; raises Unauthorized, or VersionMismatch."""
    call = hello(credentials)
    reply = await connection.call(call.method, call.request, call.reply_type, deadline_s=deadline_s)
    require_version(reply.message.protocol_version, connection.peer)


def hello(credentials: Credentials) -> Call[HelloReply]:
    """Return the first call on a connection, for callers that need no session."""
    return HELLO.call(HelloRequest(PROTOCOL_VERSION, credentials.tenant, credentials.token))


def greet_blocking(connection: FastConnection, credentials: Credentials, deadline_s: float) -> None:
    """Greet on a blocking connection, which is closed if the peer refuses."""
    call = hello(credentials)
    with undo_on_error(connection.close):
        reply = connection.call(call.method, call.request, call.reply_type, deadline_s=deadline_s)
        require_version(reply.message.protocol_version, connection.peer)


def welcome(peer: Peer, request: HelloRequest, attachment: memoryview) -> HelloReply:
    """Answer HELLO if nothing belongs to a session; the authorizer, if any, has seen the credentials."""
    return HelloReply(PROTOCOL_VERSION)
