"""The other conductors of the namespace: found by Discovery, followed by one stream each, forgotten after they leave.

A broken stream is reopened, and its first message is a full snapshot. Meanwhile the peer's last report counts, for
``FORGET_AFTER_S``: then, or as soon as Discovery loses a peer whose stream is down, it and its requests are forgotten.
(When a conductor dies, its workers end its requests.)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from tanghulu.auth.credentials import Credentials
from tanghulu.auth.tls import ServerTls
from tanghulu.auth.tokens import OneToken, TokensFile
from tanghulu.conductor.peers import wire
from tanghulu.conductor.peers.inbox import PeerRequests
from tanghulu.conductor.peers.outbox import MAX_PEERS, OwnRequests
from tanghulu.discovery.base import Discovery, EventKind, Instance, InstanceEvent
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.rpc.authorizer import Authorizer
from tanghulu.rpc.fast_port import FastPort
from tanghulu.rpc.fast_server import FastService
from tanghulu.rpc.methods import EndReply
from tanghulu.runtime.tasks import beside
from tanghulu.types import Address, InstanceId, Role

_log = structlog.get_logger(__name__)
#: Attribute of a conductor's instance with the address at which it serves its peers.
ATTRIBUTE = "peers"
FORGET_AFTER_S = 2.0
#: Connections of conductors and administrators.
MAX_CONNECTIONS = 1024
_RETRY_FIRST_S, _RETRY_MOST_S = 0.05, 1.0


@dataclass(eq=False)
class _Peer:
    instance: Instance
    task: asyncio.Task[None] | None = None
    forgetting: asyncio.TimerHandle | None = None
    last_error: str = ""


class PeerGroup:
    """The peers of a conductor: ``start`` reports to them, ``follow`` listens to them; ``close`` ends both."""

    def __init__(
        self,
        own: OwnRequests,
        requests_of_peers: PeerRequests,
        credentials: Credentials,
        end: Callable[[], EndReply],
        abort: wire.AbortHere,
        tokens: TokensFile | None = None,
    ) -> None:
        self._requests_of_peers, self._credentials = requests_of_peers, credentials
        self._service = FastService(max_connections=MAX_CONNECTIONS)
        wire.PeerService(own, end, abort).serve(self._service)
        self._tokens = tokens or (OneToken(credentials.token) if credentials.token else None)
        self._authorizer = None if self._tokens is None else Authorizer(self._tokens)
        if self._authorizer is not None:
            self._authorizer.authorize(self._service)
        self._port: FastPort | None = None
        self._peers: dict[InstanceId, _Peer] = {}
        self.address = Address("", 0)

    @property
    def num_peers(self) -> int:
        """Number of conductors followed or being connected to."""
        return len(self._peers)

    @property
    def published_address(self) -> str:
        """Published address of the port for peers; "" without one."""
        return str(self.address) if self.address.port else ""

    async def start(self, host: str, port: int, reachable_host: str, run_dir: Path) -> None:
        """Serve peers on ``port`` (0 picks one) of ``host``, and on a socket in ``run_dir``.

        Raises ConfigError if the port is taken. With TLS, a conductor without a certificate opens no port.
        """
        tls = self._credentials.tls
        if tls and not tls.cert:
            _log.warning("peers.not_published", why="--tls-ca is given without --tls-cert, and peers speak TLS")
            return
        server_tls = ServerTls(tls, mutual=bool(tls.ca)) if tls else None
        opened = FastPort(self._service, run_dir, "conductor", server_tls)
        self.address = await opened.bind(host, port, reachable_host, flag="--peer-port")
        if self._tokens is not None:
            self._tokens.answer_at(self.address, Address(host, self.address.port))
        await opened.open()
        self._port = opened

    async def follow(self, discovery: Discovery, namespace: str) -> None:
        """Follow the arrival and departure of conductors, and the accepted tokens, until cancelled."""
        async with beside(*([self._authorizer.watch(self._service)] if self._authorizer is not None else ())):
            async for event in discovery.watch(Role.CONDUCTOR, namespace=namespace):
                self.apply(event)

    def apply(self, event: InstanceEvent) -> None:
        if event.instance is not None and event.kind is EventKind.PUT:
            self._put(event.instance)
        elif event.instance is not None and event.kind is EventKind.DELETE:
            self._gone(event.instance.id)

    async def abort(self, request_id: str | None, client: str) -> int:
        """Have all peers end a request (None: all) of ``client`` ("": any client); return the number ended.

        A peer that does not answer is skipped: its requests end with it, or continue if it is merely slow.
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
        if self._port is not None:
            closing, self._port = self._port, None
            await closing.close(0)

    def _put(self, instance: Instance) -> None:
        where, known = instance.attributes.get(ATTRIBUTE, ""), self._peers.get(instance.id)
        if known is not None and known.instance.attributes.get(ATTRIBUTE) == where:
            return
        if known is not None:
            self._gone(instance.id)
        with contextlib.suppress(InvalidRequest):  # it sends no reports, or not in a format known here
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
        self._requests_of_peers.forget(peer_id)

    def _keep(self, peer: _Peer) -> None:
        if peer.forgetting is not None:
            peer.forgetting.cancel()
            peer.forgetting = None

    async def _listen(self, peer: _Peer, address: Address) -> None:
        loop, retry_s = asyncio.get_running_loop(), _RETRY_FIRST_S
        while True:
            try:
                async with contextlib.aclosing(wire.follow(address, self._credentials)) as stream:
                    async for news in stream:
                        self._keep(peer)
                        retry_s, peer.last_error = _RETRY_FIRST_S, ""
                        self._requests_of_peers.on_news(peer.instance.id, news)
            except TanghuluError as error:
                if error.message != peer.last_error:
                    _log.info("peer.stream_ended", peer=peer.instance.id, code=error.code, error=error.message)
                peer.last_error = error.message
            if peer.forgetting is None:
                peer.forgetting = loop.call_later(FORGET_AFTER_S, self._requests_of_peers.forget, peer.instance.id)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _RETRY_MOST_S)
