"""The other conductors of the namespace: found by Discovery, followed one stream each, forgotten when they are gone.

A stream that breaks is asked for again, and its first message is everything anew. What the peer told counts meanwhile,
for ``FORGET_AFTER_S``: then, or as soon as Discovery has lost a peer whose stream is down, it and its requests are
forgotten. (When a conductor dies its workers end its requests.)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tanghulu.auth.credentials import Credentials
from tanghulu.auth.tokens import TokensFile
from tanghulu.conductor.peers import wire
from tanghulu.conductor.peers.inbox import PeerRequests
from tanghulu.conductor.peers.outbox import MAX_PEERS, OwnRequests
from tanghulu.discovery.base import Discovery, EventKind, Instance, InstanceEvent
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.protos import conductor_pb2_grpc
from tanghulu.protos.common_pb2 import EndReply
from tanghulu.rpc.authorizer import GrpcAuthorizer, follow_tokens
from tanghulu.rpc.grpc_edge import MOST_CONNECTIONS, guarded_server, listen
from tanghulu.runtime.tasks import beside
from tanghulu.types import Address, InstanceId, Role

_log = structlog.get_logger(__name__)
#: The attribute of a conductor's instance that says where it tells its peers.
ATTRIBUTE = "peers"
FORGET_AFTER_S = 2.0
#: Calls of conductors under way at one time, followers' streams included.
MAX_CALLS = 1024
_RETRY_FIRST_S, _RETRY_MOST_S = 0.05, 1.0


@dataclass(eq=False)
class _Peer:
    instance: Instance
    task: asyncio.Task[None] | None = None
    forgetting: asyncio.TimerHandle | None = None
    last_error: str = ""


class PeerGroup:
    """The peers of a conductor: ``start`` tells them, ``follow`` listens to them; ``close`` ends both."""

    def __init__(
        self,
        conductor_id: str,
        own: OwnRequests,
        heard: PeerRequests,
        credentials: Credentials,
        end: Callable[[], EndReply],
        abort: wire.AbortHere,
        tokens: TokensFile | None = None,
    ) -> None:
        self._end, self._abort = end, abort
        self._tokens = tokens
        self._conductor_id, self._own, self._heard, self._credentials = conductor_id, own, heard, credentials
        authorizer = None if tokens is None else GrpcAuthorizer(tokens, wire.RULES)
        self._server = guarded_server(MAX_CALLS, authorizer, {MOST_CONNECTIONS: MAX_CALLS})
        self._peers: dict[InstanceId, _Peer] = {}
        self.address = Address("", 0)

    @property
    def num_peers(self) -> int:
        """Number of conductors that are followed, or being connected to."""
        return len(self._peers)

    @property
    def told_address(self) -> str:
        """The address of the port for peers; "" without one."""
        return str(self.address) if self.address.port else ""

    async def start(self, host: str, port: int, reachable_host: str) -> None:
        """Tell peers on ``port`` (0 picks one) of ``host``. Raises ConfigError if it is taken.

        Where there is TLS, a conductor without a certificate opens no port.
        """
        token = None if self._tokens else self._credentials.token
        servicer = wire.PeerServicer(self._own, token, self._end, self._abort)
        conductor_pb2_grpc.add_ConductorPeerServicer_to_server(servicer, self._server)
        tls = self._credentials.tls
        if tls and not tls.cert:
            _log.warning("peers.not_told", why="--tls-ca is given without --tls-cert, and peers speak TLS")
        else:
            listening = listen(self._server, Address(host, port), tls or None, mutual=bool(tls.ca), flag="--peer-port")
            self.address = Address(reachable_host, listening.port)
            servicer.addresses = {str(self.address), str(Address(host, listening.port))}
            if self._tokens is not None:
                self._tokens.answer_at(self.address, Address(host, listening.port))
        await self._server.start()

    async def follow(self, discovery: Discovery, namespace: str) -> None:
        """Follow the conductors that come and go, and the tokens that are let in, until cancelled."""
        async with beside(*([follow_tokens(self._tokens)] if self._tokens is not None else ())):
            async for event in discovery.watch(Role.CONDUCTOR, namespace=namespace):
                self.apply(event)

    def apply(self, event: InstanceEvent) -> None:
        if event.instance is not None and event.kind is EventKind.PUT:
            self._put(event.instance)
        elif event.instance is not None and event.kind is EventKind.DELETE:
            self._gone(event.instance.id)

    async def abort(self, request_id: str | None, client: str) -> int:
        """Have all peers end a request (None: all) of ``client`` ("": anybody); returns how many were ended.

        A peer that does not answer is passed over: its requests end with it, or go on if it is merely slow.
        """
        ended = await asyncio.gather(*(self._abort_at(peer, request_id, client) for peer in self._peers.values()))
        return sum(ended)

    async def _abort_at(self, peer: _Peer, request_id: str | None, client: str) -> int:
        address = Address.parse(peer.instance.attributes[ATTRIBUTE])
        try:
            return await wire.abort(address, request_id, client, self._credentials)
        except TanghuluError as error:
            _log.warning("peer.not_aborted", peer=peer.instance.id, code=error.code, error=error.message)
            return 0

    async def close(self) -> None:
        tasks = [peer.task for peer in self._peers.values() if peer.task is not None]
        for peer_id in list(self._peers):
            self._gone(peer_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.stop(0)

    def _put(self, instance: Instance) -> None:
        where, known = instance.attributes.get(ATTRIBUTE, ""), self._peers.get(instance.id)
        if known is not None and known.instance.attributes.get(ATTRIBUTE) == where:
            return
        if known is not None:
            self._gone(instance.id)
        with contextlib.suppress(InvalidRequest):  # it does not tell, or not in a way that is understood here
            address = Address.parse(where)
            if address != self.address and len(self._peers) < MAX_PEERS:
                peer = self._peers[instance.id] = _Peer(instance)
                peer.task = asyncio.create_task(self._listen(peer, address), name=f"peer {instance.id}")

    def _gone(self, peer_id: InstanceId) -> None:
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            return
        if peer.task is not None:
            peer.task.cancel()
        self._keep(peer)
        self._heard.forget(peer_id)

    def _keep(self, peer: _Peer) -> None:
        if peer.forgetting is not None:
            peer.forgetting.cancel()
            peer.forgetting = None

    async def _listen(self, peer: _Peer, address: Address) -> None:
        loop, retry_s = asyncio.get_running_loop(), _RETRY_FIRST_S
        while True:
            try:
                async with contextlib.aclosing(wire.follow(address, self._conductor_id, self._credentials)) as stream:
                    async for news in stream:
                        self._keep(peer)
                        retry_s, peer.last_error = _RETRY_FIRST_S, ""
                        self._heard.hear(peer.instance.id, news)
            except TanghuluError as error:
                if error.message != peer.last_error:
                    _log.info("peer.stream_ended", peer=peer.instance.id, code=error.code, error=error.message)
                peer.last_error = error.message
            if peer.forgetting is None:
                peer.forgetting = loop.call_later(FORGET_AFTER_S, self._heard.forget, peer.instance.id)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _RETRY_MOST_S)
