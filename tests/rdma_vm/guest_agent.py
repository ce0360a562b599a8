"""What the second guest runs: starts owners of segments, kills them, and lets shell commands have their way.

One client at a time, over multiprocessing's connections on the control network; commands are (name, arguments).
"""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer_engine"))

from segment_process import SegmentProcess

PORT = 7007
KEY = b"rdma guests"


class Agent:
    def __init__(self) -> None:
        self._owners: dict[int, SegmentProcess] = {}

    def start(self, options: dict[str, Any]) -> tuple[int, Any]:
        number = len(self._owners)
        owner = self._owners[number] = SegmentProcess(**options)
        return number, owner.descriptor

    def command(self, number: int, name: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._owners[number], name)(*arguments)

    def shell(self, line: str) -> str:
        return subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout

    def serve(self, client: Connection) -> None:
        while True:
            name, arguments = client.recv()
            try:
                client.send((True, getattr(self, name)(*arguments)))
            except Exception as error:  # noqa: BLE001 - it travels to the test
                client.send((False, error))


class RemoteAgent:
    """The test's end of it."""

    def __init__(self, host: str) -> None:
        self._connection = Client((host, PORT), authkey=KEY)

    def call(self, name: str, *arguments: Any) -> Any:
        self._connection.send((name, arguments))
        ok, answer = self._connection.recv()
        if not ok:
            raise answer
        return answer

    def close(self) -> None:
        self._connection.close()


class RemoteOwner:
    """A SegmentProcess of the other guest; has its commands as methods."""

    def __init__(self, agent: RemoteAgent, host: str, **options: Any) -> None:
        self._agent = agent
        self._number, self.descriptor = agent.call(
            "start", {"advertised_host": host, "host": "0.0.0.0", "rdma_devices": (), **options}
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self._agent.call("command", self._number, name, arguments)


if __name__ == "__main__":
    with Listener(("0.0.0.0", PORT), authkey=KEY) as listener:
        Path("/out/listening").touch()
        while True:
            try:
                Agent().serve(listener.accept())
            except EOFError:
                continue
