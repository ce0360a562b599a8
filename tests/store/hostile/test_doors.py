"""Peers that mean harm, at the doors of real processes: others are answered meanwhile, and memory stays bounded."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import tanghulu
from tanghulu.auth.handshakes import MAX_HANDSHAKES
from tanghulu.errors import InvalidRequest
from tanghulu.rpc.frames import PREAMBLE, encode_head
from tanghulu.rpc.slow_peers import MAX_UNSENT_BYTES
from tanghulu.rpc.wire import encode
from tanghulu.store.client import Client
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.checksums import NO_CHECKSUMS
from tanghulu.store.protocol.messages import (
    CommitItem,
    CommitRequest,
    GetRequest,
    KeysRequest,
    RemoveRequest,
    ReserveRequest,
    UnpinRequest,
)
from tanghulu.store.protocol.types import NewChunk
from tanghulu.types import Address, ChunkKey
from tests.store.cluster import Cluster, Process, eventually
from tests.store.gateway.running_gateway import serving
from tests.store.guarded_cluster import TOKENS, Encrypted, Secured, write_tokens
from tests.store.hostile.peers import Dripper, Forger, greeted

pytestmark = pytest.mark.slow

MIB = 1 << 20
#: What a node's own memory, without its segment, may grow by: the bound on what waits for all peers, one answer for
#: each connection of a test, and what the interpreter and the kernel's pages make of that.
GROWTH_BYTES = 2 * MAX_UNSENT_BYTES


def private_bytes(process: Process) -> int:
    """The memory of a process that it shares with nobody."""
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def others_are_served(client: Client) -> None:
    for number in range(100):
        key = f"other-{number}"
        assert client.put(key, key.encode()).ok
        with client.get(key) as chunk:
            assert chunk == key.encode()
        client.remove(key)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(1, "64MiB", checked=False) as running:
        yield running
        for process in (*running.nodes, running.master):
            assert process.alive, process.log_text()


def test_readers_that_ask_for_gigabytes_and_take_nothing(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    with tanghulu.connect(cluster.address) as client, contextlib.ExitStack() as stack:
        client.put("big", bytes(MIB))
        body = encode(GetRequest(["big"] * 4, 4 * MIB))
        before = private_bytes(node)
        for peer in range(16):
            connection, _ = greeted(node.address, f"glutton-{peer}")
            stack.callback(connection.close)
            connection._socket.settimeout(30)
            connection._socket.sendall(
                b"".join(encode_head(methods.GET.number, call_id, len(body), 0) + body for call_id in range(2, 102))
            )
        for _ in range(2):
            others_are_served(client)
            assert private_bytes(node) - before < GROWTH_BYTES


def test_connections_that_say_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    write_tokens(file, list(TOKENS))
    with Secured(file) as cluster, contextlib.ExitStack() as stack:
        node = cluster.nodes[0]
        known, welcome = greeted(node.address, "known", "secret-acme")
        stack.callback(known.close)
        data_ports = [Address.parse(each.address) for each in welcome.segment.endpoints_of("tcp")]
        ports = [Address.parse(cluster.master.address), Address.parse(node.address), *data_ports]
        for address in ports:
            for _ in range(600):
                wire = stack.enter_context(socket.create_connection((address.host, address.port)))
                with contextlib.suppress(ConnectionError):
                    wire.sendall(PREAMBLE)
        with cluster.connect("acme", transport="tcp") as client:
            client.put("large", bytes(4 * MIB))
            others_are_served(client)
            assert client.get("large").size_bytes == 4 * MIB


def test_handshakes_that_do_not_end(tmp_path: Path) -> None:
    with Encrypted(tmp_path) as cluster, contextlib.ExitStack() as stack:
        with tanghulu.connect(cluster.address, transport="tcp", **cluster.shown) as client:
            client.put("large", bytes(4 * MIB))
            welcome = client._driver._sessions._welcomes[PeerId(cluster.nodes[0].name)]
            assert welcome is not None
            data_ports = [Address.parse(each.address) for each in welcome.segment.endpoints_of("tcp")]
            for address in (
                Address.parse(cluster.master.address),
                Address.parse(cluster.nodes[0].address),
                *data_ports,
            ):
                for _ in range(600):
                    wire = stack.enter_context(socket.create_connection((address.host, address.port)))
                    with contextlib.suppress(ConnectionError):
                        wire.sendall(b"\x16\x03\x01")  # the beginning of a ClientHello
        with tanghulu.connect(cluster.address, transport="tcp", deadline_s=30, **cluster.shown) as client:
            others_are_served(client)
            assert client.get("large").size_bytes == 4 * MIB
        for process in (*cluster.nodes, cluster.master):
            num_open = len(list(Path(f"/proc/{process.popen.pid}/fd").iterdir()))
            assert num_open < 2 * MAX_HANDSHAKES + 200, "two ports at most, and what it has anyway"


def test_lists_without_end(cluster: Cluster) -> None:
    connection, _ = greeted(cluster.nodes[0].address, "lists")
    keys = [str(number) for number in range(200_000)]
    for call in (
        methods.EXISTS.call(KeysRequest(keys)),
        methods.GET.call(GetRequest(keys, 1)),
        methods.REMOVE.call(RemoveRequest(keys)),
        methods.CHUNK_STAT.call(KeysRequest(keys)),
    ):
        with pytest.raises(InvalidRequest, match="more than 65536"):
            connection.call(call.method, call.request, call.reply_type)
    connection.close()
    with tanghulu.connect(cluster.address) as client:
        others_are_served(client)


def test_verifications_without_end(cluster: Cluster) -> None:
    with tanghulu.connect(cluster.address) as client:
        client.put("big", bytes(16 * MIB))
        glutton, _ = greeted(cluster.nodes[0].address, "verifier")
        body = encode(UnpinRequest([], 0, ["big"] * 1000, []))
        glutton._socket.sendall(encode_head(methods.UNPIN.number, 2, len(body), 0) + body)
        others_are_served(client)
        glutton.close()
        honest, _ = greeted(cluster.nodes[0].address, "honest")
        client.put("small", b"value")
        request = UnpinRequest([], 0, ["small", "big", "none"], [])
        honest.call(methods.UNPIN.number, request, methods.UNPIN.reply)
        assert client.exists("small")
        assert client.exists("big")
        honest.close()


def test_commits_of_what_somebody_else_has_reserved(cluster: Cluster) -> None:
    """They are refused; the node hashes nothing for them."""
    node = cluster.nodes[0]
    with tanghulu.connect(cluster.address) as client:
        (owner, _), (thief, _) = greeted(node.address, "owner"), greeted(node.address, "thief")
        new = NewChunk(ChunkKey("mine"), 1, 32 * MIB, NO_CHECKSUMS)
        reserved = owner.call(methods.RESERVE.number, ReserveRequest([new], 0), methods.RESERVE.reply).message
        lease_id = reserved.reservations[0].lease_id
        items = [CommitItem(lease_id, NO_CHECKSUMS)] * 2000
        answer = thief.call(
            methods.COMMIT.number, CommitRequest(items, [], False, 0), methods.COMMIT.reply, deadline_s=60
        )
        assert {each.code for each in answer.message.results} == {"LEASE_EXPIRED"}
        others_are_served(client)
        owner.close()
        thief.close()


def test_bodies_that_are_declared_and_drip(cluster: Cluster) -> None:
    """They hold what has come of them, and are hung up on."""
    with serving(cluster.address, "--stall-s", "1", "--max-in-flight-bytes", "8MiB") as gateway:
        host, port = gateway.address.split(":")
        head = b"PUT /v1/values/slow HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (8 * MIB)
        slow = [socket.create_connection((host, int(port)), timeout=30) for _ in range(4)]
        with contextlib.ExitStack() as stack, gateway.asks() as http:
            for wire in slow:
                stack.enter_context(wire)
                wire.sendall(head + b"x")
                wire.settimeout(0.1)
            assert http.put("/v1/values/quick", content=bytes(MIB)).status_code == 201
            for wire in slow:
                eventually(lambda wire=wire: dripped_out(wire))  # type: ignore[misc]
        eventually(lambda: gateway.metric("tanghulu_gateway_values_in_flight_bytes") == 0)


def test_transfers_that_drip(cluster: Cluster) -> None:
    """Slices that are written or taken a byte at a time, and heads that do not end: all are cut, their ranges free."""
    node = cluster.nodes[0]
    with tanghulu.connect(cluster.address, transport="tcp", deadline_s=30) as client:
        client.put("big", bytes(8 * MIB))
        before = private_bytes(node)
        dripper = Dripper.begin(node.address, "dripper", 48, "big")
        assert len(dripper.wires) == 48
        others_are_served(client)
        eventually(lambda: dripper.drip() == 0)
        assert private_bytes(node) - before < GROWTH_BYTES
        dripper.close()
        eventually(lambda: node.metric("tanghulu_node_leases") == 0)
        client.put("large", bytes(40 * MIB))
        assert client.get("large").size_bytes == 40 * MIB


def test_index_entries_that_a_reader_forges(cluster: Cluster) -> None:
    """No way leads into the index; others go on finding what is there, and nothing else."""
    with tanghulu.connect(cluster.address) as client:
        client.put("k", b"value")
        forger = Forger(cluster.nodes[0].address, "forger")
        eventually(lambda: forger.finds("k"))
        assert list(forger.attempts()) == []
        others_are_served(client)
        assert forger.finds("k")
        assert not forger.finds("forged")
        forger.close()


def dripped_out(wire: socket.socket) -> bool:
    """One more byte; whether the answer is that it was too slow."""
    try:
        wire.sendall(b"x")
        answer = wire.recv(1 << 16)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return answer == b"" or b" 408 " in answer
