"""Prompts of 8 tokens: requests a second of ``vllm serve``, and of a vLLM worker behind the conductor.

Both run side by side with the same settings, and the same load goes to one and the other in turns: what other programs
take of the machine is taken from both. A request of 8 tokens has next to nothing to compute, so that the difference is
what conductor, session and worker cost. CPU seconds of each process say where it goes. Needs ``tools/engine_venv.py
vllm``. With ``--in-front`` the conductor is in front of that very ``vllm serve``, in place of a worker.

    python -m benchmarks.engines.small_prompts
    python -m benchmarks.engines.small_prompts --in-front
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
import psutil

from benchmarks.common.report import ROOT, keep
from benchmarks.engines.arms import inherited
from benchmarks.engines.connectors import MODEL, ORDINARY, PYTHON
from benchmarks.peers import clusters, environments

PROMPT_TOKENS, ANSWER_TOKENS, CONNECTIONS = 8, 8, 32
START_S, ANSWER_S, END_S = 300.0, 120.0, 60.0
#: Of both: what the worker decides by itself is told to ``vllm serve``.
BLOCK_TOKENS, STEP_TOKENS, CONTEXT_TOKENS, CACHE_GIB = 64, 512, 4096, 1

Row = dict[str, Any]


@dataclass
class Arm:
    """What is asked: a URL, and the processes behind it by what they do."""

    url: str
    processes: dict[str, psutil.Process] = field(default_factory=dict)
    model: str = ""

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process so far; vLLM's engine is below the process that has its API or the worker."""
        found: dict[str, float] = {}
        for name, process in self.processes.items():
            found[name] = _cpu_s(process)
            if below := sum(_cpu_s(child) for child in process.children(recursive=True)):
                found["engine"] = below
        return found


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _environment() -> dict[str, str]:
    return {
        **inherited(),
        "PYTHONPATH": str(ROOT / "src"),
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        # One thread, bound to no core: several would wait for each other wherever others have a core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@contextlib.contextmanager
def _running(command: list[str | Path], log: str) -> Iterator[psutil.Process]:
    """A server, whose own processes are ended with it."""
    with (environments.logs() / log).open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_environment())
    process = psutil.Process(child.pid)
    try:
        yield process
    finally:
        below = process.children(recursive=True) if child.poll() is None else []
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
        child.kill()
        child.wait()
        for left in psutil.wait_procs(below, 5)[1]:
            left.kill()


@contextlib.contextmanager
def plain(dtype: str, in_front: bool) -> Iterator[Arm]:
    """``vllm serve``; ``in_front``: with the options that a conductor in front of it uses."""
    port = clusters.free_port()
    flags = ["--port", str(port), "--dtype", dtype, "--enforce-eager", "--max-model-len", str(CONTEXT_TOKENS)]
    flags += ["--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", str(STEP_TOKENS)]
    flags += ["--prefix-caching-hash-algo", "sha256_cbor", "--disable-uvicorn-access-log"]
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{clusters.free_port()}"}
    flags += ["--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details"] if in_front else []
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", MODEL, *flags]
    with _running(command, "vllm-serve.log") as process:
        yield Arm(f"http://127.0.0.1:{port}", {"vllm serve": process})


@contextlib.contextmanager
def behind_conductor(dtype: str) -> Iterator[Arm]:
    """A vLLM worker without a store, behind a conductor."""
    port = clusters.free_port()
    further = {"enforce_eager": True, "max_model_len": CONTEXT_TOKENS}
    with clusters.tanghulu(64 << 20) as store:
        master = ["--master", store.settings["master"], "--log-level", "warning"]
        worker = [PYTHON, "-m", "tanghulu", "vllm-worker", "--model", MODEL, "--dtype", dtype, "--no-store", *master]
        worker += ["--port", "0", "--kv-memory", f"{CACHE_GIB}GiB", "--block-tokens", str(BLOCK_TOKENS)]
        worker += ["--max-num-batched-tokens", str(STEP_TOKENS), "--vllm", json.dumps(further)]
        conductor = [Path(sys.executable), "-m", "tanghulu", "conductor", "--port", str(port), *master]
        with _running(worker, "vllm-worker.log") as first, _running(conductor, "conductor.log") as second:
            yield Arm(f"http://127.0.0.1:{port}", {"conductor": second, "worker": first})


@contextlib.contextmanager
def in_front_of(arm: Arm) -> Iterator[Arm]:
    """A conductor in front of the server of ``arm``."""
    _until_served(arm)
    port = clusters.free_port()
    command = [Path(sys.executable), "-m", "tanghulu", "conductor", "--port", str(port), "--log-level", "warning"]
    with _running([*command, "--engine", f"vllm={arm.url}"], "conductor.log") as process:
        yield Arm(f"http://127.0.0.1:{port}", {"conductor": process, **arm.processes})


def _until_served(arm: Arm) -> None:
    """Wait until a model is served, and note its name. Raises Missing."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError, LookupError, ValueError):
            models = httpx.get(f"{arm.url}/v1/models", trust_env=False).raise_for_status().json()["data"]
            arm.model = str(models[0]["id"])
            return
        time.sleep(0.5)
    raise environments.Missing(f"nothing is served at {arm.url}, see {environments.logs()}")


async def ask_all(arm: Arm, prompts: list[list[int]]) -> float:
    """Ask all, ``CONNECTIONS`` at a time; returns the seconds until the last answer. Raises for any that fails."""
    limits = httpx.Limits(max_connections=CONNECTIONS)
    timeout = httpx.Timeout(ANSWER_S, pool=None)  # a prompt waits for its connection as long as it takes
    async with httpx.AsyncClient(base_url=arm.url, limits=limits, timeout=timeout, trust_env=False) as http:

        async def ask(prompt: list[int]) -> None:
            body = {"model": arm.model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
            body |= {"ignore_eos": True}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
            if answer["usage"]["completion_tokens"] != ANSWER_TOKENS:
                raise ValueError(f"another answer than was asked for: {answer}")

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(ask(prompt))
        return time.perf_counter() - began_s


def measured(arms: Mapping[str, Arm], num_requests: int, num_turns: int, seed: int) -> Iterator[Row]:
    """A row a turn: one, other, other, one, ..., so that what grows with time is in both. The first warms up."""
    random = np.random.default_rng(seed)
    for turn in range(-1, num_turns):
        for name in reversed(list(arms)) if turn % 2 else list(arms):
            arm, num = arms[name], num_requests // num_turns if turn >= 0 else CONNECTIONS
            prompts = random.integers(*ORDINARY, (num, PROMPT_TOKENS)).tolist()
            before = arm.cpu_s()
            took_s = asyncio.run(ask_all(arm, prompts))
            cpu_ms = {what: round(1000 * (cpu_s - before[what]) / num, 2) for what, cpu_s in arm.cpu_s().items()}
            if turn >= 0:
                row = {"what": name, "turn": turn, "num_requests": num, "requests_per_s": round(num / took_s, 2)}
                yield row | {"cpu_ms_per_request": cpu_ms}


def summary(rows: list[Row]) -> Row:
    """Medians of both, and the second's share of the first."""
    line: Row = {}
    for name in dict.fromkeys(row["what"] for row in rows):
        own = [row for row in rows if row["what"] == name]
        line[name] = {"requests_per_s": statistics.median(row["requests_per_s"] for row in own)}
        line[name]["cpu_ms_per_request"] = {
            what: round(statistics.median(row["cpu_ms_per_request"][what] for row in own), 2)
            for what in own[0]["cpu_ms_per_request"]
        }
    plainly, behind = (each["requests_per_s"] for each in line.values())
    return line | {"ratio": round(behind / plainly, 3)}


@click.command(help=__doc__)
@click.option("--requests", "num_requests", default=1000, help="For each of the two.")
@click.option("--turns", "num_turns", default=6)
@click.option("--seed", default=1)
@click.option("--dtype", default="bfloat16")
@click.option("--in-front", is_flag=True, help="The conductor is in front of the same vllm serve.")
@click.option("--keep/--no-keep", "kept", default=True)
def main(num_requests: int, num_turns: int, seed: int, dtype: str, in_front: bool, kept: bool) -> None:
    if not (PYTHON.exists() and MODEL.exists()):
        raise SystemExit("vLLM's environment is missing: tools/engine_venv.py vllm")
    with (
        plain(dtype, in_front) as first,
        in_front_of(first) if in_front else behind_conductor(dtype) as second,
    ):
        arms = {"vllm serve": first, "behind the conductor": second}
        for arm in arms.values():
            _until_served(arm)
        rows = list[Row]()
        for row in measured(arms, num_requests, num_turns, seed):
            print(row, flush=True)
            rows.append(row)
    print(summary(rows))
    if kept:
        load = os.getloadavg()[0]
        keep(
            "small_prompts_in_front" if in_front else "small_prompts",
            rows,
            seed=seed,
            summary=summary(rows),
            dtype=dtype,
            load_average=round(load, 2),
        )


if __name__ == "__main__":
    main()
