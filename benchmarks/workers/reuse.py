"""What a known prefix is worth: TTFT of a long prompt computed, and with 90 % of it in the store or in a peer's memory.

    python -m benchmarks.workers.reuse [--what store,peer,throughput] [--rounds 5]

It starts clusters of its own with `tanghulu up`. In each round of *store* and *peer* a prompt that nobody has sent is
computed, then another one that shares its first 90 % is sent: behind a flush of the workers' caches, so that the store
has it (store), or to another prefill worker, with no store (peer). *throughput*: prompts that share nothing, in the
clusters of CASES, one after the other in each round; tokens a second, prompt and answer, and what each
worker spent on them: CPU seconds, steps, tokens. With the mock engine workers do not take each other's cores: it takes
the time that a model would on a machine of its own, and moves as much KV. Medians over the rounds; every round is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.common.report import keep

# fmt: off
WORDS = [
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they",
    "at", "be", "this", "from", "have", "or", "by", "one", "had", "not", "but",
]
# fmt: on
READY_S = 120.0
#: What the mock engine keeps for a token: as much as SmolLM2 in float32.
KV_TOKEN_BYTES = 46_080
#: What is read from each process's metrics.
COUNTED = {
    "steps": "tanghulu_worker_step_seconds_count",
    "step_s": "tanghulu_worker_step_seconds_sum",
    "computed_tokens": "tanghulu_worker_computed_tokens_total",
    "store_bytes": "tanghulu_worker_store_bytes_total",
    "hand_overs": "tanghulu_conductor_hand_overs_total",
}
SHARED = 0.9
ONE = ("--prefill", "0", "--decode", "0")
TWO = (*ONE, "--workers", "2")
SPLIT = ("--prefill", "1", "--decode", "1")


@dataclass(frozen=True)
class Case:
    """A cluster: ``store`` with reuse of the store and of peers; ``threads`` of each worker, 0: one a core."""

    flags: tuple[str, ...]
    store: bool
    threads: int = 0
    beside: str = ""


@dataclass(frozen=True)
class Load:
    """``prompts`` of ``words`` (a token each, with SmolLM2) and ``new`` tokens each, ``at_a_time`` under way."""

    prompts: int
    words: int
    new: int
    at_a_time: int


#: *beside*: the case without store and hand-over that runs as many processes on as many cores.
CASES = {
    "one worker": Case(ONE, store=False),
    "one worker, store": Case(ONE, store=True, beside="one worker"),
    "two workers": Case(TWO, store=False, threads=1),
    "two workers, store and hand-over": Case(TWO, store=True, threads=1, beside="two workers"),
    "prefill and decode worker, store": Case(SPLIT, store=True, beside="two workers"),
}


class Cluster:
    """A running `tanghulu up` and a client of it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.http = httpx.Client(timeout=300, trust_env=False)
        self._folder = folder
        self.model = self.http.get(f"{url}/v1/models").json()["data"][0]["id"]

    def ttft(self, prompt: str, worker: str = "", num_new: int = 4, decode: str = "") -> dict[str, Any]:
        """Stream a completion, prefilled by ``worker`` and decoded by ``decode``; seconds to the first text, usage."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": num_new, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        if worker:
            body["routing"] = {"prefill_worker": worker} | ({"decode_worker": decode} if decode else {})
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

    def workers(self, count: int, phase: str = "can_prefill") -> list[str]:
        """The ids of those that do ``phase``, as soon as there are so many: a cluster is ready with the first."""
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            ids = [worker["id"] for worker in self.route("x")["workers"] if worker[phase]]
            if len(ids) == count:
                return ids
            time.sleep(0.1)
        raise SystemExit(f"there are not {count} workers of which each {phase}")

    def entries(self) -> list[dict[str, Any]]:
        """Its processes."""
        found: list[dict[str, Any]] = json.loads((self._folder / "cluster.json").read_text())
        return found

    def spent(self) -> dict[str, dict[str, float]]:
        """Of each process so far: CPU seconds, and what its metrics count."""
        return {entry["name"]: {"cpu_s": _cpu_s(entry["pid"])} | _counted(entry) for entry in self.entries()}

    def settle(self, num_blocks: int, prompt: str) -> None:
        """Wait until /route sees so many of the prompt's blocks in the store."""
        for _ in range(1000):
            if self.route(prompt)["hit_blocks"]["store"] >= num_blocks:
                return
            time.sleep(0.02)
        raise SystemExit("the store did not take the prompt's blocks")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _counted(entry: dict[str, Any]) -> dict[str, float]:
    """The figures of COUNTED that the process has."""
    lines = httpx.get(f"http://{entry['metrics_address']}/metrics", trust_env=False).text.splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(found[metric]) for name, metric in COUNTED.items() if metric in found}


@contextlib.contextmanager
def cluster(model: str, *flags: str, store: bool = True, threads: int = 0) -> Iterator[Cluster]:
    """A ready cluster of its own; ended at the block's end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tanghulu", "up", "--port", "0", "--master-port", "0", "--model", model]
        command += ["--state-dir", folder, "--log-level", "warning", *flags]
        command += ["--debug", f"mock_kv_token_bytes={KV_TOKEN_BYTES}"]
        reuse = str(store).lower()
        environment = os.environ | {"TANGHULU_STORE": reuse, "TANGHULU_PEER_FETCH": reuse if threads else "true"}
        environment |= {"TANGHULU_THREADS": str(threads)}
        with (Path(folder) / "up.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield Cluster(_ready_url(process, Path(folder)), Path(folder))
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
    one, other = live.workers(2)
    return {"computed": live.ttft(first, one), "known": live.ttft(second, other)}


def throughput(live: Cluster, rng: random.Random, at: Sequence[str], load: Load) -> dict[str, Any]:
    """Tokens a second, prompts and answers, under ``load``; who spent what on them.

    The workers ``at`` take them in turn, each one whole; with none the conductor decides.
    """
    texts = [prompt_of(rng, load.words) for _ in range(load.prompts)]
    places = list(itertools.islice(itertools.cycle(at or [""]), load.prompts))
    before, start_s = live.spent(), time.perf_counter()
    with ThreadPoolExecutor(load.at_a_time) as pool:
        done = list(pool.map(lambda prompt, place: live.ttft(prompt, place, load.new, place), texts, places))
    seconds, after = time.perf_counter() - start_s, live.spent()
    assert all(each["cached_tokens"] == 0 for each in done), "the prompts were to share nothing"
    spent = {name: {key: value - before[name][key] for key, value in of.items()} for name, of in after.items()}
    num_tokens = sum(each["prompt_tokens"] + load.new for each in done)
    cpu_ms = 1e3 * sum(of["cpu_s"] for of in spent.values()) / num_tokens
    return {"tokens_per_s": num_tokens / seconds, "cpu_ms_per_token": cpu_ms, "spent": spent}


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


def _warmed(live: Cluster, case: Case, rng: random.Random, words: int) -> list[str]:
    """The workers that prefill, once each has served a prompt: what is allocated or learnt once is not measured."""
    ids = live.workers(2 if case.flags == TWO else 1)
    live.workers(len(ids), "can_decode")
    for worker in ids:
        live.ttft(prompt_of(rng, words), worker, num_new=24)
    return ids


def throughput_rows(
    model: tuple[str, str], rounds: int, rng: random.Random, cases: list[str], load: Load
) -> Iterator[dict[str, Any]]:
    for number in range(rounds):
        for name in cases:
            case = CASES[name]
            with cluster(*model, *case.flags, store=case.store, threads=case.threads) as live:
                ids = _warmed(live, case, rng, load.words)
                at = ids if case.flags == TWO and not case.store else []
                row = {"what": "throughput", "case": name, "round": number} | dataclasses.asdict(load)
                row |= throughput(live, rng, at, load)
            cpu_ms = row["cpu_ms_per_token"]
            Console().print(f"{name}: {row['tokens_per_s']:.0f} tokens/s, {cpu_ms:.2f} CPU ms a token", row["spent"])
            yield row | {"load_average": os.getloadavg()[0]}


def summary(rows: list[dict[str, Any]], table: Table) -> dict[str, float]:
    """Adds a line of medians for each kind to ``table``; returns the ratios, which the targets bound."""
    ratios = {}
    for what, target in {"store": "<= 0.2", "peer": "<= 0.2"}.items():
        mine = [row for row in rows if row["what"] == what]
        if mine:
            cold, known = (statistics.median(r[kind]["ttft_s"] for r in mine) for kind in ("computed", "known"))
            ratios[what] = known / cold
            table.add_row(f"TTFT, 90 % {what}", f"{cold:.3f} s", f"{known:.3f} s", f"{known / cold:.3f}", target)
    rates = {
        name: statistics.median(row["tokens_per_s"] for row in rows if row.get("case") == name)
        for name in CASES
        if any(row.get("case") == name for row in rows)
    }
    for name, rate in rates.items():
        for beside in {CASES[name].beside, "one worker"} & rates.keys() - {name}:
            ratios[f"{name} / {beside}"] = ratio = rate / rates[beside]
            cells = (f"{rates[beside]:.0f} tokens/s", f"{rate:.0f} tokens/s", f"{ratio:.3f}")
            table.add_row(f"{name} / {beside}", *cells, ">= 0.95" if beside == CASES[name].beside else "")
    return ratios


@click.command()
@click.option("--what", default="store,peer,throughput", show_default=True)
@click.option("--model", default="smollm2", show_default=True)
@click.option("--engine", type=click.Choice(["torch", "mock"]), default="torch", help="of throughput")
@click.option("--tokens", default=2000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--cases", default="|".join(CASES), show_default=True, help="of throughput; separated by |")
@click.option("--prompts", default=16, show_default=True, help="of a round of throughput")
@click.option("--words", default=512, show_default=True, help="of a prompt")
@click.option("--new", default=32, show_default=True, help="tokens of an answer")
@click.option("--at-a-time", default=4, show_default=True, help="requests under way")
@click.option("--seed", default=1, show_default=True)
@click.option("--name", default="reuse", show_default=True, help="the file in results/")
def main(
    *,
    what: str,
    model: str,
    engine: str,
    tokens: int,
    rounds: int,
    cases: str,
    prompts: int,
    words: int,
    new: int,
    at_a_time: int,
    seed: int,
    name: str,
) -> None:
    """Measure and keep results/NAME.json."""
    rng, rows = random.Random(seed), []
    for each in what.split(","):
        found = (
            throughput_rows(
                (model, f"--engine={engine}"), rounds, rng, cases.split("|"), Load(prompts, words, new, at_a_time)
            )
            if each == "throughput"
            else reuse_rows(model, each, rounds, tokens, rng)
        )
        for row in found:
            rows.append(row)
            table = Table("", "computed / off", "known / on", "ratio", "target")
            keep(name, rows, seed=seed, ratios=summary(rows, table))  # what is cut off keeps its rounds
    Console().print(table)


if __name__ == "__main__":
    main()
