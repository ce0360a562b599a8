"""A real `tanghulu up` under test: started on free ports, asked over HTTP, ended and checked for remains."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

START_DEADLINE_S = 150.0


def eventually(condition: Callable[[], Any], deadline_s: float = 60.0, what: str = "") -> Any:
    """The first true value of ``condition``; fails after ``deadline_s``."""
    until = time.monotonic() + deadline_s
    while True:
        if value := condition():
            return value
        assert time.monotonic() < until, f"not within {deadline_s} s: {what or condition}"
        time.sleep(0.02)


class LiveCluster:
    """Handles on a running cluster."""

    def __init__(self, process: subprocess.Popen[bytes], state_dir: Path) -> None:
        self.process = process
        self.state_dir = state_dir
        self.http = httpx.Client(timeout=120, trust_env=False)

    def entries(self) -> list[dict[str, Any]]:
        try:
            return json.loads((self.state_dir / "cluster.json").read_text())
        except FileNotFoundError:
            return []

    def entry(self, role: str) -> dict[str, Any]:
        return next(e for e in self.entries() if e["role"] == role)

    @property
    def url(self) -> str:
        return f"http://{self.entry('conductor')['address']}"

    @property
    def master(self) -> str:
        return self.entry("master")["address"]

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.logs()
        with contextlib.suppress(httpx.HTTPError, StopIteration):
            return self.http.get(f"{self.url}/ready").status_code == 200
        return False

    def has_said_ready(self) -> bool:
        """Whether all parts are up: `tanghulu up` has told its user what to try."""
        assert self.process.poll() is None, self.logs()
        return "Ctrl-C" in (self.state_dir / "up.log").read_text()

    def logs(self) -> str:
        files = sorted(self.state_dir.glob("*.log"))
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in files)

    def metric(self, role: str, name: str, **labels: str) -> float:
        """The sum of a metric's samples (of all instances of ``role``) that carry ``labels``."""
        total = 0.0
        for entry in self.entries():
            if entry["role"] != role:
                continue
            text = self.http.get(f"http://{entry['metrics_address']}/metrics").text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == name and labels.items() <= sample.labels.items():
                        total += sample.value
        return total

    def metrics_by_name(self, role: str, name: str) -> dict[str, float]:
        """A metric without labels, of each instance of ``role``."""
        values = {}
        for entry in self.entries():
            if entry["role"] == role:
                text = self.http.get(f"http://{entry['metrics_address']}/metrics").text
                values[entry["name"]] = next(
                    sample.value
                    for family in text_string_to_metric_families(text)
                    for sample in family.samples
                    if sample.name == name
                )
        return values

    def generate(self, prompt: str | list[int], max_new_tokens: int = 16, **sampling: Any) -> dict[str, Any]:
        """One greedy call of /generate, not streaming."""
        body: dict[str, Any] = {"sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, **sampling}}
        body["text" if isinstance(prompt, str) else "input_ids"] = prompt
        response = self.http.post(f"{self.url}/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def settle(self) -> None:
        """Chunks are written behind the computation: wait until nothing is under way."""
        self.settle_role("prefill")
        self.settle_role("decode")

    def settle_role(self, role: str) -> None:
        name = "tanghulu_worker_store_pending_blocks"
        eventually(lambda: self.metric(role, name) == 0, what="chunks are written")

    def drop_worker_caches(self) -> None:
        assert self.http.post(f"{self.url}/flush_cache").status_code == 200

    def _pids(self, role: str) -> set[int]:
        """Of the processes of ``role`` that are ready."""
        return {e["pid"] for e in self.entries() if e["role"] == role}

    def kill(self, role: str) -> int:
        """SIGKILL the (first) process of ``role``; returns its pid."""
        pid = self.entry(role)["pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_restarted(self, role: str, old_pid: int) -> None:
        eventually(lambda: self._pids(role) - {old_pid}, 60, f"{role} restarted")
        eventually(self.is_ready, 60, "ready again")

    def stop(self) -> int:
        """Ctrl-C; returns the exit code after checking that no process is left."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(30)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, f"left running: {alive}\n{self.logs()}"
        return code


@contextlib.contextmanager
def running_cluster(
    state_dir: Path, *flags: str, program: Sequence[str] = (sys.executable, "-m", "tanghulu")
) -> Iterator[LiveCluster]:
    """A ready cluster on free ports; ended at the block's end."""
    command = [*program, "up", "--port", "0", "--master-port", "0"]
    command += ["--state-dir", str(state_dir), "--dtype", "float32", *flags]
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "up.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    cluster = LiveCluster(process, state_dir)
    try:
        eventually(cluster.has_said_ready, START_DEADLINE_S, "the cluster is ready")
        yield cluster
    finally:
        if process.poll() is None:
            cluster.stop()
        cluster.http.close()
