"""Follows the KV events of one vLLM worker over ZeroMQ: subscription, replay of what was missed.

The only file that knows ZeroMQ (extra ``vllm``: pyzmq and msgspec), imported lazily.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import structlog

from tanghulu.conductor.routing.requests import KvChange
from tanghulu.conductor.routing_service.vllm_events import EventDecoder, EventSource, Numbers
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.runtime.extras import install_command

_log = structlog.get_logger(__name__)
REPLAY_TIMEOUT_S = 5.0
_END = (-1).to_bytes(8, "big", signed=True)


class VllmFollower:
    """Hands the changes of ``source`` to ``apply``, in order and without gaps that are not told as cleared."""

    def __init__(self, source: EventSource, apply: Callable[[KvChange], None]) -> None:
        try:
            import zmq.asyncio
            from msgspec.msgpack import decode as unpack
        except ImportError as error:
            raise ConfigError(
                f"vLLM's KV events need pyzmq and msgspec: {install_command('vllm')} ({error})"
            ) from error
        self._source, self._apply, self._unpack = source, apply, unpack
        self._context: Any = zmq.asyncio.Context()
        self._subscribe, self._dealer = zmq.SUB, zmq.DEALER
        self._numbers, self._decoder = Numbers(), EventDecoder()

    async def run(self) -> None:
        """Follow until cancelled; what cannot be read is logged and left out."""
        socket = self._context.socket(self._subscribe)
        try:
            socket.subscribe(b"")
            socket.connect(self._source.events)
            while True:
                await self._take(await socket.recv_multipart())
        finally:
            socket.close(0)
            self._context.destroy(0)

    async def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            _log.warning("vllm.not_an_event", worker=self._source.worker, frames=len(frames))
            return
        number, numbers = int.from_bytes(frames[1], "big"), self._numbers
        if numbers.restarted(number):
            self._apply(KvChange(cleared=True))
        first = numbers.missing(number)
        if first is not None:
            await self._catch_up(first, number)
        self._read(number, frames[2])

    def _read(self, number: int, payload: bytes) -> None:
        try:
            for change in self._decoder.decode(self._unpack(payload)):
                self._apply(change)
        except (InvalidRequest, ValueError) as error:
            _log.warning("vllm.not_an_event", worker=self._source.worker, error=str(error))
        self._numbers.took(number)

    async def _catch_up(self, first: int, number: int) -> None:
        """Read what is missing in front of ``number``, or as much of its end as can be had: then the rest is lost."""
        missed: dict[int, bytes] = {}
        if self._source.replay:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    missed = await self._replay(first, number)
        begin = number
        while begin - 1 in missed:
            begin -= 1
        if begin > first:
            _log.warning("vllm.events_lost", worker=self._source.worker, first=first, last=begin - 1)
            self._apply(KvChange(cleared=True))
        for each in range(begin, number):
            self._read(each, missed[each])

    async def _replay(self, first: int, number: int) -> dict[int, bytes]:
        socket = self._context.socket(self._dealer)
        missed: dict[int, bytes] = {}
        try:
            socket.connect(self._source.replay)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while (frames := await socket.recv_multipart())[-2] != _END:
                each = int.from_bytes(frames[-2], "big")
                if first <= each < number:
                    missed[each] = frames[-1]
        finally:
            socket.close(0)
        return missed
