"""Redis as the directory: its servers, alone, as pairs and as a Cluster, a small client, and what it keeps of a key.

A key's value is ``version size holder [holder ...]`` in hexadecimal. The functions in ``LIBRARY`` keep the rule that of
two versions the older one stays, atomically and in the server, as a master does. Nothing but the protocol is spoken
here, so that no peer's client library is measured.
"""

from __future__ import annotations

import binascii
import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Slots of a Redis Cluster.
NUM_HASH_SLOTS = 16384
#: A primary of a Cluster that is silent so long is replaced.
NODE_TIMEOUT_MS = 1000
_START_S = 20.0

LIBRARY = b"""#!lua name=directory
redis.register_function('commit', function(keys, args)
  local found = redis.call('GET', keys[1])
  if not found then
    redis.call('SET', keys[1], args[1] .. ' ' .. args[2] .. ' ' .. args[3])
    return 1
  end
  if string.match(found, '^%x+') ~= args[1] then return 0 end
  if not string.find(found .. ' ', ' ' .. args[3] .. ' ', 1, true) then
    redis.call('APPEND', keys[1], ' ' .. args[3])
  end
  return 1
end)
redis.register_function('report', function(keys, args)
  local refused = {}
  for index, key in ipairs(keys) do
    local found = redis.call('GET', key)
    if not found then
      redis.call('SET', key, args[2 * index] .. ' ' .. args[2 * index + 1] .. ' ' .. args[1])
    elseif string.match(found, '^%x+') ~= args[2 * index] then
      refused[#refused + 1] = index
    elseif not string.find(found .. ' ', ' ' .. args[1] .. ' ', 1, true) then
      redis.call('APPEND', key, ' ' .. args[1])
    end
  end
  return refused
end)
"""


def command(*arguments: bytes) -> bytes:
    """A command as it travels."""
    return b"*%d\r\n" % len(arguments) + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in arguments)


def hash_slot(key: bytes) -> int:
    """The Cluster's slot of ``key``, whose part in braces counts if there is one."""
    if key.startswith(b"{"):
        key = key[1 : key.index(b"}")]
    return binascii.crc_hqx(key, 0) % NUM_HASH_SLOTS


class Connection:
    """A blocking connection; values must not hold a line's end."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._socket = socket.create_connection(("127.0.0.1", port), 10.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines: list[bytes] = []  # received beyond the last reply of ``receive_some``

    def send(self, commands: bytes) -> None:
        """Send what ``command`` has made."""
        self._socket.sendall(commands)

    def receive(self, count: int = 1) -> list[Any]:
        """The next ``count`` replies. Raises ConnectionError."""
        data = b""
        while True:
            part = self._socket.recv(1 << 20)
            if not part:
                raise ConnectionError("the server closed the connection")
            data += part
            if data.endswith(b"\r\n"):
                with contextlib.suppress(IndexError):
                    return _parse(data.split(b"\r\n")[:-1], count)[0]

    def receive_some(self) -> list[Any]:
        """The next reply of one line; those that came with it are kept for the next calls. Raises ConnectionError."""
        while not self._lines:
            self._lines = self._receive_lines()
        return [_parse([self._lines.pop()], 1)[0][0]]

    def _receive_lines(self) -> list[bytes]:
        data = b""
        while not data.endswith(b"\r\n"):
            part = self._socket.recv(1 << 20)
            if not part:
                raise ConnectionError("the server closed the connection")
            data += part
        return data.split(b"\r\n")[-2::-1]

    def ask(self, *arguments: bytes) -> Any:
        """One command, one reply. Raises RuntimeError with the server's error."""
        self.send(command(*arguments))
        (reply,) = self.receive()
        if isinstance(reply, RuntimeError):
            raise reply
        return reply

    def info(self, section: str) -> dict[str, str]:
        """What INFO says, whose one value has many lines."""
        self.send(command(b"INFO", section.encode()))
        data = self._socket.recv(1 << 20)
        size = int(data[1 : data.index(b"\r\n")])
        while len(data) < size:
            data += self._socket.recv(1 << 20)
        lines = (line.partition(":") for line in data.decode().splitlines())
        return {name: value for name, colon, value in lines if colon}

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _parse(lines: Sequence[bytes], count: int, at: int = 0) -> tuple[list[Any], int]:
    """``count`` replies from line ``at`` on, and the line behind them. Raises IndexError where lines are missing."""
    replies: list[Any] = []
    for _ in range(count):
        kind, rest = lines[at][:1], lines[at][1:]
        at += 1
        if kind == b"$":
            replies.append(None if rest == b"-1" else lines[at])
            at += rest != b"-1"
        elif kind == b"*":
            part, at = _parse(lines, int(rest), at)
            replies.append(part)
        elif kind == b"-":
            replies.append(RuntimeError(rest.decode()))
        else:
            replies.append(int(rest) if kind == b":" else rest)
    return replies, at


class Server:
    """A ``redis-server`` without any file; ``flags`` as on its command line."""

    def __init__(self, folder: Path, port: int, *flags: str) -> None:
        self.port, home = port, folder / str(port)
        home.mkdir()
        settings = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(home), "--save", "", "--appendonly", "no"]
        self.popen = subprocess.Popen(
            ["redis-server", *settings, "--repl-diskless-sync-delay", "0", *flags], stdout=subprocess.DEVNULL
        )
        self.pid = self.popen.pid
        eventually(self._answers)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            connection = Connection(self.port)
            connection.close()
            return True
        return False

    def connect(self) -> Connection:
        """A connection to it."""
        return Connection(self.port)

    def kill(self) -> None:
        """End it without a word."""
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()


class Servers:
    """A context manager that starts servers and ends them all."""

    def __init__(self) -> None:
        self.all: list[Server] = []

    def __enter__(self) -> Servers:
        self._folder = Path(tempfile.mkdtemp(prefix="th-redis-"))
        return self

    def start(self, *flags: str) -> Server:
        """A further server."""
        server = Server(self._folder, free_port(), *flags)
        self.all.append(server)
        return server

    def loaded(self, *flags: str) -> Server:
        """A server with the functions."""
        server = self.start(*flags)
        load(server)
        return server

    def __exit__(self, *error: object) -> None:
        for server in self.all:
            server.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def load(server: Server) -> None:
    """Give a primary the functions."""
    connection = server.connect()
    connection.ask(b"FUNCTION", b"LOAD", b"REPLACE", LIBRARY)
    connection.close()


def start_cluster(servers: Servers, num_primaries: int, replicas: int = 1) -> tuple[list[Server], list[Server]]:
    """A Cluster with the functions: its primaries, the first with the lowest slots, and a replica of each."""
    flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS))
    nodes = [servers.start(*flags, "--cluster-port", str(free_port())) for _ in range(num_primaries * (1 + replicas))]
    addresses = [f"127.0.0.1:{node.port}" for node in nodes]
    create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-replicas", str(replicas), "--cluster-yes"]
    subprocess.run(create, check=True, capture_output=True, timeout=60)
    by_role: dict[str, list[Server]] = {"master": [], "slave": []}
    for node in nodes:
        eventually(lambda node=node: _info(node, "cluster")["cluster_state"] == "ok")  # type: ignore[misc]
        by_role[_info(node, "replication")["role"]].append(node)
    primaries = sorted(by_role["master"], key=lambda node: owned(node)[0])
    for primary in primaries:
        load(primary)
        eventually(lambda p=primary: len(replicas_in_step(p)) == replicas)  # type: ignore[misc]
    return primaries, by_role["slave"]


def owned(server: Server) -> tuple[int, int]:
    """The first and the last hash slot of a primary."""
    connection = server.connect()
    slots = connection.ask(b"CLUSTER", b"SLOTS")
    connection.close()
    return next((first, last) for first, last, (_, port, *_), *_ in slots if port == server.port)


def replicas_in_step(server: Server) -> list[int]:
    """The ports of the replicas that follow ``server``."""
    found = _info(server, "replication")
    lines = [value for name, value in found.items() if name.startswith("slave") and "state=online" in value]
    return [int(line.split("port=")[1].split(",")[0]) for line in lines]


def is_primary(server: Server) -> bool:
    """Whether ``server`` takes writes."""
    return _info(server, "replication")["role"] == "master"


def _info(server: Server, section: str) -> dict[str, str]:
    connection = server.connect()
    try:
        found = connection.info(section)
        return found if section != "cluster" else {**found, **_cluster_state(connection)}
    finally:
        connection.close()


def _cluster_state(connection: Connection) -> dict[str, str]:
    connection.send(command(b"CLUSTER", b"INFO"))
    text = connection._socket.recv(1 << 16).decode()
    return {"cluster_state": "ok" if "cluster_state:ok" in text else "fail"}


def eventually(condition: Any, within_s: float = _START_S) -> float:
    """Wait until ``condition()`` holds; the seconds that it took. Raises TimeoutError."""
    begun_s = time.monotonic()
    while not condition():
        if time.monotonic() > begun_s + within_s:
            raise TimeoutError(f"not so within {within_s} s")
        time.sleep(0.01)
    return time.monotonic() - begun_s


def split(keys: Sequence[bytes], primaries: Sequence[Server]) -> list[list[int]]:
    """The positions in ``keys`` of the keys of each primary."""
    firsts = [owned(each) for each in primaries]
    parts: list[list[int]] = [[] for _ in primaries]
    for index, key in enumerate(keys):
        slot = hash_slot(key)
        parts[next(i for i, (first, last) in enumerate(firsts) if first <= slot <= last)].append(index)
    return parts


def free_port() -> int:
    """A port at which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
