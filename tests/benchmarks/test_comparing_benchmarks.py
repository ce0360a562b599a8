"""The machinery of the comparing benchmarks, with ends that need no peer installed: figures that mean what they say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers import environments, store_report, transfer_report
from benchmarks.peers.environments import Missing, Peer
from benchmarks.peers.jsonlines import Worker, WorkerFailed, cpu_s
from benchmarks.peers.limits import Limits

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MOVER = BENCHMARKS / "peers" / "mover_worker.py"


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(Path(sys.executable), MOVER, tmp_path / "log", dict(os.environ), "mover")
    yield worker
    worker.close()


def test_a_run_moves_what_it_counts_and_is_verified(worker: Worker, tmp_path: Path):
    owner = Worker(Path(sys.executable), MOVER, tmp_path / "other", dict(os.environ), "owner")
    size, area = 1 << 16, 1 << 20
    offer = owner.call("own", kind="stream", packages="", area_bytes=area)
    worker.call("open", kind="stream", packages="", area_bytes=area, **offer)
    for number, (op, source, destination) in enumerate((("READ", owner, worker), ("WRITE", worker, owner))):
        source.call("stamp", size=size, num_spots=area // size, number=number)
        figures = worker.call("run", op=op, size=size, callers=2, seconds=0.0)
        assert figures["spots"] == [0, 8]
        assert figures["num_pieces"] == 2
        figures = worker.call("run", op=op, size=size, callers=2, seconds=0.3)
        assert figures["spots"] == list(range(area // size))
        assert figures["num_pieces"] > area // size
        assert figures["p50_us"] > 0
        destination.call("verify", size=size, spots=figures["spots"], number=number)
        with pytest.raises(WorkerFailed, match="does not hold what was sent"):
            destination.call("verify", size=size, spots=[3], number=number + 7)
    assert cpu_s([owner.pid, worker.pid]) > 0
    owner.close()


def test_a_worker_that_fails_or_dies_says_so(worker: Worker):
    with pytest.raises(WorkerFailed, match="KeyError"):
        worker.call("own", kind="nobody", packages="")
    os.kill(worker.pid, 9)
    with pytest.raises(WorkerFailed, match="mover"):
        worker.call("stamp", size=1, num_spots=1, number=1)


def test_the_cpu_clock_counts_every_thread_of_another_process():
    code = "import threading; [threading.Thread(target=sum, args=(range(3_000_000),)).start() for _ in '12']; input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        until = time.monotonic() + 60
        while cpu_s([child.pid]) < 0.06:
            assert time.monotonic() < until
        child.communicate(b"\n")


def test_limits(tmp_path: Path):
    limits = Limits(1 << 16, 4)
    for name in ("memcpy", "stream", "stream_up", "echo"):
        figures = limits.measure(name, 5)
        assert 0 < figures["p50_us"] <= figures["max_us"]
    limits.close()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(environments, "BENCH", tmp_path)
    peer = Peer("x", "x", ("x",), (("no-such-library", "libnone1"),), (("no-such-program", "none"),))
    monkeypatch.setitem(environments.PEERS, "x", peer)
    with pytest.raises(Missing, match="apt-get install libnone1 none"):
        environments.interpreter("x")


def row(who: str, op: str, p50_us: float) -> dict[str, object]:
    return {"who": who, "op": op, "p50_us": p50_us, "size_bytes": 1 << 20, "callers": 1, "gb_s": 1.0}


@pytest.mark.parametrize(
    ("ours", "peer", "stream", "verdict"),
    [(70, 100, 10, "holds"), (90, 100, 85, "holds (94%"), (90, 100, 50, "MISSES (56%"), (90, None, 85, "not measured")],
)
def test_store_targets(ours: float, peer: float | None, stream: float, verdict: str):
    target = next(each for each in store_report.targets() if each.who == "tanghulu tcp" and each.op == "get")
    rows = [row("tanghulu tcp", "get", ours), row("stream", "limit", stream)]
    rows += [row("mooncake", "get", peer)] if peer else []
    assert verdict in store_report.judge(target, rows)


def test_transfer_targets():
    rows = [row("memmove", "READ", 80), row("tanghulu shm", "READ", 100), row("one stream", "READ", 100),
            row("tanghulu tcp", "READ", 105), row("Mooncake tcp", "READ", 150)]  # fmt: skip
    lines = transfer_report.judge(rows, 1 << 20, "READ")
    assert [line.rpartition(" ")[2] for line in lines[:3]] == ["MISSES", "holds", "holds"]
