"""The adapter in LMCache 0.5.6, on a real store: its own benchmark, which verifies, and a store that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.store.cluster import Cluster, eventually

pytestmark = [pytest.mark.engine_lmcache, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
BIN = Path.home() / ".cache" / "tanghulu" / "engines" / "lmcache" / "bin"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "LMCACHE_TRACK_USAGE": "false"}
DEADLINE_S = 300


@pytest.fixture
def store() -> Iterator[Cluster]:
    if not BIN.exists():
        pytest.skip("extra: LMCache's environment is missing; tools/engine_venv.py lmcache builds it")
    with Cluster(1, "512MiB", checked=False) as cluster:
        yield cluster


class Adapter:
    """The adapter in a process of LMCache's environment, behind its ``fault_inject`` where there are ``faults``."""

    def __init__(self, faults: dict[str, Any] | None = None, **params: Any) -> None:
        command = [BIN / "python", Path(__file__).with_name("adapter_process.py"), json.dumps(params)]
        command.append(json.dumps(faults or {}))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes)  # type: ignore[call-overload]

    def __call__(self, kind: str, first: int, count: int) -> list[bool]:
        self.say([(kind, first, count)])
        return self.hear()

    def say(self, tasks: Sequence[tuple[str, int, int]]) -> None:
        """Have these tasks done, one behind the other."""
        self.process.stdin.write("".join(json.dumps(task) + "\n" for task in tasks))
        self.process.stdin.flush()

    def close(self) -> dict[str, Any]:
        self.process.stdin.close()
        status = self.hear()
        assert self.process.wait(DEADLINE_S) == 0
        self.process.stdout.close()
        return status

    def hear(self) -> Any:
        """What came of the next task."""
        while not (line := self.process.stdout.readline()).startswith(("[true", "[false", "{")):
            assert line, "the adapter's process ended"
        return json.loads(line)


def test_lmcaches_own_benchmark_verifies(store: Cluster) -> None:
    params = {"master": store.master.address}
    spec = {"type": "plugin", "module_path": "tanghulu.engines.lmcache.adapter"}
    spec |= {"class_name": "TanghuluL2Adapter", "adapter_params": params}
    command = [BIN / "lmcache", "bench", "l2", "--l2-adapter", json.dumps(spec), "--no-skip-verify", "--rounds", "4"]
    command += ["--num-keys", "32", "--data-size-kb", "768", "--lookup-max-hit-rate", "0.5", "--format", "json"]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "All 32 keys data verified OK" in run.stdout


def test_a_second_process_finds_what_the_first_stored(store: Cluster) -> None:
    first = Adapter(master=store.master.address)
    assert first("store", 0, 8) == [True] * 8
    assert first.close()["keys_saved"] == 8
    second, other = (Adapter(master=store.master.address, namespace=name) for name in ("", "other"))
    assert second("lookup", 4, 8) == [True] * 4 + [False] * 4
    assert second("load", 4, 8) == [True] * 4 + [False] * 4
    assert other("lookup", 0, 8) == [False] * 8
    assert second.close()["is_healthy"]
    other.close()


def test_under_lmcaches_faults_loads_are_right_or_missing(store: Cluster) -> None:
    adapter = Adapter({"rate": 0.5, "seed": 1, "gap_indices": [0]}, master=store.master.address)
    assert adapter("store", 0, 32) == [True] * 32
    assert adapter("lookup", 0, 32) == [True] * 32, "loads fail, not lookups"
    loaded = adapter("load", 0, 32)
    assert not loaded[0]
    assert 0 < sum(loaded) < 31
    assert adapter("load", 0, 32) == loaded
    adapter.close()


def test_every_task_ends_while_a_node_is_killed(store: Cluster) -> None:
    adapter = Adapter(master=store.master.address, load_deadline_s=2, save_deadline_s=2, lookup_deadline_s=2)
    assert adapter("store", 0, 32) == [True] * 32
    rounds = [(kind, first, 32) for first in range(0, 640, 32) for kind in ("store", "lookup", "load")]
    adapter.say(rounds)
    for _ in range(6):
        assert adapter.hear() == [True] * 32
    store.nodes[0].kill()
    answers = [adapter.hear() for _ in rounds[6:]]
    assert all(len(answer) == 32 for answer in answers), "a descriptor was signalled for each"
    assert adapter("load", 0, 32) == [False] * 32
    adapter.close()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_goes_away_is_misses(store: Cluster, how: signal.Signals) -> None:
    adapter = Adapter(master=store.master.address, load_deadline_s=1, save_deadline_s=1, lookup_deadline_s=0.5)
    assert adapter("store", 0, 4) == [True] * 4
    for part in (store.nodes[0], store.master):
        part.kill() if how is signal.SIGKILL else part.popen.send_signal(how)
    assert adapter("load", 0, 4) == [False] * 4
    assert adapter("store", 4, 4) == [False] * 4
    assert adapter("lookup", 0, 4) == [False] * 4
    if how is signal.SIGSTOP:
        for part in (store.nodes[0], store.master):
            part.popen.send_signal(signal.SIGCONT)
        eventually(lambda: adapter("lookup", 0, 4) == [True] * 4 and adapter("load", 0, 4) == [True] * 4)
    adapter.close()
