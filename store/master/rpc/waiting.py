"""The shell around WaitBoard: answers WAIT when the keys have been announced, or when its time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from tanghulu.errors import InvalidRequest
from tanghulu.protos import directory_pb2 as pb
from tanghulu.rpc.fast_server import Later, Peer
from tanghulu.store.master.directory.waiters import WaitBoard, Waiter
from tanghulu.store.master.rpc.wire import check_count
from tanghulu.store.master.server import Shell

#: One call waits at most so long; clients that wait longer ask again, which shows that they live.
MAX_WAIT_S = 30.0


class Waiting:
    """The calls that wait at one master. After a change of leader they are answered at once, and asked again."""

    def __init__(self, shell: Shell) -> None:
        self.board = WaitBoard()
        self._shell = shell
        self._answers: dict[Waiter, Callable[[], None]] = {}
        self._owners: set[Peer] = set()
        shell.on_tick.append(self._tick)
        shell.on_step_down.append(self._step_down)

    def announced(self, keys: Iterable[str]) -> None:
        """These keys are stored now; to be called after the directory has taken them."""
        self._answer(self.board.stored(keys))

    def wait(self, peer: Peer, request: pb.WaitRequest, attachment: memoryview) -> pb.WaitReply | Later:
        """The fast lane's WAIT. Raises NotLeader, Overloaded, InvalidRequest."""
        later = Later()
        if not self._begin(request, peer, later.set):
            return self._reply(request.keys)
        if peer not in self._owners:
            self._owners.add(peer)
            peer.on_close.append(lambda: self._gone(peer))
        return later

    async def wait_grpc(self, request: pb.WaitRequest) -> pb.WaitReply:
        """gRPC's; a caller that hangs up cancels it."""
        future: asyncio.Future[pb.WaitReply] = asyncio.get_running_loop().create_future()
        owner = object()
        if not self._begin(request, owner, future.set_result):
            return self._reply(request.keys)
        try:
            return await future
        finally:
            self._drop(owner)

    def _begin(self, request: pb.WaitRequest, owner: object, answer: Callable[[pb.WaitReply], None]) -> bool:
        """Whether there is something to wait for; ``answer`` is then called once."""
        self._shell.require_leadership()
        check_count(len(request.keys))
        if not request.keys:
            raise InvalidRequest("WAIT names no key")
        keys = tuple(request.keys)
        held = self._shell.master.directory.holds(keys)
        missing = [key for key, there in zip(keys, held, strict=True) if not there]
        if not missing or not request.deadline_ms:
            return False
        until_s = self._shell.now_s + min(request.deadline_ms / 1000, MAX_WAIT_S)
        waiter = self.board.join(owner, missing, until_s)
        self._answers[waiter] = lambda: answer(self._reply(keys))
        return True

    def _reply(self, keys: Sequence[str]) -> pb.WaitReply:
        return pb.WaitReply(found=self._shell.master.directory.holds(keys))

    def _answer(self, over: Iterable[Waiter]) -> None:
        for waiter in over:
            self._answers.pop(waiter)()

    def _gone(self, peer: Peer) -> None:
        self._owners.discard(peer)
        self._drop(peer)

    def _drop(self, owner: object) -> None:
        for waiter in self.board.leave(owner):
            del self._answers[waiter]

    def _tick(self) -> None:
        self._answer(self.board.expire(self._shell.now_s))

    def _step_down(self) -> None:
        self._answer(self.board.clear())
