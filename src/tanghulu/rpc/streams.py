"""Calls of the fast lane answered by many messages: an asynchronous generator at each end.

The server sends what its generator yields while the peer takes it, and a beat after an idle ``BEAT_S``, so that a
client detects a frozen process. A stream has its own connection and ends with it, from either side; a typed error
raised by the generator reaches the client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, TypeVar

import structlog

from tanghulu.errors import Overloaded, PeerSilent, TanghuluError
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import Call, Reply
from tanghulu.rpc.fast_server import AnswerStream, Peer
from tanghulu.rpc.wire import Body

_log = structlog.get_logger(__name__)
A = TypeVar("A", bound=Body)

BEAT_S: Final = 0.5
#: Messages queued for a client's consumer; beyond it nothing is read from the server.
MAX_WAITING: Final = 16


def send_all(peer: Peer, messages: AsyncGenerator[Body, None], beat: Body | None = None) -> AnswerStream:
    """Return the answer that sends ``messages`` to ``peer``, and ``beat`` if there is nothing to send.

    For handlers. The generator is closed when the connection ends. Raises Overloaded for its second stream.
    """
    if peer.has_stream:
        raise Overloaded("a connection carries one stream; open another connection")
    peer.has_stream = True
    return _Sending(peer, messages, beat).stream


class _Sending:
    def __init__(self, peer: Peer, messages: AsyncGenerator[Body, None], beat: Body | None) -> None:
        self._messages, self._beat = messages, beat
        self._room = asyncio.Event()
        self._is_idle = False
        self.stream = AnswerStream(self._room.set)
        self._task = asyncio.get_running_loop().create_task(self._send())
        peer.on_close.append(self._stop)

    def _stop(self) -> None:
        self._task.cancel()

    async def _send(self) -> None:
        beating = None if self._beat is None else asyncio.create_task(self._send_beats(self._beat))
        try:
            async with aclosing(self._messages) as messages:
                async for message in messages:
                    while not self.stream.has_room:
                        self._room.clear()
                        await self._room.wait()
                    self._is_idle = False
                    self.stream.send(message)
            self.stream.end()
        except TanghuluError as error:
            self.stream.fail(error)
        except Exception:  # noqa: BLE001 - a bug in the generator must still end the client's stream
            _log.exception("fast_lane.stream_failed")
            self.stream.fail(TanghuluError("internal error in a stream; see the log"))
        finally:
            if beating is not None:
                beating.cancel()

    async def _send_beats(self, beat: Body) -> None:
        while True:
            self._is_idle = True
            await asyncio.sleep(BEAT_S)
            if self._is_idle and self.stream.has_room:
                self.stream.send(beat)


async def receive_all(
    connection: AsyncFastConnection, call: Call[A], silence_s: float | None = None
) -> AsyncGenerator[A, None]:
    """Make ``call`` and yield its messages, including beats; the connection is closed at the end.

    Raises the server's typed error, NodeUnavailable if the connection is lost, and PeerSilent if nothing has come for
    ``silence_s``, which should be several times ``BEAT_S``.
    """
    received: asyncio.Queue[Reply[A] | TanghuluError] = asyncio.Queue()

    def receive(outcome: Reply[A] | TanghuluError) -> None:
        received.put_nowait(outcome)
        if received.qsize() == MAX_WAITING:
            connection.pause_reading()

    try:
        connection.stream(call.method, call.request, call.reply_type, receive)
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    outcome = await received.get()
            except TimeoutError:
                raise PeerSilent(f"{connection.peer} has sent nothing for {silence_s:g} s") from None
            if received.qsize() == MAX_WAITING - 1:
                connection.resume_reading()
            if isinstance(outcome, TanghuluError):
                raise outcome
            yield outcome.message
    finally:
        await connection.close()
