"""Who has not said HELLO to a worker reads none of its KV, even one who knows all numbers; who has cannot write it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.methods import PROTOCOL_VERSION
from tanghulu.runtime.process import host_id
from tanghulu.transfer_engine.core.segment import SegmentDescriptor, SegmentHello, SegmentWelcome, SessionKey
from tanghulu.transfer_engine.core.wire import (
    REPLY_BYTES,
    SHM_ANSWER_BYTES,
    Head,
    Op,
    name_hash,
    pack_shm_hello,
    parse_error,
    parse_reply,
    secret_numbers,
)
from tanghulu.types import Address
from tanghulu.workers.kv.peer_methods import EXPORT_PIN, HELLO, ExportPinRequest
from tests.workers.kv.test_staging import LAYOUT, NAME, Holder, HostCopier, bytes_of


def greeted(address: str, *, wants_shm: bool = False) -> tuple[FastConnection, SegmentWelcome]:
    where, _, unix_path = address.partition("|")
    connection = FastConnection(Address.parse(where), unix_path if wants_shm else None)
    hello = SegmentHello(PROTOCOL_VERSION, client_id="reader", host_id=host_id(), wants_shm=wants_shm)
    return connection, connection.call(HELLO.number, hello, HELLO.reply).message


def read_raw(segment: SegmentDescriptor, session: SessionKey, lease_id: int, offset: int) -> bytes:
    """A block as the port of transfers gives it, or the code of its refusal."""
    where = Address.parse(segment.endpoints_of("tcp")[0].address)
    first, second = secret_numbers(session.secret)
    hello = Head(Op.HELLO, 0, session.session_id, name_hash(segment.name), segment.generation, 77, first, digest=second)
    read = Head(Op.READ, 1, session.session_id, lease_id, segment.generation, offset, LAYOUT.block_bytes)
    with socket.create_connection((where.host, where.port)) as sock:
        sock.settimeout(30)
        sock.sendall(hello.pack())
        for request in (b"", read.pack()):
            sock.sendall(request)
            refused, _, num_bytes, _ = parse_reply(sock.recv(REPLY_BYTES, socket.MSG_WAITALL))
            data = sock.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""
            if refused:
                return parse_error(data).code.encode()
        return data


async def test_numbers_are_not_enough_to_read_a_block(tmp_path: Path) -> None:
    holder = Holder(tmp_path, 3, HostCopier())
    async with holder.serving():
        export = holder.export([7])

        def attack() -> None:
            honest, welcome = greeted(holder.instance)
            stranger, other = greeted(holder.instance)
            with contextlib.closing(honest), contextlib.closing(stranger):
                request = ExportPinRequest(export.export_id, fingerprint=NAME)
                (block,) = honest.call(EXPORT_PIN.number, request, EXPORT_PIN.reply).message.blocks
                segment, key = welcome.segment, welcome.session
                assert len({key.session_id >> 32, other.session.session_id >> 32, block.lease_id >> 32}) == 3
                for shown in (SessionKey(key.session_id, bytes(16)), SessionKey(key.session_id, other.session.secret)):
                    assert read_raw(segment, shown, block.lease_id, block.offset) == b"UNAUTHORIZED"
                assert read_raw(segment, other.session, block.lease_id, block.offset) == b"LEASE_EXPIRED"
                assert read_raw(segment, key, block.lease_id, block.offset) == bytes_of(holder.parts, 7)

        await asyncio.to_thread(attack)


async def test_who_maps_the_kv_cannot_write_it(tmp_path: Path) -> None:
    holder = Holder(tmp_path, 3, HostCopier())
    async with holder.serving():

        def attack() -> None:
            connection, welcome = greeted(holder.instance, wants_shm=True)
            segment, key = welcome.segment, welcome.session
            with contextlib.closing(connection), socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(30)
                sock.connect(segment.endpoints_of("shm")[0].address)
                sock.sendall(pack_shm_hello(segment.name, segment.generation, key))
                _, fds, _, _ = socket.recv_fds(sock, SHM_ANSWER_BYTES, 3)
            assert fds
            for each in fds:
                try:
                    os.pwrite(each, b"forged", 0)
                except OSError:
                    continue
                finally:
                    os.close(each)
                raise AssertionError("the descriptor can be written")

        await asyncio.to_thread(attack)
