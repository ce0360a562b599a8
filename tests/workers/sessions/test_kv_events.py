"""KV events in vLLM's format: what is written, and what our own follower of vLLM's events makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tanghulu.conductor.engines.events import EventDecoder, VllmFollower
from tanghulu.errors import ConfigError
from tanghulu.hashing import TokenSequence
from tanghulu.runtime import kv_events
from tanghulu.runtime.kv_endpoints import EventEndpoints
from tanghulu.runtime.kv_events import KvEventPublisher, publishing
from tanghulu.session.outputs import KvChange
from tanghulu.types import BlockHash, InstanceId
from tanghulu.workers.engine.block_pool import BlockPool, KvEvent, KvEventKind
from tanghulu.workers.engine.pulls import Pulls
from tanghulu.workers.sessions.kv_events import event_maps, sender

BLOCK = 4
PLAIN, SALTED = BlockHash(b"plain-root------"), BlockHash(b"salted-root-----")


def sequence(root: BlockHash = PLAIN, first: int = 0, num_tokens: int = 3 * BLOCK + 1) -> TokenSequence:
    return TokenSequence(root, BLOCK, range(first, first + num_tokens))


def stored(of: TokenSequence, *indices: int) -> list[KvEvent]:
    return [KvEvent(KvEventKind.STORED, of.block_hashes[index], of, index) for index in indices]


def removed(of: TokenSequence, *indices: int) -> list[KvEvent]:
    return [KvEvent(KvEventKind.REMOVED, of.block_hashes[index]) for index in indices]


def low(of: TokenSequence, *indices: int) -> list[int]:
    return [int.from_bytes(of.block_hashes[index][-8:], "big") for index in indices]


def test_consecutive_blocks_are_one_event() -> None:
    one, other = sequence(), sequence(first=100)
    events = [*stored(one, 0, 1), *removed(other, 2, 0), *stored(one, 2), *stored(other, 0), *stored(other, 2)]
    fields = {"block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None}
    assert list(event_maps(events, PLAIN)) == [
        {
            "type": "BlockStored",
            "block_hashes": low(one, 0, 1),
            "parent_block_hash": None,
            "token_ids": list(range(8)),
            **fields,
        },
        {"type": "BlockRemoved", "block_hashes": low(other, 2, 0), "medium": "GPU"},
        {
            "type": "BlockStored",
            "block_hashes": low(one, 2),
            "parent_block_hash": low(one, 1)[0],
            "token_ids": list(range(8, 12)),
            **fields,
        },
        {
            "type": "BlockStored",
            "block_hashes": low(other, 0),
            "parent_block_hash": None,
            "token_ids": list(range(100, 104)),
            **fields,
        },
        {
            "type": "BlockStored",
            "block_hashes": low(other, 2),
            "parent_block_hash": low(other, 1)[0],
            "token_ids": list(range(108, 112)),
            **fields,
        },
    ]


def test_salted_prompts_are_told_apart_at_their_first_block() -> None:
    (first,) = event_maps(stored(sequence(SALTED), 0, 1), PLAIN)
    (later,) = event_maps(stored(sequence(SALTED), 1), PLAIN)
    assert first["extra_keys"] == [[SALTED.hex()], None]
    assert "extra_keys" not in later


def test_a_block_without_tokens_has_its_name_alone() -> None:
    (event,) = event_maps([KvEvent(KvEventKind.STORED, BlockHash(b"\xff" * 16))], PLAIN)
    assert (event["block_hashes"], event["token_ids"], event["block_size"]) == ([2**64 - 1], [], 0)


def test_pulled_blocks_have_their_tokens() -> None:
    pool, prompt = BlockPool(8), sequence()
    pulls = Pulls(pool, BLOCK)
    assert pulls.begin("pull", prompt, None, 0) is not None  # type: ignore[arg-type]
    pulls.arrived("pull", 2)  # type: ignore[arg-type]
    assert [(event.sequence, event.index) for event in pool.take_events()] == [(prompt, 0), (prompt, 1)]


@pytest.mark.parametrize(
    "text", ["5557", "tcp://*", "tcp://*:0", "tcp://*:5557|", "udp://*:1", "tcp://*:1|tcp://*:1", "tcp://*:1|x"]
)
def test_bad_endpoints(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events"):
        EventEndpoints.parse(text, "--kv-events")


def test_endpoints() -> None:
    endpoints = EventEndpoints.parse("tcp://*:5557|tcp://10.0.0.1:5657", "--kv-events")
    assert endpoints == EventEndpoints("tcp://*:5557", "tcp://10.0.0.1:5657")
    assert endpoints.local.events == "tcp://127.0.0.1:5557"


@pytest.fixture
def endpoints(tmp_path: Path) -> EventEndpoints:
    pytest.importorskip("zmq", reason="extra: pyzmq is not installed")
    return EventEndpoints(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")


class Follower:
    """Our follower of vLLM's events, at a worker's endpoints."""

    def __init__(self, endpoints: EventEndpoints) -> None:
        self.changes: asyncio.Queue[KvChange] = asyncio.Queue()
        follower = VllmFollower(InstanceId("w"), endpoints, self.changes.put_nowait)
        self._task = asyncio.create_task(follower.run())

    async def take(self, count: int) -> list[KvChange]:
        async with asyncio.timeout(30):
            return [await self.changes.get() for _ in range(count)]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def follower(endpoints: EventEndpoints) -> AsyncIterator[Follower]:
    follower = Follower(endpoints)
    yield follower
    await follower.close()


def names(of: TokenSequence, *indices: int) -> tuple[bytes, ...]:
    return tuple(of.block_hashes[index][-8:] for index in indices)


async def test_a_late_follower_has_the_first_messages_replayed(endpoints: EventEndpoints) -> None:
    prompt = sequence()
    async with publishing(endpoints) as send:
        publish = sender(send, PLAIN)
        publish(stored(prompt, 0))
        publish([])
        publish([*stored(prompt, 1), *removed(prompt, 0)])
        follower = Follower(endpoints)
        try:
            async with asyncio.timeout(30):
                while follower.changes.empty():  # until its subscription has come, messages pass it by
                    publish(stored(prompt, 2))
                    await asyncio.sleep(0.01)
            changes = await follower.take(4)
        finally:
            await follower.close()
    assert changes == [
        KvChange(cleared=True),
        KvChange(stored=names(prompt, 0)),
        KvChange(stored=names(prompt, 1)),
        KvChange(removed=names(prompt, 0)),
    ]


async def test_what_is_kept_for_replays_is_bounded(endpoints: EventEndpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "KEPT_BYTES", 300)
    publisher = KvEventPublisher(endpoints)
    for _ in range(100):
        publisher.publish([*event_maps(stored(sequence(), 0, 1), PLAIN)])
    kept = [payload for _, payload in publisher._kept]
    assert sum(map(len, kept)) == publisher._kept_bytes <= 300
    assert kept
    publisher.close()


async def test_bad_requests_for_replays_are_skipped(endpoints: EventEndpoints) -> None:
    import zmq.asyncio

    context: Any = zmq.asyncio.Context()
    async with publishing(endpoints):
        dealer = context.socket(zmq.DEALER)
        dealer.connect(endpoints.replay)
        for frames in ((b"",), (b"", b"1"), (b"", bytes(8), b""), (b"", bytes(8))):
            await dealer.send_multipart(frames)
        async with asyncio.timeout(30):
            replayed, end = await dealer.recv_multipart(), await dealer.recv_multipart()
        dealer.close(0)
    context.term()
    assert replayed[:3] == [b"", b"", bytes(8)]
    assert end == [b"", b"", b"\xff" * 8, b""]
    from msgspec.msgpack import decode

    assert EventDecoder().decode(decode(replayed[3])) == [KvChange(cleared=True)]


async def test_an_address_in_use_is_named(endpoints: EventEndpoints) -> None:
    bad = EventEndpoints("tcp://192.0.2.1:5557")
    with pytest.raises(ConfigError, match=r"cannot listen at tcp://192\.0\.2\.1:5557"):
        KvEventPublisher(bad)


async def test_without_endpoints_nothing_is_published() -> None:
    async with publishing(None) as send:
        assert send is None
    sender(send, PLAIN)(stored(sequence(), 0))
