"""Our workers' KV events, read by vLLM's own types in vLLM's environment: a whole cluster, and requests over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import running_cluster
from tests.engines.vllm.conftest import Conversation, Vllm
from tests.free_ports import free_port

pytest.importorskip("zmq", reason="extra: pyzmq is not installed")
pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(900)]
BLOCK_TOKENS = 64


def test_vllms_types_read_what_a_worker_publishes(vllm: Vllm, tmp_path: Path) -> None:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    file = tmp_path / "tanghulu.toml"
    file.write_text(f'[worker]\nkv_events = "{events}|{replay}"\n')
    prompt = list(range(1000, 1000 + 3 * BLOCK_TOKENS + 10))
    program = (sys.executable, "-m", "tanghulu", "--config", str(file))
    flags = ("--engine", "mock", "--prefill", "0", "--decode", "0", "--nodes", "0")
    follower = Path(__file__).with_name("events_process.py")
    with (
        running_cluster(tmp_path / "state", *flags, program=program) as cluster,
        vllm.running(follower, replay) as conversation,
    ):
        cluster.generate(prompt, max_new_tokens=1)
        (first, *_) = messages = replayed(conversation)
        assert first == [0, [{"type": "AllBlocksCleared"}]]
        stored = [event for _, each in messages for event in each if event["type"] == "BlockStored"]
        tokens = [token for event in stored for token in event["token_ids"]]
        assert tokens == prompt[: 3 * BLOCK_TOKENS]
        names = [name for event in stored for name in event["block_hashes"]]
        assert len(set(names)) == 3
        assert stored[0]["parent_block_hash"] is None
        assert {(event["block_size"], event["medium"]) for event in stored} == {(BLOCK_TOKENS, "GPU")}
        cluster.generate([*prompt[: 2 * BLOCK_TOKENS], *range(2000, 2000 + BLOCK_TOKENS + 1)], max_new_tokens=1)
        *_, (number, last) = replayed(conversation)
        assert [(event["parent_block_hash"], event["token_ids"]) for event in last] == [
            (names[1], list(range(2000, 2000 + BLOCK_TOKENS)))
        ]
        cluster.drop_worker_caches()
        later = [event for at, each in replayed(conversation) if at > number for event in each]
        assert {event["type"] for event in later} == {"BlockRemoved"}
        removed = {name for event in later for name in event["block_hashes"]}
        assert removed == {*names, *last[0]["block_hashes"]}, later


def replayed(conversation: Conversation) -> list[list[Any]]:
    """All messages so far."""
    kept: list[list[Any]] = conversation.ask()["messages"]
    assert [number for number, _ in kept] == list(range(len(kept)))
    return kept
