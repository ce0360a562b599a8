"""A hand-over across a shaped wire: a prefill worker in one network namespace, everything else in another.

Mock engines compute a prompt in chunks, or all at once; in the latter case nothing can be fetched before the prefill
has ended, so that its time and the transfer's add up. What counts is the second token, the first that the decode worker
makes, against the larger of the prefill (the first token) and what the wire needs for the KV alone. Shapes: ``8b`` has
the KV of Llama 3 8B (128 KiB a token) and computes like one A800; ``70b-8th`` computes like 8 A800s and has KV that
takes as long at 1 Gbit/s as its prefill. On a machine too busy for that, ``8b-slow`` at 62 Mbit/s takes as long as
``8b`` at 1 Gbit/s with a 16th of the bytes, ``even-slow`` at 125 Mbit/s eight times as long as ``70b-8th`` at
1 Gbit/s. The wire carries little more than the KV. Needs root, ip and tc.

    python -m benchmarks.workers.hand_over [--shape 8b] [--tokens 8000,29000] [--mbit-s 1000,10000] [--chunks 512]
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
from typing import Any, NamedTuple, TypeVar

import click
import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.common.report import ROOT, keep
from tests.netns.wires import Wires, missing

T = TypeVar("T")
HERE, THERE = "10.77.0.1", "10.77.0.2"
MASTER, CONDUCTOR, DECODE, PREFILL = 7400, 8000, 7430, 7431
METRICS = {"decode": (HERE, 7530), "prefill": (THERE, 7531)}
_CLONE_NEWNET = 0x40000000
_START_S = 150.0


class Shape(NamedTuple):
    """What the mock engines stand for."""

    kv_token_bytes: int
    timing: str
    speedup: float = 1.0


SHAPES = {
    "8b": Shape(131_072, "gpu-8b", 1 / 8),
    "70b-8th": Shape(16_384, "gpu-70b"),
    "70b-4th": Shape(32_768, "gpu-70b"),
    "8b-slow": Shape(8_192, "gpu-8b", 1 / 8),
    "even-slow": Shape(16_384, "gpu-70b", 1 / 8),
}


class Case(NamedTuple):
    """A prompt, the engines, and the wire between them."""

    shape: Shape
    num_tokens: int = 8000
    chunk_tokens: int = 512
    mbit_s: int = 1000

    @property
    def kv_bytes(self) -> int:
        return self.num_tokens * self.shape.kv_token_bytes


class Sides:
    """A running cluster with one wire in its middle; calls are made from the conductor's side."""

    def __init__(self, wires: Wires, folder: Path) -> None:
        self._wires, self._folder = wires, folder
        self._inside = ThreadPoolExecutor(8, initializer=_enter, initargs=(wires.client,))
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, case: Case) -> None:
        self._run(self._wires.client, HERE, "master", "--port", str(MASTER))
        self.until(lambda: self._listens(MASTER))
        self._run(self._wires.client, HERE, "conductor", "--port", str(CONDUCTOR), "--master", f"{HERE}:{MASTER}")
        shape = case.shape
        engine = ["--engine", "mock", "--model", "mock", "--debug", f"mock_timing={shape.timing}", "--no-store"]
        engine += ["--debug", f"mock_speedup={shape.speedup}", "--debug", f"mock_kv_token_bytes={shape.kv_token_bytes}"]
        engine += ["--max-num-batched-tokens", str(case.chunk_tokens)]
        engine += ["--kv-memory", str(5 * case.kv_bytes // 4), "--transports", "tcp"]
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


def words(number: int, num_tokens: int = Case(SHAPES["8b"]).num_tokens) -> str:
    """A prompt of so many tokens of the mock's, which are letters."""
    return "".join(random.Random(number).choices("abcdefgh ", k=num_tokens))


@contextlib.contextmanager
def sides(wires: Wires, case: Case) -> Iterator[Sides]:
    """A cluster whose two workers are joined by the case's wire."""
    wires.shape(case.mbit_s)
    with tempfile.TemporaryDirectory() as folder:
        made = Sides(wires, Path(folder))
        try:
            made.start(case)
            yield made
        finally:
            made.stop()


def measure(wires: Wires, name: str, case: Case, repeats: int) -> dict[str, Any]:
    with sides(wires, case) as made:
        made.token_times(words(0, 3000))  # connections are made
        runs = [made.token_times(words(1 + number, case.num_tokens))[:2] for number in range(repeats)]
        fetched = made.metric("decode", "tanghulu_worker_prefix_tokens_total", source="peer")
        computed = made.metric("decode", "tanghulu_worker_computed_tokens_total")
    prefill_s = statistics.median(run[0] for run in runs)
    second_s = statistics.median(run[1] for run in runs)
    transfer_s = case.kv_bytes * 8 / (case.mbit_s * 1e6)
    return {
        "shape": name,
        "tokens": case.num_tokens,
        "chunk_tokens": case.chunk_tokens,
        "kv_mb": case.kv_bytes / 1e6,
        "mbit_s": case.mbit_s,
        "prefill_s": round(prefill_s, 3),
        "transfer_s": round(transfer_s, 3),
        "second_token_s": round(second_s, 3),
        "of_the_larger": round(second_s / max(prefill_s, transfer_s), 3),
        "of_the_sum": round(second_s / (prefill_s + transfer_s), 3),
        "fetched_tokens": int(fetched),
        "computed_by_decode": int(computed),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


@click.command(help=__doc__)
@click.option("--repeats", default=3)
@click.option("--shape", "shapes", default="8b,70b-8th,70b-4th")
@click.option("--tokens", default="8000")
@click.option("--mbit-s", default="1000")
@click.option("--chunks", default="512,32768", help="one longer than the prompt is fetched behind it")
def main(repeats: int, shapes: str, tokens: str, mbit_s: str, chunks: str) -> None:
    if reason := missing():
        raise SystemExit(reason)
    cases = [
        (name, Case(SHAPES[name], num_tokens, chunk, speed))
        for name in shapes.split(",")
        for num_tokens in _numbers(tokens)
        for speed in _numbers(mbit_s)
        for chunk in _numbers(chunks)
    ]
    wires, rows = Wires(), []
    try:
        wires.build()
        for name, case in cases:
            rows.append(measure(wires, name, case, repeats))
            Console().print(rows[-1])
    finally:
        wires.remove()
    show(rows)
    keep("hand_over", rows, cores=os.cpu_count(), load=round(os.getloadavg()[1], 1))


if __name__ == "__main__":
    main()
