"""How much of the prompts live mock workers find in their caches, by routing policy, with Dynamo in the same run.

Groups of prompts that share nine tenths come in random order from a few clients at once; the groups' prefixes together
fill nine tenths of two caches, so a policy that sends a group now here, now there holds it twice and finds little. The
store is off: what counts is where requests go and what the workers' caches keep. Every run starts from empty caches.

    .venv/bin/python -m benchmarks.conductor.live_routing [--policies ttft-min,round-robin] [--dynamo VENV] [--seed 0]
    .venv/bin/python -m benchmarks.conductor.live_routing --workers 4 --groups 64 --concurrency 16 --requests 800

``--dynamo`` is a virtual environment with ai-dynamo; its frontend (KV router, default settings) and as many of its
mockers then serve the same requests in the same run, with caches of the same size.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.common.report import keep
from benchmarks.conductor.live_cluster import Served, dynamo_cluster, tanghulu_cluster

BLOCK_TOKENS = 64
VOCAB = 200  # of the byte-level tokenizer that both serve; special tokens stay out


@dataclass(frozen=True)
class Load:
    """The requests: token ids of each, in order."""

    prompts: list[list[int]]


def make_load(args: argparse.Namespace) -> Load:
    draw = random.Random(args.seed)
    shared = int(args.tokens * args.shared) // BLOCK_TOKENS * BLOCK_TOKENS
    groups = [draw.choices(range(VOCAB), k=shared) for _ in range(args.groups)]
    tail = args.tokens - shared
    return Load([draw.choice(groups) + draw.choices(range(VOCAB), k=tail) for _ in range(args.requests)])


async def send_all(served: Served, load: Load, args: argparse.Namespace) -> dict[str, float]:
    """Every prompt once, ``args.concurrency`` at a time; what the usage figures and the clock say."""
    waiting, frontends = iter(load.prompts), itertools.cycle(served.urls)
    cached = total = 0
    ttfts: list[float] = []

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal cached, total
        for prompt in waiting:
            body = {"model": served.model, "prompt": prompt, "max_tokens": args.output_tokens, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            started, usage = time.perf_counter(), {}
            async with http.stream("POST", f"{next(frontends)}/v1/completions", json=body) as answer:
                assert answer.status_code == 200, (await answer.aread())[:500]
                is_first = True
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        if is_first:
                            ttfts.append(time.perf_counter() - started)
                            is_first = False
                        usage = json.loads(line[6:]).get("usage") or usage
            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            total += usage["prompt_tokens"]

    started = time.perf_counter()
    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(args.concurrency)))
    ttfts.sort()
    return {
        "cached_share": round(cached / total, 4),
        "mean_s": round(sum(ttfts) / len(ttfts), 4),
        "p99_s": round(ttfts[int(0.99 * len(ttfts))], 4),
        "seconds": round(time.perf_counter() - started, 2),
    }


async def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    load = make_load(args)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for policy in filter(None, args.policies.split(",")):
            (Path(folder) / policy).mkdir()
            own = Path(folder) / policy
            async with tanghulu_cluster(own, policy, args.blocks, args.conductors, num_workers=args.workers) as served:
                results[policy] = await send_all(served, load, args)
            print(policy, results[policy], flush=True)
        if args.dynamo:
            own = Path(folder) / "dynamo-itself"
            async with dynamo_cluster(own, args.dynamo, args.blocks, num_workers=args.workers) as served:
                results["dynamo-itself"] = await send_all(served, load, args)
            print("dynamo-itself", results["dynamo-itself"], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="ttft-min,dynamo,linear,round-robin")
    parser.add_argument("--dynamo", type=Path, help="a virtual environment with ai-dynamo")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--conductors", type=int, default=1, help="requests alternate between so many")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shared", type=float, default=0.9)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results = asyncio.run(measure(args))
    keep(
        f"live_routing_{args.workers}",
        [{"router": name} | figures for name, figures in results.items()],
        seed=args.seed,
    )


if __name__ == "__main__":
    main()
