"""The fast lane's frames: pure encoding and decoding, no I/O.

A connection starts with ``PREAMBLE``. Then each side sends frames, a fixed head followed by a message (``wire``)
and by raw payload (the attachment), so that small values need no copy into a message:

    body_bytes u32 | attachment_bytes u32 | method u16 | flags u16 | call_id u32      16 bytes, little-endian

A reply repeats its request's call_id and method; ``ERROR`` carries a Status instead. Replies may arrive in
any order. Lengths beyond the maxima indicate a broken or hostile peer: the connection ends.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from tanghulu.errors import InvalidRequest

PREAMBLE = b"TANGHULU"
_MAX_CALL_ID = (1 << 32) - 1
#: The method of an error reply.
ERROR = 2
HEAD = struct.Struct("<IIHHI")
MAX_BODY_BYTES = 16 << 20
MAX_ATTACHMENT_BYTES = 64 << 20
#: Memory allocated for an announced frame; the rest grows with the received bytes.
_AHEAD_BYTES = 2 << 20
#: Returns memory for the attachment of a frame (method, body, its length), or None for no place yet.
Placing: TypeAlias = Callable[[int, bytes, int], memoryview | None]
#: Smaller attachments are not placed: they arrive in one piece with their head.
_PLACED_BYTES = 32 << 10


class Frame(NamedTuple):
    """One frame: ``body`` is an encoded message, ``attachment`` the payload after it."""

    method: int
    call_id: int
    body: bytes
    attachment: bytes | memoryview = b""


def encode_head(method: int, call_id: int, body_bytes: int, attachment_bytes: int) -> bytes:
    """Encode the 16-byte head of a frame; raises InvalidRequest if it is larger than a peer would accept."""
    if body_bytes > MAX_BODY_BYTES or attachment_bytes > MAX_ATTACHMENT_BYTES:
        raise InvalidRequest(
            f"a frame of {body_bytes} + {attachment_bytes} bytes exceeds {MAX_BODY_BYTES} + {MAX_ATTACHMENT_BYTES}; "
            "send fewer keys or values in one call"
        )
    return HEAD.pack(body_bytes, attachment_bytes, method, 0, call_id)


def decode_head(data: bytes | bytearray | memoryview, position: int = 0) -> tuple[int, int, int, int]:
    """Return (body bytes, attachment bytes, method, call id) of the head at ``position``.

    Raises InvalidRequest for lengths beyond the maxima.
    """
    body_bytes, attachment_bytes, method, _flags, call_id = HEAD.unpack_from(data, position)
    if body_bytes > MAX_BODY_BYTES or attachment_bytes > MAX_ATTACHMENT_BYTES:
        raise InvalidRequest(
            f"the peer announced a frame of {body_bytes} + {attachment_bytes} bytes (body + attachment), "
            f"more than {MAX_BODY_BYTES} + {MAX_ATTACHMENT_BYTES}; is it a process of tanghulu?"
        )
    return body_bytes, attachment_bytes, method, call_id


def call_id_of(number: int) -> int:
    """Return the id of a connection's call ``number`` (from 0). Ids wrap; 0 marks an error of the connection."""
    return number % _MAX_CALL_ID + 1


class PartialFrame:
    """An incomplete frame of known length; its memory is never far ahead of the received bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory = memoryview(bytearray(min(size, _AHEAD_BYTES)))
        self._filled = 0

    @property
    def rest(self) -> memoryview:
        """The memory for the next bytes."""
        return self._memory[self._filled :]

    @property
    def missing(self) -> int:
        """Number of bytes still to be received."""
        return self._size - self._filled

    @property
    def held_bytes(self) -> int:
        """Memory allocated for the frame, without the place of its attachment."""
        return len(self._memory)

    def filled(self, count: int) -> None:
        """Count bytes received into ``rest``."""
        self._filled += count
        if self._filled == len(self._memory) < self._size:
            larger = memoryview(bytearray(min(2 * self._filled, self._size)))
            larger[: self._filled] = self._memory
            self._memory = larger

    def take(self, data: memoryview) -> int:
        """Copy the frame's part of ``data``; returns its number of bytes."""
        taken = 0
        while self.missing and taken < len(data):
            rest = self.rest
            count = min(len(rest), len(data) - taken)
            rest[:count] = data[taken : taken + count]
            self.filled(count)
            taken += count
        return taken

    def cut(self) -> Frame:
        """Return the complete frame."""
        assert not self.missing
        body_bytes, attachment_bytes, method, call_id = decode_head(self._memory)
        start = HEAD.size + body_bytes
        attachment = self._memory[start:] if attachment_bytes else b""
        return Frame(method, call_id, bytes(self._memory[HEAD.size : start]), attachment)


class PlacedFrame(PartialFrame):
    """A frame whose attachment is received in its final place; ``view`` is that memory, all of it."""

    def __init__(self, method: int, call_id: int, body: bytes, view: memoryview) -> None:
        self._frame = Frame(method, call_id, body, view)
        self._size, self._memory, self._filled = len(view), view, 0

    @property
    def held_bytes(self) -> int:
        """Always 0: the memory does not belong to the frame."""
        return 0

    def cut(self) -> Frame:
        """Return the complete frame; its attachment is the memory itself."""
        assert not self.missing
        return self._frame


class FrameReader:
    """Cuts a byte stream into frames; holds at most one unfinished frame. Feed bytes, take frames.

    ``place`` is called once for a frame with head and body but without its attachment.
    """

    def __init__(self, place: Placing | None = None) -> None:
        self._buffer = b""  # the beginning of a head
        self._place = place
        self.partial: PartialFrame | None = None

    def whole(self, data: bytes) -> Frame | None:
        """Return the frame if ``data`` is exactly one and nothing was buffered: the usual and cheapest case.

        Raises InvalidRequest on a bad head.
        """
        if self.partial is not None or self._buffer or len(data) < HEAD.size:
            return None
        body_bytes, attachment_bytes, method, call_id = decode_head(data)
        start = HEAD.size + body_bytes
        if start + attachment_bytes != len(data):
            return None
        return Frame(method, call_id, data[HEAD.size : start], memoryview(data)[start:] if attachment_bytes else b"")

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that ``data`` completes, in order; raises InvalidRequest on a bad head."""
        position = 0
        if self.partial is not None:
            position = self.partial.take(memoryview(data))
            if self.partial.missing:
                return
            yield self.finish()
        elif self._buffer:
            data, self._buffer = self._buffer + data, b""
        size = len(data)
        while size - position >= HEAD.size:
            body_bytes, attachment_bytes, method, call_id = decode_head(data, position)
            start = position + HEAD.size
            end = start + body_bytes + attachment_bytes
            if end > size:
                view = None
                if self._place is not None and attachment_bytes >= _PLACED_BYTES and start + body_bytes <= size:
                    view = self._place(method, data[start : start + body_bytes], attachment_bytes)
                if view is None:
                    self.partial = PartialFrame(end - position)
                    self.partial.take(memoryview(data)[position:])
                else:
                    self.partial = PlacedFrame(method, call_id, data[start : start + body_bytes], view)
                    self.partial.take(memoryview(data)[start + body_bytes :])
                return
            body = data[start : start + body_bytes]
            attachment = memoryview(data)[start + body_bytes : end] if attachment_bytes else b""
            position = end
            yield Frame(method, call_id, body, attachment)
        self._buffer = data[position:]

    def finish(self) -> Frame:
        """Return the now complete partial frame."""
        assert self.partial is not None
        frame, self.partial = self.partial.cut(), None
        return frame
