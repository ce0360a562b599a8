"""A prefix that only another worker has in its cache is read from there, without a store; the mock compares the KV."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import LiveCluster, eventually, running_cluster

FLAGS = (
    "--engine",
    "mock",
    "--model",
    "mock",
    "--debug",
    "checks=true",
    "--debug",
    "mock_speedup=5",
    "--prefill",
    "2",
    "--decode",
    "1",
)


@pytest.fixture(scope="module")
def storeless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Two prefill workers that ask no store and compare all KV with what it must be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANGHULU_STORE", "false")
        patch.setenv("TANGHULU_KV_MEMORY", "1MiB")  # 1,024 blocks: all are checked after every step
        with running_cluster(tmp_path_factory.mktemp("storeless"), *FLAGS) as live:
            yield live


def _ask(cluster: LiveCluster, prompt: str, worker: str) -> tuple[str, int]:
    """(text, cached tokens) with ``worker`` for the prefill."""
    body = {"model": "mock", "prompt": prompt, "max_tokens": 8, "seed": 1, "routing": {"prefill_worker": worker}}
    answer = cluster.http.post(f"{cluster.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def _prompt(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=length))


def _workers(cluster: LiveCluster) -> list[str]:
    """The prefill workers, once all are there: until then one may do both phases."""

    def listed() -> list[dict]:
        workers = cluster.http.post(f"{cluster.url}/route", json={"prompt": "x"}).json()["workers"]
        return workers if len(workers) == 3 else []

    return [worker["id"] for worker in eventually(listed, 30, "three workers") if not worker["can_decode"]]


def _read_from_caches(cluster: LiveCluster) -> float:
    return cluster.metric("prefill", "tanghulu_worker_prefix_tokens_total", source="peer_cache")


def test_what_one_worker_cached_another_reads(storeless: LiveCluster) -> None:
    first, second = _workers(storeless)[:2]
    before = _read_from_caches(storeless)
    text, cached = _ask(storeless, _prompt(1, 1000), first)
    assert cached == 0
    again, cached = _ask(storeless, _prompt(1, 1000), second)
    assert (again, cached) == (text, 960)
    assert _read_from_caches(storeless) - before == 960
    _, cached = _ask(storeless, _prompt(1, 1000), second)
    assert cached == 960
    assert _read_from_caches(storeless) - before == 960, "the third time it is its own"


def test_a_second_turn_computes_only_its_new_tokens(storeless: LiveCluster) -> None:
    """The prefill worker has the first prompt; the answer it reads out of the cache of the worker that made it."""
    first, _ = _workers(storeless)[:2]
    body = {"model": "mock", "prompt": _prompt(30, 1000), "max_tokens": 200, "routing": {"prefill_worker": first}}
    answer = storeless.http.post(f"{storeless.url}/v1/completions", json=body).json()["choices"][0]["text"]
    before = _read_from_caches(storeless)
    _, cached = _ask(storeless, body["prompt"] + answer + _prompt(31, 50), first)
    assert cached == (1000 + 200 - 1) // 64 * 64
    assert _read_from_caches(storeless) - before == cached - 1000 // 64 * 64


def test_blocks_are_given_back(storeless: LiveCluster) -> None:
    first, second = _workers(storeless)[:2]
    for seed in range(2, 8):
        _ask(storeless, _prompt(seed, 700), first)
        assert _ask(storeless, _prompt(seed, 900)[:700] + _prompt(99, 200), second)[1] == 640
    eventually(
        lambda: sum(storeless.metric(role, "tanghulu_worker_blocks_in_use") for role in ("prefill", "decode")) == 0,
        what="all blocks are free or cached",
    )
    eventually(lambda: storeless.metric("prefill", "tanghulu_worker_exports") == 0, what="no export is left")


def test_health_is_a_token_of_every_worker(storeless: LiveCluster) -> None:
    url = f"{storeless.url}/health_generate"
    answer = storeless.http.get(url, params={"timeout_s": 30})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["workers"]) == 3
    assert all(0 < worker["seconds"] < 30 for worker in answer.json()["workers"])
    stopped = storeless.entry("decode")
    os.kill(stopped["pid"], signal.SIGSTOP)
    try:
        answer = storeless.http.get(url, params={"timeout_s": 0.5})
    finally:
        os.kill(stopped["pid"], signal.SIGCONT)
    assert answer.status_code == 503
    ill = [worker for worker in answer.json()["workers"] if not worker["healthy"]]
    assert stopped["address"].rsplit(":", 1)[1] in "".join(worker["id"] for worker in ill)
    eventually(lambda: storeless.http.get(url).status_code == 200, 30, "it goes on")
    assert storeless.http.get(url, params={"timeout_s": 0}).status_code in (400, 422)


def test_a_worker_that_is_told_to_end_lets_its_answers_end(storeless: LiveCluster) -> None:
    body = {"model": "mock", "prompt": _prompt(70, 100), "max_tokens": 150, "seed": 1}
    wanted = storeless.http.post(f"{storeless.url}/v1/completions", json=body).json()["choices"][0]["text"]
    moved = storeless.metric("conductor", "tanghulu_migrations_total")
    worker, text = storeless.entry("decode"), ""
    with storeless.http.stream("POST", f"{storeless.url}/v1/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                if not text:
                    os.kill(worker["pid"], signal.SIGTERM)
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == wanted
    assert storeless.metric("conductor", "tanghulu_migrations_total") == moved
    storeless.wait_restarted("decode", worker["pid"])


def test_a_holder_that_is_gone_costs_only_the_computation(storeless: LiveCluster) -> None:
    first, second = _workers(storeless)[:2]
    text, _ = _ask(storeless, _prompt(50, 800), first)
    storeless.drop_worker_caches()  # the conductor may still believe in them when the next request comes
    assert _ask(storeless, _prompt(50, 800), second)[0] == text
