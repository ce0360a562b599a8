"""A conversation trace by ``tanghulu replay --live``: two vLLM workers share what two of ours do, and lose no request.

The first 100 requests of the trace have little in common, so they are replayed twice: the second time every prefix is
there, at the worker that computed it or in the store. Then once more, while a worker, the node and the master are
killed in turn. Ours are mock workers, with the same number of blocks: what is cached does not depend on the arithmetic.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import MODEL, PYTHON
from tests.engines.vllm_worker.conftest import FURTHER, Served, VllmWorker, WorkerProcess, eventually
from tests.store.cluster import Cluster

pytestmark = [pytest.mark.engine_vllm, pytest.mark.slow, pytest.mark.by_hand, pytest.mark.timeout(7200)]
TRACE = Path(__file__).parents[2] / "conductor" / "replay" / "data" / "conversation_excerpt.jsonl.gz"
NUM_REQUESTS = 100
#: Prompts of 240 tokens on average and of 1,884 at most; shorter blocks vLLM does not have on CPUs.
SCALE, BLOCK_TOKENS = 64, 32
#: All prompts have 24,000 tokens and a worker has room for half as many: the rest is in the store.
KV_TOKENS = 12_000 // BLOCK_TOKENS * BLOCK_TOKENS
#: Of SmolLM2 in bfloat16, and of a mock worker.
TOKEN_BYTES, MOCK_TOKEN_BYTES = 30 * 2 * 3 * 64 * 2, 16
STORE_TOKENS = 80_000
VLLM = ("--block-tokens", str(BLOCK_TOKENS), "--kv-memory", str(KV_TOKENS * TOKEN_BYTES), "--dtype", "bfloat16")
VLLM = (*VLLM, "--vllm", json.dumps(FURTHER))
OWN = (sys.executable, "-m", "tanghulu", "worker", "--engine", "mock", "--model", "mock", "--debug", "mock_speedup=4")
OWN = (*OWN, "--block-tokens", str(BLOCK_TOKENS), "--kv-memory", str(KV_TOKENS * MOCK_TOKEN_BYTES))
OWN = (*OWN, "--debug", f"mock_kv_token_bytes={MOCK_TOKEN_BYTES}")
#: Points by which the shares of cached tokens may differ.
WITHIN = 0.05
REPLAY_S, EVENT_S = 3600.0, 1800.0


class Replay:
    """``tanghulu replay --live`` of the trace's beginning, under way."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._ended_before = self._num_ended()
        command = [sys.executable, "-m", "tanghulu", "replay", str(TRACE), "--live", str(served.http.base_url)]
        command += ["--scale", str(SCALE), "--limit", str(NUM_REQUESTS), "--warmup", "0", "--json"]
        command += ["--connections", "4"]
        self._popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def _num_ended(self) -> float:
        return self._served.metric("tanghulu_conductor_requests_total")

    def until_ended(self, num_requests: int) -> None:
        """Wait for the first ``num_requests`` answers."""
        eventually(lambda: self._num_ended() - self._ended_before >= num_requests, EVENT_S)

    def report(self) -> dict[str, Any]:
        """Wait for its end."""
        told, _ = self._popen.communicate(timeout=REPLAY_S)
        assert self._popen.returncode == 0
        found: dict[str, Any] = json.loads(told)
        print({name: found[name] for name in ("num_requests", "hit_tokens", "ttft_p50_s", "tbt_mean_s")})
        counts = found["num_requests"], found["failed_requests"], found["rejected_requests"]
        assert counts == (NUM_REQUESTS, 0, 0), self._served.troubles()
        return found


def test_shares_as_with_our_workers_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (PYTHON.exists() and MODEL.exists()):
        pytest.skip("extra: vLLM's environment is missing; tools/engine_venv.py vllm builds it")
    # A thread each: several of one process would wait for each other wherever others have a core.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with Cluster(1, "64MiB", checked=False) as store, contextlib.closing(Served(store)) as served:
        served.workers += [WorkerProcess(OWN, store.address) for _ in range(2)]
        served.until_connected()
        ours = [Replay(served).report()["hit_tokens"] for _ in range(2)]
    memory = str(STORE_TOKENS * TOKEN_BYTES)
    with Cluster(1, memory, checked=False) as store, contextlib.closing(Served(store)) as served:
        with ThreadPoolExecutor() as starting:
            served.workers += starting.map(lambda _: VllmWorker(store.address, *VLLM), range(2))
        served.until_connected()
        theirs = [Replay(served).report()["hit_tokens"] for _ in range(2)]
        print({"ours": ours, "vllm": theirs})
        assert theirs == pytest.approx(ours, abs=WITHIN)

        replay = Replay(served)
        replay.until_ended(15)
        served.workers[0].kill()
        replay.until_ended(40)
        store.nodes[0].kill()
        store.add_node(memory)
        replay.until_ended(65)
        store.restart_master()
        replay.report()
        assert served.metric("tanghulu_conductor_workers") == 1
