"""What peers that mean harm cost others: p99 of a get and a put of 64 KiB with and without each attack, in one run.

    PYTHONPATH=src python -m benchmarks.store.hostile [--rounds 6] [--calls 150] [--seed 1] [--only NAME] [--no-keep]

The attacks are those of tests/store/hostile, each kept up for a whole round by processes of its own at a node that has
nothing else to do. Rounds with and without it take turns, in an order that the seed shuffles, so that what else the
machine does falls on both. A round's calls are one client's put and get of 64 KiB over tcp, the way of another host,
where each call asks the node; latencies of all rounds of a kind are taken together. Memory: by how much the node's own
(RssAnon, without its segment) was larger during the attack than just before.

The attackers run at a low priority, as if they were on another machine: what counts is what the *node* is made to do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import tanghulu
from benchmarks.common.report import keep
from benchmarks.store.soak import Server
from tanghulu.rpc.frames import PREAMBLE, encode_head
from tanghulu.rpc.wire import encode
from tanghulu.store.client import Client
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.checksums import NO_CHECKSUMS
from tanghulu.store.protocol.messages import CommitItem, CommitRequest, GetRequest, ReserveRequest, UnpinRequest
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import Address, ChunkKey
from tests.store.hostile.peers import Dripper, Forger, greeted

KIB, MIB = 1 << 10, 1 << 20
SIZE = 64 * KIB
NICE = 10
#: Between two beginnings of an attack whose connection was ended.
PAUSE_S = 0.01
MAX_ANSWERS = 1 << 16


# --- the attacks; each goes on until its process is ended


def gluttony(address: str) -> None:
    """Sixteen peers ask for 400 MiB each and take nothing; then again."""
    body = encode(GetRequest(["big"] * 4, 4 * MIB))
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for peer in range(16):
                connection, _ = greeted(address, f"glutton-{peer}")
                stack.callback(connection.close)
                frames = (encode_head(methods.GET.number, call_id, len(body), 0) + body for call_id in range(2, 102))
                connection._socket.settimeout(5)
                connection._socket.sendall(b"".join(frames))
            time.sleep(1)


def silence(address: str) -> None:
    """Connections that say their first eight bytes and nothing more, as many as come in; those cut come again."""
    _, welcome = greeted(address, "asks-for-ports")
    data_ports = [Address.parse(each.address) for each in welcome.segment.endpoints_of("tcp")]
    wires: list[socket.socket] = []
    while True:
        for port in (Address.parse(address), *data_ports):
            with contextlib.suppress(OSError):
                wires.append(socket.create_connection((port.host, port.port), timeout=5))
                wires[-1].sendall(PREAMBLE)
        if len(wires) > 1200:
            wires.pop(0).close()
            time.sleep(PAUSE_S)


def huge_lists(address: str) -> None:
    """Lists of 65,536 keys, the most that is taken, one behind the other."""
    _repeat(address, methods.GET.number, encode(GetRequest([f"none-{number}" for number in range(65_536)], 0)), 2)


def verification(address: str) -> None:
    """Calls that have 16 MiB verified a thousand times over."""
    _repeat(address, methods.UNPIN.number, encode(UnpinRequest([], 0, ["large"] * 1000, [])), 2)


def foreign_commits(address: str) -> None:
    """Commits of somebody else's reservation of 32 MiB, two thousand a call, without checksums."""
    owner, _ = greeted(address, "owner")
    thief, _ = greeted(address, "thief")
    new = NewChunk(ChunkKey(f"mine-{os.getpid()}"), 1, 32 * MIB, NO_CHECKSUMS)
    reply = owner.call(methods.RESERVE.number, ReserveRequest([new], 0), methods.RESERVE.reply).message
    items = [CommitItem(reply.reservations[0].lease_id, NO_CHECKSUMS)] * 2000
    while True:
        thief.call(methods.COMMIT.number, CommitRequest(items, [], False, 0), methods.COMMIT.reply, deadline_s=60)


def dripping(address: str) -> None:
    """Sixty-four peers that send the head of a frame of 1 MiB and then a byte now and then."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            wires = []
            for peer in range(64):
                connection, _ = greeted(address, f"drip-{peer}")
                stack.callback(connection.close)
                connection._socket.settimeout(5)
                connection._socket.sendall(encode_head(methods.GET.number, 2, MIB, 0))
                wires.append(connection._socket)
            while True:
                for wire in wires:
                    wire.sendall(b"x")
                time.sleep(0.05)


def slow_transfers(address: str) -> None:
    """Ninety-six slices and heads on the port of transfers, of which a byte comes now and then, or is taken."""
    while True:
        with contextlib.suppress(OSError, tanghulu.errors.TanghuluError):
            dripper = Dripper.begin(address, f"drip-{os.getpid()}-{time.monotonic_ns()}", 96, "big")
            while dripper.drip():
                time.sleep(0.05)
            dripper.close()


def forged_entries(address: str) -> None:
    """A process of the node's user that tries every way of writing into the index that it maps, again and again."""
    forger = Forger(address, "forger")
    while True:
        assert not list(forger.attempts())


ATTACKS: dict[str, Callable[[str], None]] = {
    each.__name__: each
    for each in (
        gluttony,
        silence,
        huge_lists,
        verification,
        foreign_commits,
        dripping,
        slow_transfers,
        forged_entries,
    )
}


def _repeat(address: str, method: int, body: bytes, in_flight: int) -> None:
    """Keep so many calls under way on one connection; it is opened again when the node ends it."""
    while True:
        with contextlib.suppress(OSError, tanghulu.errors.TanghuluError):
            connection, _ = greeted(address, f"attacker-{os.getpid()}")
            connection._socket.settimeout(60)
            for call_id in range(2, 2 + in_flight):
                connection._socket.sendall(encode_head(method, call_id, len(body), 0) + body)
            call_id = 2 + in_flight
            while connection._socket.recv(MAX_ANSWERS):
                call_id += 1
                connection._socket.sendall(encode_head(method, call_id, len(body), 0) + body)
        time.sleep(PAUSE_S)


@contextlib.contextmanager
def attacked(name: str, address: str) -> Iterator[None]:
    """The attack goes on inside the block."""
    program = ["nice", "-n", str(NICE), sys.executable, "-m", "benchmarks.store.hostile"]
    command = [*program, "--attack", name, "--node", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)  # it has begun by then
        assert process.poll() is None, f"the attack {name} ended by itself: {process.returncode}"
        yield
        assert process.poll() is None, f"the attack {name} ended by itself: {process.returncode}"
    finally:
        process.kill()
        process.communicate()


# --- what others feel


def private_bytes(node: Server) -> int:
    status = Path(f"/proc/{node.popen.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


class Victim:
    """A client whose calls are timed."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._value = random.Random(seed).randbytes(SIZE)
        self._number = 0

    def round(self, calls: int, node: Server) -> tuple[list[float], list[float], int]:
        """(seconds of each put, of each get, the most private memory that the node had)."""
        puts, gets, most = [], [], 0
        for call in range(calls):
            key = f"victim/{self._number}"
            self._number += 1
            begun = time.perf_counter()
            self._client.put(key, self._value).check()
            put = time.perf_counter()
            with self._client.get(key) as chunk:
                got = time.perf_counter()
                assert chunk == self._value
            puts.append(put - begun)
            gets.append(got - put)
            self._client.remove(key)
            if call % 10 == 0:
                most = max(most, private_bytes(node))
        return puts, gets, most


def measure(name: str, rounds: int, calls: int, seed: int, folder: Path) -> dict[str, Any]:
    """A row: milliseconds with and without the attack, their ratio, and what the node's memory grew by."""
    rng = random.Random(f"{seed}/{name}")
    where = folder / name
    where.mkdir()
    master = Server("tanghulu.store.master.main", "master", where, ["--port", "0"], {})
    flags = ["--port", "0", "--master", master.address, "--memory", "256MiB"]
    node = Server("tanghulu.store.node.main", "node", where, flags, {})
    taken: dict[bool, tuple[list[float], list[float]]] = {True: ([], []), False: ([], [])}
    grown = 0
    try:
        with tanghulu.connect(master.address, transport="tcp", deadline_s=60) as client:
            client.put("big", bytes(MIB), pin="soft")
            client.put("large", bytes(16 * MIB), pin="soft")
            victim = Victim(client, seed)
            victim.round(calls, node)  # nobody pays for a first time
            for _ in range(rounds):
                for under_attack in rng.sample([True, False], 2):
                    before = private_bytes(node)
                    with attacked(name, node.address) if under_attack else contextlib.nullcontext():
                        puts, gets, most = victim.round(calls, node)
                    taken[under_attack][0].extend(puts)
                    taken[under_attack][1].extend(gets)
                    if under_attack:
                        grown = max(grown, most - before)
    finally:
        for server in (node, master):
            server.end(subprocess.signal.SIGTERM)  # type: ignore[attr-defined]
    row: dict[str, Any] = {"attack": name, "grown_mib": round(grown / MIB, 1)}
    for what, index in (("put", 0), ("get", 1)):
        usual, attack = (np.percentile(taken[kind][index], [50, 99]) * 1000 for kind in (False, True))
        row[what] = {
            "usual_p50_ms": round(float(usual[0]), 3),
            "attack_p50_ms": round(float(attack[0]), 3),
            "usual_p99_ms": round(float(usual[1]), 3),
            "attack_p99_ms": round(float(attack[1]), 3),
            "ratio_p99": round(float(attack[1] / usual[1]), 2),
        }
    return row


def shown(rows: list[dict[str, Any]]) -> Table:
    table = Table("attack", "call", "p99 usual", "p99 attacked", "ratio", "p50 usual", "p50 attacked", "node grew by")
    for row in rows:
        for what in ("put", "get"):
            each = row[what]
            cells = [f"{each[name]:.2f}" for name in ("usual_p99_ms", "attack_p99_ms", "ratio_p99")]
            cells += [f"{each[name]:.2f}" for name in ("usual_p50_ms", "attack_p50_ms")]
            table.add_row(row["attack"], what, *cells, f"{row['grown_mib']} MiB")
    return table


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--calls", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=tuple(ATTACKS))
    parser.add_argument("--no-keep", action="store_true")
    parser.add_argument("--attack", choices=tuple(ATTACKS), help=argparse.SUPPRESS)
    parser.add_argument("--node", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        print("begins", flush=True)
        ATTACKS[options.attack](options.node)
        return
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="th-hostile-") as folder:
        names = [options.only] if options.only else list(ATTACKS)
        rows = [measure(name, options.rounds, options.calls, options.seed, Path(folder)) for name in names]
    Console().print(shown(rows))
    if not options.no_keep and not options.only:
        keep("hostile", rows, seed=options.seed, load_before=load, load_after=os.getloadavg())


if __name__ == "__main__":
    main()
