"""A hand-over across a shaped wire: a prefill worker in one network namespace, everything else in another.

Mock engines compute a prompt of 8,000 tokens in chunks, or all at once; in the latter case nothing can be fetched
before the prefill has ended, so that its time and the transfer's add up. What counts is the second token, the first
that the decode worker makes. The wire carries little more than the KV. Needs root, ip and tc.

    python -m benchmarks.workers.hand_over
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.common.report import ROOT, keep
from tests.netns.wires import Wires, missing

T = TypeVar("T")
NUM_TOKENS = 8000
HERE, THERE = "10.77.0.1", "10.77.0.2"
MASTER, CONDUCTOR, DECODE, PREFILL = 7400, 8000, 7430, 7431
METRICS = {"decode": (HERE, 7530), "prefill": (THERE, 7531)}
_CLONE_NEWNET = 0x40000000
_START_S = 150.0


class Sides:
    """A running cluster with one wire in its middle; calls are made from the conductor's side."""

    def __init__(self, wires: Wires, folder: Path) -> None:
        self._wires, self._folder = wires, folder
        self._inside = ThreadPoolExecutor(8, initializer=_enter, initargs=(wires.client,))
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, kv_token_bytes: int, chunk_tokens: int) -> None:
        self._run(self._wires.client, HERE, "master", "--port", str(MASTER))
        self.until(lambda: self._listens(MASTER))
        self._run(self._wires.client, HERE, "conductor", "--port", str(CONDUCTOR), "--master", f"{HERE}:{MASTER}")
        engine = ["--engine", "mock", "--model", "mock", "--mock-timing", "gpu-70b", "--no-store"]
        engine += ["--mock-kv-token-bytes", str(kv_token_bytes), "--max-num-batched-tokens", str(chunk_tokens)]
        engine += ["--kv-memory", str(3 * NUM_TOKENS * kv_token_bytes), "--transports", "tcp"]
        engine += ["--master", f"{HERE}:{MASTER}"]
        sides = (("decode", DECODE, self._wires.client), ("prefill", PREFILL, self._wires.owner))
        for role, port, namespace in sides:
            host, metrics = METRICS[role]
            self._run(namespace, host, role, "--port", str(port), "--metrics-port", str(metrics), *engine)
        self.until(self._can_hand_over)

    def _run(self, namespace: str, host: str, *words: str) -> None:
        log = (self._folder / f"{words[0]}.log").open("wb")
        run_dir = self._folder / words[0]
        run_dir.mkdir(mode=0o700)
        command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tanghulu", *words]
        command += ["--host", host, "--run-dir", str(run_dir)]
        self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT))
        log.close()

    def _listens(self, port: int) -> bool:
        import socket

        def connect() -> bool:
            with contextlib.suppress(OSError), socket.create_connection((HERE, port), 1):
                return True
            return False

        return self.inside(connect)

    def _can_hand_over(self) -> bool:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            workers = self.post("/route", {"prompt": "x"}).json()["workers"]
            return len(workers) == 2 and {w["can_prefill"] for w in workers} == {True, False}
        return False

    def until(self, condition: Callable[[], T]) -> T:
        until = time.monotonic() + _START_S
        while not (found := condition()):
            if time.monotonic() > until or any(process.poll() is not None for process in self._processes):
                logs = "\n".join(path.read_text()[-1500:] for path in self._folder.glob("*.log"))
                raise SystemExit(f"the cluster does not come to what was waited for:\n{logs}")
            time.sleep(0.02)
        return found

    def inside(self, call: Callable[[], T]) -> T:
        return self._inside.submit(call).result()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        url = f"http://{HERE}:{CONDUCTOR}{path}"
        return self.inside(lambda: httpx.post(url, json=body, timeout=60, trust_env=False))

    def metric(self, role: str, name: str, **labels: str) -> float:
        host, port = METRICS[role]
        text = self.inside(lambda: httpx.get(f"http://{host}:{port}/metrics", trust_env=False).text)
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def token_times(self, prompt: str) -> list[float]:
        """Seconds from the request to each of its tokens."""

        def ask() -> list[float]:
            body = {"model": "mock", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}
            started_s, times = time.monotonic(), []
            url = f"http://{HERE}:{CONDUCTOR}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                        times.append(time.monotonic() - started_s)
            return times

        return self.inside(ask)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            if process.poll() is None:
                process.kill()
                process.wait()
        self._inside.shutdown()


def _enter(namespace: str) -> None:
    """Have this thread alone open its sockets in ``namespace``."""
    with Path(f"/var/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no way into {namespace}")


def words(number: int) -> str:
    """A prompt of 8,000 tokens of the mock's, which are letters."""
    return "".join(random.Random(number).choices("abcdefgh ", k=NUM_TOKENS))


@contextlib.contextmanager
def sides(wires: Wires, kv_token_bytes: int, chunk_tokens: int, mbit_s: int) -> Iterator[Sides]:
    """A cluster whose two workers are joined by a wire of so many Mbit/s."""
    wires.shape(mbit_s)
    with tempfile.TemporaryDirectory() as folder:
        made = Sides(wires, Path(folder))
        try:
            made.start(kv_token_bytes, chunk_tokens)
            yield made
        finally:
            made.stop()


def measure(wires: Wires, kv_token_bytes: int, chunk_tokens: int, mbit_s: int, repeats: int) -> dict[str, Any]:
    with sides(wires, kv_token_bytes, chunk_tokens, mbit_s) as made:
        made.token_times(words(0))  # connections are made
        runs = [made.token_times(words(1 + number))[:2] for number in range(repeats)]
    prefill_s = statistics.median(run[0] for run in runs)
    second_s = statistics.median(run[1] for run in runs)
    transfer_s = NUM_TOKENS * kv_token_bytes * 8 / (mbit_s * 1e6)
    return {
        "chunk_tokens": chunk_tokens,
        "kv_mb": NUM_TOKENS * kv_token_bytes / 1e6,
        "mbit_s": mbit_s,
        "prefill_s": round(prefill_s, 3),
        "transfer_s": round(transfer_s, 3),
        "second_token_s": round(second_s, 3),
        "of_the_larger": round(second_s / max(prefill_s, transfer_s), 3),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


@click.command(help=__doc__)
@click.option("--repeats", default=3)
@click.option("--mbit-s", default=1000)
def main(repeats: int, mbit_s: int) -> None:
    if reason := missing():
        raise SystemExit(reason)
    wires = Wires()
    try:
        wires.build()
        cases = [(16_384, 512), (16_384, 8192), (32_768, 512), (32_768, 8192)]
        rows = [measure(wires, kv_token_bytes, chunk, mbit_s, repeats) for kv_token_bytes, chunk in cases]
    finally:
        wires.remove()
    show(rows)
    keep("hand_over", rows, cores=os.cpu_count())


if __name__ == "__main__":
    main()
