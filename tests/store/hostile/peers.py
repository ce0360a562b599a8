"""What hostile peers do, for the tests here and for benchmarks/hostile.py."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tanghulu.auth.credentials import Credentials
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.runtime import process
from tanghulu.store.client.logic import messages
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.checksums import NO_CHECKSUMS
from tanghulu.store.protocol.messages import Found, GetRequest, ReserveRequest, Welcome
from tanghulu.store.protocol.shared_index import IndexPlace, IndexReader, IndexWriter, index_bytes
from tanghulu.store.protocol.types import NewChunk
from tanghulu.transfer_engine.core.wire import SHM_ANSWER_BYTES, Head, Op, name_hash, pack_shm_hello, secret_numbers
from tanghulu.types import Address, ChunkKey

MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def greeted(address: str, name: str, token: str = "") -> tuple[FastConnection, Welcome]:
    """A connection with a session at a node, as of another host, and what it was told."""
    connection = FastConnection(Address.parse(address))
    call = messages.hello(name, Credentials("", token), "elsewhere", False, ())
    return connection, messages.welcome(connection.call(call.method, call.request, call.reply_type))


# --- slow drip on the port of transfers


@dataclass
class Dripper:
    """Slices on the port of transfers that go on for ever, each under a lease of its own."""

    connection: FastConnection
    wires: list[socket.socket]

    @classmethod
    def begin(cls, address: str, name: str, num_slices: int, present: str) -> Dripper:
        """So many WRITEs of 1 MiB, READs of ``present`` that is pinned, and heads; a third of each."""
        connection, welcome = greeted(address, name)
        port = Address.parse(welcome.segment.endpoints_of("tcp")[0].address)
        third = num_slices // 3
        new = [NewChunk(ChunkKey(f"{name}-{number}"), 1, MIB, NO_CHECKSUMS) for number in range(third)]
        reply = connection.call(methods.RESERVE.number, ReserveRequest(new, 0), methods.RESERVE.reply).message
        pinned = connection.call(methods.GET.number, GetRequest([present] * third, 0), methods.GET.reply).message
        writes = [(Op.WRITE, each.lease_id, each.offset, MIB) for each in reply.reservations if hasattr(each, "offset")]
        reads = [(Op.READ, each.lease_id, each.offset, each.size_bytes) for each in pinned.items if type(each) is Found]
        made = cls(connection, [])
        for op, lease_id, offset, length in [*writes, *reads, *[(Op.READ, 1, 0, 1)] * third]:
            wire = socket.socket()
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that little of a READ is taken unasked
            wire.settimeout(30)
            wire.connect((port.host, port.port))
            made.wires.append(wire)
            token = int.from_bytes(os.urandom(7)) + 1
            name_number = name_hash(welcome.segment.name)
            session_id, secret = welcome.session
            first, second = secret_numbers(secret)
            hello = Head(Op.HELLO, 0, session_id, name_number, welcome.generation, token, first, digest=second)
            wire.sendall(hello.pack())
            head = Head(op, 1, session_id, lease_id, welcome.generation, offset, length).pack()
            wire.sendall(head[:-40] if lease_id == 1 and length == 1 else head)
        return made

    def drip(self) -> int:
        """A byte more of each, and how many the node has not hung up on."""
        for wire in list(self.wires):
            try:
                wire.sendall(b"\0")
            except OSError:
                wire.close()
                self.wires.remove(wire)
        return len(self.wires)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()
        self.connection.close()


# --- index entries that a reader forges


class Forger:
    """A process of the node's user, which has been given the node's memory and tries to forge entries of its index."""

    def __init__(self, address: str, name: str) -> None:
        self._connection = FastConnection(Address.parse(address), shortcut=True)
        call = messages.hello(name, Credentials("", ""), process.host_id(), True, ())
        welcome = messages.welcome(self._connection.call(call.method, call.request, call.reply_type))
        assert welcome.index is not None
        self.place: IndexPlace = welcome.index
        self._wire = socket.socket(socket.AF_UNIX)
        self._wire.connect(welcome.segment.endpoints_of("shm")[0].address)
        self._wire.sendall(pack_shm_hello(welcome.segment.name, welcome.generation, welcome.session))
        _, fds, _, _ = socket.recv_fds(self._wire, SHM_ANSWER_BYTES, 3)
        self._fds = list(fds)
        self.data = mmap.mmap(fds[0], 0, prot=mmap.PROT_READ)
        self._index_fd = fds[1]
        self.index = mmap.mmap(fds[1], 0, prot=mmap.PROT_READ)
        self._forged = self._make(b"what nobody has put")

    def _make(self, value: bytes) -> bytes:
        """An index in this process's own memory, with an entry for a key that is not there."""
        memory = bytearray(index_bytes(self.place.num_buckets))
        IndexWriter(memoryview(memory), self.place.seed, 0.0).publish("forged", 1, 0, len(value), 0)
        return bytes(memory)

    def attempts(self) -> Iterator[str]:
        """Try each way of writing into the index; yields those that the kernel lets pass."""
        for fd in self._doors():
            for prot in (mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_WRITE):
                with contextlib.suppress(OSError):
                    mmap.mmap(fd, 0, prot=prot).close()
                    yield "a writable mapping"
            with contextlib.suppress(OSError):
                os.pwrite(fd, self._forged[:64], 0)
                yield "write()"
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)
                yield "other seals"
            for size in (0, 2 * len(self.index)):
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, size)
                    yield "another size"
        if self._made_writable(self.index):
            yield "mprotect()"

    def _doors(self) -> Iterator[int]:
        """The descriptor that was given, and the same file opened for writing by way of /proc, its mode changed."""
        yield self._index_fd
        with contextlib.suppress(OSError):
            os.fchmod(self._index_fd, 0o600)
            fd = os.open(f"/proc/self/fd/{self._index_fd}", os.O_RDWR)
            try:
                yield fd
            finally:
                os.close(fd)

    @staticmethod
    def _made_writable(area: mmap.mmap) -> bool:
        page = np.frombuffer(area, np.uint8).__array_interface__["data"][0]
        return not _libc.mprotect(
            ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE
        )

    def finds(self, key: str) -> bool:
        """Whether a reader of the node's index would find the key."""
        reader = IndexReader(memoryview(self.data), memoryview(self.index), self.place)
        return reader.find(key, time.monotonic()) is not None

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._wire.close()
        self._connection.close()
