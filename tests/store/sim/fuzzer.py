"""Sends what no client would: random and mutated frames and gRPC messages to a real node and a real master.

Everything derives from one seed. ``python -m tests.store.sim.fuzzer --seconds 600 --seed 1`` runs it by hand; see
``attacked`` for what is asserted of the processes meanwhile and afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import tanghulu
from tanghulu.discovery import membership
from tanghulu.errors import InvalidRequest, TanghuluError, VersionMismatch
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.frames import HEAD, PREAMBLE, FrameReader, encode_head
from tanghulu.rpc.methods import PROTOCOL_VERSION
from tanghulu.rpc.wire import Failure, encode, parser_of
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.announcements import ChunkEntry, NodeAnnouncement, Removal
from tanghulu.store.protocol.directory_messages import PlaceRequest
from tanghulu.store.protocol.messages import NodeHello, PutRequest
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import Address, ChunkKey
from tests.store.cluster import Cluster, Process, eventually

#: Without DRAIN: a node that was told to drain rightly takes nothing any more.
METHODS: dict[int, type[Any]] = {
    method.number: method.request
    for method in (*methods.METHODS, *membership.METHODS)
    if method is not methods.DRAIN and method.request is not bytes
}
_INTERESTING = (0, 1, 2, 127, 128, 255, 1 << 15, (1 << 16) - 1, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_WORDS = ("", "k0", "fuzz/a", "fuzz/" + "x" * 2000, "\x00", "ключ", "kv/", "node-1-abc", "lru", "no-such", "a/b/c")
_REPLY_S = 0.02


@contextlib.contextmanager
def recording() -> Iterator[list[bytes]]:
    """The frames that clients of this process really send."""
    frames: list[bytes] = []
    original = FastConnection._send

    def send(self: FastConnection, call: Any, call_id: int, until: float) -> None:
        body, data = call.body, b"".join(bytes(part) for part in call.attachment)
        frames.append(encode_head(call.method, call_id, len(body), len(data)) + body + data)
        original(self, call, call_id, until)

    FastConnection._send = send  # type: ignore[method-assign]
    try:
        yield frames
    finally:
        FastConnection._send = original  # type: ignore[method-assign]


def record(address: str) -> list[bytes]:
    """One of everything that a client does."""
    with recording() as frames:
        for transport in ("shm", "tcp"):
            with tanghulu.connect(address, transport=transport) as client:
                client.put(f"fuzz/small{transport}", b"small" * 100, ttl_s=5)
                for i in range(3):
                    client.put(f"fuzz/often{transport}{i}", b"often")
                client.put(f"fuzz/large{transport}", bytes(200_000), pin="soft", part_bytes=65536)
                client.put_many([(f"fuzz/{transport}{i}", bytes([i]) * 900) for i in range(5)])
                client.get(f"fuzz/large{transport}").close()
                client.get_range(f"fuzz/large{transport}", 70_000, 10).close()
                client.wait_for_many([f"fuzz/large{transport}", "fuzz/never"], deadline_s=0.2)
                client.get_many([f"fuzz/{transport}{i}" for i in range(7)])
                client.exists_many(["fuzz/0", "fuzz/1"])
                client.match_prefix(["fuzz/0"])
                client.stat(f"fuzz/small{transport}")
                client.list_keys("fuzz/")
                client.nodes()
                client.eviction_policy(client.nodes()[0].id)
                client.remove(f"fuzz/small{transport}")
    added, removed = [ChunkEntry(ChunkKey("fuzz/y"), 3, 100)], [Removal(ChunkKey("fuzz/x"), 2)]
    body = encode(NodeAnnouncement("node-1-abc", 7, added, removed, report_id=1))
    place = encode(PlaceRequest(1000, 2, client_place="a/b/c"))
    frames.append(encode_head(methods.ANNOUNCE.number, 1, len(body), 0) + body)
    frames.append(encode_head(methods.PLACE.number, 2, len(place), 0) + place)
    new = NewChunk(ChunkKey("fuzz/stream"), 5, 100_000)
    request = encode(PutRequest([new], True, 500))
    frames.append(encode_head(methods.PUT.number, 3, len(request), new.size_bytes) + request + bytes(new.size_bytes))
    return frames


@dataclass
class Mutator:
    """Makes bytes out of recorded frames and message types; everything from ``rng``."""

    rng: random.Random
    frames: list[bytes]

    def bytes_like(self, data: bytes) -> bytes:
        """``data`` with a few changes."""
        rng, out = self.rng, bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 3, 8))):
            if not out:
                return rng.randbytes(rng.randrange(40))
            at = rng.randrange(len(out))
            match rng.randrange(7):
                case 0:
                    out[at] ^= 1 << rng.randrange(8)
                case 1:
                    out[at] = rng.choice(_INTERESTING) & 255
                case 2:
                    del out[at : at + rng.choice((1, 2, 8, 100))]
                case 3:
                    out[at:at] = rng.randbytes(rng.choice((1, 4, 50)))
                case 4:
                    other = rng.choice(self.frames)
                    begin = rng.randrange(len(other))
                    out[at : at + 20] = other[begin : begin + rng.choice((4, 40))]
                case 5:
                    out[at:at] = out[at : at + rng.choice((5, 60))] * rng.choice((1, 10))
                case _:
                    out = out[:at]
        return bytes(out)

    def frame(self) -> bytes:
        """A frame that is nearly right, or not at all."""
        rng = self.rng
        match rng.randrange(6):
            case 0:
                return rng.randbytes(rng.randrange(1, 200))
            case 1:
                return self.bytes_like(rng.choice(self.frames))
            case 2:  # a head that lies about what follows
                known = rng.choice(self.frames)
                head = list(HEAD.unpack_from(known))
                head[0] = rng.choice((*_INTERESTING, *head))
                head[1] = rng.choice((head[1], *_INTERESTING))
                method = rng.choice([*METHODS, 0, 2, 9, 50, 51, 65535])
                return HEAD.pack(head[0], head[1], method, rng.randrange(65536), rng.choice(_INTERESTING)) + known[16:]
            case 3:  # a sound frame around a mutated message
                known = rng.choice(self.frames)
                method, body = HEAD.unpack_from(known)[2], self.bytes_like(known[HEAD.size :])
                return encode_head(method, rng.randrange(1, 1 << 32), len(body), 0) + body
            case 4:  # another method's message
                known = rng.choice(self.frames)
                size, attached, _, _, call_id = HEAD.unpack_from(known)
                return HEAD.pack(size, attached, rng.choice(list(METHODS)), 0, call_id) + known[HEAD.size :]
            case _:
                method, kind = rng.choice(list(METHODS.items()))
                body = self.body(kind)
                data = rng.randbytes(rng.choice((0, 0, 10, 5000)))
                return encode_head(method, rng.randrange(1, 1 << 32), len(body), len(data)) + body + data

    def body(self, kind: type[Any]) -> bytes:
        """The bytes of a message of ``kind``, odd or not quite one."""
        fields = self._odd(msgspec.inspect.type_info(kind))
        if kind is membership.RegisterRequest and isinstance(fields, list):
            fields[1:2] = [200]  # ms: an instance that nobody is would be taken for a node until its lease ends
        return msgspec.msgpack.encode(fields)

    def _odd(self, info: Any) -> Any:
        """What stands for a value of that type in a message: of the type, mostly, and of odd size or value."""
        rng = self.rng
        if rng.random() < 0.05:
            return rng.choice((None, -1, 1.5, "x", b"x", [], {}, True))
        if isinstance(info, msgspec.inspect.StructType):
            fields = [self._odd(each.type) for each in info.fields]
            fields = fields[: rng.choice((len(fields), len(fields), rng.randrange(len(fields) + 1)))]
            return ([] if info.tag is None else [info.tag]) + fields + [[]] * rng.choice((0, 0, 1))
        if isinstance(info, msgspec.inspect.NamedTupleType):
            return [self._odd(each.type) for each in info.fields]
        if isinstance(info, msgspec.inspect.TupleType):
            return [self._odd(each) for each in info.item_types]
        if isinstance(info, msgspec.inspect.DictType):
            return {rng.choice(_WORDS): self._odd(info.value_type) for _ in range(rng.choice((0, 1, 3)))}
        if isinstance(info, msgspec.inspect.UnionType):
            return self._odd(rng.choice(info.types))
        if isinstance(info, msgspec.inspect.CollectionType):
            return [self._odd(info.item_type) for _ in range(rng.choice((0, 1, 1, 4, 300)))]
        if isinstance(info, msgspec.inspect.EnumType):
            return rng.choice([*(each.value for each in info.cls), 99])
        if isinstance(info, msgspec.inspect.IntType):
            return rng.choice((0, 1, 5, 1000, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1, -1))
        if isinstance(info, msgspec.inspect.FloatType):
            return rng.choice((0.0, -1.0, 1e300, float("nan"), float("inf"), 5.0))
        odd = {
            msgspec.inspect.StrType: rng.choice(_WORDS),
            msgspec.inspect.BytesType: rng.randbytes(rng.choice((0, 3, 900))),
            msgspec.inspect.BoolType: rng.random() < 0.5,
            msgspec.inspect.NoneType: None,
        }
        return odd[type(info)]


def decode_in_process(mutator: Mutator, num: int) -> None:
    """The decoders take anything: frames, InvalidRequest or, of a HELLO, VersionMismatch come out, nothing else."""
    for _ in range(num):
        reader, stream = FrameReader(), b"".join(mutator.frame() for _ in range(3))
        position = 0
        with contextlib.suppress(InvalidRequest):
            while position < len(stream):
                step = mutator.rng.choice((1, 7, 100, 5000))
                for frame in reader.feed(stream[position : position + step]):
                    kind = METHODS.get(frame.method, Failure)
                    with contextlib.suppress(InvalidRequest, VersionMismatch):
                        parser_of(kind)(frame.body)
                position += step


@dataclass
class Fuzzer:
    """Attacks ``targets`` in turn. ``counts`` says how much was sent."""

    mutator: Mutator
    cluster: Cluster
    counts: dict[str, int] = field(default_factory=lambda: {"connections": 0, "frames": 0})

    @property
    def targets(self) -> list[Process]:
        return [self.cluster.master, *self.cluster.nodes]

    def run(self, seconds: float, look: Callable[[], None], least: int = 0) -> None:
        """For ``seconds``, and until ``least`` frames were sent; ``look`` is called about once a second."""
        until_s, looked_s = time.monotonic() + seconds, 0.0
        while time.monotonic() < until_s or self.counts["frames"] < least:
            for target in self.targets:
                self._connection(target)
            if time.monotonic() > looked_s + 1.0:
                look()
                looked_s = time.monotonic()
        look()

    def _open(self, target: Process) -> socket.socket:
        unix = list(target.run_dir.glob("*.sock"))
        if unix and self.mutator.rng.random() < 0.5:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(self.mutator.rng.choice(unix)))
        else:
            address = Address.parse(target.address)
            sock = socket.create_connection((address.host, address.port))
        sock.settimeout(_REPLY_S)
        return sock

    def _connection(self, target: Process) -> None:
        """One connection: a beginning that is right or wrong, a few frames, whatever comes back, an end."""
        rng, mutator = self.mutator.rng, self.mutator
        self.counts["connections"] += 1
        with self._open(target) as sock, contextlib.suppress(OSError):
            sock.sendall(PREAMBLE if rng.random() < 0.9 else mutator.bytes_like(rng.choice((PREAMBLE, _HTTP2))))
            if rng.random() < 0.7:
                sock.sendall(hello(rng))
            for _ in range(rng.choice((1, 3, 10))):
                sock.sendall(mutator.frame())
                self.counts["frames"] += 1
            if rng.random() < 0.3:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends by a reset
            elif rng.random() < 0.7:
                while sock.recv(1 << 16):
                    pass


_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


def hello(rng: random.Random) -> bytes:
    """A sound first frame of a client that nobody knows."""
    request = NodeHello(PROTOCOL_VERSION, client_id=f"fuzz{rng.randrange(50)}", wants_shm=rng.random() < 0.5)
    body = encode(request)
    return encode_head(methods.HELLO.number, 1, len(body), 0) + body


def resident_bytes(process: Process) -> int:
    """Private memory of the process, without the segment that it shares."""
    for line in Path(f"/proc/{process.popen.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def handled_badly(log: str) -> list[str]:
    """Traces of exceptions that no handler foresaw."""
    ends = [match.end() for match in re.finditer("Traceback|handler_failed", log)]
    return [log[max(end - 1500, 0) : end + 3000] for end in ends]


def fuzz(cluster: Cluster, seconds: float, seed: int, most_bytes: int, least: int = 0) -> Fuzzer:
    """Attack as `Fuzzer.run`; asserts that every process lives, handles nothing badly, stays below ``most_bytes``."""
    mutator = Mutator(random.Random(seed), record(cluster.address))
    decode_in_process(mutator, 300)
    fuzzer = Fuzzer(mutator, cluster)

    def look() -> None:
        for process in fuzzer.targets:
            assert process.alive, f"seed {seed}: {process.log_text()[-4000:]}"
            assert resident_bytes(process) < most_bytes, f"seed {seed}: {process.name} has {resident_bytes(process)} B"

    fuzzer.run(seconds, look, least)
    for process in fuzzer.targets:
        bugs = handled_badly(process.log_text())
        assert not bugs, f"seed {seed}: {process.name}: {bugs[0]}"
    return fuzzer


MIB = 1 << 20
#: Private memory that neither process may ever have: some 40 MiB when empty, and bounded queues and tables beyond.
MOST_BYTES = 320 * MIB


def canary(key: str) -> bytes:
    return random.Random(key).randbytes(50_000 if key.endswith("0") else 300)


@contextlib.contextmanager
def attacked(seconds: float, seed: int, least: int) -> Iterator[Fuzzer]:
    """A cluster that was attacked, and serves right bytes afterwards."""
    keys = [f"canary{i}" for i in range(40)]
    with Cluster(1, "64MiB", "--debug", "lease_ms=1000") as cluster, tanghulu.connect(cluster.address) as client:
        for key in keys:
            client.put(key, canary(key), pin="hard")
        fuzzer = fuzz(cluster, seconds, seed, MOST_BYTES, least)
        node = cluster.nodes[0]
        with tanghulu.connect(cluster.address) as fresh:
            for each in (client, fresh):
                for key in keys:
                    assert bytes(each.get(key)) == canary(key)
                assert _puts(each)
        eventually(lambda: node.metric("tanghulu_node_leases") == 0)
        yield fuzzer


def _puts(client: tanghulu.store.client.Client) -> bool:
    """A put that goes through, once the instances are gone that the fuzzer had registered."""

    def put() -> bool:
        try:
            return client.put(f"after{random.random()}", bytes(100_000), deadline_s=2).ok
        except TanghuluError:
            return False

    eventually(put)
    return True


def main() -> None:
    """By hand."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    with attacked(arguments.seconds, arguments.seed) as fuzzer:
        sizes = {process.name: f"{resident_bytes(process) >> 20} MiB" for process in fuzzer.targets}
        print(f"seed {arguments.seed}: {fuzzer.counts}; memory at the end {sizes}")


if __name__ == "__main__":
    main()
