"""Connections between conductors: the methods a conductor serves, and the stream of each peer it follows.

If a conductor has a token for its master, its peers must prove the same one; if it has a certificate (--tls-cert),
their streams are encrypted, and with --tls-ca both sides present theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeAlias

from tanghulu.auth.certificate_roles import CONDUCTOR, require_role
from tanghulu.auth.credentials import Credentials
from tanghulu.auth.tenants import Right
from tanghulu.conductor.peers.outbox import MAX_PEERS, News, OwnRequests
from tanghulu.errors import Overloaded
from tanghulu.rpc import greeting
from tanghulu.rpc.fast_server import AnswerStream, FastService, Peer
from tanghulu.rpc.methods import END, HELLO, EndReply, Method, Rule
from tanghulu.rpc.streams import receive_all, send_all
from tanghulu.rpc.wire import U32, FastMessage
from tanghulu.types import Address

#: Seconds for which a change waits for more: one message instead of many.
GATHER_S = 0.002
#: Seconds without a heartbeat after which a peer counts as lost, and for which a new connection waits.
SILENCE_S = 4.0
#: Seconds for a peer to end a request.
ABORT_DEADLINE_S = 2.0

#: Ends the request of that id (None: all) if it is the client's ("": any client's); returns the number ended.
AbortHere: TypeAlias = Callable[[str | None, str], int]


class FollowRequest(FastMessage, frozen=True):
    """Request for a snapshot of all requests in progress, then changes."""


class AbortRequest(FastMessage, frozen=True):
    """A client's order to end a request, received by another conductor.

    ``request_id`` is that of a call or of one of its sequences; None means all. ``client`` "" means any client's.
    """

    request_id: str | None = None
    client: str = ""


class AbortReply(FastMessage, frozen=True):
    """Number of requests ended."""

    num_aborted: U32


FOLLOW = Method(70, "follow", FollowRequest, News, Rule("follow", Right.JOIN))
ABORT = Method(71, "abort", AbortRequest, AbortReply, Rule("abort", Right.JOIN))


class PeerService:
    """Streams the changes of this conductor's requests, and accepts orders, carried out by ``end`` and ``abort``."""

    def __init__(self, own: OwnRequests, end: Callable[[], EndReply], abort: AbortHere) -> None:
        self._own, self._end, self._abort = own, end, abort

    def serve(self, service: FastService) -> None:
        """Serve conductors and administrators that connect to ``service``."""
        service.register(HELLO, greeting.welcome)
        service.register(FOLLOW, self._follow)
        service.register(ABORT, lambda peer, order, _: AbortReply(self._abort(order.request_id, order.client)))
        service.register(END, lambda peer, request, _: self._end())

    def _follow(self, peer: Peer, request: FollowRequest, attachment: memoryview) -> AnswerStream:
        require_role(peer.roles, CONDUCTOR, "to follow a conductor")
        return send_all(peer, self._news(), News())

    async def _news(self) -> AsyncGenerator[News, None]:
        changed = asyncio.Event()
        outbox = self._own.follow(changed.set)
        if outbox is None:
            raise Overloaded(f"{MAX_PEERS} conductors follow this one already, the maximum; run fewer conductors")
        try:
            while True:
                changed.clear()
                news = self._own.take(outbox)
                for part in news.parts() if news else ():
                    yield part
                await changed.wait()
                await asyncio.sleep(GATHER_S)
        finally:
            self._own.unfollow(outbox)


async def follow(address: Address, credentials: Credentials) -> AsyncGenerator[News, None]:
    """Yield the changes of the conductor at ``address``, a snapshot first.

    Raises a typed error when the stream breaks, or the peer ends it.
    """
    connection = await greeting.connect(address, credentials.to(address), CONDUCTOR, SILENCE_S)
    async with aclosing(receive_all(connection, FOLLOW.call(FollowRequest()), SILENCE_S)) as messages:
        async for news in messages:
            yield news


async def abort(address: Address, request_id: str | None, client: str, credentials: Credentials) -> int:
    """Have the conductor at ``address`` end a client's request, or all; return the number. Raises a typed error."""
    connection = await greeting.connect(address, credentials.to(address), CONDUCTOR, ABORT_DEADLINE_S)
    try:
        order = AbortRequest(request_id, client)
        reply = await connection.call(ABORT.number, order, ABORT.reply, deadline_s=ABORT_DEADLINE_S)
        return reply.message.num_aborted
    finally:
        await connection.close()
