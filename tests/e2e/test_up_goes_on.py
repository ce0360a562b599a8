"""`tanghulu up` goes on where its surroundings fail it: a port, a variable, a directory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import LiveCluster, eventually, running_cluster
from tests.free_ports import free_port


def _killed_with_its_port_taken(cluster: LiveCluster) -> tuple[int, socket.socket]:
    """Kill the node and take its port before its supervisor may start it again; its pid and what has the port."""
    entry = cluster.entry("node")
    cluster.process.send_signal(signal.SIGSTOP)
    os.kill(entry["pid"], signal.SIGKILL)

    def take() -> socket.socket | None:
        taken = socket.socket()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", int(entry["address"].rpartition(":")[2])))
        except OSError:  # the kernel is not done with the dead yet
            taken.close()
            return None
        taken.listen()
        return taken

    try:
        return entry["pid"], eventually(take)
    finally:
        cluster.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.by_hand
def test_a_taken_port_a_foreign_variable_and_removed_directories_do_not_end_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TANGHULU_METRICS_PORT", str(free_port()))
    with running_cluster(tmp_path / "c", "--engine", "mock", "--model", "mock") as cluster:
        said = (tmp_path / "c" / "up.log").open()
        addresses = [entry["metrics_address"] for entry in cluster.entries()]
        assert len(set(addresses)) == len(addresses) == 5
        killed, taken = _killed_with_its_port_taken(cluster)
        with taken:
            eventually(lambda: "cannot listen on" in said.read(), what="the node was refused its port")
        cluster.wait_restarted("node", killed)

        command = psutil.Process(cluster.entry("node")["pid"]).cmdline()
        shutil.rmtree(Path(command[command.index("--run-dir") + 1]).parent)
        shutil.rmtree(tmp_path / "c")
        os.kill(_pid_of("node", cluster), signal.SIGKILL)
        cluster.wait_restarted("node", 0)
        said.close()
        assert cluster.stop() == 0


def _pid_of(role: str, cluster: LiveCluster) -> int:
    """As the processes say, where there is no list of them any more."""
    children = psutil.Process(cluster.process.pid).children()
    return next(child.pid for child in children if f" {role} " in " ".join(child.cmdline()))
