"""``tanghulu curve``: of a trace, of a running conductor, drawn, and of what cannot be read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tanghulu.cli.curve import COMMAND
from tanghulu.conductor.curves.curve import SIZES
from tanghulu.errors import ConfigError, InvalidRequest, NodeUnavailable
from tests.conductor.cluster import running_cluster

TRACE = Path(__file__).parents[1] / "conductor" / "replay" / "data" / "conversation_excerpt.jsonl.gz"


def curve(*arguments: str) -> Result:
    return CliRunner().invoke(COMMAND, arguments, catch_exceptions=False)


@pytest.fixture
def short(tmp_path: Path) -> Path:
    rows = [{"timestamp": at, "input_length": 1025, "output_length": 1, "hash_ids": [1, 2, at]} for at in range(9)]
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_as_json_and_for_people(short: Path) -> None:
    (row,) = json.loads(curve("--trace", str(short), "--blocks", "10", "--eviction", "lru", "--json").output)["models"]
    assert (row["model"], row["sampling_rate"], row["sizes"]) == ("short", 1, list(SIZES))
    assert row["tenants"]["*"]["shares"]["lru"][-1] == pytest.approx(8 * 1024 / (9 * 1025))
    shown = curve("--trace", str(short), "--blocks", "10").output.splitlines()
    assert len(shown) == 2 + len(SIZES)
    assert "reuse" in shown[1]
    assert shown[-1].endswith("█")


def test_drawings(short: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="extra: plot is not installed")
    page = tmp_path / "curve.html"
    curve("--trace", str(short), "--plot", str(page))
    text = page.read_text()
    assert "short, eviction reuse" in text
    assert "<th>optimum</th>" in text


def test_what_cannot_be_drawn(short: Path, tmp_path: Path) -> None:
    for arguments, error, match in (
        (("--trace", str(tmp_path / "no")), InvalidRequest, "cannot read trace"),
        (("--trace", str(short), "--plot", "x.gif"), ConfigError, "must end in"),
        (("--trace", str(short), "--tenant", "who"), ConfigError, "no tenant 'who'"),
        (("--url", "http://127.0.0.1:9"), NodeUnavailable, "no conductor answers"),
    ):
        with pytest.raises(error, match=match):
            curve(*arguments)


async def test_of_a_running_conductor(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        url = ("--url", f"http://{cluster.conductor.address}/v1")
        assert "no request has ended" in (await asyncio.to_thread(curve, *url)).output
        await cluster.add()
        body: dict[str, Any] = {"model": "tiny", "prompt": [1] * 200, "max_tokens": 1}
        await cluster.http.post("/v1/completions", json=body)
        cluster.conductor.curves._reported_s = -1e9
        shown = (await asyncio.to_thread(curve, *url)).output
        assert "tiny, eviction lru: 1 requests, 1000 blocks" in shown


async def test_of_a_conductor_without_curves(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, curve_memory=0) as cluster:
        with pytest.raises(ConfigError, match=r"400.*--curve-memory"):
            await asyncio.to_thread(curve, "--url", f"http://{cluster.conductor.address}")
