"""A worker process that speaks JSON lines over a socket of its own, both ends; the standard library only.

The parent starts ``INTERPRETER SCRIPT FD``; the child answers every line ``{"do": name, ...}`` with one line, either
``{"ok": result}`` or ``{"error": text}``. The child's stdout and stderr go to a log file: peers' libraries write there.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG_TAIL_BYTES = 2000


class WorkerFailed(Exception):
    """The worker answered with an error, or ended; the message says which and shows its log's end."""


def cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, all its threads with those that ended (see clock_getcpuclockid)."""
    return (~pid << 3) | 2


def cpu_s(pids: list[int]) -> float:
    """CPU seconds that the processes have used."""
    return sum(time.clock_gettime(cpu_clock(pid)) for pid in pids)


class Worker:
    """The parent's end."""

    def __init__(self, interpreter: Path, script: Path, log: Path, environment: dict[str, str], name: str) -> None:
        self.name = name
        self._log = log
        ours, theirs = socket.socketpair()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [interpreter, script, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        theirs.close()
        self.pid = self._process.pid
        self._socket = ours
        self._lines = ours.makefile("r")

    def call(self, name: str, **arguments: Any) -> Any:
        """Have the worker do ``name``; raises WorkerFailed."""
        self.start(name, **arguments)
        return self.finish()

    def start(self, name: str, **arguments: Any) -> None:
        """Tell it to begin, without waiting."""
        try:
            self._socket.sendall(json.dumps({"do": name, **arguments}).encode() + b"\n")
        except OSError as error:
            raise WorkerFailed(self._about(str(error))) from error

    def finish(self) -> Any:
        """The result of what was started."""
        try:
            line = self._lines.readline()
        except OSError:
            line = ""
        answer = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise WorkerFailed(self._about(answer["error"]))
        return answer["ok"]

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._lines.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _about(self, text: str) -> str:
        tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return f"{self.name}: {text}\n--- end of {self._log}\n{tail}"


def serve(fd: int, handlers: dict[str, Callable[..., Any]]) -> None:
    """The child's end: answer until the parent hangs up."""
    with socket.socket(fileno=fd) as sock, sock.makefile("r") as lines:
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"ok": handlers[request.pop("do")](**request)}
            except Exception:  # noqa: BLE001 - it travels to the parent, which stops and shows it
                answer = {"error": traceback.format_exc(limit=-4)}
            try:
                sock.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:
                return
