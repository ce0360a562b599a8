"""Causes of cache misses at two real vLLM workers, provoked from outside, and what the answers say of them."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

import tanghulu
from tests.engines.vllm.conftest import MODEL, PYTHON
from tests.engines.vllm_worker.conftest import BLOCK_TOKENS, FURTHER, Served, eventually
from tests.store.cluster import Cluster
from tests.store.fault_tools import stopped

pytestmark = [pytest.mark.engine_vllm, pytest.mark.slow, pytest.mark.by_hand, pytest.mark.timeout(3000)]
#: A worker's cache: 40 blocks of 64 tokens, each with two vectors of 192 float32 in each of 30 layers.
CACHE_BLOCKS = 40
CACHE_BYTES = CACHE_BLOCKS * BLOCK_TOKENS * 30 * 2 * 192 * 4
PROMPT_TOKENS = 650
NAMED_TOKENS = 640
Runs = list[dict[str, Any]]


class Explained:
    """Asks one of the workers, and returns what is explained."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._number = 0

    def prompt(self, num_tokens: int = PROMPT_TOKENS) -> list[int]:
        """Return a prompt that nobody has seen."""
        self._number += 1
        return random.Random(self._number).choices(range(1000, 40_000), k=num_tokens)

    def route(self, prompt: list[int]) -> dict[str, Any]:
        """Return what the conductor knows of ``prompt``."""
        answer: dict[str, Any] = self.served.http.post("/route", json={"prompt": prompt}).json()
        return answer

    def workers(self, prompt: list[int]) -> dict[str, dict[str, Any]]:
        return {each["id"]: each for each in self.route(prompt)["workers"]}

    def name(self, worker: int) -> str:
        return self.served.workers[worker].name

    def ask(self, prompt: list[int], worker: int = 0, **fields: Any) -> Runs:
        answer = self.served.complete(
            prompt, 2, **{"explain_cache": True, "routing": {"worker": self.name(worker)}} | fields
        )
        explained = answer["cache_explanation"]
        assert explained["prompt_tokens"] == len(prompt) == sum(run["tokens"] for run in explained["runs"])
        from_cache = sum(run["tokens"] for run in explained["runs"] if "source" in run)
        assert from_cache == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        runs: Runs = explained["runs"]
        return runs

    def push_out(self, prompt: list[int]) -> None:
        """Fill the first worker's cache with other prompts until it has nothing of ``prompt``."""
        while self.workers(prompt)[self.name(0)]["hit_blocks"]:
            self.ask(self.prompt((CACHE_BLOCKS - 4) * BLOCK_TOKENS))

    def forget_in_store(self, prompt: list[int]) -> None:
        """Remove everything, and wait until the conductor has heard of it."""
        with tanghulu.connect(self.served.store.address) as client:
            client.remove_matching("^kv/")
        eventually(lambda: not self.route(prompt)["hit_blocks"]["store"])


def brief(runs: Runs) -> list[tuple[str, int]]:
    return [(run.get("source") or run["cause"], run["tokens"]) for run in runs]


def certain(runs: Runs) -> dict[str, int]:
    return {run["cause"]: run["tokens"] for run in runs if run.get("certain")}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Explained]:
    if not (PYTHON.exists() and MODEL.exists()):
        pytest.skip("extra: vLLM's environment is missing; tools/engine_venv.py vllm builds it")
    small = ("--kv-memory", str(CACHE_BYTES), "--vllm", json.dumps(FURTHER | {"max_model_len": 2400}))
    with Cluster(1, "2GiB", checked=False) as store, contextlib.closing(Served(store)) as served:
        served.add(*small)
        served.add(*small)
        yield Explained(served)


def test_new_and_then_in_the_cache(cluster: Explained) -> None:
    prompt = cluster.prompt()
    assert brief(cluster.ask(prompt)) == [("new", NAMED_TOKENS), ("tail", 10)]
    assert brief(cluster.ask(prompt)) == [("worker", NAMED_TOKENS), ("tail", 10)]


def test_a_token_at_which_prompts_part(cluster: Explained) -> None:
    prompt = cluster.prompt()
    cluster.ask(prompt)
    worker, diverged, _ = cluster.ask([*prompt[:200], 7, *cluster.prompt(449)])
    assert brief([worker, diverged]) == [("worker", 192), ("diverged", 448)]
    assert (diverged["detail"]["block"], diverged["detail"]["token"]) == (3, 200)


def test_another_salt(cluster: Explained) -> None:
    prompt = cluster.prompt()
    cluster.ask(prompt, cache_salt="one")
    run, _ = cluster.ask(prompt, cache_salt="two")
    assert (run["cause"], run["tokens"], run["detail"]) == ("other_name", NAMED_TOKENS, {"differs": ["salt"]})


def test_evicted_from_a_small_cache(cluster: Explained) -> None:
    prompt = cluster.prompt()
    cluster.ask(prompt)
    cluster.push_out(prompt)
    cluster.forget_in_store(prompt)
    runs = cluster.ask(prompt)
    assert certain(runs) == {"evicted": NAMED_TOKENS, "tail": 10}, runs


def test_loaded_from_the_store(cluster: Explained) -> None:
    prompt = cluster.prompt()
    cluster.ask(prompt)
    cluster.push_out(prompt)
    assert brief(cluster.ask(prompt)) == [("store", NAMED_TOKENS), ("tail", 10)]
    runs = cluster.ask([*prompt[:128], *cluster.prompt(522)])
    assert brief(runs)[:2] == [("worker", 128), ("diverged", 512)]


def test_a_part_that_is_gone_when_it_is_loaded(cluster: Explained) -> None:
    """The store's node stops once the scheduler has looked the prompt up: the load fails, and all is computed."""
    prompt = cluster.prompt()
    cluster.ask(prompt)
    cluster.push_out(prompt)
    with stopped(cluster.served.store.nodes[0].popen.pid):
        runs = cluster.ask(prompt)
    assert sum(run["tokens"] for run in runs if "source" in run) == 0
    assert certain(runs) == {"load_failed": NAMED_TOKENS, "tail": 10}, runs
    eventually(lambda: brief(cluster.ask(prompt))[0][0] == "worker")


def test_a_worker_that_was_killed(cluster: Explained) -> None:
    prompt, holder = cluster.prompt(), cluster.name(0)
    cluster.ask(prompt)
    cluster.forget_in_store(prompt)
    cluster.served.workers[0].kill()
    eventually(lambda: holder not in cluster.workers(prompt))
    run, _ = cluster.ask(prompt, 1)
    assert (run["cause"], run["tokens"], run["certain"]) == ("evicted", NAMED_TOKENS, True)
    assert (run["detail"]["where"], run["detail"]["why"]) == (holder, "it went away")
