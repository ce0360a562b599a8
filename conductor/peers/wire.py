"""The connections between conductors: the methods that a conductor answers, and the stream of each peer it follows.

Where a conductor has a token to show to its master, its peers must prove the same one; where it has a certificate
(--tls-cert), their streams are encrypted, and with --tls-ca both sides show theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeAlias

from tanghulu.auth.certificate_roles import CONDUCTOR, require_role
from tanghulu.auth.credentials import Credentials
from tanghulu.auth.tenants import Right
from tanghulu.conductor.peers.outbox import News, OwnRequests
from tanghulu.errors import Overloaded
from tanghulu.rpc import greeting
from tanghulu.rpc.fast_server import AnswerStream, FastService, Peer
from tanghulu.rpc.methods import END, HELLO, EndReply, Method, Rule
from tanghulu.rpc.streams import receive_all, send_all
from tanghulu.rpc.wire import U32, FastMessage
from tanghulu.types import Address

#: News wait so long for more to come, in seconds: one message instead of many.
GATHER_S = 0.002
#: Seconds without a beat after which a peer counts as lost, and for which a new connection waits.
SILENCE_S = 4.0
#: The time that a peer has to end a request, in seconds.
ABORT_DEADLINE_S = 2.0

#: Ends the request of that id (None: all) if it is the client's ("": anybody's), and returns how many it ended.
AbortHere: TypeAlias = Callable[[str | None, str], int]


class FollowRequest(FastMessage, frozen=True):
    """All that is under way, then changes."""


class AbortRequest(FastMessage, frozen=True):
    """A client's order to end a request, which came in at another conductor.

    ``request_id`` is that of a call or of one of its sequences; None: all. ``client`` "" ends anybody's.
    """

    request_id: str | None = None
    client: str = ""


class AbortReply(FastMessage, frozen=True):
    """How many were ended."""

    num_aborted: U32


FOLLOW = Method(70, "follow", FollowRequest, News, Rule("follow", Right.JOIN))
ABORT = Method(71, "abort", AbortRequest, AbortReply, Rule("abort", Right.JOIN))


class PeerService:
    """Streams what this conductor's requests do, and takes orders: ``end`` and ``abort`` obey them."""

    def __init__(self, own: OwnRequests, end: Callable[[], EndReply], abort: AbortHere) -> None:
        self._own, self._end, self._abort = own, end, abort

    def serve(self, service: FastService) -> None:
        """Answer conductors and administrators that come to ``service``."""
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
            raise Overloaded("too many conductors follow this one")
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
    """The news of the conductor that listens at ``address``, a snapshot first.

    Raises a typed error when the stream breaks, or the peer ends it.
    """
    connection = await greeting.connect(address, credentials.to(address), CONDUCTOR, SILENCE_S)
    async with aclosing(receive_all(connection, FOLLOW.call(FollowRequest()), SILENCE_S)) as messages:
        async for news in messages:
            yield news


async def abort(address: Address, request_id: str | None, client: str, credentials: Credentials) -> int:
    """Have the conductor at ``address`` end a request, or all, of a client; returns how many. Raises a typed error."""
    connection = await greeting.connect(address, credentials.to(address), CONDUCTOR, ABORT_DEADLINE_S)
    try:
        order = AbortRequest(request_id, client)
        reply = await connection.call(ABORT.number, order, ABORT.reply, deadline_s=ABORT_DEADLINE_S)
        return reply.message.num_aborted
    finally:
        await connection.close()
