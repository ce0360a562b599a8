"""What a streamed request costs on its way through the cluster: processor time by process, requests a second, gaps.

A cluster (`tanghulu up --engine mock`, one prefill and one decode worker that take no time for a step) and its clients
in a process apart: each sends its next chat when its last has ended. A chat has 256 prompt tokens, 90 % of them shared,
and 64 streamed tokens; with ``--system`` what is shared is a system message, and the template puts a special token
behind each message. Other source trees (``--beside``) and Dynamo (``--dynamo``, its environment) take turns with this
one, so that ratios hold on a busy machine; processor time is the figure, as wall time tells of the neighbours.

``--in-front`` adds a conductor in front of a played vLLM server, whose steps take no time either: what its conductor
uses compares with the cluster's.

    python -m benchmarks.conductor.serving --beside ../before/src --dynamo /opt/dynamo
    python -m benchmarks.conductor.serving --in-front --concurrency 16
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common.report import ROOT, keep
from benchmarks.conductor.live_cluster import dynamo_cluster, write_model

PROGRAM = (sys.executable, "-m", "benchmarks.conductor.serving")
SHARED = 0.9
MODEL = "mock"
_NUM_BLOCKS = 16384
_END = b"0\r\n\r\n"


@dataclass
class Subject:
    """A cluster that is measured: where its HTTP is, and its processes by what they are."""

    name: str
    port: int
    processes: list[tuple[str, psutil.Process]]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def cpu_s(self) -> dict[str, float]:
        """Processor time by process since each began."""
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes}


# --- the clients, a process apart


class Client:
    """One connection that sends one chat after the other."""

    def __init__(self, port: int, prompt_tokens: int, max_tokens: int, fresh: bool, system: bool) -> None:
        self._port = port
        self._shared = "s" * int(prompt_tokens * SHARED)
        self._own = prompt_tokens - len(self._shared)
        self._max_tokens = max_tokens
        self._fresh = fresh
        self._system = system
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.first_s: list[float] = []
        self.whole_s: list[float] = []
        self.gaps_s: list[float] = []
        self.num_events = 0

    async def chat(self, number: int) -> None:
        """Send the chat of that number and read its stream."""
        own = f"{number:x}".rjust(self._own, "o")[-self._own :]
        said = [("system", self._shared), ("user", own)] if self._system else [("user", self._shared + own)]
        body = json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": role, "content": text} for role, text in said],
                "max_tokens": self._max_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        began = last = time.perf_counter()
        if self._connection is None:
            self._connection = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._connection
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        end = b""
        while not end.endswith(_END):
            piece = await reader.read(65536)
            assert piece, f"the stream ended early: {end!r}"
            now = time.perf_counter()
            (self.gaps_s if end else self.first_s).append(now - last)
            last = now
            self.num_events += piece.count(b"data: ")
            end = (end + piece)[-64:] if len(piece) < 64 else piece[-64:]
        self.whole_s.append(last - began)
        if self._fresh:
            writer.close()
            self._connection = None


async def _load(
    port: int, concurrency: int, requests: int, first: int, shape: tuple[int, int], fresh: bool, system: bool
) -> None:
    """Send ``requests`` chats, numbered from ``first``; print what they saw."""
    clients = [Client(port, *shape, fresh, system) for _ in range(concurrency)]
    numbers = iter(range(first, first + requests))

    async def run(client: Client) -> None:
        for number in numbers:
            await client.chat(number)

    began = time.perf_counter()
    await asyncio.gather(*map(run, clients))
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    first_s, whole_s, gaps_s = (
        sorted(value for client in clients for value in getattr(client, name))
        for name in ("first_s", "whole_s", "gaps_s")
    )
    row = {
        "requests_per_s": requests / seconds,
        "ttft_ms_p50": 1000 * statistics.median(first_s),
        "e2e_ms_p50": 1000 * statistics.median(whole_s),
        "gap_ms_p99": 1000 * gaps_s[int(len(gaps_s) * 0.99)],
        "gap_ms_max": 1000 * gaps_s[-1],
        "reads_per_request": len(gaps_s) / requests + 1,
        "events_per_request": sum(client.num_events for client in clients) / requests,
        "client_cpu_ms": 1000 * (used.ru_utime + used.ru_stime) / requests,
    }
    print(json.dumps({key: round(value, 3) for key, value in row.items()}))


# --- the clusters


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _ours(name: str, source: Path, folder: Path, *, system: bool = False) -> Iterator[Subject]:
    """`tanghulu up` from the tree ``source``."""
    state = folder / name
    write_model(state / MODEL, marks_ends=system)
    up = [sys.executable, "-m", "tanghulu", "up", "--engine", "mock", "--debug", "mock_speedup=1000000"]
    up += ["--model", str(state / MODEL)]
    up += ["--port", str(_free_port()), "--master-port", "0", "--state-dir", str(state / "state")]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(up, stdout=log, stderr=log, env=environment)
    try:
        entries = _entries(state / "state" / "cluster.json", process)
        port = next(int(e["address"].rpartition(":")[2]) for e in entries if e["role"] == "conductor")
        yield Subject(name, port, [(_role(e), psutil.Process(e["pid"])) for e in entries])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _role(entry: dict[str, Any]) -> str:
    return str(entry.get("name") or entry["role"])


@contextlib.contextmanager
def _in_front(folder: Path) -> Iterator[Subject]:
    """A conductor in front of a played vLLM server."""
    write_model(folder / MODEL)
    port, events, front = (str(_free_port()) for _ in range(3))
    server = ["benchmarks.conductor.played_vllm", str(folder / MODEL), port, events]
    conductor = ["tanghulu", "conductor", "--port", front, "--engine", f"vllm=http://127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log, contextlib.ExitStack() as stack:
        commands = [[sys.executable, "-m", *each] for each in (server, conductor)]
        begun = [subprocess.Popen(each, stdout=log, stderr=log, cwd=ROOT) for each in commands]
        for each in begun:
            stack.callback(each.wait, 30)
            stack.callback(each.terminate)
        _wait_for_model(f"127.0.0.1:{front}", begun)
        engine, own = (psutil.Process(each.pid) for each in begun)
        yield Subject("in-front", int(front), [("conductor", own), ("played vLLM", engine)])


def _entries(path: Path, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """The processes of the cluster, as soon as the conductor serves the model."""
    while True:
        assert process.poll() is None, "the cluster has ended"
        time.sleep(0.2)
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, StopIteration):
            entries: list[dict[str, Any]] = json.loads(path.read_text())
            address = next(e["address"] for e in entries if e["role"] == "conductor")
            if {"prefill", "decode"} <= {entry["role"] for entry in entries}:
                _wait_for_model(address, [process])
                return entries


def _wait_for_model(address: str, processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until the conductor at ``address`` serves a model."""
    import httpx

    while True:
        assert all(each.poll() is None for each in processes), "a process has ended"
        time.sleep(0.2)
        with contextlib.suppress(httpx.HTTPError):
            models = httpx.get(f"http://{address}/v1/models", timeout=2, trust_env=False)
            if models.status_code == 200 and models.json()["data"]:
                time.sleep(1)
                return


@contextlib.asynccontextmanager
async def _dynamo(environment: Path, folder: Path, *, system: bool) -> AsyncIterator[Subject]:
    flags = ("--speedup-ratio", "1000000")
    async with dynamo_cluster(folder, environment, _NUM_BLOCKS, *flags, marks_ends=system) as served:
        processes = []
        for child in psutil.Process().children():
            command = child.cmdline()
            name = next((part for part in command if part.startswith("dynamo.")), "")
            if name:
                processes.append((f"{name} {len(processes)}", child))
        yield Subject("dynamo", int(served.urls[0].rpartition(":")[2]), processes)


async def _turn(subject: Subject, concurrency: int, requests: int, first: int, flags: list[str]) -> dict[str, Any]:
    """One turn: the clients run, and what each process of the subject used meanwhile."""
    arguments = ["--load", f"{subject.port},{concurrency},{requests},{first}", *flags]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    before = subject.cpu_s()
    clients = await asyncio.create_subprocess_exec(
        *PROGRAM, *arguments, stdout=asyncio.subprocess.PIPE, env=environment, cwd=ROOT
    )
    printed, _ = await clients.communicate()
    assert clients.returncode == 0, f"{subject.name}: the clients failed"
    cpu_ms = {name: 1000 * (used - before[name]) / requests for name, used in subject.cpu_s().items()}
    return {
        "subject": subject.name,
        "concurrency": concurrency,
        "requests": requests,
        "cpu_ms_per_request": round(sum(cpu_ms.values()), 3),
        "cpu_ms_by_process": {name: round(value, 3) for name, value in cpu_ms.items()},
        **json.loads(printed),
    }


def _medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of the turns of one subject at one concurrency; of the longest gap the longest."""
    row: dict[str, Any] = dict(rows[0], turns=len(rows))
    for key, value in rows[0].items():
        if isinstance(value, float):
            row[key] = round(statistics.median(each[key] for each in rows), 3)
    row["gap_ms_max"] = max(each["gap_ms_max"] for each in rows)
    row["cpu_ms_by_process"] = {
        name: round(statistics.median(each["cpu_ms_by_process"][name] for each in rows), 3)
        for name in rows[0]["cpu_ms_by_process"]
    }
    return row


async def _measure(
    asked: dict[str, Any], concurrencies: list[int], turns: int, requests: int, flags: list[str]
) -> list[dict[str, Any]]:
    dynamo = asked["dynamo"]
    with tempfile.TemporaryDirectory(prefix="tanghulu-") as name:
        folder = Path(name)
        async with contextlib.AsyncExitStack() as stack:
            trees = [("this", ROOT / "src"), *((f"beside-{i}", tree) for i, tree in enumerate(asked["beside"]))]
            system = "--system" in flags
            opened = [_ours(each, tree.resolve(), folder, system=system) for each, tree in trees]
            subjects = [stack.enter_context(each) for each in opened]
            if asked["in_front"]:
                subjects.append(stack.enter_context(_in_front(folder)))
            if dynamo is not None:
                subjects.append(await stack.enter_async_context(_dynamo(dynamo, folder / "dynamo", system=system)))
            first, rows = 0, list[dict[str, Any]]()
            for subject in subjects:  # what is made once is made now
                await _turn(subject, 8, 100, 1_000_000, flags)
            for concurrency in concurrencies:
                for _ in range(turns):
                    for subject in subjects:
                        subject.rows.append(await _turn(subject, concurrency, requests, first, flags))
                    first += requests
                for subject in subjects:
                    rows.append(_medians(subject.rows))
                    subject.rows = []
            return rows


@click.command(help=__doc__)
@click.option("--beside", type=click.Path(path_type=Path), multiple=True, help="another tree's src")
@click.option("--dynamo", type=click.Path(path_type=Path), help="an environment that has ai-dynamo")
@click.option("--in-front", is_flag=True, help="a conductor in front of a played vLLM server, too")
@click.option("--concurrency", "concurrencies", type=int, multiple=True, default=(1, 16, 64))
@click.option("--turns", default=3, help="of each subject at each concurrency")
@click.option("--requests", default=300, help="in a turn")
@click.option("--prompt-tokens", default=256)
@click.option("--max-tokens", default=64)
@click.option("--fresh", is_flag=True, help="a connection for each request")
@click.option("--system", is_flag=True, help="what is shared is a system message")
@click.option("--name", default="serving", help="the results' file")
@click.option("--load", "load", hidden=True)
def main(load: str | None, name: str, **asked: Any) -> None:
    """Measure, or be the clients."""
    shape = asked["prompt_tokens"], asked["max_tokens"]
    if load is not None:
        port, concurrency, count, first = map(int, load.split(","))
        asyncio.run(_load(port, concurrency, count, first, shape, asked["fresh"], asked["system"]))
        return
    flags = ["--prompt-tokens", str(shape[0]), "--max-tokens", str(shape[1])]
    flags += [f"--{flag}" for flag in ("fresh", "system") if asked[flag]]
    rows = asyncio.run(_measure(asked, list(asked["concurrencies"]), asked["turns"], asked["requests"], flags))
    keep(name, rows, load_average=os.getloadavg()[0])
    table = Table("subject", "concurrency", "CPU ms/request", "by process", "requests/s", "e2e p50", "gap p99, max")
    for row in rows:
        parts = ", ".join(f"{who} {value:.2f}" for who, value in row["cpu_ms_by_process"].items())
        gaps = f"{row['gap_ms_p99']:.1f}, {row['gap_ms_max']:.1f} ms"
        cells = [
            f"{row['cpu_ms_per_request']:.2f}",
            parts,
            f"{row['requests_per_s']:.0f}",
            f"{row['e2e_ms_p50']:.1f} ms",
        ]
        table.add_row(row["subject"], str(row["concurrency"]), *cells, gaps)
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
