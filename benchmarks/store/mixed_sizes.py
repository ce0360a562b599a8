"""Large puts into a node full of small chunks: the length of the loop's steps, and what is evicted for what is needed.

    PYTHONPATH=src python -m benchmarks.store.mixed_sizes [--chunks 1000000] [--puts 50] [--tenants 3]

Only the books: there is no memory behind them, so the copies cost nothing here; a core copies 4 MiB, the most of one
step, in about a millisecond. The chunks were used in random order, so the oldest lie scattered.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time

from tanghulu.auth.tenants import Tenant
from tanghulu.eviction import make_policy
from tanghulu.eviction.base import Policy
from tanghulu.runtime.clock import SystemClock
from tanghulu.store.node.state.node_state import NodeState, make_node_state
from tanghulu.store.node.state.outcomes import CommittedBy, Reserved
from tanghulu.store.node.state.tenant_usage import Policies, TenantUsage
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.types import NewChunk, Pin
from tanghulu.transfer_engine.core.access import AccessTable
from tanghulu.types import ChunkKey

_SUM = Checksums(0, (1,))


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--small", type=int, default=64 << 10)
    parser.add_argument("--large", type=int, default=16 << 20)
    parser.add_argument("--puts", type=int, default=50)
    parser.add_argument("--tenants", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    state = _full_node(options.chunks, options.small, options.tenants, rng)
    steps_ms: list[float] = []
    evicted = state.chunks.counters.evicted_bytes
    for number in range(options.puts):
        _put(state, f"large/{number}", options.large, Pin.NONE, steps_ms)
    needed = options.puts * options.large
    steps_ms.sort()
    figures = {
        "chunks": options.chunks,
        "puts": options.puts,
        "steps": len(steps_ms),
        "step_ms_median": round(steps_ms[len(steps_ms) // 2], 2),
        "step_ms_p99": round(steps_ms[len(steps_ms) * 99 // 100], 2),
        "step_ms_max": round(steps_ms[-1], 2),
        "put_ms_mean": round(sum(steps_ms) / options.puts, 2),
        "evicted_ratio": round((state.chunks.counters.evicted_bytes - evicted) / needed, 3),
        "moved_ratio": round(state.chunks.space.moved_bytes / needed, 3),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    print(json.dumps(figures))


def _full_node(num_chunks: int, size_bytes: int, num_tenants: int, rng: random.Random) -> NodeState:
    clock, capacity = SystemClock(), num_chunks * size_bytes
    names = {f"t{number}": Tenant(f"t{number}") for number in range(num_tenants)}
    tenants = TenantUsage(lambda: names, capacity) if names else None

    def make() -> Policy:
        return make_policy("lru") if tenants is None else Policies.fair(tenants).memory("lru")

    state = make_node_state(capacity, AccessTable(clock, 1000, capacity), make, clock, tenants=tenants)
    scopes = [f"@{name}/" for name in names] or [""]
    keys = [ChunkKey(f"{scopes[number % len(scopes)]}{number}") for number in range(num_chunks)]
    for key in keys:
        _put(state, key, size_bytes, Pin.SOFT if rng.random() < 0.05 else Pin.NONE, [])
        state.reports.leader.take()
        state.reports.leader.done()
    rng.shuffle(keys)
    for key in keys:
        chunk = state.chunks.find(key)
        if chunk is not None:
            state.chunks.touch([chunk])
    return state


def _put(state: NodeState, key: str, size_bytes: int, pin: Pin, steps_ms: list[float]) -> None:
    new = NewChunk(ChunkKey(key), 1, size_bytes, _SUM, pin, None)
    begun_s = time.thread_time()
    outcome = state.reserve(new, None) or state.wait_for_room(new, None)
    state.chunks.end_call()
    steps_ms.append((time.thread_time() - begun_s) * 1000)
    while not isinstance(outcome, Reserved):
        assert state.has_more_to_do, "nothing is leased, so there is room"
        begun_s = time.thread_time()
        served = state.admit_waiters()
        state.chunks.end_call()
        steps_ms.append((time.thread_time() - begun_s) * 1000)
        for _, late in served:
            assert isinstance(late, Reserved)
            outcome = late
    state.commit(outcome.chunk, _SUM, CommittedBy.NODE_UNAWAITED)
    state.chunks.end_call()


if __name__ == "__main__":
    main()
