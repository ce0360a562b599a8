"""Two real ``vllm serve`` and a conductor in front of them, shared by the modules of this folder.

Both serve SmolLM2 in float32: greedy answers are equal. test_vllm_serve, the last module, stops servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engines.vllm.conftest import CACHE, MODEL
from tests.free_ports import free_port
from tests.store.cluster import Process

VLLM = CACHE / "vllm" / "bin" / "vllm"
MARKS = [
    pytest.mark.engine_vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM's environment is not built: tools/engine_venv.py vllm"),
]
START_S, ANSWER_S = 900.0, 600.0
BLOCK_TOKENS, CONTEXT = 64, 4096
#: Most of a step, so that none takes seconds on a busy machine.
STEP_TOKENS = 512


class Server:
    """One ``vllm serve`` with KV events, ready after ``wait``."""

    def __init__(self, folder: Path) -> None:
        self.port, events, replay = (free_port() for _ in range(3))
        source = {"enable_kv_cache_events": True, "publisher": "zmq"}
        source |= {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
        flags = [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--served-model-name",
            "smollm2",
            "--dtype",
            "float32",
        ]
        flags += ["--enforce-eager", "--max-model-len", str(CONTEXT), "--block-size", str(BLOCK_TOKENS)]
        flags += ["--enable-prompt-tokens-details", "--max-num-batched-tokens", str(STEP_TOKENS)]
        flags += ["--kv-events-config", json.dumps(source)]
        self.log = folder / f"vllm-{self.port}.log"
        env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen([VLLM, "serve", MODEL, *flags], stdout=log, stderr=log, env=env)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=ANSWER_S, trust_env=False)

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait(self) -> None:
        def is_up() -> bool:
            assert self.popen.poll() is None, self.log.read_text()[-5000:]
            try:
                return self.http.get("/health").status_code == 200
            except httpx.HTTPError:
                return False

        eventually(is_up, START_S)

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.http, name, **labels)

    def signal(self, number: int) -> None:
        for each in [*psutil.Process(self.popen.pid).children(recursive=True), psutil.Process(self.popen.pid)]:
            each.send_signal(number)

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.signal(signal.SIGKILL)
        self.popen.wait()
        self.http.close()


class Front:
    """The conductor in front of the servers named in its file, lost after ``timeout_s`` without a step."""

    def __init__(self, folder: Path, timeout_s: float = 5.0) -> None:
        self.file = folder / "engines.json"
        self.list([])
        self.log_requests: list[str] = []
        flags = ["--port", "0", "--engines", str(self.file), "--worker-timeout-s", str(timeout_s), "--notice-s", "0"]
        self.process = Process(
            "tanghulu.conductor.main", *flags, "--first-token-timeout-s", "0", "--token-timeout-s", "0"
        )
        url = f"http://{self.process.address}"
        self.http = httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, limits=httpx.Limits())

    def list(self, servers: list[Server]) -> None:
        fresh = self.file.with_suffix(".new")
        # vLLM's engine for CPUs ends at a seed of a prompt of several steps.
        urls = [str(each.http.base_url).rstrip("/") for each in servers]
        fresh.write_text(json.dumps([f"vllm={url},seeds=no" for url in urls]))
        fresh.replace(self.file)

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.http, name, **labels)

    def until_workers(self, num: int) -> None:
        eventually(lambda: self.metric("tanghulu_conductor_workers") == num, 60.0)


def metric(http: httpx.Client, name: str, **labels: str) -> float:
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith((f"{name} ", name + "{"))]
    wanted = [each for each in lines if all(f'{key}="{value}"' in each for key, value in labels.items())]
    return sum(float(each.rpartition(" ")[2]) for each in wanted)


def eventually(condition, within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, "it did not come"
        time.sleep(0.1)


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("vllm")
    made = [Server(folder), Server(folder)]
    try:
        for each in made:
            each.wait()
        yield made
    finally:
        for each in made:
            each.stop()
            print("\n".join(line for line in each.log.read_text().splitlines() if "INFO" not in line)[-3000:])


@contextlib.contextmanager
def running_front(folder: Path, servers: list[Server], timeout_s: float = 5.0) -> Iterator[Front]:
    """A conductor in front of ``servers``."""
    made = Front(folder, timeout_s)
    try:
        made.list(servers)
        made.until_workers(len(servers))
        yield made
    finally:
        made.http.close()
        print(made.process.log_text()[-8000:])
        made.process.kill()


@pytest.fixture(scope="package")
def front(tmp_path_factory: pytest.TempPathFactory, servers: list[Server]) -> Iterator[Front]:
    with running_front(tmp_path_factory.mktemp("front"), servers) as made:
        yield made
