"""A minute of chaos, and the plans that it follows; longer by hand (``make chaos``)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.faults.chaos import plan, run
from tests.e2e.faults.pool import Pool


def test_a_plan_depends_on_its_seed_alone() -> None:
    assert list(plan(3, 300)) == list(plan(3, 300)) != list(plan(4, 300))


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short = list(plan(5, 60))
    assert list(plan(5, 600))[: len(short)] == short


def test_all_kinds_of_parts_and_faults_come_up() -> None:
    strikes = list(plan(6, 3600))
    assert {strike.name for strike in strikes} == {
        *("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "node-0", "node-1", "node-2"),
        *("master-0", "master-1", "master-2", "conductor-0", "conductor-1"),
    }
    assert {strike.fault for strike in strikes} == {"SIGKILL", "SIGTERM", "SIGSTOP", "hang", "cut", "black hole"}


@pytest.mark.slow
def test_a_minute_of_chaos(tmp_path: Path) -> None:
    with Pool(tmp_path) as pool:
        load = asyncio.run(run(pool, seed=1, seconds=60))
    assert load.counts["answered"] > len(load.wanted)
