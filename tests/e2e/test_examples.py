"""Each script of examples/ is run as it stands, against real processes, and prints what its docstring promises."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import LiveCluster, eventually
from tests.free_ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
TESTED = ("asyncio_client", "prefix_reuse_http", "put_and_get", "replay_policies", "store_over_http", "torch_tensors")


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.fixture
def gateway(cluster: LiveCluster, tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "tanghulu", "store", "serve", "--master", cluster.master, "--port", str(port)]
    (tmp_path / "run").mkdir(mode=0o700)
    command += ["--metrics-port", "0", "--run-dir", str(tmp_path / "run")]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, (tmp_path / "gateway.log").read_text()
        try:
            return cluster.http.get(f"{url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    with (tmp_path / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        eventually(is_ready, 30, "the gateway")
        yield url
    finally:
        process.terminate()
        process.wait(15)


def test_every_example_is_tested_and_listed():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(TESTED)
    assert all(f"`{name}.py`" in (EXAMPLES / "README.md").read_text() for name in TESTED)


def test_put_and_get(cluster):
    lines = run("put_and_get", cluster.master).splitlines()
    assert lines[:4] == [
        "existed before: False",
        "existed now: True",
        "value: b'first block' of 11 bytes",
        "read into a buffer: 11 b'first block'",
    ]
    assert lines[4] == "keys there: [True, True, False, True] - usable as a prefix: 2"
    assert lines[5].startswith("not found:")
    assert "example/put/c" in lines[5]


def test_asyncio_client(cluster):
    lines = run("asyncio_client", cluster.master).splitlines()
    assert lines[0] == "waiting for 3 keys"
    assert lines[-1] == "all there: [True, True, True]"
    keys = [f"example/asyncio/{number}" for number in range(3)]
    assert [line for line in lines if line.startswith("put")] == [f"put {key}" for key in keys]
    assert [line for line in lines if line.startswith("got")] == [f"got block of {key}" for key in keys]


def test_torch_tensors(cluster):
    assert run("torch_tensors", cluster.master).splitlines() == [
        "stored: (8, 2, 64, 4, 64) torch.bfloat16 524288 bytes",
        "equal: True",
        "layer 3 alone: True",
        "with dtype and shape: torch.bfloat16 (8, 64, 4, 64) True",
        "filled in place: 524288 bytes, equal: True",
    ]


def test_prefix_reuse_http(cluster):
    lines = run("prefix_reuse_http", cluster.url).splitlines()
    figures = [re.search(r"prompt of (\d+) tokens, (\d+) not computed", line) for line in lines]
    counts = [(int(found[1]), int(found[2])) for found in figures if found is not None]
    assert len(counts) == len(lines) >= 3
    assert counts[0][1] == 0, "nobody knows the text before"
    assert counts[1][1] > counts[1][0] / 2, "from the worker's own cache"
    assert counts[-1][1] > 0, "from the store"
    assert lines[-1].startswith("And from the store?")


def test_replay_policies():
    output = run("replay_policies")
    assert "conversations, 1000 requests" in output
    ttft_s = dict(re.findall(r"^  (greedy \(ours\)|random|ttft-min) +([\d.]+)", output, re.MULTILINE))
    assert float(ttft_s["ttft-min"]) < float(ttft_s["greedy (ours)"]) < float(ttft_s["random"])


def test_replay_policies_on_a_given_trace():
    trace = Path(__file__).parents[1] / "conductor" / "replay" / "data" / "conversation_excerpt.jsonl.gz"
    assert "conversation_excerpt.jsonl.gz, 1051 requests" in run("replay_policies", str(trace))


def test_store_over_http(gateway):
    assert run("store_over_http", gateway).splitlines() == [
        "put: 201",
        "put again, a hit: 200",
        "get: 200 b'forty-two'",
        "get a range: 206 b'two'",
        "get if it changed: 304",
        "keys: ['example/http/answer']",
        "size: 9",
        "remove: 200",
        "get what is gone: 404 chunk_not_found",
    ]


def test_the_guide_shows_the_policy_of_the_example():
    page = (EXAMPLES.parent / "docs/guides/write_a_policy.md").read_text()
    shown = page.partition("```python\n")[2].partition("\n```")[0]
    assert shown in (EXAMPLES / "replay_policies.py").read_text()
    assert len(shown) > 500
