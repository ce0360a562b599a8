"""``tanghulu plan``: forecasts of a burst against replays and later traces, the live curve, bad input."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tanghulu.cli import plan as planner
from tanghulu.cli.plan import COMMAND, PlanConfig, plan
from tanghulu.conductor.replay.main import ReplayConfig, replay
from tanghulu.errors import ConfigError
from tests.conductor.cluster import running_cluster


def burst(path: Path, *, measured: dict[str, float] | None = None, seed: int = 1) -> Path:
    """Two requests a second, and twenty in the middle third; every prompt continues one of a few chats."""
    draw, rows, at_ms = random.Random(seed), list[dict[str, Any]](), 0.0
    chats = [[100 * i] for i in range(12)]
    while at_ms < 24_000:
        at_ms += draw.expovariate(0.02 if 8_000 < at_ms < 16_000 else 0.002)
        chat = draw.choice(chats)
        chat.append(max(chat) + 1)
        length = {"timestamp": at_ms, "input_length": 512 * len(chat), "output_length": draw.randint(5, 60)}
        rows.append({**length, "hash_ids": list(chat), **(measured or {})})
        if len(chat) > 15:
            del chat[1:]
            chat[0] += 10_000
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(path: Path, tmp_path: Path, **options: Any) -> PlanConfig:
    return PlanConfig(**{"traces": (path,), "warmup": "0", "state_dir": tmp_path / "state", "workers": 2} | options)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(COMMAND, arguments, catch_exceptions=False)


def test_a_burst_with_one_more_worker_is_within_a_fifth_of_its_replay(tmp_path: Path) -> None:
    trace = burst(tmp_path / "burst.jsonl")
    found = plan(config(trace, tmp_path))["scenarios"]
    (replayed,) = replay(ReplayConfig(traces=(trace,), workers=3, speedup=1.0, warmup="0"))
    assert found["one more worker"]["ttft_mean_s"] == pytest.approx(replayed.ttft_mean_s, rel=0.2)
    assert found["one more worker"]["ttft_mean_s"] < found["now"]["ttft_mean_s"]


def test_memory_and_an_ssd(tmp_path: Path) -> None:
    trace = burst(tmp_path / "burst.jsonl")
    found = plan(config(trace, tmp_path, workers=0, prefill=1, decode=1, blocks=30))["scenarios"]
    assert found.keys() == {
        "now",
        "one more decode worker",
        "one more prefill worker",
        "twice the memory",
        "an SSD",
    }
    hits = {name: figures["hit_tokens"] for name, figures in found.items()}
    assert hits["now"] < hits["twice the memory"] < hits["an SSD"]
    slow = plan(config(trace, tmp_path, workers=0, prefill=1, decode=1, blocks=30, ssd=1e8))["scenarios"]
    assert slow["an SSD"]["ttft_mean_s"] > found["an SSD"]["ttft_mean_s"]
    assert slow["now"] == found["now"]


def test_an_earlier_forecast_is_compared_with_the_replay_and_with_measurements(tmp_path: Path) -> None:
    first = plan(config(burst(tmp_path / "monday.jsonl"), tmp_path))
    assert first["earlier_forecasts"] == []
    later = burst(tmp_path / "tuesday.jsonl", seed=2)
    (earlier,) = plan(config(later, tmp_path, workers=3))["earlier_forecasts"]
    assert (earlier["trace"], earlier["scenario"]) == ("monday", "one more worker")
    assert earlier["figures"] == first["scenarios"]["one more worker"]
    assert set(earlier["errors"]) == {"ttft_mean_s", "ttft_p99_s", "tbt_mean_s", "hit_tokens"}
    seen = burst(tmp_path / "wednesday.jsonl", measured={"ttft_ms": 500, "tbt_ms": 25, "cached_tokens": 512})
    found = plan(config(seen, tmp_path, workers=3))
    assert found["measured"]["ttft_mean_s"] == 0.5
    error = next(each["errors"] for each in found["earlier_forecasts"] if each["trace"] == "monday")["ttft_mean_s"]
    assert error == pytest.approx(earlier["figures"]["ttft_mean_s"] / 0.5 - 1)
    arguments = (str(seen), "--workers", "3", "--warmup", "0", "--state-dir", str(tmp_path / "state"))
    shown = run(*arguments).output
    assert "measured" in shown
    assert "forecast from monday (one more worker) compared with measurements now: TTFT" in shown
    assert json.loads(run(*arguments, "--json").output)["trace"] == "wednesday"


@pytest.mark.parametrize(
    ("ttft_factor", "tbt_factor", "warns"), [(1.4, 0.7, False), (2.0, 1.0, True), (1.0, 0.5, True)]
)
def test_costs_of_another_model_are_noticed(ttft_factor: float, tbt_factor: float, warns: bool, tmp_path: Path) -> None:
    now = plan(config(burst(tmp_path / "burst.jsonl"), tmp_path))["scenarios"]["now"]
    times = {"ttft_ms": 1000 * now["ttft_mean_s"] * ttft_factor, "tbt_ms": 1000 * now["tbt_mean_s"] * tbt_factor}
    seen = burst(tmp_path / "seen.jsonl", measured=times | {"cached_tokens": 512})
    shown = run(str(seen), "--workers", "2", "--warmup", "0", "--state-dir", str(tmp_path / "state"))
    assert ("do not rely on these forecasts" in shown.stderr) == warns


def test_forecasts_are_bounded_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, file = burst(tmp_path / "burst.jsonl"), tmp_path / "state" / "forecasts.json"
    for _ in range(2):
        plan(config(trace, tmp_path))
    assert len(json.loads(file.read_text())) == 4
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(planner, "MAX_KEPT", 3)
    plan(config(trace, tmp_path))
    assert len(json.loads(file.read_text())) == 3
    file.write_text('[{"figures": 3}]')
    with pytest.raises(ConfigError, match="move it away"):
        plan(config(trace, tmp_path))
    file.unlink()
    with pytest.raises(ConfigError, match="choose another --state-dir"):
        plan(config(trace, tmp_path, state_dir=trace / "below"))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((), "give one trace, or --url"),
        (("--url", "http://127.0.0.1:1", "--policy", "ttft-min,dynamo"), "one policy"),
        (("--url", "http://127.0.0.1:1", "--chunk-tokens", "3"), "needs --workers"),
    ],
)
def test_bad_options(arguments: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run(*arguments)


async def test_from_a_running_conductor(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        url = ("--url", f"http://{cluster.conductor.address}")
        assert "nothing to plan from" in (await asyncio.to_thread(run, *url)).output
        await cluster.add()
        body: dict[str, Any] = {"model": "tiny", "prompt": [1] * 200, "max_tokens": 1}
        for _ in range(3):
            await cluster.http.post("/v1/completions", json=body)
        cluster.conductor.curves._reported_s = -1e9
        (row,) = await asyncio.to_thread(planner.plan_live, PlanConfig(url=url[1]))
        hits, more = (row["scenarios"][name] for name in ("now", "twice the memory"))
        assert 0 < hits["hit_tokens"] <= more["hit_tokens"] < 1
        assert hits["prefill_s"] >= more["prefill_s"] > 0
        assert "unknown: queues" in (await asyncio.to_thread(run, *url)).output


def test_between_two_sizes() -> None:
    sizes, shares = (0.1, 1.0, 10.0), (0.2, 0.4, 0.8)
    found = [planner._between(sizes, shares, size) for size in (0.01, 0.1, 1.0, 10**0.5, 100.0)]
    assert found == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.8])
