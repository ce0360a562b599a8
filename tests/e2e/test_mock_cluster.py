"""A cluster of mock workers, which needs no model: all of it in seconds, two conductors side by side, and losses."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import LiveCluster, eventually, running_cluster
from tests.free_ports import free_port

FLAGS = ("--engine", "mock", "--model", "mock", "--debug", "mock_speedup=5", "--prefill", "2", "--decode", "2")


@pytest.fixture(scope="module")
def mock_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with running_cluster(tmp_path_factory.mktemp("mock"), *FLAGS) as live:
        yield live


@contextlib.contextmanager
def second_conductor(cluster: LiveCluster, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    command = [sys.executable, "-m", "tanghulu", "conductor", "--master", cluster.master, "--port", str(port)]
    command += ["--metrics-port", "0", "--run-dir", str(folder / "run")]
    (folder / "run").mkdir(mode=0o700)
    with (folder / "conductor.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "conductor.log").read_text()
        with contextlib.suppress(httpx.HTTPError):
            return cluster.http.get(f"{url}/ready").status_code == 200
        return False

    try:
        eventually(is_ready, 30, "the second conductor")
        yield process, url
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(15)


@pytest.mark.slow
def test_two_workers_that_do_both_phases(tmp_path: Path) -> None:
    both = ("--engine", "mock", "--model", "mock", "--prefill", "0", "--decode", "0", "--workers", "2")
    with running_cluster(tmp_path / "c", *both) as live:

        def able() -> list[bool]:
            route = live.http.post(f"{live.url}/route", json={"prompt": "x"}).json()
            return [worker["can_prefill"] and worker["can_decode"] for worker in route["workers"]]

        eventually(lambda: able() == [True, True], what="both workers are known")
        assert ask(live, live.url, "hello")["usage"]["completion_tokens"] == 8


def ask(cluster: LiveCluster, url: str, prompt: str, max_tokens: int = 8) -> dict:
    body = {"model": "mock", "prompt": prompt, "max_tokens": max_tokens, "seed": 1}
    answer = cluster.http.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def blocks_in_use(cluster: LiveCluster) -> float:
    return sum(cluster.metric(role, "tanghulu_worker_blocks_in_use") for role in ("prefill", "decode"))


def running(cluster: LiveCluster) -> list[float]:
    """Requests on each of the decode workers."""
    return list(cluster.metrics_by_name("decode", "tanghulu_worker_requests_running").values())


def foreign_requests(cluster: LiveCluster) -> float:
    """Of other conductors, as the first one knows them."""
    return cluster.metric("conductor", "tanghulu_conductor_peer_requests")


def words(number: int, length: int) -> str:
    return "".join(random.Random(number).choices("abcdefgh ", k=length))


def test_text_is_whole_and_the_second_time_cached(mock_cluster: LiveCluster) -> None:
    first, second = (ask(mock_cluster, mock_cluster.url, words(1, 1000), 20) for _ in range(2))
    assert len(first["choices"][0]["text"]) == 20
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached == [0, 960]


def test_a_second_turn_finds_the_first_and_its_answer(mock_cluster: LiveCluster) -> None:
    prompt = words(77, 900)
    answer = ask(mock_cluster, mock_cluster.url, prompt, 300)["choices"][0]["text"]
    mock_cluster.settle()
    mock_cluster.drop_worker_caches()
    again = ask(mock_cluster, mock_cluster.url, prompt + answer + words(78, 40))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (900 + 300 - 1) // 64 * 64


def test_two_conductors_spread_and_share_what_workers_cached(mock_cluster: LiveCluster, tmp_path: Path) -> None:
    before = mock_cluster.metric("prefill", "tanghulu_worker_computed_tokens_total")
    with second_conductor(mock_cluster, tmp_path) as (_, url):
        urls = [mock_cluster.url, url]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: ask(mock_cluster, urls[n % 2], words(100 + n, 640)), range(40)))
            mock_cluster.settle()
            again = list(pool.map(lambda n: ask(mock_cluster, urls[(n + 1) % 2], words(100 + n, 640)), range(40)))
    found = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again]
    assert min(found) == 576, "what one conductor's request left is found by the other's"
    shares = mock_cluster.metrics_by_name("prefill", "tanghulu_worker_computed_tokens_total")
    assert sum(shares.values()) - before < 40 * 640 * 1.2, "prefixes are computed once"
    assert min(shares.values()) > 0.1 * sum(shares.values()), f"no worker has it all: {shares}"


def test_a_conductor_that_dies_leaves_nothing_behind(mock_cluster: LiveCluster, tmp_path: Path) -> None:
    """Its streams end; the other's go on; the workers give up what nobody waits for."""
    eventually(lambda: blocks_in_use(mock_cluster) == 0, what="idle")
    with second_conductor(mock_cluster, tmp_path) as (process, url), ThreadPoolExecutor(16) as pool:
        lost = [pool.submit(ask, mock_cluster, url, words(200 + n, 640), 4000) for n in range(6)]
        eventually(lambda: sum(running(mock_cluster)) == 6, what="all of them run")
        eventually(lambda: foreign_requests(mock_cluster) == 6, what="the other conductor's requests count here")
        kept = [pool.submit(ask, mock_cluster, mock_cluster.url, words(300 + n, 640), 200) for n in range(6)]
        eventually(lambda: sum(running(mock_cluster)) > 6, what="others beside them")
        os.kill(process.pid, signal.SIGKILL)
        assert {future.result(60)["usage"]["completion_tokens"] for future in kept} == {200}
        for future in lost:
            with pytest.raises(httpx.HTTPError):
                future.result(60)
    eventually(lambda: blocks_in_use(mock_cluster) == 0, what="the dead conductor's requests are given up")
    eventually(lambda: foreign_requests(mock_cluster) == 0, what="and forgotten")


def test_a_killed_decode_worker_is_not_noticed(mock_cluster: LiveCluster) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, mock_cluster, mock_cluster.url, words(400 + n, 640), 300) for n in range(8)]
        eventually(lambda: min(running(mock_cluster)) > 1, what="some run on each worker")
        killed = mock_cluster.kill("decode")
        texts = [future.result(60)["choices"][0]["text"] for future in asked]
    assert {len(text) for text in texts} == {300}
    stories = mock_cluster.http.get(f"{mock_cluster.url}/debug/requests?limit=8").json()["requests"]
    moved = [story for story in stories if "lost" in [visit["left"] for visit in story["workers"]]]
    assert moved, "each shows the worker that it lost, and where it went on"
    for story in moved:
        assert story["workers"][-1]["left"] == "ended"
        assert sum(story["phases"].values()) == pytest.approx(story["seconds"], abs=2e-5)
    mock_cluster.wait_restarted("decode", killed)
    assert texts[0] == ask(mock_cluster, mock_cluster.url, words(400, 640), 300)["choices"][0]["text"]


def story_of(cluster: LiveCluster, name: str) -> dict:
    """The one story of a request that is over; its phases add up."""

    def found() -> dict | None:
        answer = cluster.http.get(f"{cluster.url}/debug/requests/{name}").json()
        (story,) = answer.get("requests", [{"status": "under_way"}])
        return story if story["status"] != "under_way" else None

    story = eventually(found, what=f"the story of {name}")
    assert sum(story["phases"].values()) == pytest.approx(story["seconds"], abs=2e-5)
    return story


def answer_id(streamed: httpx.Response) -> str:
    first, _, _ = streamed.text.partition("\n\n")
    return json.loads(first.removeprefix("data: "))["id"]


def test_a_request_tells_its_story(mock_cluster: LiveCluster) -> None:
    """Handed over, refused, aborted: each with the phases that it had, and a worker's own among them."""
    url, trace = f"{mock_cluster.url}/v1/completions", "0af7651916cd43dd8448eb211c80319c"
    body = {"model": "mock", "prompt": words(600, 640), "max_tokens": 20, "stream": True, "seed": 1}
    headers = {"x-request-id": "served", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    answer = mock_cluster.http.post(url, json=body, headers=headers)
    assert answer.headers["traceresponse"].startswith(f"00-{trace}-")
    served = story_of(mock_cluster, "served")
    assert (served["status"], served["generated_tokens"]) == ("served", 20)
    wanted = {
        "receive",
        "tokenise",
        "queue",
        "route",
        "transit",
        "worker_queue",
        "prefill",
        "hand_over",
        "decode",
        "send",
    }
    assert wanted <= served["phases"].keys()
    assert [visit["left"] for visit in served["workers"]] == ["handed_over", "ended"]
    assert [story_of(mock_cluster, name)["id"] for name in (trace, answer_id(answer))] == [served["id"]] * 2
    refused = mock_cluster.http.post(url, json=body | {"regex": "a+"}, headers={"x-request-id": "refused"})
    assert refused.status_code == 400, "a mock knows no grammar"
    assert story_of(mock_cluster, "refused")["status"] == "refused"
    body["max_tokens"] = 4000
    with mock_cluster.http.stream("POST", url, json=body, headers={"x-request-id": "aborted"}) as response:
        next(response.iter_raw())
    assert story_of(mock_cluster, "aborted")["status"] == "aborted"


def pid_of(cluster: LiveCluster, name: str) -> int:
    """The process of that name; 0 while it is not ready."""
    return next((entry["pid"] for entry in cluster.entries() if entry["name"] == name), 0)


def wait_restarted(cluster: LiveCluster, name: str, old_pid: int) -> None:
    eventually(lambda: pid_of(cluster, name) not in (0, old_pid), 60, f"{name} restarted")


@contextlib.contextmanager
def hung_engine(pid: int) -> Iterator[None]:
    """Stop the engine's thread alone, as a call to a GPU does that never returns: a tracer holds it."""
    tasks = Path(f"/proc/{pid}/task")
    engine = next(task.name for task in tasks.iterdir() if (task / "comm").read_text().strip() == "engine")
    command = [sys.executable, "-c", _HOLD, engine]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n", "ptrace is not allowed here"
            yield
        finally:
            holder.kill()


_HOLD = """
import ctypes, os, sys
libc, thread = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
assert libc.ptrace(16, thread, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.waitpid(thread, 0x40000000)
print("held", flush=True)
os.waitpid(thread, 0x40000000)  # that it is killed: before its tracer knows, its process does not end
"""


@pytest.mark.slow
def test_a_hung_engine_loses_its_requests_to_others_and_is_restarted(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "c", *FLAGS, "--worker-timeout-s", "3") as live:
        wanted = [ask(live, live.url, words(500 + n, 640), 150)["choices"][0]["text"] for n in range(8)]
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, live, live.url, words(500 + n, 640), 150) for n in range(8)]
            eventually(lambda: min(running(live)) > 1, what="some run on each worker")
            pid = pid_of(live, "decode-0")
            with hung_engine(pid):
                assert [future.result(60)["choices"][0]["text"] for future in asked] == wanted
                wait_restarted(live, "decode-0", pid)
        assert live.metric("conductor", "tanghulu_migrations_total", outcome="resumed") > 0
        assert not live.metric("conductor", "tanghulu_migrations_total", outcome="failed")


@pytest.mark.slow
def test_a_worker_that_hung_while_idle_swallows_nobody(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "c", *FLAGS, "--worker-timeout-s", "3") as live:
        with hung_engine(live.entry("decode")["pid"]):
            eventually(lambda: live.metric("conductor", "tanghulu_conductor_workers") == 3, 30, "it is lost")
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda n: ask(live, live.url, words(600 + n, 640), 20), range(16)))


@pytest.mark.slow
def test_a_worker_that_dies_again_and_again_does_not_end_the_cluster(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "c", *FLAGS) as live:
        for _ in range(6):
            pid = pid_of(live, "decode-0")
            os.kill(pid, signal.SIGKILL)
            wait_restarted(live, "decode-0", pid)
        assert ask(live, live.url, "still here")["usage"]["completion_tokens"] == 8


@pytest.mark.slow
def test_drained_one_by_one_under_load_nothing_fails(tmp_path: Path) -> None:
    """`tanghulu drain` for each worker in turn: its long stream ends whole, and short ones beside it."""
    with running_cluster(tmp_path / "c", *FLAGS) as live, ThreadPoolExecutor(8) as pool:

        def drain(wanted: str) -> str:
            command = [sys.executable, "-m", "tanghulu", "drain", wanted, "--master", live.master]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            return done.stdout + done.stderr

        assert "no instance 'nobody' is registered; there are: " in drain("nobody")
        long = pool.submit(ask, live, live.url, words(900, 64), 1500)
        eventually(lambda: sum(running(live)) == 1, what="it runs")
        for entry in [e for e in live.entries() if e["role"] in ("prefill", "decode")]:
            short = [pool.submit(ask, live, live.url, words(901 + n, 64), 20) for n in range(4)]
            assert "ends within 10 s" in drain(entry["address"])
            wait_restarted(live, entry["name"], entry["pid"])
            assert {future.result(60)["usage"]["completion_tokens"] for future in short} == {20}
        assert long.result(120)["usage"]["completion_tokens"] == 1500
        conductor = live.entry("conductor")
        assert "under way there" in drain(conductor["address"])
        wait_restarted(live, "conductor", conductor["pid"])
        node = next(e for e in live.entries() if e["role"] == "node")
        assert drain(node["address"]) != ""


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_the_end_of_all_tells_every_client(tmp_path: Path, stream: bool) -> None:
    """Ctrl-C: answers that do not end within the grace are told so, with [DONE]; none is cut."""
    with running_cluster(tmp_path / "c", *FLAGS, "--grace-s", "1") as live, ThreadPoolExecutor(8) as pool:
        body = {"model": "mock", "max_tokens": 20_000, "ignore_eos": True, "stream": stream}

        def whole(number: int) -> httpx.Response:
            return httpx.post(
                f"{live.url}/v1/completions", json=body | {"prompt": words(number, 64)}, timeout=60, trust_env=False
            )

        asked = [pool.submit(whole, number) for number in range(8)]
        eventually(lambda: sum(running(live)) == 8, what="all run")
        assert live.stop() == 0
        for answer in (future.result(30) for future in asked):
            if stream:
                assert answer.status_code == 200
                last, done = [line for line in answer.text.split("\n\n") if line][-2:]
                assert done == "data: [DONE]"
                assert '"error"' in last
                assert '"finish_reason":"error"' in last
            else:
                assert answer.status_code == 503
                assert "shutting down" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_six_hundred_of_one_client_do_not_keep_another_waiting(tmp_path: Path) -> None:
    """All of them are at the workers; the other's single one takes its turn there, and ends while most still wait."""
    with running_cluster(tmp_path / "c", *FLAGS) as live, ThreadPoolExecutor(4) as pool:
        url = f"{live.url}/v1/completions"

        def send(user: str, prompts: list[str]) -> httpx.Response:
            body = {"model": "mock", "prompt": prompts, "max_tokens": 40, "ignore_eos": True, "user": user}
            return httpx.post(url, json=body, timeout=300, trust_env=False)

        def waiting() -> float:
            return live.metric("prefill", "tanghulu_worker_requests_waiting")

        prompts = [words(2000 + n, 200) for n in range(600)]
        many = [pool.submit(send, "many", prompts[at : at + 120]) for at in range(0, 480, 120)]
        eventually(lambda: waiting() > 300, what="they wait at the workers")
        assert send("one", [words(3000, 200)]).status_code == 200
        assert waiting() > 150, "the other's wait on"
        assert [future.result(300).status_code for future in many] == [200] * 4
