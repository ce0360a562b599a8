"""Incoming request bodies: limits on their slowness, and on the bytes that a process keeps at one time.

``BodyRoom`` decides which body to drop when there is no room; ``IncomingBody`` reads one within its time, and
``Bodies`` performs both for an application.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from tanghulu.errors import NodeUnavailable, TanghuluError
from tanghulu.runtime.clock import LEAST_BYTES_S, LeastRate
from tanghulu.types import format_size
from tanghulu.web.errors import BodiesFull, BodyTooLarge, BodyTooSlow

#: Seconds after which a body is dropped if no piece, or too little, has arrived.
STALL_S = 10.0
#: Maximum duration of a body, however steadily it arrives.
DEADLINE_S = 120.0
#: A body that has been arriving for less is not dropped in favour of another.
GRACE_S = 1.0
_SMALL_BYTES = 256 << 10


@dataclass(eq=False, slots=True)
class HeldBody:
    """One body in the room; ``arriving`` until complete, and from then on read by the application."""

    begun_s: float
    num_bytes: int = 0
    arriving: bool = True


class BodyRoom:
    """The bytes of bodies that a process keeps at one time, with a bound. Pure.

    If there is no room for a piece, the bodies that have been arriving longest are dropped: an honest one completes
    quickly, and stalled ones pile up at the front. Example, with room for 32 MiB: twenty clients have each sent 1.5 MiB
    and then nothing. Two seconds later one more sends 4 MiB, and two of the twenty are dropped for it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: dict[HeldBody, None] = {}  # in order of arrival
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, now_s: float) -> HeldBody:
        """Add a body, as yet without bytes."""
        body = HeldBody(now_s)
        self._held[body] = None
        return body

    def come(self, body: HeldBody, num_bytes: int, now_s: float) -> list[HeldBody]:
        """Count a piece of ``body``; the returned bodies must be dropped for it, and are no longer counted.

        Raises BodiesFull if that would not make room: then ``body`` itself must be dropped.
        """
        assert body in self._held
        assert body.arriving
        leaving: list[HeldBody] = []
        lacking = self.num_bytes + num_bytes - self._most_bytes
        for other in self._held:
            if lacking <= 0:
                break
            if other is body or now_s - other.begun_s < GRACE_S:
                raise self._full()
            if other.arriving and other.num_bytes:
                leaving.append(other)
                lacking -= other.num_bytes
        if lacking > 0:
            raise self._full()
        for other in leaving:
            self.end(other)
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes
        return leaving

    def arrived(self, body: HeldBody) -> None:
        """Note that ``body`` is complete; from now on it stays until its end."""
        body.arriving = False

    def end(self, body: HeldBody) -> None:
        """Remove ``body``; no error if it was removed before."""
        if body in self._held:
            del self._held[body]
            self.num_bytes -= body.num_bytes

    def check(self) -> None:
        """Assert the bound and the sum."""
        assert self.num_bytes == sum(body.num_bytes for body in self._held) <= self._most_bytes

    def _full(self) -> BodiesFull:
        return BodiesFull(
            f"{len(self._held)} request bodies take {format_size(self.num_bytes)} of "
            f"{format_size(self._most_bytes)}; retry in a moment"
        )


class IncomingBody:
    """The body of one request, with a time limit: ``stall_s`` for each piece and the rate, ``deadline_s`` for all."""

    def __init__(self, scope: Scope, receive: Receive, stall_s: float, deadline_s: float = math.inf) -> None:
        self.is_complete = False
        self.num_come = 0
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        #: The length announced by the client; None if unknown.
        self.length = int(length) if length.isdigit() and b"transfer-encoding" not in headers else None
        self._receive = receive
        self._stall_s = stall_s
        self._deadline_s = deadline_s
        self._rate: LeastRate | None = None  # from the first requested piece
        self._over_s = math.inf
        self._timeout: asyncio.Timeout | None = None
        self._given_up: TanghuluError | None = None

    @property
    def num_left(self) -> float:
        """The number of bytes still to come; infinite if unknown."""
        return 0 if self.is_complete else math.inf if self.length is None else self.length - self.num_come

    async def receive(self) -> Message:
        """Return the next piece; the last one makes the body complete.

        Raises BodyTooSlow if no piece comes, or too little over a time, and the error with which it was given up.
        """
        now_s = time.monotonic()
        if self._rate is None:
            self._rate = LeastRate(self._stall_s, now_s)
            self._over_s = now_s + self._deadline_s
        try:
            async with asyncio.timeout(min(self._stall_s, max(0.0, self._over_s - now_s))) as self._timeout:
                self._look()
                message = await self._receive()
        except TimeoutError:
            self._look()
            late = time.monotonic() >= self._over_s
            reason = f"and the limit is {self._deadline_s:g} s" if late else f"then nothing for {self._stall_s:g} s"
            raise self._too_slow(reason) from None
        finally:
            self._timeout = None
        self.num_come += len(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)
        if self._rate.is_too_slow(self.num_come, time.monotonic()) and not self.is_complete:
            raise self._too_slow(f"below the minimum of {format_size(LEAST_BYTES_S)} a second")
        return message

    def give_up(self, error: TanghuluError) -> None:
        """End the reading: readers of the next piece, and of later ones, get ``error``."""
        self._given_up = error
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(0)

    def _look(self) -> None:
        if self._given_up is not None:
            raise self._given_up

    def _too_slow(self, reason: str) -> BodyTooSlow:
        of = "" if self.length is None else f" of {self.length}"
        return BodyTooSlow(f"received {self.num_come}{of} bytes, {reason}")


class BodyBuffer:
    """The bytes of one body of at most ``most_bytes``.

    More than a few are kept in separate memory: a bytearray growing to 30 MB is copied repeatedly, which blocks the
    loop for a tenth of a second, and what it leaves in the heap is not returned to the system.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._small = bytearray()
        self._large: mmap.mmap | None = None

    def write(self, piece: bytes) -> None:
        """Append ``piece``."""
        if self._large is None and len(self._small) + len(piece) > _SMALL_BYTES:
            self._large = mmap.mmap(-1, self._most_bytes)
            self._large.write(self._small)
        if self._large is None:
            self._small += piece
        else:
            self._large.write(piece)

    def view(self) -> memoryview:
        """Return all bytes, valid until ``clear``; to be released before."""
        return memoryview(self._small) if self._large is None else memoryview(self._large)[: self._large.tell()]

    def clear(self) -> None:
        """Free the memory. No error if it was freed before."""
        self._small.clear()
        if self._large is not None and not self._large.closed:
            self._large.close()


class Bodies:
    """Reads the bodies of an application's requests, each up to ``limit_bytes``, within one room for all."""

    def __init__(self, limit_bytes: int, room_bytes: int, stall_s: float = STALL_S) -> None:
        self.room = BodyRoom(max(room_bytes, limit_bytes))
        self._limit_bytes = limit_bytes
        self._stall_s = stall_s
        self._arriving: dict[HeldBody, IncomingBody] = {}
        self._stopped: NodeUnavailable | None = None

    @contextlib.asynccontextmanager
    async def reading(self, scope: Scope, receive: Receive) -> AsyncIterator[BodyBuffer]:
        """Yield the complete body, which keeps its place in the room until the block ends.

        Raises BodyTooLarge as soon as the body is known to be too long, BodyTooSlow, BodiesFull, ClientDisconnect.
        """
        incoming = IncomingBody(scope, receive, self._stall_s, DEADLINE_S)
        held = self.room.begin(time.monotonic())
        self._arriving[held] = incoming
        body = BodyBuffer(self._limit_bytes)
        try:
            async for piece in pieces(incoming, self._limit_bytes):
                self._make_room(held, len(piece))
                body.write(piece)
            self.room.arrived(held)
            del self._arriving[held]
            yield body
        finally:
            body.clear()
            self._arriving.pop(held, None)
            self.room.end(held)

    @contextlib.contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Reserve room for a request that arrived complete in another way, until the block ends. Raises BodiesFull."""
        held = self.room.begin(time.monotonic())
        try:
            self._make_room(held, num_bytes)
            self.room.arrived(held)
            yield
        finally:
            self.room.end(held)

    def stop(self) -> None:
        """Give up unfinished bodies and all new ones: the process is ending."""
        self._stopped = NodeUnavailable("the process is shutting down; send the request elsewhere")
        for incoming in self._arriving.values():
            incoming.give_up(self._stopped)

    def _make_room(self, held: HeldBody, num_bytes: int) -> None:
        if self._stopped is not None:
            raise self._stopped
        for leaving in self.room.come(held, num_bytes, time.monotonic()):
            slow = BodyTooSlow("the body arrived too slowly, and other requests needed its memory; retry")
            self._arriving[leaving].give_up(slow)


async def pieces(incoming: IncomingBody, limit_bytes: int) -> AsyncIterator[bytes]:
    """Yield the pieces of a body of at most ``limit_bytes``.

    Raises BodyTooLarge as soon as it is known to be longer, BodyTooSlow, and ClientDisconnect.
    """
    if incoming.length is not None and incoming.length > limit_bytes:
        raise BodyTooLarge(f"the body has {incoming.length} bytes; the limit is {limit_bytes}")
    while not incoming.is_complete:
        message = await incoming.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if incoming.num_come > limit_bytes:
            raise BodyTooLarge(f"the body has more than {limit_bytes} bytes")
        yield message.get("body", b"")
