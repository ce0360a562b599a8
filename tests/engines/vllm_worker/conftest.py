"""A store, a conductor and workers with vLLM, all as processes; skipped where vLLM's environment was not built."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engines.vllm.conftest import MODEL, PYTHON, ROOT
from tests.store.cluster import Cluster, Process

#: Other processes use the machine, too: starting vLLM takes half a minute of CPU, and a step may take seconds.
START_DEADLINE_S = 600.0
ANSWER_S = 600.0
BLOCK_TOKENS = 64
#: Every prompt of the tests fits. Eager: nothing is compiled.
FURTHER = {"enforce_eager": True, "max_model_len": 4096}


class WorkerProcess:
    """A worker, started by ``command`` and ready when the constructor returns."""

    def __init__(self, command: Sequence[str | Path], master: str) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="th-"))
        self._status, theirs = socket.socketpair()
        self._status.settimeout(START_DEADLINE_S)
        flags = ["--port", "0", "--master", master, "--grace-s", "0"]
        flags += ["--run-dir", str(self.run_dir), "--status-fd", str(theirs.fileno())]
        self._log_path = self.run_dir / "log"
        with self._log_path.open("wb") as log:
            self.popen = subprocess.Popen(
                [*command, *flags],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
            )
        theirs.close()
        self.children: list[psutil.Process] = []
        try:
            self._wait_until_ready()
        except BaseException:  # an interrupt, too: the process would stay behind; all is raised on
            self.end()
            raise
        self.children = psutil.Process(self.popen.pid).children(recursive=True)

    def _wait_until_ready(self) -> None:
        for line in self._status.makefile():
            message = json.loads(line)
            if message["event"] == "ready":
                self.name, self.address = message["name"], message["address"]
                self.metrics_address = message["metrics_address"]
                return
        raise AssertionError(self.log_text()[-5000:])

    def log_text(self) -> str:
        return self._log_path.read_text(errors="replace")

    def metric(self, name: str) -> float:
        text = httpx.get(f"http://{self.metrics_address}/metrics", trust_env=False, timeout=ANSWER_S).text
        (line,) = [each for each in text.splitlines() if each.startswith(f"{name} ")]
        return float(line.split()[1])

    def kill(self) -> None:
        """SIGKILL: no good-byes."""
        self.popen.kill()
        self.popen.wait()

    def end(self) -> None:
        """SIGTERM, and nothing may stay behind."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        self.popen.wait(START_DEADLINE_S)
        _, left = psutil.wait_procs(self.children, START_DEADLINE_S)
        self._status.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        assert not left


class VllmWorker(WorkerProcess):
    """One ``tanghulu vllm-worker``; ``more_flags`` have the last word."""

    def __init__(self, master: str, *more_flags: str) -> None:
        flags = ["--model", str(MODEL), "--dtype", "float32", "--kv-memory", "600MiB"]
        flags += ["--block-tokens", "64", "--max-num-batched-tokens", "512", "--vllm", json.dumps(FURTHER)]
        super().__init__([PYTHON, "-m", "tanghulu", "vllm-worker", *flags, *more_flags], master)


class Served:
    """What a test holds in its hands: conductor and workers in front of one store."""

    def __init__(self, store: Cluster) -> None:
        self.store = store
        self.workers: list[WorkerProcess] = []
        self.start_conductor()

    def start_conductor(self) -> None:
        flags = ["--port", "0", "--master", self.store.address, "--worker-timeout-s", "300", "--grace-s", "0"]
        flags += ["--notice-s", "0", "--log-requests"]
        self.conductor = Process("tanghulu.conductor.main", *flags)
        self.http = httpx.Client(base_url=f"http://{self.conductor.address}", timeout=ANSWER_S, trust_env=False)

    def add(self, *more_flags: str) -> VllmWorker:
        worker = VllmWorker(self.store.address, *more_flags)
        self.workers.append(worker)
        self.until_connected()
        return worker

    def until_connected(self) -> None:
        """Wait until the conductor has a session with every worker."""
        num_alive = sum(worker.popen.poll() is None for worker in self.workers)
        eventually(lambda: self.metric("tanghulu_conductor_workers") == num_alive)

    def survivor(self) -> WorkerProcess:
        """The only worker that runs."""
        (alive,) = [worker for worker in self.workers if worker.popen.poll() is None]
        return alive

    def metric(self, name: str) -> float:
        lines = [
            each for each in self.http.get("/metrics").text.splitlines() if each.startswith((f"{name} ", name + "{"))
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def troubles(self) -> str:
        """What the logs say of requests that were not served, and of vLLM's failures."""
        logs = [self.conductor.log_text(), *(worker.log_text() for worker in self.workers)]
        lines = [line for log in logs for line in log.splitlines() if line]
        told = [line for line in lines if "request.story" in line]
        unserved = [line for line in told if '"status": "served"' not in line]
        return "\n".join(unserved + [line for line in lines if "rror" in line and line not in told][-40:])

    def complete(self, prompt: str | list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy completion."""
        body = {"model": MODEL.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, (answer.text, [worker.log_text()[-3000:] for worker in self.workers])
        found: dict[str, Any] = answer.json()
        return found

    def chat(self, text: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        body = {"model": MODEL.name, "messages": messages, "temperature": 0, **more}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def close(self) -> None:
        self.http.close()
        self.conductor.stop()
        for worker in self.workers:
            worker.end()


def eventually(condition: Any, deadline_s: float = 120.0) -> None:
    """Wait for other processes."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def cached_tokens(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    if not (PYTHON.exists() and MODEL.exists()):
        pytest.skip("extra: vLLM's environment is missing; tools/engine_venv.py vllm builds it")
    with Cluster(1, "2GiB", checked=False) as store, contextlib.closing(Served(store)) as served:
        served.add()
        yield served
