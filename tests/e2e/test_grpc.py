"""Inference over gRPC against real processes: the guide's example, HTTP's tokens, killed processes, blocks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from tanghulu.protos import inference_pb2 as pb
from tanghulu.protos import inference_pb2_grpc
from tests.e2e.cluster import LiveCluster, eventually, running_cluster
from tests.free_ports import free_port

pytestmark = pytest.mark.slow
GUIDE = Path(__file__).parents[2] / "docs/grpc_api.md"
PROMPT = "a prompt of some blocks, " * 20
DEADLINE_S = 60
WORKERS = ("--prefill", "0", "--decode", "0", "--workers", "2")


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[LiveCluster]:
    ports = ("--conductors", "2", "--port", str(free_port()), "--grpc-port", str(port))
    flags = ("--engine", "mock", "--model", "mock", "--debug", "mock_speedup=4", *ports, *WORKERS)
    with running_cluster(tmp_path_factory.mktemp("cluster"), *flags) as cluster:
        yield cluster


@pytest.fixture
def stub(live: LiveCluster, port: int) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def request(num_tokens: int) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(max_tokens=num_tokens, temperature=0, seed=1, ignore_eos=True)
    return pb.GenerateRequest(text=PROMPT, sampling=sampling)


def nothing_is_held(live: LiveCluster) -> bool:
    return live.metric("worker", "tanghulu_worker_blocks_in_use") == 0


def test_the_guide_s_example_runs(live: LiveCluster, port: int) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert "localhost:8001" in code
    code = code.replace("localhost:8001", f"127.0.0.1:{port}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "length: 32 tokens"


def test_a_stream_has_http_s_tokens_even_if_its_worker_is_killed(live: LiveCluster, stub: Any) -> None:
    sampling = {"seed": 1, "ignore_eos": True}
    expected = live.generate(PROMPT, 200, **sampling)["output_ids"]
    call = stub.Generate(request(200), timeout=DEADLINE_S)
    tokens = list(next(call).tokens)
    busy = live.metrics_by_name("worker", "tanghulu_worker_blocks_in_use")
    name = max(busy, key=lambda each: busy[each])
    pid = next(entry["pid"] for entry in live.entries() if entry["name"] == name)
    subprocess.run(["kill", "-9", str(pid)], check=True)
    for reply in call:
        tokens += reply.tokens
    assert tokens == expected
    assert (reply.finish_reason, reply.usage.completion_tokens) == ("length", 200)
    live.wait_restarted("worker", pid)


def test_cancelled_calls_give_their_blocks_back(live: LiveCluster, stub: Any) -> None:
    calls = [stub.Generate(request(4000), timeout=DEADLINE_S) for _ in range(8)]
    for call in calls:
        next(call)
    assert not nothing_is_held(live)
    for call in calls[:4]:
        call.cancel()
    assert stub.Abort(pb.AbortRequest(all=True), timeout=DEADLINE_S).num_aborted >= 4
    for call in calls[4:]:
        assert [reply.finish_reason for reply in call][-1] == "abort"
    eventually(lambda: nothing_is_held(live), what="all blocks are given back")


def test_conductors_share_the_ports_and_one_may_die(live: LiveCluster, port: int) -> None:
    def ask() -> None:
        """One request each over connections of their own, which either conductor may get."""
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert [reply.finish_reason for reply in stub.Generate(request(2), timeout=DEADLINE_S)][-1] == "length"
        answer = httpx.get(f"{live.url}/v1/models", trust_env=False, timeout=DEADLINE_S)
        assert answer.status_code == 200

    def both_were_asked() -> bool:
        ask()
        return all(live.metrics_by_name("conductor", "tanghulu_conductor_request_seconds_count").values())

    eventually(both_were_asked, what="both conductors get connections")
    killed = live.kill("conductor")
    eventually(lambda: not psutil.pid_exists(killed), what="the kernel has closed its sockets")
    for _ in range(8):
        ask()
    eventually(lambda: len(live._pids("conductor") - {killed}) == 2, what="the other is restarted")
