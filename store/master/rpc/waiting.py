"""The driver of WaitBoard: answers WAIT when the keys have been announced, or when its time is up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tanghulu.errors import InvalidRequest
from tanghulu.rpc.fast_server import Later, Peer
from tanghulu.store.master.directory.waiters import WaitBoard, WaitingCall
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol.directory_messages import WaitReply, WaitRequest

#: Longest wait of one call; clients that wait longer ask again, which shows that they are alive.
MAX_WAIT_S = 30.0


class WaitCalls:
    """The calls waiting at one master. After a change of owners they are answered at once; the clients ask again."""

    def __init__(self, server: MasterServer) -> None:
        self.board = WaitBoard()
        self._server = server
        self._answers: dict[WaitingCall, Callable[[], None]] = {}
        self._owners: set[Peer] = set()
        server.on_tick.append(self._tick)
        server.on_map.append(self._map_changed)

    def announced(self, keys: Iterable[str]) -> None:
        """Answer the calls waiting for ``keys``; called after the directory has taken them."""
        self._answer(self.board.stored(keys))

    def wait(self, peer: Peer, request: WaitRequest, attachment: memoryview) -> WaitReply | Later:
        """Answer WAIT. Raises NotLeader, KeysMoved, Overloaded, InvalidRequest."""
        later = Later()
        if not self._begin(request, peer, later.set):
            return self._reply(request.keys)
        if peer not in self._owners:
            self._owners.add(peer)
            peer.on_close.append(lambda: self._gone(peer))
        return later

    def _begin(self, request: WaitRequest, owner: object, answer: Callable[[WaitReply], None]) -> bool:
        """Return whether there is something to wait for; ``answer`` is then called once."""
        self._server.require_owned(request.keys)
        if not request.keys:
            raise InvalidRequest("WAIT needs at least one key")
        keys = tuple(request.keys)
        held = self._server.master.directory.holds(keys)
        missing = [key for key, there in zip(keys, held, strict=True) if not there]
        if not missing or not request.deadline_ms:
            return False
        until_s = self._server.now_s + min(request.deadline_ms / 1000, MAX_WAIT_S)
        waiter = self.board.join(owner, missing, until_s)
        self._answers[waiter] = lambda: answer(self._reply(keys))
        return True

    def _reply(self, keys: Sequence[str]) -> WaitReply:
        server = self._server
        found = server.master.directory.holds(keys) if server.owns(keys) else bytes(len(keys))
        return WaitReply(found, server.ownership.signature)

    def _answer(self, over: Iterable[WaitingCall]) -> None:
        for waiter in over:
            self._answers.pop(waiter)()

    def _gone(self, peer: Peer) -> None:
        self._owners.discard(peer)
        self._drop(peer)

    def _drop(self, owner: object) -> None:
        for waiter in self.board.leave(owner):
            del self._answers[waiter]

    def _tick(self) -> None:
        self._answer(self.board.expire(self._server.now_s))

    def _map_changed(self) -> None:
        self._answer(self.board.clear())
