"""The connections between conductors: one gRPC server that tells, and a stream from each peer that is followed.

Protobuf stays in this file. Where a conductor has a token to show to its master, its peers must prove the same one;
where it has a certificate (--tls-cert), their streams are encrypted, and with --tls-ca both sides show theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from typing import Any, TypeAlias

import grpc.aio

from tanghulu.auth.certificate_roles import CONDUCTOR, require_role, shown_roles
from tanghulu.auth.credentials import Credentials, from_metadata
from tanghulu.auth.derived_tokens import is_token
from tanghulu.auth.tenants import Right
from tanghulu.conductor.peers.outbox import Begun, News, OwnRequests
from tanghulu.errors import Overloaded, TanghuluError, Unauthorized
from tanghulu.protos import conductor_pb2 as pb
from tanghulu.protos import conductor_pb2_grpc
from tanghulu.protos.common_pb2 import EndReply, EndRequest
from tanghulu.rpc import grpc_edge
from tanghulu.rpc.methods import Rule
from tanghulu.rpc.versions import PROTOCOL_VERSION, require_version
from tanghulu.types import Address, BlockHash, InstanceId

#: News wait so long for more to come, in seconds: one message instead of many.
GATHER_S = 0.002
#: Requests in one message; a snapshot of more comes in several.
MAX_BEGUN = 256
_PING_MS, _SILENCE_MS = 1000, 3000

#: What a caller's token has to allow, where the conductor was started with --tokens.
RULES = {f"/tanghulu.v1.ConductorPeer/{name}": Rule(name, Right.JOIN) for name in ("Follow", "Drain", "Abort")}
#: The time that a peer has to end a request, in seconds.
ABORT_DEADLINE_S = 2.0

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
#: Ends the request of that id (None: all) if it is the client's ("": anybody's), and returns how many it ended.
AbortHere = Callable[[str | None, str], int]


class PeerServicer(conductor_pb2_grpc.ConductorPeerServicer):
    """Reports to every follower what this conductor's requests do, and takes orders: ``end`` and ``abort`` obey them.

    Callers prove ``token``, also by one derived for one of ``addresses``; None: something in front has let them in.
    """

    addresses: Collection[str] = ()

    def __init__(self, own: OwnRequests, token: str | None, end: Callable[[], EndReply], abort: AbortHere) -> None:
        self._own, self._token, self._end, self._abort = own, token, end, abort

    async def Follow(self, request: pb.PeerFollow, context: Context) -> AsyncIterator[pb.PeerNews]:
        """Stream all that is under way, then changes."""
        changed = asyncio.Event()
        try:
            self._admit(request, context)
            outbox = self._own.follow(changed.set)
            if outbox is None:
                raise Overloaded("too many conductors follow this one")
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
            return
        try:
            while True:
                changed.clear()
                news = self._own.take(outbox)
                for message in _news(news) if news else ():
                    yield message
                await changed.wait()
                await asyncio.sleep(GATHER_S)
        finally:
            self._own.unfollow(outbox)

    async def Drain(self, request: EndRequest, context: Context) -> EndReply:
        """End in order; those who follow may order it, too."""
        try:
            self._authorize(context)
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
            raise
        return self._end()

    async def Abort(self, request: pb.PeerAbort, context: Context) -> pb.PeerAborted:
        """End requests of this conductor that a client has aborted at another."""
        try:
            self._authorize(context)
        except TanghuluError as error:
            await grpc_edge.abort(context, error)
            raise
        request_id = request.request_id if request.HasField("request_id") else None
        return pb.PeerAborted(num_aborted=self._abort(request_id, request.client))

    def _admit(self, request: pb.PeerFollow, context: Context) -> None:
        self._authorize(context)
        require_role(shown_roles(context.auth_context()), CONDUCTOR, "to follow a conductor")
        require_version(request.protocol_version, f"conductor {request.conductor_id}")

    def _authorize(self, context: Context) -> None:
        if self._token is None:  # an interceptor has looked already
            return
        shown = from_metadata(tuple(context.invocation_metadata() or ())).token
        if not is_token(self._token, shown, self.addresses):
            raise Unauthorized("conductors of one cluster prove to each other the token that they have for the master")


async def follow(address: Address, conductor_id: str, credentials: Credentials) -> AsyncGenerator[News, None]:
    """The news of the conductor that tells at ``address``, a snapshot first.

    Raises a typed error when the stream breaks; ends when the peer ends it.
    """
    channel = grpc_edge.channel(address, _PING_MS, _SILENCE_MS, credentials.tls.to(CONDUCTOR))
    hello = pb.PeerFollow(conductor_id=conductor_id, protocol_version=PROTOCOL_VERSION)
    try:
        async with grpc_edge.typed_errors(f"conductor {address}"):
            stub: Any = conductor_pb2_grpc.ConductorPeerStub(channel)
            async for message in stub.Follow(hello, metadata=credentials.to(address).metadata):
                yield _read(message)
    finally:
        await channel.close()


async def abort(address: Address, request_id: str | None, client: str, credentials: Credentials) -> int:
    """Have the conductor at ``address`` end a request, or all, of a client; returns how many. Raises a typed error."""
    channel = grpc_edge.channel(address, _PING_MS, _SILENCE_MS, credentials.tls.to(CONDUCTOR))
    try:
        async with grpc_edge.typed_errors(f"conductor {address}"):
            stub: Any = conductor_pb2_grpc.ConductorPeerStub(channel)
            order = pb.PeerAbort(request_id=request_id, client=client)
            reply = await stub.Abort(order, metadata=credentials.to(address).metadata, timeout=ABORT_DEADLINE_S)
            return int(reply.num_aborted)
    finally:
        await channel.close()


def _news(news: News) -> list[pb.PeerNews]:
    """``news`` in messages of at most MAX_BEGUN requests; at least one."""
    parts = [news.begun[at : at + MAX_BEGUN] for at in range(0, len(news.begun), MAX_BEGUN)] or [()]
    messages = [pb.PeerNews(begun=[_begun(b) for b in part]) for part in parts]
    messages[0].snapshot = news.snapshot
    messages[-1].prefilled.extend(news.prefilled)
    messages[-1].freed.extend(news.freed)
    return messages


def _begun(begun: Begun) -> pb.PeerBegun:
    return pb.PeerBegun(
        request_id=begun.request_id,
        worker=begun.worker,
        prefill_tokens=begun.prefill_tokens,
        num_blocks=begun.num_blocks,
        block_hashes=begun.hashes,
        decode_worker=begun.decode,
        prefilled=begun.prefilled,
    )


def _read(message: pb.PeerNews) -> News:
    begun = [
        Begun(
            b.request_id,
            InstanceId(b.worker),
            b.prefill_tokens,
            b.num_blocks,
            [BlockHash(h) for h in b.block_hashes],
            InstanceId(b.decode_worker),
            b.prefilled,
        )
        for b in message.begun
    ]
    return News(message.snapshot, begun, list(message.prefilled), list(message.freed))
