"""Serving side of the shm transport: a Unix socket that hands the segment's descriptor to peers on this host.

Owns the socket and its peers' connections; finds the peers' processes (pidfd), which others watch. A peer keeps its
connection open while it uses the mapping; the mapping may outlive the connection, which is why leases of mapped ranges
do too (see ``access``), unless the segment's owner can rule that out (``shm_hang_up_frees``). Only processes of this
user are admitted, and, where leases are kept, only the process that opened the session. It gets the memory for reading,
and for writing too if its session may write.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import structlog

from tanghulu.errors import InvalidRequest, NodeUnavailable, Overloaded, TanghuluError, Unauthorized
from tanghulu.rpc.sockets import peer_pidfd, peer_process, peer_uid, private_files
from tanghulu.runtime.tasks import undo_on_error
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.transfer_engine.core.segment import MAX_NAME_BYTES, Endpoint, SessionKey
from tanghulu.transfer_engine.core.transport import ServeContext
from tanghulu.transfer_engine.core.wire import (
    PREFIX_BYTES,
    SHM_HELLO_BYTES,
    MalformedMessage,
    OtherVersion,
    check_shm_hello_version,
    pack_shm_answer,
    parse_shm_hello,
)

_log = structlog.get_logger(__name__)
_HELLO_TIMEOUT_S = 5.0
#: Pause after a failure to accept a connection.
_ACCEPT_AGAIN_S = 1.0
_BACKLOG = 128


class ShmListener:
    """Serves the file descriptor of a segment, of one generation, at a Unix socket (mode 0600)."""

    def __init__(self, context: ServeContext) -> None:
        path = context.listen.unix_path
        assert path is not None, "shm needs a path to listen at"
        self.num_refused = 0
        self._segment = context.segment
        self._access = context.access
        self._path = path
        self._generation = context.generation
        self._watch_process = context.watch_process
        self._on_hang_up = context.on_hang_up
        self._max_connections = context.limits.max_connections
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._peers: set[asyncio.Task[None]] = set()

    @property
    def num_connections(self) -> int:
        """Peers with an open connection."""
        return len(self._peers)

    def endpoints(self) -> list[Endpoint]:
        """Return the socket's path."""
        return [Endpoint("shm", self._path)]

    def check(self) -> None:
        """Assert the invariants: while it listens, it accepts."""
        assert self._listener is None or (self._accepting is not None and not self._accepting.done())

    async def start(self) -> None:
        """Bind (replacing a dead process's socket file) and listen; raises OSError if the path cannot be used."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with undo_on_error(listener.close):
            _unlink_if_dead(self._path)
            with private_files():
                listener.bind(self._path)
            listener.listen(_BACKLOG)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener), name=f"shm listener {self._path}")

    async def close(self) -> None:
        """Disconnect every peer and unlink the socket file."""
        if self._listener is None or self._accepting is None:
            return
        listener, self._listener = self._listener, None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        tasks = [self._accepting, *self._peers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        listener.close()

    # --- inside

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is free; peers use tcp meanwhile
                _log.warning("shm.cannot_accept", path=self._path, error=str(error))
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            task = asyncio.create_task(self._serve(peer))
            self._peers.add(task)
            task.add_done_callback(self._peers.discard)

    async def _serve(self, peer: socket.socket) -> None:
        session_id: int | None = None
        with peer:
            try:
                async with asyncio.timeout(_HELLO_TIMEOUT_S):
                    session_id = await self._greet(peer)
                while session_id is not None and await asyncio.get_running_loop().sock_recv(peer, 64):
                    pass  # a peer sends nothing more; we wait for its end
            except (OSError, MalformedMessage, TimeoutError):
                pass  # the peer is gone or does not speak our protocol: closing is the answer
        if session_id is not None:
            self._on_hang_up(session_id)

    async def _greet(self, peer: socket.socket) -> int | None:
        """Read the hello and answer it; return the session of the peer if it was admitted."""
        loop = asyncio.get_running_loop()
        try:
            name_bytes, generation, session = parse_shm_hello(await _receive_hello(peer))
        except OtherVersion as other:
            await self._refuse(peer, other.error)
            peer.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(peer, 4096):
                pass  # further bytes of it must not reset the connection before it has received our answer
            return None
        if name_bytes > MAX_NAME_BYTES:
            raise MalformedMessage(f"segment name of {name_bytes} bytes")
        name = (await _receive(peer, name_bytes)).decode(errors="replace")
        try:
            writable = self._admit(peer, name, generation, session)
        except TanghuluError as error:
            await self._refuse(peer, error)
            return None
        # A fresh stream socket has room for these few bytes, so sending without waiting cannot block.
        answer = pack_shm_answer(self._segment.size_bytes, self._segment.address)
        socket.send_fds(peer, [answer], self._segment.descriptors(writable=writable))
        return session.session_id

    async def _refuse(self, peer: socket.socket, error: TanghuluError) -> None:
        self.num_refused += 1
        answer = pack_shm_answer(self._segment.size_bytes, error=error)
        await asyncio.get_running_loop().sock_sendall(peer, answer)

    def _admit(self, peer: socket.socket, name: str, generation: int, session: SessionKey) -> bool:
        """Raise the refusal of the peer; else return whether it may write."""
        uid = peer_uid(peer)
        if uid != os.getuid():
            raise Unauthorized(f"uid {uid} may not map the memory of uid {os.getuid()}; use tcp")
        if name != self._segment.name or generation != self._generation:
            raise NodeUnavailable(
                f"segment {name!r} of generation {generation} has ended; "
                f"{self._segment.name!r} of generation {self._generation} is served now; fetch its descriptor again"
            )
        if len(self._peers) > self._max_connections:
            raise Overloaded(f"{self._max_connections} peers map this segment; use tcp")
        if self._access is None:
            return True
        self._access.authenticate(session)
        self._admit_process(peer, self._access, session.session_id)
        return self._access.may_write(session.session_id)

    def _admit_process(self, peer: socket.socket, access: AccessTable, session_id: int) -> None:
        pid, session_pid = peer_process(peer), access.session_pid(session_id)
        if not pid or session_pid != pid:
            raise Unauthorized(f"session {session_id} belongs to process {session_pid}, not to {pid}; use tcp")
        try:
            pidfd = peer_pidfd(peer)
        except OSError as error:
            raise InvalidRequest(f"process {pid} cannot be watched ({error}); use tcp") from error
        self._watch_process(session_id, pidfd)


async def _receive_hello(peer: socket.socket) -> bytes:
    """Return SHM_HELLO_BYTES; raises OtherVersion as soon as they begin like another's, which may be shorter."""
    begin = await _receive(peer, PREFIX_BYTES)
    check_shm_hello_version(begin)
    return begin + await _receive(peer, SHM_HELLO_BYTES - len(begin))


async def _receive(peer: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = await asyncio.get_running_loop().sock_recv(peer, num_bytes - len(data))
        if not piece:
            raise MalformedMessage("the peer closed the connection inside its hello")
        data += piece
    return data


def _unlink_if_dead(path: str) -> None:
    """Remove the socket file of a dead process; one that answers stays and makes ``bind`` fail."""
    if not os.path.exists(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except BlockingIOError:
            return
