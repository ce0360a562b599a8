"""What huge and half-sent bodies of one client cost the others: waits of /live and of streams, the conductor's memory.

A real cluster (`tanghulu up --engine mock`), four streams that never end and a probe of /live every 20 ms. First they
are alone, then another process sends prompts of 0.5, 4 and 30 MB and 20 bodies of 30 MB that never end. A bare TCP echo
in a process of its own is probed all the while: what it waits, too, is the machine's and not the conductor's.

    python -m benchmarks.conductor.hostile_bodies
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common.report import keep

PROGRAM = (sys.executable, "-m", "benchmarks.conductor.hostile_bodies")
MB = 1_000_000
PROMPTS = (MB // 2, 4 * MB, 30 * MB)
HALF_SENT = 20
STREAMS = 4
ALONE_S, ATTACK_S = 10.0, 25.0
PROBE_S = 0.02
PHRASE = 'The quick brown fox says "so", and jumps over the lazy dog.\n'


class Waits:
    """The longest waits of one kind in the present phase, in milliseconds."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def row(self) -> dict[str, float]:
        """Largest and 99th percentile; empties the list."""
        seen, self.seen = sorted(self.seen), []
        if not seen:
            return {"max_ms": 0.0, "p99_ms": 0.0}
        return {"max_ms": round(1000 * seen[-1], 1), "p99_ms": round(1000 * seen[int(len(seen) * 0.99)], 1)}


def request(path: str, body: bytes, length: int | None = None) -> bytes:
    """A POST of ``body``; ``length`` announces more than comes."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length or len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def probe(port: int, message: bytes, waits: Waits) -> None:
    """Ask on one connection every PROBE_S, for ever."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        asked = time.perf_counter()
        writer.write(message)
        answer = await reader.read(65536)
        assert answer, "the connection was closed"
        waits.seen.append(time.perf_counter() - asked)
        await asyncio.sleep(PROBE_S)


async def stream(port: int, waits: Waits) -> None:
    """Read streams, one after the other, for ever; note the gaps between their pieces."""
    body = json.dumps({"model": "mock", "prompt": "hello", "max_tokens": 100_000, "ignore_eos": True, "stream": True})
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/completions", body.encode()))
        await reader.read(65536)
        last = time.perf_counter()
        while piece := await reader.read(65536):
            now = time.perf_counter()
            waits.seen.append(now - last)
            last = now
            if b"[DONE]" in piece:
                break
        writer.close()


async def echo() -> None:
    """The control: answers on a port, which it prints."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            writer.write(piece)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def attack(port: int) -> None:
    """Send the prompts, one kind after the other, beside the bodies that never end; print each answer."""
    text = (PHRASE * (PROMPTS[-1] // len(PHRASE) + 1))[: PROMPTS[-1]]
    filler = json.dumps({"prompt": text}).encode()

    async def half() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/completions", filler[: 30 * MB - 1000], 30 * MB))
        with contextlib.suppress(ConnectionError):
            line = await reader.readline()
            print(json.dumps({"kind": "half-sent", "answer": line.decode().strip()}), flush=True)

    async def whole(size: int, path: str) -> None:
        prompt = text[:size]
        fields: dict[str, Any] = {"prompt": prompt} if path == "/v1/completions" else {"text": prompt}
        if path == "/v1/chat/completions":
            fields = {"messages": [{"role": "user", "content": prompt}]}
        body = json.dumps({**fields, "model": "mock"}).encode()
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = ""
        with contextlib.suppress(ConnectionError):
            writer.write(request(path, body))
            answer = (await reader.readline()).decode().strip()
        writer.close()
        seconds = round(time.perf_counter() - began, 2)
        print(json.dumps({"kind": f"{size / MB:g} MB {path}", "answer": answer, "seconds": seconds}), flush=True)

    halves = [asyncio.create_task(half()) for _ in range(HALF_SENT)]
    for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
        for size in PROMPTS:
            await whole(size, path)
    await asyncio.gather(*halves)


async def measure(url_port: int, echo_port: int, conductor: psutil.Process) -> list[dict[str, Any]]:
    """The two phases."""
    live, streams, control = Waits(), Waits(), Waits()
    peak = 0

    async def sample() -> None:
        nonlocal peak
        while True:
            peak = max(peak, conductor.memory_info().rss)
            await asyncio.sleep(0.02)

    ask = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
    kinds: list[Callable[[], Awaitable[None]]] = [
        lambda: probe(url_port, ask, live),
        lambda: probe(echo_port, ask, control),
        sample,
    ]
    kinds += [lambda: stream(url_port, streams)] * STREAMS
    tasks = [asyncio.ensure_future(kind()) for kind in kinds]
    rows = []

    def row(phase: str, **more: Any) -> None:
        nonlocal peak
        waits = {"live": live.row(), "streams": streams.row(), "control": control.row()}
        rows.append({"phase": phase, **waits, "peak_rss_mb": round(peak / MB), **more})
        peak = 0

    await asyncio.sleep(3)
    live.row(), streams.row(), control.row()
    await asyncio.sleep(ALONE_S)
    row("alone")
    attacker = await asyncio.create_subprocess_exec(*PROGRAM, "--attack", str(url_port), stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(ATTACK_S):
            answers, _ = await attacker.communicate()
    except TimeoutError:
        attacker.kill()
        answers = await attacker.stdout.read() if attacker.stdout else b""
    row("attacked", answers=[json.loads(line) for line in answers.splitlines()])
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, asyncio.CancelledError), result
    return rows


def main_run() -> None:
    with tempfile.TemporaryDirectory(prefix="tanghulu-") as folder:
        state = Path(folder) / "state"
        up = [
            sys.executable,
            "-m",
            "tanghulu",
            "up",
            "--engine",
            "mock",
            "--model",
            "mock",
            "--debug",
            "mock_speedup=5",
        ]
        up += ["--prefill", "0", "--decode", "0", "--port", "0", "--master-port", "0", "--state-dir", str(state)]
        process = subprocess.Popen(up, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        control = subprocess.Popen([*PROGRAM, "--echo"], stdout=subprocess.PIPE)
        assert control.stdout is not None
        try:
            echo_port = int(control.stdout.readline())
            entry = _conductor(state)
            port = int(entry["address"].rpartition(":")[2])
            _until_served(port)
            rows = asyncio.run(measure(port, echo_port, psutil.Process(entry["pid"])))
        finally:
            control.kill()
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    keep("hostile_bodies", rows, load_average=os.getloadavg()[0])
    table = Table("phase", "/live max, p99", "streams max, p99", "control max, p99", "peak RSS")
    for row in rows:
        cells = [f"{row[kind]['max_ms']:g}, {row[kind]['p99_ms']:g} ms" for kind in ("live", "streams", "control")]
        table.add_row(row["phase"], *cells, f"{row['peak_rss_mb']} MB")
    Console().print(table)
    for answer in rows[-1]["answers"]:
        Console().print(answer)


def _conductor(state: Path) -> dict[str, Any]:
    while True:
        with contextlib.suppress(FileNotFoundError, StopIteration, json.JSONDecodeError):
            entries = json.loads((state / "cluster.json").read_text())
            return next(entry for entry in entries if entry["role"] == "conductor")
        time.sleep(0.1)


def _until_served(port: int) -> None:
    import httpx

    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)


@click.command(help=__doc__)
@click.option("--attack", "attack_port", type=int, hidden=True)
@click.option("--echo", "is_echo", is_flag=True, hidden=True)
def main(attack_port: int | None, is_echo: bool) -> None:
    """Measure, or be one of the processes beside."""
    if attack_port:
        asyncio.run(attack(attack_port))
    elif is_echo:
        asyncio.run(echo())
    else:
        main_run()


if __name__ == "__main__":
    main()
