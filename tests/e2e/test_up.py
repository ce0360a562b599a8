"""`tanghulu up` as its user meets it: restarts, endings, and what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import eventually, running_cluster

EXPECTED = {"master", "node", "prefill", "decode", "conductor"}


def _own_files() -> set[Path]:
    return {*Path("/dev/shm").glob("tanghulu*"), *Path(tempfile.gettempdir()).glob("tanghulu-*")}


@pytest.mark.slow
def test_kill_restart_and_end(tmp_path):
    before = _own_files()
    with running_cluster(tmp_path / "c") as cluster:
        assert {e["role"] for e in cluster.entries()} == EXPECTED
        assert cluster.generate("Hello", 4)["meta_info"]["completion_tokens"] == 4
        _a_stream_survives_its_decode_worker(cluster)
        for role in ("master", "conductor", "node"):
            cluster.wait_restarted(role, cluster.kill(role))
            wanted = cluster.generate("The capital of France is", 8)["text"]
            assert "Paris" in wanted
        assert cluster.stop() == 0
    assert _own_files() == before


def _a_stream_survives_its_decode_worker(cluster):
    """kill -9 of the decode worker in mid-stream: the text goes on as if nothing had happened."""
    prompt, num_tokens = "The history of the sea is", 60
    wanted = cluster.generate(prompt, num_tokens, ignore_eos=True)
    got = {}
    worker = threading.Thread(target=lambda: got.update(cluster.generate(prompt, num_tokens, ignore_eos=True)))
    before = cluster.metric("decode", "tanghulu_worker_generated_tokens_total")
    worker.start()
    eventually(lambda: cluster.metric("decode", "tanghulu_worker_generated_tokens_total") > before + 5)
    old = cluster.kill("decode")
    worker.join(90)
    assert got["output_ids"] == wanted["output_ids"]
    assert got["meta_info"]["completion_tokens"] == num_tokens
    cluster.wait_restarted("decode", old)


@pytest.mark.slow
def test_children_end_with_a_killed_supervisor(tmp_path):
    before = _own_files()
    with running_cluster(tmp_path / "c", "--prefill", "0", "--decode", "0") as cluster:
        children = psutil.Process(cluster.process.pid).children(recursive=True)
        assert len(children) >= 4
        cluster.process.send_signal(signal.SIGKILL)
        cluster.process.wait(10)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        eventually(lambda: _own_files() == before, what="sockets and memory are gone")


def _up(tmp_path, *flags):
    command = [sys.executable, "-m", "tanghulu", "up", "--state-dir", str(tmp_path), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_taken_port_ends_all_and_says_so(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = _up(tmp_path, "--master-port", str(port), "--port", "0")
    assert done.returncode != 0
    assert f"127.0.0.1:{port}" in done.stderr
    assert "another --master-port" in done.stderr


def test_a_missing_model_ends_all_and_says_so(tmp_path):
    done = _up(tmp_path, "--master-port", "0", "--port", "0", "--model", "/no/such/model")
    assert done.returncode != 0
    assert "/no/such/model" in done.stderr


@pytest.mark.parametrize("flags", [("--prefill", "0"), ("--nodes", "-1"), ("--workers", "0")])
def test_bad_counts_are_refused_at_once(tmp_path, flags):
    done = _up(tmp_path, *flags)
    assert done.returncode == 7
    assert flags[0] in done.stderr


def test_two_clusters_do_not_share_a_state_dir(tmp_path):
    import fcntl

    tmp_path.mkdir(exist_ok=True)
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = _up(tmp_path)
    assert done.returncode == 7
    assert "--state-dir" in done.stderr
    assert os.listdir(tmp_path) == ["lock"]
