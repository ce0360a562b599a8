"""`tanghulu bench` against a running cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from tanghulu.cli.bench import StreamLoad, prompts
from tanghulu.cli.main import root
from tanghulu.errors import StoreFull
from tests.e2e.cluster import LiveCluster, running_cluster
from tests.store.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    flags = ("--engine", "mock", "--model", "mock", "--debug", "mock_speedup=1000", "--prefill", "1", "--decode", "1")
    with running_cluster(tmp_path_factory.mktemp("bench"), *flags) as live:
        yield live


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(root, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_prompts_share_what_was_asked_and_no_two_runs_meet() -> None:
    load = StreamLoad(num_requests=3, concurrency=1, prompt_tokens=10, output_tokens=2, shared=0.5, seed=7)
    first, again, other = (prompts(load, range(1000), run) for run in (1, 1, 2))
    assert first == again
    assert first[0][:5] == first[1][:5] == first[2][:5]
    assert first[0][5:] != first[1][5:]
    assert {len(tokens) for tokens in first} == {10}
    assert first[0][0] != other[0][0]


@pytest.mark.slow
def test_http(cluster: LiveCluster) -> None:
    load = ("--requests", "12", "--concurrency", "3", "--prompt-tokens", "600", "--output-tokens", "8")
    figures = json.loads(_run("http", "--url", cluster.url, *load, "--json"))
    assert (figures["num_requests"], figures["num_failed"]) == (12, 0)
    assert figures["ttft_p99_s"] >= figures["ttft_p50_s"] > 0
    assert 0 < figures["cached_share"] < 1
    assert "tokens per s" in _run("http", "--url", cluster.url, *load)


@pytest.mark.slow
def test_store(cluster: LiveCluster) -> None:
    sizes = ("--size", "4KiB", "--size", "1MiB")
    rows = json.loads(_run("store", "--master", cluster.master, "--seconds", "0.05", *sizes, "--json"))
    assert [(row["operation"], row["num_bytes"]) for row in rows] == [
        (operation, size) for size in (4096, 1 << 20) for operation in ("put", "exists", "get", "remove")
    ]
    assert all(row["p99_us"] >= row["p50_us"] > 0 for row in rows)
    assert "bench/" not in CliRunner().invoke(root, ["store", "ls", "--master", cluster.master]).output


@pytest.mark.slow
def test_a_store_that_is_smaller_than_sixteen_chunks() -> None:
    with Cluster(1, memory="8MiB") as small:
        sizes = ("--size", "1MiB", "--size", "9MiB")
        result = CliRunner().invoke(
            root, ["bench", "store", "--master", small.address, "--seconds", "0.05", *sizes, "--json"]
        )
    assert isinstance(result.exception, StoreFull)
    assert "exceeds the largest node" in result.exception.message
    assert {row["num_bytes"] for row in json.loads(result.stdout)} == {1 << 20}, "what was measured is printed"


def test_nobody_there_is_one_line() -> None:
    command = [sys.executable, "-m", "tanghulu", "bench", "http", "--url", "http://127.0.0.1:9"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 4
    assert "no model answers at http://127.0.0.1:9" in result.stderr
    assert "Traceback" not in result.stderr
