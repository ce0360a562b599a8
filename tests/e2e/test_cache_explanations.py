"""Causes of cache misses, provoked from outside in a live cluster of mock workers, and what the answers say of them."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import tanghulu
from tests.e2e.cluster import LiveCluster, eventually, running_cluster
from tests.store.fault_tools import stopped

pytestmark = pytest.mark.slow

BLOCK = 64
#: KV of a worker's cache, in blocks of 64 tokens of 1 KiB; the nodes have room for more.
WORKER_BLOCKS = 64
CONFIG = f"""
[worker]
kv_memory = "{WORKER_BLOCKS * BLOCK}KiB"
"""
FLAGS = (
    *("--engine", "mock", "--model", "mock", "--prefill", "0", "--decode", "0", "--workers", "2"),
    *("--debug", "mock_speedup=5", "--debug", "mock_kv_token_bytes=1024"),
    *("--node-memory", "32MiB", "--node-ssd", "64MiB"),
)


class Explained:
    """Asks a cluster of two workers, and returns what it explains."""

    def __init__(self, live: LiveCluster) -> None:
        self.live = live
        self._number = 0

    def prompt(self, num_tokens: int = 640) -> str:
        """Return a prompt that nobody has seen; each character is a token."""
        self._number += 1
        return "".join(random.Random(self._number).choices("abcdefgh ", k=num_tokens))

    def route(self, prompt: str) -> dict[str, Any]:
        """Return what the conductor knows of its workers, in order of their ids, and of the blocks of ``prompt``."""
        found = self.live.http.post(f"{self.live.url}/route", json={"prompt": prompt}).json()
        found["workers"].sort(key=lambda each: each["id"])
        return found

    @property
    def ids(self) -> list[str]:
        return [each["id"] for each in self.route("x")["workers"]]

    def process_of(self, worker: int) -> int:
        _, port, _ = self.ids[worker].split("-")
        return next(entry["pid"] for entry in self.live.entries() if entry["address"].endswith(f":{port}"))

    def empty_store(self) -> None:
        self.live.settle_role("worker")
        with tanghulu.connect(self.live.master) as client:
            client.remove_matching("^kv/")

    def body(self, prompt: str, worker: int, **fields: Any) -> dict[str, Any]:
        own = {"model": "mock", "max_tokens": 2, "explain_cache": True, "routing": {"worker": self.ids[worker]}}
        return own | ({} if "messages" in fields else {"prompt": prompt}) | fields

    def ask(self, prompt: str, worker: int = 0, path: str = "completions", **fields: Any) -> list[dict[str, Any]]:
        """Return the runs of the prompt's explanation."""
        answer = self.live.http.post(f"{self.live.url}/v1/{path}", json=self.body(prompt, worker, **fields))
        assert answer.status_code == 200, answer.text
        explained = answer.json()["cache_explanation"]
        runs = explained["runs"]
        assert sum(run["tokens"] for run in runs) == explained["prompt_tokens"]
        return runs

    def push_out(self, prompt: str) -> None:
        """Fill the first worker's cache with others until it has nothing of ``prompt``."""
        while self.route(prompt)["workers"][0]["hit_blocks"]:
            self.ask(self.prompt((WORKER_BLOCKS - 4) * BLOCK))
        self.live.settle_role("worker")


def certain(runs: list[dict[str, Any]]) -> dict[str, int]:
    """Return the tokens of each cause that is certain."""
    tokens: Counter[str] = Counter()
    for run in runs:
        if run.get("certain"):
            tokens[run["cause"]] += run["tokens"]
    return dict(tokens)


def brief(runs: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(run.get("source") or run["cause"], run["tokens"]) for run in runs]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explained]:
    folder = tmp_path_factory.mktemp("explained")
    (folder / "c.toml").write_text(CONFIG)
    program = (sys.executable, "-m", "tanghulu", "--config", str(folder / "c.toml"))
    with running_cluster(folder / "state", *FLAGS, program=program) as live:
        yield Explained(live)


def test_new_and_then_in_the_cache(cluster: Explained) -> None:
    prompt = cluster.prompt()
    assert brief(cluster.ask(prompt)) == [("new", 576), ("tail", 64)]
    assert brief(cluster.ask(prompt)) == [("worker", 576), ("tail", 64)]


def test_a_token_at_which_prompts_part(cluster: Explained) -> None:
    prompt = cluster.prompt()
    cluster.ask(prompt)
    worker, diverged, _ = cluster.ask(prompt[:200] + "X" + cluster.prompt(400))
    assert brief([worker, diverged]) == [("worker", 192), ("diverged", 384)]
    assert (diverged["detail"]["block"], diverged["detail"]["token"]) == (3, 200)


def test_a_time_of_day_in_the_first_message(cluster: Explained) -> None:
    rules = cluster.prompt(300)
    for time in ("10:41:07", "10:43:55"):
        messages = [{"role": "system", "content": f"It is 2026-11-28 {time}. {rules}"}]
        run, tail = cluster.ask("", path="chat/completions", messages=messages)
    assert (run["cause"], run["detail"]["message"], run["detail"]["kind"]) == ("diverged", 0, "date")
    assert tail["cause"] == "tail"


def test_a_prompt_that_continues_an_answer(cluster: Explained) -> None:
    prompt = cluster.prompt()
    body = cluster.body(prompt, 0, max_tokens=30)
    answer = cluster.live.http.post(f"{cluster.live.url}/v1/completions", json=body).json()["choices"][0]["text"]
    runs = cluster.ask(prompt + answer + cluster.prompt(200))
    assert brief(runs) == [("worker", 640), ("new", 192), ("tail", 38)]


def test_another_salt(cluster: Explained) -> None:
    prompt = cluster.prompt()
    cluster.ask(prompt, cache_salt="one")
    run, _ = cluster.ask(prompt, cache_salt="two")
    assert (run["cause"], run["tokens"], run["detail"]) == ("other_name", 576, {"differs": ["salt"]})


def test_a_client_that_hung_up(cluster: Explained) -> None:
    prompt = cluster.prompt()
    with stopped(cluster.process_of(0)), pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{cluster.live.url}/v1/completions", json=cluster.body(prompt, 0), timeout=0.5, trust_env=False)
    run, _ = cluster.ask(prompt)
    assert (run["cause"], run["tokens"], run["certain"]) == ("not_kept", 576, True)


def test_evicted_from_a_small_cache(cluster: Explained) -> None:
    prompt = cluster.prompt()
    cluster.ask(prompt)
    cluster.empty_store()
    cluster.push_out(prompt)
    runs = cluster.ask(prompt)
    assert certain(runs) == {"evicted": 576, "tail": 64}, runs
    assert {(run["detail"]["tier"], run["detail"]["uses"]) for run in runs[:-1]} == {("worker", 1)}


def test_loaded_from_the_store_s_memory_and_from_its_ssd(cluster: Explained) -> None:
    prompt = cluster.prompt()
    cluster.ask(prompt)
    cluster.push_out(prompt)
    assert brief(cluster.ask(prompt)) == [("store", 576), ("tail", 64)]
    cluster.push_out(prompt)
    with tanghulu.connect(cluster.live.master) as client:
        (node,) = client.nodes()
        keys = [each.key for each in client.list_keys("kv/")]
        assert client.evict(node.id, keys).num_chunks > 9
        eventually(lambda: client.nodes()[0].ssd_used_bytes > 0, what="chunks are on the SSD")
    assert brief(cluster.ask(prompt)) == [("ssd", 576), ("tail", 64)]


def test_evicted_from_the_store(cluster: Explained) -> None:
    prompt = cluster.prompt()
    cluster.ask(prompt)
    cluster.push_out(prompt)
    with tanghulu.connect(cluster.live.master) as client:
        for number in range(150):  # more than memory and SSD together
            client.put(f"filling/{number}", bytes(1 << 20))
        eventually(lambda: cluster.route(prompt)["hit_blocks"]["store"] < 9, what="some of it is evicted")
        runs = cluster.ask(prompt)
        client.remove_matching("^filling/")
    assert certain(runs) == {"evicted": 576 - sum(run["tokens"] for run in runs if "source" in run), "tail": 64}, runs
    assert runs[-2]["detail"]["tier"] == "store"


def test_a_store_that_does_not_answer(cluster: Explained) -> None:
    prompt = cluster.prompt()
    cluster.ask(prompt)
    cluster.push_out(prompt)
    with stopped(cluster.live.entry("node")["pid"]):
        runs = cluster.ask(prompt)
    assert certain(runs) == {"load_failed": 576, "tail": 64}, runs
    assert runs[0]["detail"]["source"] == "store"


def test_computed_on_another_worker_at_the_time(cluster: Explained) -> None:
    prompt = cluster.prompt()
    with ThreadPoolExecutor(1) as pool, stopped(cluster.process_of(0)):
        first = pool.submit(cluster.ask, prompt, 0)
        eventually(lambda: cluster.route(prompt)["workers"][0]["coming_blocks"] >= 9, what="it is sent there")
        run, _ = cluster.ask(prompt, 1)
    assert (run["cause"], run["tokens"], run["certain"]) == ("not_worth_fetching", 576, True)
    assert run["detail"]["holder"] == cluster.ids[0]
    assert brief(first.result(30))[0][1] == 576  # computed, or loaded from the store to which the other has saved it


def test_a_worker_that_was_killed(cluster: Explained) -> None:
    prompt, holder = cluster.prompt(), cluster.ids[0]
    cluster.ask(prompt, 0)
    cluster.empty_store()
    os.kill(cluster.process_of(0), signal.SIGKILL)
    eventually(lambda: holder not in cluster.ids, what="the conductor misses it")
    run, _ = cluster.ask(prompt, 0)  # the only one left
    assert (run["cause"], run["tokens"], run["certain"]) == ("evicted", 576, True)
    assert (run["detail"]["where"], run["detail"]["why"]) == (holder, "it went away")
