"""What the second guest runs: starts owners of segments, kills them, and lets shell commands have their way.

One client at a time, over multiprocessing's connections on the control network; commands are (name, arguments).
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from tests.transfer_engine.segment_process import SegmentProcess

HOST, PORT = "10.77.2.2", 7007
KEY = b"rdma guests"
#: So long may the other guest take to boot.
START_S = 90.0
OPTIONS: dict[str, Any] = {"advertised_host": HOST, "host": "0.0.0.0", "transports": ("shm", "rdma", "tcp")}


class Agent:
    """The second guest's end; its methods are the commands."""

    def __init__(self) -> None:
        self._owners = [SegmentProcess(**OPTIONS)]

    def start(self, options: dict[str, Any]) -> int:
        self._owners.append(SegmentProcess(**OPTIONS, **options))
        return len(self._owners) - 1

    def descriptor(self, number: int) -> Any:
        return self._owners[number].descriptor

    def command(self, number: int, name: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._owners[number], name)(*arguments)

    def shell(self, line: str) -> str:
        return subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout

    def serve(self, client: Connection) -> None:
        """Until the client hangs up."""
        while True:
            name, arguments = client.recv()
            try:
                client.send((True, getattr(self, name)(*arguments)))
            except Exception as error:  # noqa: BLE001 - it travels to the test
                client.send((False, error))


class RemoteAgent:
    """The test's end of it."""

    def __init__(self) -> None:
        self._connection = _connect()

    def call(self, name: str, *arguments: Any) -> Any:
        self._connection.send((name, arguments))
        ok, answer = self._connection.recv()
        if not ok:
            raise answer
        return answer

    def shell(self, line: str) -> str:
        return str(self.call("shell", line))

    def shared_owner(self) -> RemoteOwner:
        """The one that was started with the guest."""
        return RemoteOwner(self, 0)

    def start_owner(self, **options: Any) -> RemoteOwner:
        """One for the caller alone; it ends with the guest."""
        return RemoteOwner(self, self.call("start", options))

    def close(self) -> None:
        self._connection.close()


class RemoteOwner:
    """A SegmentProcess of the other guest; has its commands as methods."""

    def __init__(self, agent: RemoteAgent, number: int) -> None:
        self._agent, self._number = agent, number
        self.descriptor = agent.call("descriptor", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self._agent.call("command", self._number, name, arguments)


def _connect() -> Connection:
    """Both guests start at once, so the agent may not listen yet."""
    until_s = time.monotonic() + START_S
    while True:
        try:
            return Client((HOST, PORT), authkey=KEY)
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)


def main() -> None:
    """Serve one client, then end."""
    agent = Agent()
    with Listener(("0.0.0.0", PORT), authkey=KEY) as listener, contextlib.suppress(EOFError):
        agent.serve(listener.accept())


if __name__ == "__main__":
    main()
