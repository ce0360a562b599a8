"""Waiting for the answer to a plain slice that has its connection for itself, in as few calls of the kernel as can be.

Knows sockets and the wire's sizes; what becomes of an answer that is not as hoped is the stream's affair.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from tanghulu.runtime.busy_polling import BusyPoller
from tanghulu.transfer_engine.core.network import StreamSocket
from tanghulu.transfer_engine.core.wire import REPLY_BYTES, pack_reply

#: The number of a slice that has the stream for itself.
DIRECT_SLICE_ID = 1
_ACKNOWLEDGEMENT = pack_reply(DIRECT_SLICE_ID, 0)
#: More pieces of a payload are not asked for one by one: the wait for all of them has an end.
_MAX_PIECES = 64


class AnswerTaker:
    """Takes the answers that come over ``sock``; with a ``BusyPoller`` it may ask for a moment before it sleeps."""

    def __init__(self, sock: StreamSocket) -> None:
        self._sock = sock

    def acknowledgement(self, head: memoryview, spinner: BusyPoller | None) -> tuple[bool, int]:
        """(whether a WRITE was acknowledged, how many bytes came into ``head``)."""
        got = _first(self._sock.recv_into, head, spinner)
        return got == REPLY_BYTES and head == _ACKNOWLEDGEMENT, got

    def payload(self, head: memoryview, memory: memoryview, spinner: BusyPoller | None) -> tuple[bool, int]:
        """(whether all of a READ's payload is in ``memory``, how many bytes came, its reply's included)."""
        got = _first(self._sock.recvmsg_into, (head, memory), spinner)[0]
        num_bytes = len(memory)
        if got < REPLY_BYTES or head != pack_reply(DIRECT_SLICE_ID, num_bytes):
            return False, got
        if got < REPLY_BYTES + num_bytes:
            got += self._rest(memory[got - REPLY_BYTES :], spinner)
        return got == REPLY_BYTES + num_bytes, got

    def _rest(self, rest: memoryview, spinner: BusyPoller | None) -> int:
        """How many bytes came of what a payload still lacks."""
        got, receive = 0, self._sock.recv_into
        for _ in range(_MAX_PIECES):
            found: int | None = None if spinner is None else spinner.receive_more(receive, rest[got:])
            if not found:
                break
            got += found
            if got == len(rest):
                return got
        with contextlib.suppress(BlockingIOError):
            got += receive(rest[got:], 0, socket.MSG_WAITALL)
        return got


def _first(receive: Callable[[Any, int, int], Any], into: object, spinner: BusyPoller | None) -> Any:
    """What a receiving method gives first; waits for it."""
    return receive(into, 0, 0) if spinner is None else spinner.receive(receive, into)
