"""vLLM's KV events: the payload, the numbers, and a publisher over real ZeroMQ sockets where pyzmq is there."""

from __future__ import annotations

import asyncio

import pytest

from tanghulu.conductor.engines import events
from tanghulu.conductor.engines.events import (
    EventDecoder,
    VllmFollower,
    parse_sources,
)
from tanghulu.conductor.routing_service.main import RouterConfig
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.runtime.kv_endpoints import EventEndpoints
from tanghulu.session.outputs import KvChange
from tanghulu.types import InstanceId

WORKER = InstanceId("w")


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def test_a_message():
    events = [
        ["BlockStored", [1, 2**64 - 1], None, [5, 6], 2, None, "GPU"],
        ["BlockStored", [b"\x07" * 32], 1, [5, 6], 2, None],
        ["BlockStored", [9], None, [5, 6], 2, None, "CPU"],
        ["BlockRemoved", [1], "GPU"],
        ["BlockRemoved", [9], "CPU"],
        ["AllBlocksCleared"],
        ["SomethingNew", 1],
        {"type": "BlockStored", "block_hashes": [3], "parent_block_hash": None, "medium": "GPU", "lora_id": None},
        {"type": "BlockStored", "block_hashes": [3], "medium": "CPU"},
        {"type": "BlockRemoved", "block_hashes": [3]},
        {"type": "AllBlocksCleared"},
    ]
    assert EventDecoder().decode([12.5, events, 0]) == [
        KvChange(stored=(number(1), b"\xff" * 8)),
        KvChange(stored=(b"\x07" * 32,)),
        KvChange(),
        KvChange(removed=(number(1),)),
        KvChange(),
        KvChange(cleared=True),
        KvChange(),
        KvChange(stored=(number(3),)),
        KvChange(),
        KvChange(removed=(number(3),)),
        KvChange(cleared=True),
    ]


@pytest.mark.parametrize(
    "payload",
    [[], 7, [1.0, [[]]], [1.0, [["BlockStored"]]], [1.0, [["BlockRemoved", ["x"]]]], [1.0, [{"type": "BlockStored"}]]],
)
def test_what_is_no_message(payload):
    with pytest.raises(InvalidRequest, match="not a KV event message"):
        EventDecoder().decode(payload)


def test_hashes_of_sglang_are_signed():
    stored = {"type": "BlockStored", "block_hashes": [-5, 5, -(2**63)], "medium": "GPU"}
    assert EventDecoder().decode([0.0, [stored, ["BlockRemoved", [-5]]], None]) == [
        KvChange(stored=(number(2**64 - 5), number(5), number(2**63))),
        KvChange(removed=(number(2**64 - 5),)),
    ]


def stored(group: int, kind: str | None, *hashes: int) -> dict[str, object]:
    return {"type": "BlockStored", "block_hashes": list(hashes), "group_idx": group, "kv_cache_spec_kind": kind}


def removed(group: int, *hashes: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "group_idx": group}


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", None])
def test_a_removal_in_a_sliding_window_leaves_the_block_of_full_attention(kind):
    decoder = EventDecoder()
    decoder.decode([0.0, [stored(1, "sliding_window", 7), stored(0, kind, 7)], 0])
    assert decoder.decode([0.0, [removed(1, 7), stored(1, "sliding_window", 8)], 0]) == [KvChange(), KvChange()]
    assert decoder.decode([0.0, [removed(0, 7)], 0]) == [KvChange(removed=(number(7),))]


def test_where_every_group_has_a_window_all_count():
    changes = EventDecoder().decode([0.0, [stored(0, "sliding_window", 7), removed(0, 7)], 0])
    assert changes == [KvChange(stored=(number(7),)), KvChange(removed=(number(7),))]


def test_sources():
    assert parse_sources("a=tcp://h:1|tcp://h:2, b=ipc://x") == {
        "a": EventEndpoints("tcp://h:1", "tcp://h:2"),
        "b": EventEndpoints("ipc://x"),
    }
    for wrong in ("a", "a=h:1", "=tcp://h:1", "a=tcp://h:1|h:2", "worker=tcp://h:70000", "worker=tcp://h:1|tcp://h"):
        with pytest.raises(ConfigError, match="worker=tcp"):
            RouterConfig(vllm_events=wrong)


class Publisher:
    """As vLLM publishes: numbered messages, and a replay of those that are still kept."""

    def __init__(self, zmq, pack) -> None:
        self._pack, self.kept, self.context = pack, {}, zmq.asyncio.Context()
        self.pub, self.router = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self.pub, self.router)]
        self.endpoints = EventEndpoints(*(f"tcp://127.0.0.1:{port}" for port in ports))

    async def tell(self, at: int, *events: list[object], lost: bool = False) -> None:
        payload = self.kept[at] = self._pack([1.0, list(events), 0])
        if not lost:
            await self.pub.send_multipart((b"kv", number(at), payload))

    async def serve_replay(self) -> None:
        while True:
            client, _, start = await self.router.recv_multipart()
            for at, payload in sorted(self.kept.items()):
                if at >= int.from_bytes(start, "big"):
                    await self.router.send_multipart((client, b"", number(at), payload))
            await self.router.send_multipart((client, b"", (-1).to_bytes(8, "big", signed=True), b""))


async def test_following_a_publisher():
    zmq = pytest.importorskip("zmq")
    pytest.importorskip("zmq.asyncio")
    pack = pytest.importorskip("msgspec.msgpack").encode
    publisher, heard = Publisher(zmq, pack), asyncio.Queue()
    follower = VllmFollower(WORKER, publisher.endpoints, heard.put_nowait)
    tasks = [asyncio.create_task(follower.run()), asyncio.create_task(publisher.serve_replay())]
    try:
        async with asyncio.timeout(30):
            await publisher.pub.recv()  # the subscription has come
            await publisher.tell(0, ["BlockStored", [1], None, [], 2, None])
            assert await heard.get() == KvChange(stored=(number(1),))
            await publisher.tell(1, ["BlockStored", [2], 1, [], 2, None], lost=True)
            await publisher.tell(2, ["BlockRemoved", [1]])
            assert await heard.get() == KvChange(stored=(number(2),))  # replayed, in front of what shows the gap
            assert await heard.get() == KvChange(removed=(number(1),))
            publisher.kept.clear()
            await publisher.tell(5, ["BlockStored", [5], 1, [], 2, None])
            assert await heard.get() == KvChange(cleared=True)  # 3 and 4 are lost
            assert await heard.get() == KvChange(stored=(number(5),))
            publisher.kept.clear()
            await publisher.tell(0, ["BlockStored", [6], None, [], 2, None])
            assert await heard.get() == KvChange(cleared=True)  # the publisher began anew
            assert await heard.get() == KvChange(stored=(number(6),))
            for at, unreadable in enumerate((b"\xc1", b"\x91" * 100_000), 1):
                await publisher.pub.send_multipart((b"kv", number(at), unreadable))
                assert await heard.get() == KvChange(cleared=True)  # whatever it said is lost
            for frames in ((b"kv", b"", b""), (b"kv", b"\xff" * 9, b"\x90"), (b"kv",)):
                await publisher.pub.send_multipart(frames)
            await publisher.tell(3, ["BlockStored", [7], None, [], 2, None])
            assert await heard.get() == KvChange(stored=(number(7),))
            publisher.kept.clear()
            for at in range(3):
                await publisher.tell(at, ["BlockStored", [8 + at], None, [], 2, None], lost=at < 2)
            assert await heard.get() == KvChange(cleared=True)  # it began anew, which only its third message shows
            assert [await heard.get() for _ in range(3)] == [KvChange(stored=(number(8 + at),)) for at in range(3)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        publisher.context.destroy(0)


async def test_messages_that_show_no_gap_are_requested(monkeypatch):
    """Of before the subscription, and the last ones of a burst; one that arrives late changes nothing."""
    monkeypatch.setattr(events, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(events, "PAUSE_S", 0.01)
    zmq = pytest.importorskip("zmq")
    pytest.importorskip("zmq.asyncio")
    publisher, heard = Publisher(zmq, pytest.importorskip("msgspec.msgpack").encode), asyncio.Queue()
    await publisher.tell(0, ["BlockStored", [1], None, [], 2, None], lost=True)
    follower = VllmFollower(WORKER, publisher.endpoints, heard.put_nowait)
    tasks = [asyncio.create_task(follower.run()), asyncio.create_task(publisher.serve_replay())]
    try:
        async with asyncio.timeout(30):
            assert await heard.get() == KvChange(stored=(number(1),))
            assert follower.is_complete
            await publisher.pub.recv()
            await publisher.tell(1, ["BlockStored", [2], 1, [], 2, None], lost=True)
            assert await heard.get() == KvChange(stored=(number(2),))
            await publisher.pub.send_multipart((b"kv", number(1), publisher.kept[1]))
            await publisher.tell(2, ["BlockStored", [3], 2, [], 2, None])
            assert await heard.get() == KvChange(stored=(number(3),))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        publisher.context.destroy(0)


async def test_whatever_fails_clears_the_worker_and_is_tried_again():
    """A replay port that answers nonsense, an index that refuses a change: the follower goes on."""
    zmq = pytest.importorskip("zmq")
    pytest.importorskip("zmq.asyncio")
    publisher, heard = Publisher(zmq, pytest.importorskip("msgspec.msgpack").encode), asyncio.Queue()

    def apply(change: KvChange) -> None:
        heard.put_nowait(change)
        if change.stored == (number(13),):
            raise KeyError("a fault of the index")

    async def answer_nonsense() -> None:
        client, *_ = await publisher.router.recv_multipart()
        await publisher.router.send_multipart((client, b""))

    tasks = [
        asyncio.create_task(VllmFollower(WORKER, publisher.endpoints, apply).run()),
        asyncio.create_task(answer_nonsense()),
    ]
    try:
        async with asyncio.timeout(30):
            await publisher.pub.recv()
            await publisher.tell(5, ["BlockStored", [5], None, [], 2, None])  # 0 to 4 are asked for
            assert await heard.get() == KvChange(cleared=True)
            assert await heard.get() == KvChange(stored=(number(5),))
            await publisher.tell(6, ["BlockStored", [13], None, [], 2, None])
            assert [await heard.get(), await heard.get()] == [KvChange(stored=(number(13),)), KvChange(cleared=True)]
            assert await publisher.pub.recv() == b"\x00"  # the subscription is withdrawn
            await publisher.pub.recv()  # and comes again
            await publisher.tell(0, ["BlockStored", [1], None, [], 2, None])
            assert await heard.get() == KvChange(stored=(number(1),))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        publisher.context.destroy(0)
