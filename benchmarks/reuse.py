"""What a stored prefix is worth: TTFT of a long prompt computed, and loaded from the store, on a running `tanghulu up`.

Each round sends a prompt that nobody has sent (computed), waits until its chunks are stored, drops the workers' own
caches, and sends it again (loaded). Medians over the rounds; every round is kept.

    tanghulu up &  python benchmarks/reuse.py --rounds 5
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
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


def prompt_of(rng: random.Random, num_tokens: int) -> str:
    """Words that are one token each, so that the prompt has about ``num_tokens``."""
    return " ".join(rng.choice(WORDS) for _ in range(num_tokens))


def ttft(http: httpx.Client, url: str, prompt: str) -> dict[str, Any]:
    """Stream a completion of 4 tokens; seconds to the first text, and the usage."""
    model = http.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    start_s, first_s, usage = time.perf_counter(), 0.0, {}
    with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                if chunk["choices"] and not first_s:
                    first_s = time.perf_counter() - start_s
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"ttft_s": first_s, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}


def settle(http: httpx.Client, url: str, cached_at_least: int, prompt: str) -> None:
    """Wait until /route sees the prompt's blocks in the store."""
    for _ in range(500):
        route = http.post(f"{url}/route", json={"prompt": prompt}).json()
        if route["hit_blocks"]["store"] * route["block_tokens"] >= cached_at_least:
            return
        time.sleep(0.02)


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True)
@click.option("--tokens", default=2000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(url: str, tokens: int, rounds: int, seed: int) -> None:
    """Measure and keep results/reuse.json."""
    rng, rows = random.Random(seed), []
    with httpx.Client(timeout=300, trust_env=False) as http:
        ttft(http, url, prompt_of(rng, tokens))  # the first request of a process pays for what is allocated once
        for number in range(rounds):
            prompt = prompt_of(rng, tokens)
            cold = ttft(http, url, prompt)
            settle(http, url, (cold["prompt_tokens"] - 1) // 64 * 64, prompt)
            http.post(f"{url}/flush_cache").raise_for_status()
            warm = ttft(http, url, prompt)
            rows.append({"round": number, "computed": cold, "loaded": warm, "load_average": os.getloadavg()[0]})
    cold_s = statistics.median(r["computed"]["ttft_s"] for r in rows)
    warm_s = statistics.median(r["loaded"]["ttft_s"] for r in rows)
    table = Table("prompt tokens", "computed", "loaded", "ratio")
    table.add_row(str(tokens), f"{cold_s * 1e3:.0f} ms", f"{warm_s * 1e3:.0f} ms", f"{cold_s / warm_s:.1f}")
    Console().print(table)
    keep("reuse", rows, seed=seed, median_computed_s=cold_s, median_loaded_s=warm_s, ratio=cold_s / warm_s)


if __name__ == "__main__":
    main()
