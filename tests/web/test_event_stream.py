"""Server-sent events, read."""

from __future__ import annotations

import pytest

from tanghulu.web.event_stream import EventReader

STREAM = 'data: "a\x85b\u2028c\u2029d"\n\n: a remark\n\nevent: x\r\ndata: {}\r\n\r\ndata: [DONE]\n\n'.encode()
EVENTS = ['"a\x85b\u2028c\u2029d"'.encode(), b"{}"]


@pytest.mark.parametrize("num_bytes", [1, 2, 7, len(STREAM)])
def test_events_end_at_line_feeds_alone_whatever_pieces_come(num_bytes):
    reader = EventReader()
    pieces = [STREAM[at : at + num_bytes] for at in range(0, len(STREAM), num_bytes)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS


def test_an_event_without_an_end_is_none():
    assert EventReader().feed(b"data: {}") == []
