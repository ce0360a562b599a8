"""KV that is handed over while it is computed, by real processes: in which order, and what a lost worker costs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tanghulu.rpc.fast_client import FastConnection
from tanghulu.session.messages import DROP_CACHE, DropCacheRequest
from tanghulu.types import Address
from tests.e2e.cluster import LiveCluster, eventually, running_cluster

pytestmark = pytest.mark.slow

BLOCK = 64
FLAGS = ("--engine", "mock", "--model", "mock", "--debug", "checks=true", "--debug", "mock_speedup=8", "--decode", "1")


@contextmanager
def storeless(folder, *flags: str) -> Iterator[LiveCluster]:
    """Workers that ask no store and compare all KV with what it must be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANGHULU_STORE", "false")
        patch.setenv("TANGHULU_KV_MEMORY", "1MiB")
        with running_cluster(folder, *FLAGS, *flags) as live:
            yield live


def words(number: int, length: int) -> str:
    return "".join(random.Random(number).choices("abcdefgh ", k=length))


def ask(cluster: LiveCluster, prompt: str | list[int], max_tokens: int = 20, model: str = "mock", **more: Any) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "seed": 1, "temperature": 0, **more}
    body["ignore_eos"] = True
    answer = cluster.http.post(f"{cluster.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def pulled_bytes(cluster: LiveCluster) -> float:
    return cluster.metric("decode", "tanghulu_worker_fetch_bytes_total", source="peer")


def nothing_is_held(cluster: LiveCluster) -> bool:
    """Whether no worker holds blocks; one that is being restarted is waited for."""
    names = ("tanghulu_worker_blocks_in_use", "tanghulu_worker_exports")
    try:
        return not any(cluster.metric(role, name) for role in ("prefill", "decode") for name in names)
    except httpx.ConnectError:
        return False


def test_blocks_arrive_before_the_prefill_has_ended(tmp_path) -> None:
    with storeless(tmp_path / "c", "--prefill", "1") as live, ThreadPoolExecutor(1) as pool:
        prompt = words(1, 8000)
        asked = pool.submit(ask, live, prompt)
        eventually(lambda: pulled_bytes(live) > 0, what="some of it arrives")
        assert live.metric("prefill", "tanghulu_worker_computed_tokens_total") < 8000, "the rest is still computed"
        text = asked.result(60)
        block_bytes = live.metric("decode", "tanghulu_worker_block_bytes")
        assert pulled_bytes(live) == 8000 // BLOCK * block_bytes, "each block came once"
        assert live.metric("decode", "tanghulu_worker_computed_tokens_total") < BLOCK + 20
        assert ask(live, prompt) == text
        eventually(lambda: nothing_is_held(live), what="all is given back")


def test_an_aborted_request_holds_nothing_at_either_worker(tmp_path) -> None:
    with storeless(tmp_path / "c", "--prefill", "1") as live:
        body = {"model": "mock", "prompt": words(2, 8000), "max_tokens": 20, "stream": True}
        with live.http.stream("POST", f"{live.url}/v1/completions", json=body):
            pass  # the head of the answer comes with the first token, so this one has begun to decode
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, live, words(3, 8000))
            eventually(lambda: live.metric("decode", "tanghulu_worker_blocks_in_use") > 0, what="it is pulled")
            live.http.post(f"{live.url}/abort_request", json={"abort_all": True})
            asked.exception(60)
        eventually(lambda: nothing_is_held(live), what="all is given back")


def test_a_prefill_worker_that_dies_in_the_middle_costs_what_nobody_has(tmp_path) -> None:
    with storeless(tmp_path / "c", "--prefill", "2") as live, ThreadPoolExecutor(1) as pool:
        wanted = ask(live, words(4, 8000))
        live.drop_worker_caches()
        before = pulled_bytes(live)
        asked = pool.submit(ask, live, words(4, 8000))
        half = 4000 // BLOCK * live.metric("decode", "tanghulu_worker_block_bytes")
        eventually(lambda: pulled_bytes(live) - before > half, what="half of it has arrived")
        kill_who_prefills(live)
        assert asked.result(60) == wanted
        eventually(lambda: nothing_is_held(live), what="all is given back")


def kill_who_prefills(live: LiveCluster) -> None:
    busy = live.metrics_by_name("prefill", "tanghulu_worker_requests_running")
    victim = next(entry for entry in live.entries() if busy.get(entry["name"]))
    os.kill(victim["pid"], signal.SIGKILL)


@pytest.mark.parametrize("engine", ["mock", "torch"])
def test_a_prefill_worker_that_dies_before_the_pull_costs_a_block_at_most(tmp_path, engine: str) -> None:
    """The decode worker stands still meanwhile; what it then finds gone it takes from the store."""
    model = ("--engine", "mock", "--model", "mock") if engine == "mock" else ("--model", "smollm2")
    length = 2000 if engine == "mock" else 600
    flags = ("--prefill", "1", "--decode", "1", "--worker-timeout-s", "300")
    with running_cluster(tmp_path / "c", *model, *flags) as live:
        prompt = [1 + n % 90 for n in random.Random(5).choices(range(90), k=length)]
        name = live.http.get(f"{live.url}/v1/models").json()["data"][0]["id"]
        wanted = ask(live, prompt, 16, name)
        live.settle()
        live.drop_worker_caches()
        before = live.metric("decode", "tanghulu_worker_computed_tokens_total")
        with ThreadPoolExecutor(1) as pool, stopped(live.entry("decode")["pid"]) as go_on:
            asked = pool.submit(ask, live, prompt, 16, name)
            handed_over(live, 2)
            live.settle_role("prefill")
            live.kill("prefill")
            go_on()
            assert asked.result(120) == wanted
        computed = live.metric("decode", "tanghulu_worker_computed_tokens_total") - before
        assert computed <= BLOCK + 16


def test_a_peer_has_what_died_before_the_pull(tmp_path) -> None:
    """As above without a store: the other prefill worker computed the same prompt before."""
    with storeless(tmp_path / "c", "--prefill", "2", "--worker-timeout-s", "300") as live:
        dying, other = prefill_workers(live)
        prompt = words(7, 2000)
        wanted = ask(live, prompt, routing={"prefill_worker": other})
        decode = live.entry("decode")
        eventually(lambda: nothing_is_held(live), what="blocks in use are not dropped")
        with contextlib.closing(FastConnection(Address.parse(decode["address"]))) as connection:
            dropped: list[int] = []

            def drop() -> bool:
                reply = connection.call(DROP_CACHE.number, DropCacheRequest(), DROP_CACHE.reply, deadline_s=30)
                dropped.append(reply.message.num_blocks)
                return sum(dropped) >= 2000 // BLOCK

            eventually(drop, what="its blocks are dropped")
        before, read = live.metric("decode", "tanghulu_worker_computed_tokens_total"), tokens_of_peers(live)
        with ThreadPoolExecutor(1) as pool, stopped(decode["pid"]) as go_on:
            asked = pool.submit(ask, live, prompt, routing={"prefill_worker": dying})
            handed_over(live, 2)
            os.kill(pid_of(live, dying), signal.SIGKILL)
            go_on()
            assert asked.result(120) == wanted
        eventually(lambda: tokens_of_peers(live) - read >= 2000 - BLOCK, what="the rest comes from the other")
        assert live.metric("decode", "tanghulu_worker_computed_tokens_total") - before <= BLOCK + 20
        eventually(lambda: nothing_is_held(live), what="all is given back")


def tokens_of_peers(live: LiveCluster) -> float:
    """What came by a hand-over, by which the conductor may replace the lost one, or from another's cache."""
    name = "tanghulu_worker_prefix_tokens_total"
    return sum(live.metric("decode", name, source=source) for source in ("peer", "peer_cache"))


def prefill_workers(live: LiveCluster) -> list[str]:
    """The ids of both, once they and the decode worker are there."""

    def listed() -> list[dict]:
        workers = live.http.post(f"{live.url}/route", json={"prompt": "x"}).json()["workers"]
        return workers if len(workers) == 3 else []

    return [worker["id"] for worker in eventually(listed, what="three workers") if not worker["can_decode"]]


def pid_of(live: LiveCluster, worker: str) -> int:
    """The process of the worker of that id, which has its port in its middle."""
    port = worker.split("-")[1]
    return next(entry["pid"] for entry in live.entries() if entry["address"].endswith(f":{port}"))


def handed_over(live: LiveCluster, count: int) -> None:
    name = "tanghulu_conductor_hand_overs_total"
    eventually(lambda: live.metric("conductor", name) >= count, what="the prefill has ended")


@contextmanager
def stopped(pid: int):
    """Stop the process until the yielded function is called."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)
