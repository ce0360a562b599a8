"""vLLM's connectors in one run: a first process computes prompts, another one finds them, and what both cost.

Each connector's turn is two vLLM processes, one behind the other, that are asked the same prompts of 2,000 tokens. The
first computes them (cold), and what it saves is all that the second has. Engines without a connector show what cold
is. Times are ratios only: the machine is others' as well; CPU seconds are those of the engine's processes, without
their start. Needs ``tools/engine_venv.py vllm``; connectors that are not installed are left out, and the kept file says
so.

    python -m benchmarks.engines.connectors
    python -m benchmarks.engines.connectors --what cold    # what ours adds to cold prompts, with and without in turns
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.report import ROOT, keep
from benchmarks.engines.arms import ARMS, ENGINES, Arm, inherited
from benchmarks.peers import environments
from benchmarks.peers.jsonlines import Worker, WorkerFailed

PYTHON = ENGINES / "vllm" / "bin" / "python"
MODEL = ENGINES / "smollm2"
PROGRAM, IN_TURNS = Path(__file__).with_name("vllm_process.py"), Path(__file__).with_name("vllm_in_turns.py")
#: Tokens of SmolLM2 that stand for text, not for structure.
ORDINARY = (1000, 40_000)
NUM_PROMPTS, PROMPT_TOKENS = 4, 2000
#: Of them half with the connector.
NUM_COLD = 12
#: Behind the last answer: what was computed is still being saved, some of it with the engine's next step.
SETTLE_S = 3.0

Row = dict[str, Any]


def prompts(seed: int, num_prompts: int = NUM_PROMPTS) -> list[list[int]]:
    """Prompts that share nothing."""
    random = np.random.default_rng(seed)
    return [random.integers(*ORDINARY, PROMPT_TOKENS).tolist() for _ in range(num_prompts)]


@contextlib.contextmanager
def started(program: Path, arm: Arm, name: str, more: Mapping[str, str] | None = None) -> Iterator[Worker]:
    """``program`` in vLLM's environment."""
    environment = {
        **inherited(),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # One thread, bound to no core: several would wait for each other wherever others have a core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # Names of blocks that all processes share, also where a connector hashes by itself.
        "PYTHONHASHSEED": "0",
        **arm.environment,
        **(more or {}),
    }
    worker = Worker(PYTHON, program, environments.logs() / f"vllm-{name}.log", environment, f"vllm with {name}")
    try:
        yield worker
    finally:
        worker.close()


@contextlib.contextmanager
def engine(arm: Arm, name: str, dtype: str) -> Iterator[Worker]:
    """vLLM with the arm's connector, started."""
    with started(PROGRAM, arm, name) as worker:
        worker.call("open", model=str(MODEL), dtype=dtype, transfer=arm.transfer, beside=arm.beside)
        yield worker
        worker.call("close")


def one_process(arm: Arm, name: str, number: int, asked: Sequence[list[int]], dtype: str) -> list[Row]:
    """Ask all prompts of a fresh process: a row for each, and one for all of it."""
    with engine(arm, name, dtype) as worker:
        cpu_s, servers_s = worker.call("cpu_s"), arm.servers_cpu_s()
        rows = [worker.call("ask", prompt=prompt) for prompt in asked]
        worker.call("ask", prompt=asked[0][:20])  # a further step: some save with the step behind
        time.sleep(SETTLE_S)
        spent_s, servers_s = worker.call("cpu_s") - cpu_s, arm.servers_cpu_s() - servers_s
    about = {"connector": name, "process": number}
    whole = {"what": "process", "cpu_s": round(spent_s, 2), "servers_cpu_s": round(servers_s, 2)}
    whole["held_bytes"] = arm.held_bytes()
    return [about | {"what": "prompt", "prompt": at} | row for at, row in enumerate(rows)] + [about | whole]


def of_connector(name: str, asked: Sequence[list[int]], dtype: str) -> list[Row]:
    """Two processes, one behind the other. Raises Missing, WorkerFailed and what else keeps one from running."""
    rows = list[Row]()
    with ARMS[name]() as arm:
        for number in (1, 2) if arm.shares else (1,):
            rows += one_process(arm, name, number, asked, dtype)
            print(name, number, [row["ttft_s"] for row in rows if "ttft_s" in row], flush=True)
    return rows


def cold(asked: Sequence[list[int]], dtype: str) -> Iterator[Row]:
    """What TanghuluConnector adds to prompts that nobody has: with it and without it in turns, in one process."""
    with ARMS["tanghulu"]() as arm, started(IN_TURNS, arm, "cold", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}) as worker:
        worker.call("open", model=str(MODEL), dtype=dtype, transfer=arm.transfer)
        for at, prompt in enumerate(asked):
            connected = at % 4 in (1, 2)  # without, with, with, without: what grows with time is in both
            yield {"connected": connected, **worker.call("ask", prompt=prompt, connected=connected)}


def summary_of_cold(rows: Sequence[Row]) -> Row:
    """Medians of CPU seconds with and without the connector, to the first token and until all is saved."""
    line: Row = {}
    for name in ("ttft_cpu_s", "whole_cpu_s"):
        spent = {True: list[float](), False: list[float]()}
        for row in rows:
            spent[row["connected"]].append(row["ttft_cpu_s"] + (row["saved_cpu_s"] if name == "whole_cpu_s" else 0))
        line[name] = {
            "with": round(statistics.median(spent[True]), 3),
            "without": round(statistics.median(spent[False]), 3),
            "ratio": round(statistics.median(spent[True]) / statistics.median(spent[False]), 3),
        }
    return line


def summary(rows: Sequence[Row]) -> list[Row]:
    """For each connector medians over the prompts, and ratios within its two processes."""
    return [of_one([row for row in rows if row["connector"] == name]) for name in dict.fromkeys(_names(rows))]


def _names(rows: Sequence[Row]) -> list[str]:
    return [row["connector"] for row in rows]


def of_one(rows: Sequence[Row]) -> Row:
    """The line of a connector; what another process finds is left out where it can find nothing."""
    whole = [row for row in rows if row["what"] == "process"]
    asked = [[row for row in rows if row["what"] == "prompt" and row["process"] == each["process"]] for each in whole]
    line: Row = {"connector": rows[0]["connector"]}
    for field, names in (("ttft_s", ("cold_s", "other_s")), ("ttft_cpu_s", ("cold_cpu_s", "other_cpu_s"))):
        medians = [statistics.median(row[field] for row in part) for part in asked]
        line |= {name: round(value, 3) for name, value in zip(names, medians, strict=False)}
        if len(medians) > 1:
            line[f"{names[1]}_of_cold"] = round(medians[1] / medians[0], 3)
    if len(asked) > 1:
        line["cached_tokens"] = statistics.median(row["cached"] for row in asked[1])
        line["same_answers"] = sum(one["answered"] == two["answered"] for one, two in zip(*asked, strict=True))
    held = whole[0]["held_bytes"]
    return line | {
        "cpu_s": [each["cpu_s"] for each in whole],
        "servers_cpu_s": [each["servers_cpu_s"] for each in whole],
        "held_mb": None if held is None else round(held / 1e6, 1),
    }


def show(lines: Sequence[Row]) -> None:
    names = list(dict.fromkeys(name for line in lines for name in line))
    table = Table(*names)
    for line in lines:
        table.add_row(*(str(line.get(name, "")) for name in names))
    Console(width=220).print(table)


@click.command(help=__doc__)
@click.option("--only", default=",".join(ARMS), help="Connectors, in this order.")
@click.option("--what", type=click.Choice(["shared", "cold"]), default="shared")
@click.option("--seed", default=1)
@click.option("--dtype", default="bfloat16")
@click.option("--keep/--no-keep", "kept", default=True)
def main(only: str, what: str, seed: int, dtype: str, kept: bool) -> None:
    if not (PYTHON.exists() and MODEL.exists()):
        raise SystemExit("vLLM's environment is missing: tools/engine_venv.py vllm")
    names = only.split(",")
    about = {"dtype": dtype, "prompt_tokens": PROMPT_TOKENS, "load_average": os.getloadavg()[0]}
    if what == "cold":
        rows = list[Row]()
        for row in cold(prompts(seed, NUM_COLD), dtype):
            print(row, flush=True)
            rows.append(row)
            if kept and len(rows) % 4 == 0:  # so far: a run takes long
                keep("connectors_cold", rows, seed=seed, summary=summary_of_cold(rows), **about)
        print(summary_of_cold(rows))
        return
    rows, left_out = list[Row](), dict.fromkeys(names, "not reached")
    for name in names:
        try:
            rows += of_connector(name, prompts(seed), dtype)
            del left_out[name]
        except (environments.Missing, WorkerFailed, subprocess.SubprocessError, OSError) as error:
            left_out[name] = str(error).strip().splitlines()[0].replace(f"{ROOT}/", "")
            print(f"{name} is left out: {error}", flush=True)
        if kept:  # so far: a run takes long
            keep("connectors", rows, seed=seed, summary=summary(rows), left_out=left_out, **about)
    show(summary(rows))


if __name__ == "__main__":
    main()
