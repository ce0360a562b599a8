"""What a known prefix is worth: TTFT of a long prompt computed, and with 90 % of it in the store or in a peer's memory.

    python benchmarks/reuse.py [--what store,peer,throughput] [--rounds 5]

It starts clusters of its own with `tanghulu up`. In each round of *store* and *peer* a prompt that nobody has sent is
computed, then another one that shares its first 90 % is sent: behind a flush of the workers' caches, so that the store
has it (store), or to another prefill worker, with no store (peer). *throughput*: prompts that share nothing, four at a
time, once with store and hand-over between two workers and once with neither; tokens a second, prompt and answer.
Medians over the rounds; every round is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from report import keep

# fmt: off
WORDS = [
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they",
    "at", "be", "this", "from", "have", "or", "by", "one", "had", "not", "but",
]
# fmt: on
READY_S = 120.0
SHARED = 0.9


class Cluster:
    """A running `tanghulu up` and a client of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(timeout=300, trust_env=False)
        self.model = self.http.get(f"{url}/v1/models").json()["data"][0]["id"]

    def ttft(self, prompt: str, worker: str = "", num_new: int = 4) -> dict[str, Any]:
        """Stream a completion; seconds to the first text, and the usage."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": num_new, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        if worker:
            body["routing"] = {"prefill_worker": worker}
        start_s, first_s, usage = time.perf_counter(), 0.0, {}
        with self.http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    usage = chunk.get("usage") or usage
                    if chunk["choices"] and not first_s:
                        first_s = time.perf_counter() - start_s
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {"ttft_s": first_s, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}

    def route(self, prompt: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.post(f"{self.url}/route", json={"prompt": prompt}).json()
        return found

    def prefill_workers(self, count: int) -> list[str]:
        """Their ids, as soon as there are so many: a cluster is ready with the first."""
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            ids = [worker["id"] for worker in self.route("x")["workers"] if worker["can_prefill"]]
            if len(ids) == count:
                return ids
            time.sleep(0.1)
        raise SystemExit(f"there are not {count} prefill workers")

    def settle(self, num_blocks: int, prompt: str) -> None:
        """Wait until /route sees so many of the prompt's blocks in the store."""
        for _ in range(1000):
            if self.route(prompt)["hit_blocks"]["store"] >= num_blocks:
                return
            time.sleep(0.02)
        raise SystemExit("the store did not take the prompt's blocks")


@contextlib.contextmanager
def cluster(model: str, *flags: str, store: bool = True) -> Iterator[Cluster]:
    """A ready cluster of its own; ended at the block's end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tanghulu", "up", "--port", "0", "--master-port", "0", "--model", model]
        command += ["--state-dir", folder, "--log-level", "warning", *flags]
        environment = os.environ | {"TANGHULU_STORE": str(store).lower()}
        with (Path(folder) / "up.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield Cluster(_ready_url(process, Path(folder)))
        finally:
            process.terminate()
            process.wait(60)


def _ready_url(process: subprocess.Popen[bytes], folder: Path) -> str:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError, ValueError, StopIteration, httpx.HTTPError):
            entries = json.loads((folder / "cluster.json").read_text())
            url = "http://" + next(entry["address"] for entry in entries if entry["role"] == "conductor")
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return url
        time.sleep(0.1)
    raise SystemExit(f"the cluster was not ready: {(folder / 'up.log').read_text()[-2000:]}")


def prompt_of(rng: random.Random, num_tokens: int) -> str:
    """Words that are one token each, so that the prompt has about ``num_tokens``."""
    return " ".join(rng.choice(WORDS) for _ in range(num_tokens))


def pair_of(rng: random.Random, num_tokens: int) -> tuple[str, str]:
    """Two prompts that share their first 90 %."""
    shared, own = prompt_of(rng, round(SHARED * num_tokens)), num_tokens - round(SHARED * num_tokens)
    return f"{shared} {prompt_of(rng, own)}", f"{shared} {prompt_of(rng, own)}"


def from_store(live: Cluster, rng: random.Random, tokens: int) -> dict[str, Any]:
    first, second = pair_of(rng, tokens)
    cold = live.ttft(first)
    live.settle((cold["prompt_tokens"] - 1) // live.route(first)["block_tokens"], first)
    live.http.post(f"{live.url}/flush_cache").raise_for_status()
    return {"computed": cold, "known": live.ttft(second)}


def from_peer(live: Cluster, rng: random.Random, tokens: int) -> dict[str, Any]:
    first, second = pair_of(rng, tokens)
    one, other = live.prefill_workers(2)
    return {"computed": live.ttft(first, one), "known": live.ttft(second, other)}


def throughput(live: Cluster, rng: random.Random) -> float:
    """Tokens a second, prompts and answers, of 16 prompts of 512 tokens with 32 new ones."""
    prompts = [prompt_of(rng, 512) for _ in range(16)]
    start_s = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda prompt: live.ttft(prompt, num_new=32), prompts))
    assert all(each["cached_tokens"] == 0 for each in done), "the prompts were to share nothing"
    return sum(each["prompt_tokens"] + 32 for each in done) / (time.perf_counter() - start_s)


def reuse_rows(model: str, what: str, rounds: int, tokens: int, rng: random.Random) -> list[dict[str, Any]]:
    flags = ("--prefill", "0", "--decode", "0") if what == "store" else ("--prefill", "2", "--decode", "1")
    measured = from_store if what == "store" else from_peer
    rows = []
    with cluster(model, *flags, store=what == "store") as live:
        measured(live, rng, tokens)  # the first requests of a process pay for what is allocated once
        for number in range(rounds):
            row = measured(live, rng, tokens)
            rows.append({"what": what, "round": number, "load_average": os.getloadavg()[0]} | row)
    return rows


def throughput_rows(model: str, rounds: int, rng: random.Random) -> list[dict[str, Any]]:
    rows = []
    for number in range(rounds):
        for case, flags in {
            "on": ("--prefill", "1", "--decode", "1"),
            "off": ("--prefill", "0", "--decode", "0"),
        }.items():
            with cluster(model, *flags, store=case == "on") as live:
                live.ttft(prompt_of(rng, 600))
                rate = throughput(live, rng)
            row = {"what": "throughput", "case": case, "round": number, "tokens_per_s": rate}
            rows.append(row | {"load_average": os.getloadavg()[0]})
    return rows


def summary(rows: list[dict[str, Any]], table: Table) -> dict[str, float]:
    """Adds a line of medians for each kind to ``table``; returns the ratios, which the targets bound."""
    ratios = {}
    for what, target in {"store": "<= 0.2", "peer": "<= 0.2"}.items():
        mine = [row for row in rows if row["what"] == what]
        if mine:
            cold, known = (statistics.median(r[kind]["ttft_s"] for r in mine) for kind in ("computed", "known"))
            ratios[what] = known / cold
            table.add_row(f"TTFT, 90 % {what}", f"{cold:.3f} s", f"{known:.3f} s", f"{known / cold:.3f}", target)
    rates = [[r["tokens_per_s"] for r in rows if r.get("case") == case] for case in ("off", "on")]
    if all(rates):
        off, on = map(statistics.median, rates)
        ratios["throughput"] = on / off
        table.add_row("nothing shared", f"{off:.0f} tokens/s", f"{on:.0f} tokens/s", f"{on / off:.3f}", ">= 0.95")
    return ratios


@click.command()
@click.option("--what", default="store,peer,throughput", show_default=True)
@click.option("--model", default="smollm2", show_default=True)
@click.option("--tokens", default=2000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--name", default="reuse", show_default=True, help="the file in results/")
def main(what: str, model: str, tokens: int, rounds: int, seed: int, name: str) -> None:
    """Measure and keep results/NAME.json."""
    rng, rows = random.Random(seed), []
    for each in what.split(","):
        rows += (
            throughput_rows(model, rounds, rng)
            if each == "throughput"
            else reuse_rows(model, each, rounds, tokens, rng)
        )
    table = Table("", "computed / off", "known / on", "ratio", "target")
    ratios = summary(rows, table)
    Console().print(table)
    keep(name, rows, seed=seed, ratios=ratios)


if __name__ == "__main__":
    main()
