"""Rolling upgrades: peers of the version before, from bytes that were recorded when it was the newest.

``version_4.txt`` was written by the last tree before anything was added to version 4, ``version_5.txt`` by the last one
of version 5; neither is ever written again. A line is a name and bytes in hex. What was sent then is sent to the node
and the master of today; and a scripted peer answers today's client with what was answered then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf.message import Message

import tanghulu.aio
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import VersionMismatch
from tanghulu.protos import directory_pb2, store_pb2
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.frames import PREAMBLE, Frame, FrameReader, encode_head
from tanghulu.rpc.methods import HELLO, Method
from tanghulu.rpc.versions import SPOKEN, VersionRange, settle, settled
from tanghulu.rpc.wire import parser_of
from tanghulu.store.protocol import messages, methods
from tanghulu.store.protocol.types import ClientCommit
from tanghulu.types import Address
from tests.store.cluster import Cluster
from tests.store.master.running_master import instance, master_here


def _read(version: int) -> dict[str, bytes]:
    lines = (Path(__file__).parent / f"version_{version}.txt").read_text().splitlines()
    return {name: b"" if text == "-" else bytes.fromhex(text) for name, text in map(str.split, lines)}


RECORDED = {version: _read(version) for version in (4, 5)}
BYTES = RECORDED[4]
VALUE = b"value"


# --- the rule


@pytest.mark.parametrize(
    ("caller", "server", "common"),
    [((4, 4), (4, 4), 4), ((4, 5), (4, 4), 4), ((4, 5), (5, 6), 5), ((5, 6), (4, 5), 5), ((5, 6), (5, 6), 6)],
)
def test_two_peers_speak_the_highest_version_that_both_know(
    caller: tuple[int, int], server: tuple[int, int], common: int
) -> None:
    request = store_pb2.HelloRequest(protocol_version=caller[0], highest_version=caller[1])
    assert settle(request, VersionRange(*server)) == common
    reply = store_pb2.HelloReply(protocol_version=common)
    assert settled(reply, "node-1", VersionRange(*caller)) == common


def test_peers_without_a_common_version_are_told_both_ranges() -> None:
    with pytest.raises(VersionMismatch, match=r"the caller speaks version 3 .* this process versions 4 to 5"):
        settle(store_pb2.HelloRequest(protocol_version=3), VersionRange(4, 5))
    with pytest.raises(VersionMismatch, match=r"node-1 speaks version 5 .* this process version 4"):
        settled(store_pb2.HelloReply(protocol_version=5), "node-1", VersionRange(4, 4))


def test_peers_from_before_ranges_speak_what_they_say_and_say_nothing_back() -> None:
    request = store_pb2.HelloRequest.FromString(BYTES["hello.request"])
    assert (request.protocol_version, request.highest_version) == (4, 0)
    assert settle(request, VersionRange(4, 5)) == 4
    assert settled(store_pb2.HelloReply.FromString(BYTES["pb.HelloReply"]), "node-1", VersionRange(4, 5)) == 4
    assert SPOKEN.lowest == 4, "a node from before ranges compares what it is told with 4"


# --- messages


#: Of methods that version 5 has no more: their callers hear that, and put the value another way.
GONE = {"StreamRequest", "EndStreamRequest"}


NAMES = [(version, name) for version, recorded in RECORDED.items() for name in recorded]


@pytest.mark.parametrize(("version", "name"), [each for each in NAMES if each[1][0].isupper() and each[1] not in GONE])
def test_every_message_of_then_is_understood_now(version: int, name: str) -> None:
    kind: Any = ClientCommit if name == "ClientCommit" else getattr(messages, name)
    assert isinstance(parser_of(kind)(RECORDED[version][name]), kind)


@pytest.mark.parametrize(("version", "name"), [each for each in NAMES if each[1].startswith("pb.")])
def test_every_protobuf_message_of_then_is_understood_now_and_passes_over_what_is_new(version: int, name: str) -> None:
    recorded = RECORDED[version][name]
    kind = getattr(directory_pb2, name[3:], None) or getattr(store_pb2, name[3:])
    message: Message = kind.FromString(recorded)
    assert message.SerializeToString(deterministic=True) == recorded, "nothing of it is taken for something else"
    field_of_later = b"\xfa\x3f\x03new"  # field 1023, which nobody has
    later = kind.FromString(recorded + field_of_later)
    assert later.SerializeToString(deterministic=True) == recorded + field_of_later


# --- a client of then


class ClientOfThen:
    """Sends recorded bytes, and reads answers as its version did: the fields that it knew, in their places."""

    def __init__(self, address: str, version: int = 4) -> None:
        self._connection = FastConnection(Address.parse(address))
        self._recorded = RECORDED[version]

    def ask(self, method: Method[Any, Any], request: str | bytes, attachment: bytes = b"") -> tuple[bytes, bytes]:
        """Send the bytes, or those that were recorded under a name; the message of the answer, and its attachment."""
        body = self._recorded[request] if isinstance(request, str) else request
        call = methods.Method(method.number, method.name, bytes, bytes).call(body, [attachment] if attachment else ())
        outcome = self._connection.call(call.method, call.request, bytes, call.attachment)
        return outcome.message, bytes(outcome.attachment)

    def fields(self, answer: bytes, recorded: str) -> list[Any]:
        """The fields of ``answer`` that the recorded answer has, after the shape of both was compared."""
        known = msgspec.msgpack.decode(self._recorded[recorded])
        fields: list[Any] = msgspec.msgpack.decode(answer)
        assert len(fields) >= len(known), "no field was taken away"
        assert [type(each) for each in fields[: len(known)]] == [type(each) for each in known]
        return fields[: len(known)]

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(1) as cluster:
        cluster.complete()
        yield cluster


@pytest.mark.parametrize("version", RECORDED)
def test_a_client_of_then_puts_and_gets_at_the_node_of_today(cluster: Cluster, version: int) -> None:
    client = ClientOfThen(cluster.nodes[0].address, version)
    hello = store_pb2.HelloReply.FromString(client.ask(HELLO, "hello.request")[0])
    assert hello.protocol_version == version
    assert client.fields(client.ask(methods.PUT, "put.request", VALUE)[0], "put.reply")[0] == [False]
    answer, value = client.ask(methods.GET, "get.request")
    assert value == VALUE
    assert client.fields(answer, "get.reply")[0] == msgspec.msgpack.decode(BYTES["get.reply"])[0]
    master = ClientOfThen(cluster.address, version)
    _, (location,), *_ = master.fields(master.ask(methods.LOCATE, "locate.request")[0], "locate.reply")
    assert location[:2] == [7, len(VALUE)]
    assert master.fields(master.ask(methods.LOCATE, "exists.request")[0], "exists.reply")[:3] == [False, [], b"\1\0"]
    assert master.fields(master.ask(methods.COMMIT_KEY, "commit_key.request")[0], "commit_key.reply")[0] == 2
    nodes = directory_pb2.NodesReply.FromString(master.ask(methods.NODES, "pb.NodesRequest")[0])
    assert [node.instance.id for node in nodes.nodes] == [hello.instance_id], "who names no version gets the list"
    assert not nodes.unchanged
    placed = directory_pb2.PlaceReply.FromString(master.ask(methods.PLACE, "pb.PlaceRequest")[0])
    assert [node.instance.id for node in placed.nodes] == [hello.instance_id]
    listed = directory_pb2.ListKeysReply.FromString(master.ask(methods.LIST_KEYS, "pb.ListKeysRequest")[0])
    assert not listed.keys, "none begins with the recorded prefix"
    assert directory_pb2.WaitReply.FromString(master.ask(methods.WAIT, "pb.WaitRequest")[0]).found == b"\0"
    assert client.ask(methods.REMOVE, "remove.request")[0] == BYTES["remove.reply"]
    for each in (client, master):
        each.close()


def test_a_client_of_version_3_is_refused_with_both_versions(cluster: Cluster) -> None:
    connection = FastConnection(Address.parse(cluster.nodes[0].address))
    with pytest.raises(VersionMismatch, match="version 3"):
        connection.call(HELLO.number, store_pb2.HelloRequest(protocol_version=3, client_id="old"), HELLO.reply)
    connection.close()


async def test_a_node_of_then_announces_at_the_master_of_today() -> None:
    async with master_here() as master:
        address = await master.address
        async with MasterDiscovery(address) as discovery:
            await discovery.register(instance("node-1", generation=2))
            connection = await AsyncFastConnection.connect(address)
            announce = methods.ANNOUNCE
            answer = (await connection.call(announce.number, BYTES["pb.AnnounceRequest"], bytes)).message
            assert list(directory_pb2.AnnounceReply.FromString(answer).accepted) == [True]
            await connection.close()


# --- a peer of then


#: What the peer answers each method with.
ANSWERS = {
    HELLO: "pb.HelloReply",
    methods.NODES: "pb.NodesReply",
    methods.PLACE: "pb.PlaceReply",
    methods.LIST_KEYS: "pb.ListKeysReply",
    methods.WAIT: "pb.WaitReply",
    methods.COMMIT_KEY: "commit_key.reply",
    methods.PUT: "put.reply",
    methods.GET: "get.reply",
    methods.REMOVE: "remove.reply",
    methods.UNPIN: "Done",
}


class PeerOfThen(asyncio.Protocol):
    """A master and a node in one, that answer with recorded bytes whatever they are asked."""

    def __init__(self, port: int, version: int) -> None:
        self._names = {method.number: name for method, name in ANSWERS.items()}
        self._port, self._recorded = port, RECORDED[version]
        self._reader = FrameReader()
        self._greeted = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._greeted:
            assert data.startswith(PREAMBLE)
            self._greeted, data = True, data[len(PREAMBLE) :]
        for frame in self._reader.feed(data):
            self._answer(frame)

    def _answer(self, frame: Frame) -> None:
        if frame.method == HELLO.number:  # as the node of version 4 compared it
            assert store_pb2.HelloRequest.FromString(frame.body).protocol_version == 4
        if frame.method == methods.LOCATE.number:
            asks_existence = msgspec.msgpack.decode(frame.body)[1]
            name = "exists.reply" if asks_existence else "locate.reply"
        else:
            name = self._names[frame.method]
        body = self._recorded[name].replace(b"127.0.0.1:7410", f"127.0.0.1:{self._port}".encode())
        attachment = VALUE if frame.method == methods.GET.number else b""
        head = encode_head(frame.method, frame.call_id, len(body), len(attachment))
        self._transport.write(head + body + attachment)


@asynccontextmanager
async def peer_of_then(version: int = 4) -> AsyncIterator[str]:
    """A port of four digits: its address stands in recorded bytes that must keep their length."""
    loop = asyncio.get_running_loop()
    for port in range(7411, 9999):
        try:
            server = await loop.create_server(lambda port=port: PeerOfThen(port, version), "127.0.0.1", port)
        except OSError:
            continue
        async with server:
            yield f"127.0.0.1:{port}"
        return


@pytest.mark.parametrize("version", RECORDED)
async def test_the_client_of_today_works_with_a_peer_of_then(version: int) -> None:
    async with peer_of_then(version) as address:
        async with await tanghulu.aio.connect(address, transport="tcp", deadline_s=5.0) as client:
            status = await client.put("v4/k", VALUE)
            assert (status.existed, status.num_replicas) == (False, 1)
            with await client.get("v4/k") as chunk:
                assert chunk.bytes() == VALUE
            assert await client.exists_many(["v4/k", "v4/none"]) == [True, False]
            assert [node.id for node in await client.nodes()] == ["node-1"]
            assert [info.key for info in await client.list_keys("k")] == ["k"]
            assert await client.wait_for("v4/k")
            assert await client.remove("v4/k")
