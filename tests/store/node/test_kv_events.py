"""A real node's KV events in vLLM's format: what a follower gathers from them is what the node holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import tanghulu
from tanghulu.store.node.reporting.kv_events import HeldBlocks
from tanghulu.types import BlockHash, Fingerprint, kv_chunk_key
from tests.store.cluster import Cluster, eventually
from tests.store.node.rig import make_state, new, put

FINGERPRINT = Fingerprint(bytes(16))
VALUE = bytes(1 << 20)


def key_of(number: int, part: int = 0) -> str:
    return str(kv_chunk_key(FINGERPRINT, BlockHash(number.to_bytes(16, "big")), part))


def test_other_chunks_and_further_parts_of_a_block_are_no_events() -> None:
    published: list[Any] = []
    held = HeldBlocks(published.extend, has_ssd=False)
    state = make_state()
    state.reports.watch = held.changed
    for key in (key_of(1), key_of(1, part=1), "mine", key_of(2)):
        put(state, new(key))
    held.flush()
    fields = {"parent_block_hash": None, "token_ids": [], "block_size": 0, "lora_id": None, "lora_name": None}
    assert published == [{"type": "BlockStored", "block_hashes": [1, 2], "medium": "CPU", **fields}]


def test_what_the_master_refuses_was_never_there() -> None:
    published: list[Any] = []
    held = HeldBlocks(published.extend, has_ssd=False)
    state = make_state()
    state.reports.watch = held.changed
    chunk = put(state, new(key_of(1))).chunk
    state.reported(chunk, accepted=False)
    held.flush()
    assert [(each["type"], each["block_hashes"]) for each in published] == [("BlockStored", [1]), ("BlockRemoved", [1])]


def test_a_follower_knows_what_a_node_holds_in_each_tier(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq", reason="extra: pyzmq is not installed")
    replay = f"ipc://{tmp_path}/replay"
    flags = ("--kv-events", f"ipc://{tmp_path}/events|{replay}", "--ssd-path", str(tmp_path / "ssd"))
    context = zmq.Context()
    asker = context.socket(zmq.DEALER)

    def followed() -> set[tuple[int, str]]:
        held: set[tuple[int, str]] = set()
        asker.send_multipart((b"", bytes(8)))
        while (frames := asker.recv_multipart())[3]:
            for event in msgspec.msgpack.decode(frames[3])[1]:
                if event["type"] == "AllBlocksCleared":
                    held.clear()
                else:
                    change = {(number, event["medium"]) for number in event["block_hashes"]}
                    held = held | change if event["type"] == "BlockStored" else held - change
        return held

    asker.connect(replay)
    with Cluster(1, "16MiB", *flags, "--ssd-size", "24MiB") as cluster, tanghulu.connect(cluster.address) as client:
        for number in range(60):
            client.put(key_of(number), VALUE)
        client.remove(key_of(59))
        with client.get(key_of(58)) as chunk:
            assert len(chunk) == len(VALUE)

        def agrees() -> bool:
            listed = {int(info.key.split("/")[2], 16) for info in client.list_keys("kv/")}
            in_memory = {number for number, medium in followed() if medium == "CPU"}
            on_ssd = {number for number, medium in followed() if medium == "STORAGE"}
            num_in_memory = cluster.nodes[0].metric("tanghulu_node_chunks")
            return in_memory | on_ssd == listed and len(in_memory) == num_in_memory and 0 < num_in_memory < len(listed)

        eventually(agrees)
        assert 20 < len(followed()) < 50
    asker.close(0)
    context.term()
