"""Prompts in groups that share nine tenths, two workers whose caches the shared parts fill to nine tenths.

In virtual time with the real dispatcher, policy, index, scheduler and block pool; the same with processes is
benchmarks/conductor/live_routing.py. Were every prefix computed once, 0.81 of the tokens would be cached here.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.conductor.virtual_workers import BLOCK_TOKENS, WIRE_S, VirtualCluster

#: Seconds that the conductor takes for a prompt; prompts come one behind the other.
CONDUCTOR_S = 0.02
TOKENS, SHARED, NUM_GROUPS, NUM_REQUESTS, CONCURRENCY, OUTPUT = 2048, 0.9, 32, 400, 8, 8
#: For each worker: the shared parts fill nine tenths, as they do with prompts of 8,192 tokens and 2,048 blocks.
NUM_BLOCKS = 512


def cached_share(policy: str, seed: int) -> tuple[float, int]:
    """(share of the prompt tokens that were cached, hand-overs)."""
    draw = random.Random(seed)
    num_shared = int(TOKENS * SHARED) // BLOCK_TOKENS * BLOCK_TOKENS
    groups = [draw.choices(range(200), k=num_shared) for _ in range(NUM_GROUPS)]
    tails = (draw.choices(range(200), k=TOKENS - num_shared) for _ in range(NUM_REQUESTS))
    prompts = iter([np.array(draw.choice(groups) + tail, dtype=np.uint32) for tail in tails])
    cluster, cached, free_s = VirtualCluster(policy, 2, NUM_BLOCKS), [], 0.0

    def ask() -> None:
        nonlocal free_s
        prompt = next(prompts, None)
        if prompt is not None:
            free_s = max(free_s, cluster.time.now_s()) + CONDUCTOR_S
            number = len(cached) + 1000 * round(1e6 * free_s)
            cluster.time.after(free_s - cluster.time.now_s(), lambda: cluster.ask(number, prompt, OUTPUT, ended))

    def ended(num_cached: int) -> None:
        cached.append(num_cached)
        ask()

    for _ in range(CONCURRENCY):
        cluster.time.after(WIRE_S, ask)
    cluster.time.run()
    cluster.check()
    assert len(cached) == NUM_REQUESTS
    return sum(cached) / (TOKENS * NUM_REQUESTS), sum(worker.num_hand_overs for worker in cluster.workers)


@pytest.mark.slow
async def test_the_default_keeps_groups_apart_and_in_the_cache():
    runs = [cached_share("ttft-min", seed) for seed in range(3)]
    shares = [share for share, _ in runs]
    assert min(shares) > 0.73, shares
    assert sum(num_hand_overs for _, num_hand_overs in runs) < 10, "a larger batch costs less than a copy of the prefix"
    assert cached_share("round-robin", 0)[0] < 0.68
