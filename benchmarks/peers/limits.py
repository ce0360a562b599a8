"""What the machine can do at best: one memmove, one plain blocking TCP stream, one echo over a Unix socket.

The other end of the stream and of the echo is a process of its own (``python limits.py FD``).
"""

from __future__ import annotations

import ctypes
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __package__:
    from .memory import Memory
else:
    from memory import Memory

REQUEST = struct.Struct("<Q")
UPLOAD = 1 << 63
ECHO_BYTES = 100


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill ``view``."""
    got = 0
    while got < len(view):
        num = sock.recv_into(view[got:])
        if not num:
            raise ConnectionResetError("the other end hung up")
        got += num


class Limits:
    """The three, for values of ``size`` bytes that rotate through ``num_pieces`` places."""

    def __init__(self, size: int, num_pieces: int) -> None:
        self._memory, self._source = Memory(num_pieces, size), Memory(num_pieces, size)
        self._echo, theirs = socket.socketpair()
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        command = [sys.executable, Path(__file__), str(theirs.fileno()), str(port), str(size)]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._stream, _ = listener.accept()
        listener.close()
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._message = bytes(ECHO_BYTES)
        self._answer = bytearray(ECHO_BYTES)

    def measure(self, name: str, times: int) -> dict[str, float]:
        """Median and mean of ``times`` calls in microseconds; ``name`` is one of memcpy, stream, stream_up, echo."""
        calls: dict[str, Callable[[int], None]] = {
            "memcpy": self._copy, "stream": self._download, "stream_up": self._upload, "echo": self._say,
        }  # fmt: skip
        call = calls[name]
        took: list[float] = []
        for number in range(times):
            begun = time.perf_counter()
            call(number % self._memory.num_pieces)
            took.append((time.perf_counter() - begun) * 1e6)
        return {"p50_us": statistics.median(took), "mean_us": statistics.fmean(took), "max_us": max(took)}

    def close(self) -> None:
        """Hang up; the other end follows."""
        self._stream.close()
        self._echo.close()
        self._process.wait(5)

    def _copy(self, piece: int) -> None:
        size = self._memory.piece_bytes
        ctypes.memmove(self._memory.address + piece * size, self._source.address + piece * size, size)

    def _download(self, piece: int) -> None:
        self._stream.sendall(REQUEST.pack(self._memory.piece_bytes))
        receive_into(self._stream, self._memory.piece(piece))

    def _upload(self, piece: int) -> None:
        self._stream.sendall(REQUEST.pack(self._memory.piece_bytes | UPLOAD))
        self._stream.sendall(self._memory.piece(piece))
        assert self._stream.recv(1) == b"\1"

    def _say(self, piece: int) -> None:
        self._echo.sendall(self._message)
        receive_into(self._echo, memoryview(self._answer))


def _serve_stream(sock: socket.socket, memory: Memory) -> None:
    number = 0
    while request := sock.recv(REQUEST.size, socket.MSG_WAITALL):
        piece = memory.piece(number % memory.num_pieces)
        number += 1
        if REQUEST.unpack(request)[0] & UPLOAD:
            receive_into(sock, piece)
            sock.sendall(b"\1")
        else:
            sock.sendall(piece)


def main() -> None:
    import threading

    echo = socket.socket(fileno=int(sys.argv[1]))
    size = int(sys.argv[3])
    stream = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    thread = threading.Thread(target=_serve_stream, args=(stream, Memory(4, size)), daemon=True)
    thread.start()
    while data := echo.recv(65536):
        echo.sendall(data)
    thread.join()


if __name__ == "__main__":
    main()
