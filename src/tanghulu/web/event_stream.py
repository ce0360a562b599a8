"""Server-sent events as read by a client: the text after ``data:``, however the stream is cut into pieces."""

from __future__ import annotations

_DATA, _LAST = b"data: ", b"[DONE]"


class EventReader:
    """Splits a stream at its line feeds only.

    Lines of text, as in httpx's ``iter_lines``, also end at other characters (U+0085, U+2028, U+2029), which are
    unescaped in JSON: an answer with one would be cut in the middle of an event.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events whose lines ``piece`` completes, without the stream's ``[DONE]``."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        data = [line.removeprefix(_DATA).rstrip(b"\r") for line in lines if line.startswith(_DATA)]
        return [each for each in data if each != _LAST]
