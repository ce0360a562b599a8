"""Child processes of the embedded cluster: started with a status stream and a log file, and cleaned up at their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

#: Roles whose command has another name.
_COMMANDS = {"gateway": ("store", "serve")}
#: Number of bytes at a log's end searched for its last line.
_LAST_BYTES = 4096


@dataclass
class ChildProcess:
    """One child: its command line (without the interpreter) and, while it runs, its process."""

    role: str
    name: str
    arguments: list[str]
    log_path: Path
    run_dir: Path
    configuration: Path | None = None  # the supervisor's TOML file
    info: dict[str, Any] = field(default_factory=dict)  # from its last "ready"
    process: asyncio.subprocess.Process | None = None
    _status: socket.socket | None = None

    async def spawn(self, on_status: Callable[[str, dict[str, Any]], None]) -> None:
        """Start the process; its status lines arrive as ``on_status(name, message)``, its exit as event "exited"."""
        self.info = {}
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        shared = ("--config", str(self.configuration)) if self.configuration is not None else ()
        words = _COMMANDS.get(self.role, (self.role,))
        command = [sys.executable, "-m", "tanghulu", *shared, *words, *self.arguments]
        command += ["--run-dir", str(self.run_dir), "--status-fd", str(theirs.fileno())]
        with self._open_log() as log:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal reaches only the supervisor, which ends them in order
            )
        theirs.close()
        self._status = ours
        self._watching = asyncio.create_task(self._watch(ours, self.process, on_status))

    def last_words(self) -> str:
        """Return the last line of the log; for a line in JSON, the error in it. Empty if there is no log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
                lines = log.read().decode("utf-8", "replace").split("\n")
        except OSError:
            return ""
        line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        with contextlib.suppress(ValueError, AttributeError):
            last = json.loads(line)
            return str(last.get("error") or last.get("event") or line)
        return line.removeprefix("Error: ").removeprefix("tanghulu: ")

    def _open_log(self) -> BinaryIO:
        """Open the log file; return /dev/null if it is unavailable, as when its directory was removed."""
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            return self.log_path.open("ab")
        except OSError:
            return Path(os.devnull).open("ab")

    async def _watch(
        self,
        status: socket.socket,
        process: asyncio.subprocess.Process,
        on_status: Callable[[str, dict[str, Any]], None],
    ) -> None:
        reader, writer = await asyncio.open_connection(sock=status)
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if message["event"] == "ready":
                    self.info = message
                    self._keep_port(message["address"])
                on_status(self.name, message)
            code = await process.wait()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        on_status(self.name, {"event": "exited", "code": code})

    def _keep_port(self, address: str) -> None:
        """Have a restarted child listen at the address under which others know it."""
        position = self.arguments.index("--port") + 1
        self.arguments[position] = address.rpartition(":")[2]

    def kill(self) -> None:
        """Send SIGKILL; the exit is reported like any other."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after ``grace_s``; returns when the process has exited."""
        process = self.process
        if process is None:
            return
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience_s)
                break
        await asyncio.gather(self._watching, return_exceptions=True)

    def entry(self) -> dict[str, Any]:
        """Return this child's entry in cluster.json."""
        return {
            "role": self.role,
            "name": self.name,
            "pid": self.process.pid if self.process is not None else None,
            "address": self.info.get("address", ""),
            "metrics_address": self.info.get("metrics_address", ""),
        }
