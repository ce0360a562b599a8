"""A prefix is computed once: what the node served and the worker computed, not what anybody reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tanghulu.store.client.signed_kv import SIGNATURE_BYTES
from tests.e2e.cluster import LiveCluster

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """One streamed greedy chat, as its client saw it."""

    text: str
    ttft_s: float
    num_prompt: int
    num_cached: int
    num_generated: int

    @property
    def positions(self) -> int:
        """What the model had to compute for it: the rest of the prompt, and each token but the last."""
        return self.num_prompt - self.num_cached + self.num_generated - 1


def _chat(cluster: LiveCluster, system: str) -> Answer:
    body = {
        "model": "smollm2",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": "Name one rule."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 12,
    }
    start_s, ttft_s, text, usage = time.monotonic(), 0.0, "", {}
    with cluster.http.stream("POST", f"{cluster.url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    ttft_s = ttft_s or time.monotonic() - start_s
                    text += choice["delta"]["content"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(text, ttft_s, usage["prompt_tokens"], cached, usage["completion_tokens"])


def _computed(cluster: LiveCluster) -> float:
    return sum(cluster.metric(role, "tanghulu_worker_computed_tokens_total") for role in ("prefill", "decode"))


def _served(cluster: LiveCluster) -> float:
    return cluster.metric("node", "tanghulu_node_read_bytes_total")


def _prompt(seed: str) -> str:
    """About 1,000 tokens of prose that no other test has sent."""
    return f"Document {seed}.\n" + (ROOT / "LICENSE").read_text()[:5200]


def _whole_blocks(num_prompt: int) -> int:
    """The longest prefix that can be cached: the last token is always computed."""
    return (num_prompt - 1) // 64 * 64


def test_a_prefix_is_loaded_and_not_computed_again(cluster):
    prompt, before = _prompt("one"), _computed(cluster)
    cold = _chat(cluster, prompt)
    assert 900 < cold.num_prompt < 1300
    assert cold.num_cached == 0
    assert _computed(cluster) - before == cold.positions
    cluster.settle()
    cluster.drop_worker_caches()
    before, served = _computed(cluster), _served(cluster)
    warm = _chat(cluster, prompt)
    assert warm.text == cold.text
    assert warm.num_cached == _whole_blocks(cold.num_prompt)
    assert _computed(cluster) - before == warm.positions
    assert _served(cluster) - served >= warm.num_cached // 64 * cluster.metric("prefill", "tanghulu_worker_block_bytes")
    print(f"TTFT cold {cold.ttft_s:.3f} s, from the store {warm.ttft_s:.3f} s: {cold.ttft_s / warm.ttft_s:.1f} times")


def test_misses_are_explained(cluster):
    """New, in the worker's cache, loaded from the store, and different in a time of day."""
    document = _prompt("explained")

    def runs(time_of_day: str) -> list[tuple[str, int]]:
        messages = [{"role": "system", "content": f"It is 2026-11-28 {time_of_day}. {document}"}]
        body = {"model": "smollm2", "messages": messages, "max_tokens": 2, "temperature": 0, "explain_cache": True}
        explained = cluster.http.post(f"{cluster.url}/v1/chat/completions", json=body).json()["cache_explanation"]
        seen.append(explained["runs"][-2])
        return [(run.get("source") or run["cause"], run["tokens"]) for run in explained["runs"]]

    seen: list[dict] = []
    named, tail = runs("10:41:07")
    assert (named[0], tail[0]) == ("new", "tail")
    assert runs("10:41:07") == [("worker", named[1]), tail]
    cluster.settle()
    cluster.drop_worker_caches()
    assert runs("10:41:07") == [("store", named[1]), tail]
    assert runs("10:43:55")[-2][0] == "diverged"
    assert (seen[-1]["detail"]["message"], seen[-1]["detail"]["kind"]) == (0, "date")


def test_the_hit_survives_the_workers(cluster):
    prompt = _prompt("two")
    cold = _chat(cluster, prompt)
    cluster.settle()
    old = {role: cluster.kill(role) for role in ("prefill", "decode")}
    for role, pid in old.items():
        cluster.wait_restarted(role, pid)
    warm = _chat(cluster, prompt)
    assert warm.text == cold.text
    assert warm.num_cached == _whole_blocks(cold.num_prompt)
    assert _computed(cluster) == warm.positions


def test_a_corrupt_chunk_is_found_and_computed_again(cluster):
    prompt = _prompt("three")
    cold = _chat(cluster, prompt)
    cluster.settle()
    cluster.drop_worker_caches()
    corrupt_before = cluster.metric("node", "tanghulu_node_corrupt_chunks_total")
    _flip_every_page(cluster)
    before = _computed(cluster)
    again = _chat(cluster, prompt)
    assert again.text == cold.text
    assert again.num_cached == 0
    assert _computed(cluster) - before == again.positions
    assert cluster.metric("node", "tanghulu_node_corrupt_chunks_total") > corrupt_before


def _flip_every_page(cluster: LiveCluster) -> None:
    """Change a byte in each 4 KiB of the node's whole segment, from outside, through its memory file."""
    pid = cluster.entry("node")["pid"]
    memories = [f for f in Path(f"/proc/{pid}/fd").iterdir() if "memfd:" in os.readlink(f)]
    fd = max(memories, key=lambda f: f.stat().st_size)
    with fd.open("r+b", buffering=0) as memory:
        size = os.fstat(memory.fileno()).st_blocks * 512
        for offset in range(0, min(size, os.fstat(memory.fileno()).st_size), 4096):
            byte = os.pread(memory.fileno(), 1, offset)
            os.pwrite(memory.fileno(), bytes([byte[0] ^ 0xFF]), offset)


def test_the_store_shows_the_chunks(cluster):
    _chat(cluster, _prompt("four")[:1500])
    cluster.settle()
    listed = _store(cluster, "ls")
    keys = [row["key"] for row in listed if row["key"].startswith("kv/")]
    assert keys
    stat = _store(cluster, "stat", keys[0])
    assert stat["size_bytes"] == cluster.metric("prefill", "tanghulu_worker_block_bytes") + SIGNATURE_BYTES
    [node] = _store(cluster, "nodes")
    assert stat["nodes"] == [node["id"]]
    assert node["address"] == cluster.entry("node")["address"]


def _store(cluster: LiveCluster, *arguments: str):
    command = [sys.executable, "-m", "tanghulu", "store", *arguments, "--master", cluster.master, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
