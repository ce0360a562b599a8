"""The clients of a node: one session each, over any number of connections, watched until its process exits.

A client identifies itself with a random id in its first frame; all its connections share one session, so that threads
may use several. When the last connection is gone the session is lost: the access table ends its leases, and keeps
mapped ones in quarantine until the process has exited (watched here by pidfd) or the client comes back and states which
ones it still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import structlog

from tanghulu.errors import Overloaded, Unauthorized
from tanghulu.rpc.fast_server import Handler
from tanghulu.store.node.state.node_state import NodeState
from tanghulu.store.node.state.outcomes import Holder
from tanghulu.transfer_engine.core.access import unguessable_numbers
from tanghulu.transfer_engine.core.segment import SessionKey
from tanghulu.transfer_engine.server import ProcessWatch

_log = structlog.get_logger(__name__)

MAX_SESSIONS = 16384
#: The reason why memory is not mapped across PID namespaces, and the remedy.
OTHER_NAMESPACE = (
    "a client of another PID namespace cannot be recognised before Linux 6.9; "
    "share the namespace (compose: pid: service:node, Kubernetes: hostPID) or it gets copies"
)
_MAX_CLIENT_ID = 128


@dataclass(eq=False)
class Session:
    """One client. ``owned`` holds its session's number and those of lost ones with leases that it may give back."""

    key: SessionKey
    client_id: str
    pid: int | None
    holder: Holder
    owned: tuple[int, ...]
    num_connections: int = 1

    @property
    def session_id(self) -> int:
        return self.key.session_id


@dataclass(frozen=True, slots=True)
class Greeting:
    """A client's greeting; ``pid`` and ``pidfd`` come from the kernel (Unix sockets), never from the client."""

    client_id: str
    pid: int | None
    wants_shm: bool
    held_lease_ids: Container[int] = field(default=frozenset())
    may_write: bool = False
    pidfd: Callable[[], int] | None = None


class Sessions:
    """Opens, joins and ends sessions. ``on_freed`` is called after leases of a vanished client ended."""

    def __init__(self, state: NodeState, on_freed: Callable[[], None]) -> None:
        self._state, self._leases = state, state.leases
        self._on_freed = on_freed
        self._watch = ProcessWatch(self._exited)
        self._by_client: dict[tuple[str, int | None], Session] = {}
        self._lost: dict[tuple[str, int | None], tuple[int, ...]] = {}
        self._pids: dict[int, tuple[str, int | None]] = {}  # watched session -> its client
        self._has_logged_unknown = False
        self._ids = unguessable_numbers()

    def __len__(self) -> int:
        return len(self._by_client)

    def open(self, greeting: Greeting) -> Session:
        """Return the client's session, new or joined. Raises Unauthorized for a bad id, Overloaded for too many."""
        if not 0 < len(greeting.client_id) <= _MAX_CLIENT_ID:
            raise Unauthorized(f"a client names itself by an id of 1 to {_MAX_CLIENT_ID} characters")
        client = (greeting.client_id, greeting.pid)
        session = self._by_client.get(client)
        if session is not None:
            session.num_connections += 1
            return session
        if len(self._by_client) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} clients are connected to this node, the most allowed; try again later")
        lost = self._lost.pop(client, ())
        if lost:
            self._leases.release_unheld(lost, greeting.held_lease_ids)
            self._on_freed()
            lost = tuple(each for each in lost if self._leases.has_session(each))
        session_id = next(self._ids)
        key = self._leases.open_session(session_id, greeting.pid, may_write=greeting.may_write)
        maps = greeting.wants_shm and self._watch_process(session_id, greeting)
        session = Session(key, greeting.client_id, greeting.pid, Holder(session_id, maps), (session_id, *lost))
        self._by_client[client] = session
        if maps:
            self._pids[session_id] = client
        return session

    def leave(self, session: Session) -> None:
        """Remove one connection of the session; with the last one its leases end."""
        session.num_connections -= 1
        if session.num_connections:
            return
        client = (session.client_id, session.pid)
        del self._by_client[client]
        self._state.close_session(session.session_id)
        if session.session_id in self._pids:
            self._lost[client] = session.owned
        self._on_freed()

    def forget_ended(self) -> None:
        """Stop watching lost sessions without leases; to be called now and then."""
        connected = {session.session_id for session in self._by_client.values()}
        for session_id in list(self._pids):
            if session_id not in connected and not self._state.depends_on(session_id):
                self._watch.forget(session_id)
                self._lose_track(session_id)

    def close(self) -> None:
        """Stop watching processes."""
        self._watch.close()

    # --- inside

    def _watch_process(self, session_id: int, greeting: Greeting) -> bool:
        """Watch for the end of the client's process; False if that is unknown: the client then gets copies."""
        if greeting.pid is None or greeting.pidfd is None:
            return False
        if greeting.pid == 0:
            self._log_unknown()
            return False
        try:
            self._watch.add(session_id, greeting.pidfd())
        except OSError:
            return False  # gone already
        return True

    def _log_unknown(self) -> None:
        """Log once why clients in containers of their own cannot map this node's memory."""
        if not self._has_logged_unknown:
            self._has_logged_unknown = True
            _log.warning("client.gets_copies", reason=OTHER_NAMESPACE)

    def _exited(self, session_id: int) -> None:
        self._state.session_exited(session_id)
        self._lose_track(session_id)
        self._on_freed()

    def _lose_track(self, session_id: int) -> None:
        client = self._pids.pop(session_id, None)
        if client is not None and client in self._lost:
            rest = tuple(each for each in self._lost[client] if each != session_id)
            if rest:
                self._lost[client] = rest
            else:
                del self._lost[client]

    def check(self) -> None:
        """Assert that connected sessions are counted and open at the access table."""
        for (client_id, pid), session in self._by_client.items():
            assert (session.client_id, session.pid) == (client_id, pid)
            assert session.num_connections > 0
            assert self._leases.has_session(session.session_id)


def after_drain(state: NodeState, handler: Handler) -> Handler:
    """Return ``handler`` for a node whose answers depend on its chunks: clients' writes in buffers count as held."""

    def handled(peer: Any, request: Any, attachment: memoryview) -> Any:
        state.drain_buffers()
        return handler(peer, request, attachment)

    return handled
