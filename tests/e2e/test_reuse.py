"""A prefix is computed once: what the node served and the worker computed, not what anybody reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from cluster import LiveCluster, eventually

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 2000


def _chat(cluster: LiveCluster, system: str) -> tuple[str, float, int, int]:
    """(text, TTFT in s, prompt tokens, cached tokens) of one streamed greedy chat."""
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
    return text, ttft_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def _computed(cluster: LiveCluster) -> float:
    return cluster.metric("prefill", "tanghulu_worker_computed_tokens_total")


def _served(cluster: LiveCluster) -> float:
    return cluster.metric("node", "tanghulu_node_read_bytes_total")


def _prompt(seed: str) -> str:
    """About 2,000 tokens of prose that no other test has sent."""
    return f"Document {seed}.\n" + (ROOT / "LICENSE").read_text()[:9200]


def _settle(cluster: LiveCluster) -> None:
    """Chunks are written behind the computation: wait until nothing is under way."""
    eventually(
        lambda: cluster.metric("prefill", "tanghulu_worker_store_pending_blocks") == 0, what="chunks are written"
    )


def test_a_prefix_is_loaded_and_not_computed_again(cluster):
    prompt = _prompt("one")
    before = _computed(cluster)
    text, cold_s, num_prompt, cached = _chat(cluster, prompt)
    assert cached == 0
    assert _computed(cluster) - before == num_prompt
    assert 1800 < num_prompt < 2600
    _settle(cluster)
    cluster.drop_worker_caches()
    before, served = _computed(cluster), _served(cluster)
    again, warm_s, _, cached = _chat(cluster, prompt)
    assert again == text
    assert cached == (num_prompt - 1) // 64 * 64
    assert _computed(cluster) - before == num_prompt - cached
    assert _served(cluster) - served >= cached // 64 * cluster.metric("prefill", "tanghulu_worker_block_bytes")
    print(f"TTFT cold {cold_s:.3f} s, from the store {warm_s:.3f} s, ratio {cold_s / warm_s:.1f}")
    assert cold_s / warm_s > 2, "the figure is benchmarks' matter; this only catches a path that computes"


def test_the_hit_survives_the_workers(cluster):
    prompt = _prompt("two")
    text, _, num_prompt, _ = _chat(cluster, prompt)
    _settle(cluster)
    old = {role: cluster.kill(role) for role in ("prefill", "decode")}
    for role, pid in old.items():
        cluster.wait_restarted(role, pid)
    again, _, _, cached = _chat(cluster, prompt)
    assert again == text
    assert cached == (num_prompt - 1) // 64 * 64
    assert _computed(cluster) == num_prompt - cached


def test_a_corrupt_chunk_is_found_and_computed_again(cluster):
    prompt = _prompt("three")
    text, _, num_prompt, _ = _chat(cluster, prompt)
    _settle(cluster)
    cluster.drop_worker_caches()
    corrupt_before = cluster.metric("node", "tanghulu_node_corrupt_chunks_total")
    _flip_every_page(cluster)
    before = _computed(cluster)
    again, _, _, cached = _chat(cluster, prompt)
    assert again == text
    assert cached == 0
    assert _computed(cluster) - before == num_prompt
    assert cluster.metric("node", "tanghulu_node_corrupt_chunks_total") > corrupt_before


def _flip_every_page(cluster: LiveCluster) -> None:
    """Change a byte in each 4 KiB of the node's whole segment, from outside, through its memory file."""
    pid = cluster.entry("node")["pid"]
    [fd] = [f for f in Path(f"/proc/{pid}/fd").iterdir() if "memfd:" in os.readlink(f)]
    with fd.open("r+b", buffering=0) as memory:
        size = os.fstat(memory.fileno()).st_blocks * 512
        for offset in range(0, min(size, os.fstat(memory.fileno()).st_size), 4096):
            byte = os.pread(memory.fileno(), 1, offset)
            os.pwrite(memory.fileno(), bytes([byte[0] ^ 0xFF]), offset)


def test_the_store_shows_the_chunks(cluster):
    _chat(cluster, _prompt("four"))
    _settle(cluster)
    listed = _store(cluster, "ls")
    keys = [row["key"] for row in listed if row["key"].startswith("kv/")]
    assert keys
    stat = _store(cluster, "stat", keys[0])
    assert stat["size_bytes"] == cluster.metric("prefill", "tanghulu_worker_block_bytes")
    assert stat["nodes"] == [cluster.entry("node")["name"]]


def _store(cluster: LiveCluster, *arguments: str):
    command = [sys.executable, "-m", "tanghulu", "store", *arguments, "--master", cluster.master, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
