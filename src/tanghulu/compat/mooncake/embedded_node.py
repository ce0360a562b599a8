"""A store node that a library starts for its own lifetime, as a child process that ends with its parent."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any

from tanghulu.errors import NodeUnavailable

START_S = 30.0
END_S = 10.0


class EmbeddedNode:
    """A running node of ``memory_bytes`` at ``host`` and ``port``. Raises NodeUnavailable if it does not start.

    It takes credentials and further options from the TANGHULU_* variables, as every ``tanghulu node`` does, and leaves
    when this object is closed or this process ends, however that happens: its status stream breaks then.
    """

    def __init__(self, master: str, host: str, port: int, memory_bytes: int) -> None:
        self._owner = os.getpid()
        self._status, theirs = socket.socketpair()
        flags = [f"--master={master}", f"--host={host}", f"--port={port}", f"--memory={memory_bytes}"]
        command = [sys.executable, "-m", "tanghulu", "node", *flags]
        command += ["--metrics-port=0", f"--status-fd={theirs.fileno()}"]
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - it lives as long as this object
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a signal for the program's group must not end the node before the program
        )
        theirs.close()
        try:
            ready = self._await_ready()
        except BaseException:  # an interrupt, too: the process would stay behind
            self.close()
            raise
        self.id: str = ready["name"]
        self.address: str = ready["address"]

    def _await_ready(self) -> dict[str, Any]:
        """Read status lines up to the one that reports readiness."""
        self._status.settimeout(START_S)
        try:
            with self._status.makefile() as lines:
                ready = next((line for line in map(json.loads, lines) if line["event"] == "ready"), None)
        except TimeoutError:
            raise NodeUnavailable(f"the store node was not ready within {START_S:g} s") from None
        if ready is None:
            raise NodeUnavailable(f"the store node did not start: {self._last_words()}")
        return dict(ready)

    def _last_words(self) -> str:
        self._process.wait(END_S)
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4096))
        return self._log.read().decode("utf-8", "replace").strip().rpartition("\n")[2]

    def close(self) -> None:
        """End the node; its chunks are gone then. A node that does not end in time is killed.

        Does nothing in a forked child: the node is its parent's.
        """
        if os.getpid() != self._owner:
            return
        self._status.close()
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
