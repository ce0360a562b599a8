"""Follow the KV events of one vLLM worker over ZeroMQ: subscription, and replay of missed messages.

The only file that uses ZeroMQ (extra ``vllm``: pyzmq and msgspec), imported lazily.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import structlog

from tanghulu.conductor.routing_service.vllm_events import EventDecoder, EventSource, Numbers
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.runtime.clock import Backoff
from tanghulu.runtime.extras import install_command
from tanghulu.runtime.telemetry import RareLog
from tanghulu.session.outputs import KvChange

_log = structlog.get_logger(__name__)
REPLAY_TIMEOUT_S = 5.0
#: Most messages and bytes of one replay; if it would be longer, the blocks are cleared instead.
MAX_REPLAYED, MAX_REPLAYED_BYTES = 1 << 16, 256 << 20
#: Initial and longest pause before a failed subscription is retried.
_RETRY_S, _RETRY_MOST_S = 0.1, 10.0
_END = (-1).to_bytes(8, "big", signed=True)


class VllmFollower:
    """Passes the changes of ``source`` to ``apply`` in order; for missing or unreadable ones, a clearing."""

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
        self._rare_log = RareLog(_log, worker=source.worker)

    async def run(self) -> None:
        """Follow until cancelled. Any failure clears the worker's blocks; a new subscription follows after a pause."""
        backoff = Backoff(_RETRY_S, _RETRY_MOST_S)
        try:
            while True:
                try:
                    await self._follow()
                except Exception as error:  # noqa: BLE001 - whatever one publisher sends, the others are served
                    self._rare_log.warning("vllm.follower_failed", error=repr(error))
                    self._lose()
                await asyncio.sleep(backoff.pause_s())
        finally:
            self._context.destroy(0)

    async def _follow(self) -> None:
        socket = self._context.socket(self._subscribe)
        try:
            socket.subscribe(b"")
            socket.connect(self._source.events)
            while True:
                await self._take(await socket.recv_multipart())
        finally:
            socket.close(0)

    def _lose(self) -> None:
        """Discard everything known about the worker's cache."""
        self._numbers, self._decoder = Numbers(), EventDecoder()
        self._apply(KvChange(cleared=True))

    async def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != len(_END):
            self._rare_log.warning("vllm.not_an_event", frames=[len(frame) for frame in frames[:4]])
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
            changes = self._decoder.decode(self._unpack(payload))
        except (InvalidRequest, ValueError, RecursionError, MemoryError) as error:
            self._rare_log.warning("vllm.not_an_event", error=str(error))
            changes = [KvChange(cleared=True)]
        for change in changes:
            self._apply(change)
        self._numbers.took(number)

    async def _catch_up(self, first: int, number: int) -> None:
        """Read the messages missing before ``number``, as far as they are available; the rest is lost."""
        missed: dict[int, bytes] = {}
        if self._source.replay:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    missed = await self._replay(first, number)
        begin = number
        while begin - 1 in missed:
            begin -= 1
        if begin > first:
            self._rare_log.warning("vllm.events_lost", first=first, last=begin - 1)
            self._apply(KvChange(cleared=True))
        for each in range(begin, number):
            self._read(each, missed[each])

    async def _replay(self, first: int, number: int) -> dict[int, bytes]:
        """Return the messages from ``first`` to before ``number`` still available; none if the answer is malformed."""
        socket = self._context.socket(self._dealer)
        missed: dict[int, bytes] = {}
        num_bytes = 0
        try:
            socket.connect(self._source.replay)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                frames = await socket.recv_multipart()
                if len(frames) < 2:
                    self._rare_log.warning("vllm.not_a_replay", frames=len(frames))
                    return {}
                if frames[-2] == _END:
                    return missed
                each = int.from_bytes(frames[-2], "big")
                if first <= each < number:
                    missed[each] = frames[-1]
                    num_bytes += len(frames[-1])
                if len(missed) > MAX_REPLAYED or num_bytes > MAX_REPLAYED_BYTES:
                    self._rare_log.warning("vllm.replay_too_long", messages=len(missed), num_bytes=num_bytes)
                    return {}
        finally:
            socket.close(0)
