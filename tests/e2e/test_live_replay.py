"""``tanghulu replay --live`` against a real conductor with mock workers: the same report as in virtual time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tanghulu.conductor.replay.main import COMMAND
from tests.e2e.cluster import LiveCluster, running_cluster

FLAGS = ("--engine", "mock", "--model", "mock", "--debug", "mock_speedup=20", "--prefill", "1", "--decode", "1")
IN_TURNS = ("--connections", "1")  # each waits for the one before it: what is cached does not depend on the machine


@pytest.fixture(scope="module")
def live_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with running_cluster(tmp_path_factory.mktemp("replay"), *FLAGS) as live:
        yield live


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four conversations of three turns, each turn two blocks longer than the one before; half a second in all."""
    rows = [
        {
            "timestamp": 500 * turn + 20 * talk,
            "input_length": 512 * 2 * (turn + 1) + 100,
            "output_length": 8,
            "hash_ids": [100 * talk + block for block in range(2 * (turn + 1))] + [10_000 + 10 * talk + turn],
        }
        for turn in range(3)
        for talk in range(4)
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def replayed(cluster: LiveCluster, trace: Path, *arguments: str) -> list[dict]:
    given = [str(trace), "--live", cluster.url, "--warmup", "0", "--json", *arguments]
    result = CliRunner().invoke(COMMAND, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_turns_find_what_the_turns_before_left(live_cluster: LiveCluster, trace: Path) -> None:
    before = live_cluster.metric("prefill", "tanghulu_worker_computed_tokens_total")
    (row,) = replayed(live_cluster, trace, *IN_TURNS)
    assert (row["num_requests"], row["failed_requests"], row["rejected_requests"]) == (12, 0, 0)
    assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"] < 30
    assert row["tbt_mean_s"] > 0
    total = 4 * (1124 + 2148 + 3172)
    assert row["hit_tokens"] == pytest.approx(4 * (1024 + 2048) / total, abs=0.01), "all but new turns is cached"
    computed = live_cluster.metric("prefill", "tanghulu_worker_computed_tokens_total") - before
    assert computed == pytest.approx(total * (1 - row["hit_tokens"]), abs=1), "and the worker says so too"


def test_policies_are_compared_each_on_prompts_of_its_own(live_cluster: LiveCluster, trace: Path) -> None:
    few = ("--scale", "4", "--limit", "6", *IN_TURNS)
    rows = replayed(live_cluster, trace, "--policy", "linear,round-robin", *few)
    assert [(row["policy"], row["num_requests"]) for row in rows] == [("linear", 6), ("round-robin", 6)]
    assert rows[0]["hit_tokens"] == pytest.approx(rows[1]["hit_tokens"], abs=0.01), "none finds what the other left"
    again, other = (
        replayed(live_cluster, trace, "--policy", "linear", *few, *more)[0] for more in ((), ("--seed", "1"))
    )
    assert again["hit_tokens"] > 0.8, "the same seed sends the same prompts"
    assert other["hit_tokens"] == pytest.approx(rows[0]["hit_tokens"], abs=0.01), "another one others"


def test_requests_that_are_due_are_under_way_together(live_cluster: LiveCluster, trace: Path) -> None:
    (row,) = replayed(live_cluster, trace, "--seed", "2")
    assert (row["num_requests"], row["failed_requests"], row["rejected_requests"]) == (12, 0, 0)
    assert 0 <= row["hit_tokens"] <= 4 * (1024 + 2048) / (4 * (1124 + 2148 + 3172)) + 0.01, "turns may overlap"
