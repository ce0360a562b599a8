"""What a fail-over of Redis does to commits that it has acknowledged: primaries are killed under load.

Redis answers before its replicas have a write. A process that is killed leaves what it has sent to the kernel, which
delivers it; of a host that is lost nothing more arrives. The second is played by a relay between primary and replica
that holds every byte back for a millisecond and is killed with the primary.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.redis_directory import (
    Connection,
    Server,
    Servers,
    command,
    eventually,
    free_port,
    hash_slot,
    is_primary,
    owned,
    replicas_in_step,
    start_cluster,
)

#: Commits of one pipeline of a writer, and writers.
PIPELINE = 64
NUM_WRITERS = 2
#: How long there is load before the kill.
LOAD_S = 0.4
RELAY_DELAY_S = 0.001


class Writer(threading.Thread):
    """Commits keys with one hash tag, ``PIPELINE`` at a time, until its server is gone; remembers what it was told."""

    def __init__(self, server: Server, tag: bytes) -> None:
        super().__init__()
        self._connection, self._tag = server.connect(), tag
        self.acknowledged: list[bytes] = []

    def run(self) -> None:
        """Write until the connection breaks."""
        number = 0
        try:
            while True:
                keys = [self._tag + b"%012x" % (number + i) for i in range(PIPELINE)]
                number += PIPELINE
                self._connection.send(
                    b"".join(command(b"FCALL", b"commit", b"1", key, b"7", b"30d40", b"2") for key in keys)
                )
                for key in keys:
                    (reply,) = self._connection.receive_some()
                    if reply == 1:
                        self.acknowledged.append(key)
        except OSError:
            self._connection.close()


def _lost(primary: Server, replica: Server, tags: list[bytes], kill: Any) -> dict[str, Any]:
    """Load ``primary``, ``kill`` it, and count what ``replica``, once it leads, has not got."""
    _prove_that_it_follows(primary, replica, tags[0])
    writers = [Writer(primary, tag) for tag in tags]
    for writer in writers:
        writer.start()
    time.sleep(LOAD_S)
    kill()
    promoted_s = eventually(lambda: is_primary(replica))
    for writer in writers:
        writer.join()
    connection, num_gone = replica.connect(), 0
    for writer in writers:
        for start in range(0, len(writer.acknowledged), 1000):
            num_gone += connection.ask(b"MGET", *writer.acknowledged[start : start + 1000]).count(None)
    connection.close()
    num_acknowledged = sum(len(writer.acknowledged) for writer in writers)
    return {"acknowledged": num_acknowledged, "gone": num_gone, "promoted_s": round(promoted_s, 2)}


def _prove_that_it_follows(primary: Server, replica: Server, tag: bytes) -> None:
    """Wait until a write has come through: a replica that still loads its first snapshot would have nothing at all."""
    writing, reading = primary.connect(), replica.connect()
    reading.send(command(b"READONLY"))
    reading.receive()
    writing.ask(b"SET", tag + b"probe", b"1")
    eventually(lambda: reading.ask(b"GET", tag + b"probe") == b"1")
    writing.close()
    reading.close()


def kill_cluster_primaries(rounds: int) -> list[dict[str, Any]]:
    """A Cluster of three primaries with a replica each; one primary after the other is killed."""
    rows: list[dict[str, Any]] = []
    with Servers() as servers:
        primaries, replicas = start_cluster(servers, 3)
        for primary in primaries[:rounds]:
            port = replicas_in_step(primary)[0]
            replica = next(each for each in replicas if each.port == port)
            first, last = owned(primary)
            names = (b"{r%d}" % number for number in range(10_000))
            tags = [name for name in names if first <= hash_slot(name) <= last][:NUM_WRITERS]
            rows.append(
                {"what": "Redis Cluster, primary killed", **_lost(primary, replica, tags, primary.kill)},
            )
            time.sleep(1.0)
    return rows


def lose_hosts(rounds: int) -> list[dict[str, Any]]:
    """A primary behind a link of one millisecond is lost with all that is under way."""
    rows: list[dict[str, Any]] = []
    for _ in range(rounds):
        with Servers() as servers:
            primary, port = servers.loaded(), free_port()
            code = f"from benchmarks.peers.redis_failover import relay; relay({port}, {primary.port})"
            link = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
            try:
                eventually(lambda port=port: _listens(port))  # type: ignore[misc]
                replica = servers.start("--replicaof", f"127.0.0.1 {port}")
                eventually(lambda p=primary: len(replicas_in_step(p)) == 1)  # type: ignore[misc]

                def kill(link: subprocess.Popen[bytes] = link, primary: Server = primary) -> None:
                    link.kill()
                    primary.kill()
                    replica.connect().ask(b"REPLICAOF", b"NO", b"ONE")  # noqa: B023 - called within the round

                tags = [b"{r%d}" % number for number in range(NUM_WRITERS)]
                rows.append({"what": "Redis, host of the primary lost", **_lost(primary, replica, tags, kill)})
            finally:
                link.kill()
                link.wait()
    return rows


def _listens(port: int) -> bool:
    try:
        Connection(port).close()
    except OSError:
        return False
    return True


def relay(port: int, to_port: int) -> None:
    """Pass bytes on between a replica, which connects to ``port``, and its primary, delayed on their way there."""

    async def passing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 20):
            loop.call_later(delay_s, writer.write, data)
        loop.call_later(delay_s, writer.close)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", to_port)
        await asyncio.gather(passing(up_reader, writer, RELAY_DELAY_S), passing(reader, up_writer, 0.0))

    async def serve() -> None:
        async with await asyncio.start_server(accept, "127.0.0.1", port) as server:
            await server.serve_forever()

    asyncio.run(serve())
