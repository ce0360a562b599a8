"""Prompts of 8 tokens: requests a second of ``vllm serve``, and of a vLLM worker behind the conductor.

Both run side by side, and the same load goes to one and the other in turns: what other programs take of the machine is
taken from both. A request of 8 tokens has next to nothing to compute, so that the difference is what conductor, session
and worker cost. Needs ``tools/engine_venv.py vllm``.

    python -m benchmarks.engines.small_prompts
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

from benchmarks.common.report import ROOT, keep
from benchmarks.engines.arms import inherited
from benchmarks.engines.connectors import MODEL, ORDINARY, PYTHON
from benchmarks.peers import clusters, environments

PROMPT_TOKENS, NUM_ANSWERED, CONNECTIONS = 8, 8, 32
NUM_REQUESTS, NUM_TURNS = 1000, 4
START_S, ANSWER_S = 300.0, 120.0
_SHARED = {"enforce_eager": True, "max_model_len": 4096}

Row = dict[str, Any]


def _environment() -> dict[str, str]:
    return {
        **inherited(),
        "PYTHONPATH": str(ROOT / "src"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _until_served(url: str, log: str) -> str:
    """Wait until a model is served there, and return its name. Raises Missing."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError, LookupError, ValueError):
            models = httpx.get(f"{url}/v1/models", trust_env=False).raise_for_status().json()["data"]
            return str(models[0]["id"])
        time.sleep(0.5)
    raise environments.Missing(f"nothing is served at {url}, see {environments.logs() / log}")


@contextlib.contextmanager
def plain(dtype: str) -> Iterator[str]:
    """``vllm serve``."""
    port = clusters.free_port()
    flags = ["--port", str(port), "--dtype", dtype, "--block-size", "64", "--enforce-eager", "--max-model-len", "4096"]
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", MODEL, *flags, "--disable-uvicorn-access-log"]
    with clusters.running(command, "vllm-serve.log", env=_environment()):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def behind_conductor(dtype: str) -> Iterator[str]:
    """A vLLM worker without a store, behind a conductor."""
    port = clusters.free_port()
    with clusters.tanghulu(64 << 20) as store, contextlib.ExitStack() as stack:
        master = ["--master", store.settings["master"], "--log-level", "warning"]
        worker = [PYTHON, "-m", "tanghulu", "vllm-worker", "--model", MODEL, "--dtype", dtype, "--no-store", *master]
        worker += ["--port", "0", "--kv-memory", "1GiB", "--vllm", json.dumps(_SHARED)]
        conductor = [Path(sys.executable), "-m", "tanghulu", "conductor", "--port", str(port), *master]
        stack.enter_context(clusters.running(worker, "vllm-worker.log", env=_environment()))
        stack.enter_context(clusters.running(conductor, "conductor.log", env=_environment()))
        yield f"http://127.0.0.1:{port}"


async def rate(url: str, model: str, prompts: list[list[int]]) -> float:
    """Requests a second, all of them answered."""
    limits = httpx.Limits(max_connections=CONNECTIONS)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=ANSWER_S, trust_env=False) as http:

        async def ask(prompt: list[int]) -> None:
            body = {"model": model, "prompt": prompt, "max_tokens": NUM_ANSWERED, "temperature": 0, "ignore_eos": True}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
            if answer["usage"]["completion_tokens"] != NUM_ANSWERED:
                raise ValueError(f"another answer than was asked for: {answer}")

        began_s = time.perf_counter()
        await asyncio.gather(*map(ask, prompts))
        return len(prompts) / (time.perf_counter() - began_s)


def measured(urls: dict[str, str], models: dict[str, str], seed: int) -> Iterator[Row]:
    """A row a turn: ``vllm serve``, worker, worker, ``vllm serve``, ..., so that what grows with time is in both."""
    random = np.random.default_rng(seed)
    names = list(urls)
    for turn in range(-1, NUM_TURNS):
        for name in names if turn % 2 else reversed(names):
            num = NUM_REQUESTS // NUM_TURNS if turn >= 0 else CONNECTIONS
            prompts = random.integers(*ORDINARY, (num, PROMPT_TOKENS)).tolist()
            found = asyncio.run(rate(urls[name], models[name], prompts))
            if turn >= 0:  # the first one warms up
                yield {"what": name, "turn": turn, "requests_per_s": round(found, 2)}


def summary(rows: list[Row]) -> Row:
    """Medians of both, and the second's share of the first."""
    line = {
        name: statistics.median(row["requests_per_s"] for row in rows if row["what"] == name)
        for name in dict.fromkeys(row["what"] for row in rows)
    }
    plainly, behind = line.values()
    return line | {"ratio": round(behind / plainly, 3)}


@click.command(help=__doc__)
@click.option("--seed", default=1)
@click.option("--dtype", default="bfloat16")
@click.option("--keep/--no-keep", "kept", default=True)
def main(seed: int, dtype: str, kept: bool) -> None:
    if not (PYTHON.exists() and MODEL.exists()):
        raise SystemExit("vLLM's environment is missing: tools/engine_venv.py vllm")
    with plain(dtype) as first, behind_conductor(dtype) as second:
        urls = {"vllm serve": first, "behind the conductor": second}
        models = {name: _until_served(url, "vllm-serve.log, vllm-worker.log") for name, url in urls.items()}
        rows = list[Row]()
        for row in measured(urls, models, seed):
            print(row, flush=True)
            rows.append(row)
    print(summary(rows))
    if kept:
        load = os.getloadavg()[0]
        keep("small_prompts", rows, seed=seed, summary=summary(rows), dtype=dtype, load_average=round(load, 2))


if __name__ == "__main__":
    main()
