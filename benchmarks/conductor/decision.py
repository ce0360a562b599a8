"""A whole routing decision: hash the prompt's blocks, match them, show the workers to the policy, let it choose.

    python -m benchmarks.conductor.decision [--policy NAME] [--profile]

64 prefill and 64 decode workers, a prefix index with 200,000 blocks. *new*: 131,072 tokens that nobody has seen behind
a system prompt of 2,048 that 16 workers hold. *extends*: a session of 8,192 tokens that came through here before, and
that one worker holds, goes on with 256 more. Before each decision eight workers report another load. Every sample is
another prompt. The stages are timed one behind the other: hash (TokenSequence from a uint32 buffer, with the
conductor's cache of hashes), match (CacheMirror.hits), views (a WorkerView a worker, as routing makes them), choose
(the policy).
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.common import report
from tanghulu.conductor.index.events import CacheMirror
from tanghulu.conductor.index.hash_cache import HashCache
from tanghulu.conductor.index.prefix_index import Stored
from tanghulu.conductor.routing.policies.base import RequestView
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES, make_policy
from tanghulu.conductor.routing.worker_state import LoadTracker
from tanghulu.conductor.routing.worker_views import WorkerViews
from tanghulu.hashing import Tokens, TokenSequence, root_hash
from tanghulu.runtime import garbage
from tanghulu.session.load import WorkerLoad
from tanghulu.types import BlockHash, Fingerprint, InstanceId, Place, Role

BLOCK_TOKENS = 64
BLOCK_BYTES = 2 << 20
NEW_TOKENS, SYSTEM_TOKENS, SESSION_TOKENS, MORE_TOKENS = 131_072, 2048, 8192, 256
STAGES = ("hash", "match", "views", "choose")
ROOT = root_hash(Fingerprint(b"f" * 16))


@dataclass(frozen=True)
class Member:
    """A registered worker without its process."""

    id: InstanceId
    role: Role
    load: LoadTracker
    place: Place = Place()


class Scene:
    """Workers, index and prompts."""

    def __init__(self, policy: str, num_workers: int, seed: int) -> None:
        self._tokens = np.random.default_rng(seed)
        self._chance = random.Random(seed)
        self._policy = make_policy(policy)
        self._mirror = CacheMirror()
        names = [(f"{role.value}-{n:03}", role) for role in (Role.PREFILL, Role.DECODE) for n in range(num_workers)]
        self._workers = [Member(InstanceId(name), role, self._load()) for name, role in names]
        self._worker_views = WorkerViews(self._workers)
        self._hashes = HashCache()
        self._system = self._random_tokens(SYSTEM_TOKENS)
        for worker in self._workers[:16]:
            self._hold(worker.id, self._system)
        while self._mirror.workers.num_blocks < 200_000:
            self._hold(self._chance.choice(self._workers).id, self._random_tokens(512 * BLOCK_TOKENS))

    def new(self) -> Tokens:
        """A long prompt of which the system prompt alone is known."""
        return np.concatenate([self._system, self._random_tokens(NEW_TOKENS - SYSTEM_TOKENS)])

    def extends(self) -> Tokens:
        """The next turn of a session that one worker holds."""
        session = self._random_tokens(SESSION_TOKENS)
        self._hold(self._chance.choice(self._workers).id, session)
        return np.concatenate([session, self._random_tokens(MORE_TOKENS)])

    def decide(self, tokens: Tokens) -> list[float]:
        """Seconds of each stage."""
        for worker in self._chance.sample(self._workers, 8):
            worker.load.report(self._report())
        times = [time.perf_counter()]
        sequence = TokenSequence(ROOT, BLOCK_TOKENS, tokens, chain=self._hashes.chain)
        times.append(time.perf_counter())
        hits = self._mirror.hits(sequence.block_hashes)
        times.append(time.perf_counter())
        request = RequestView(len(sequence), BLOCK_TOKENS, BLOCK_BYTES, hits.store)
        shown = self._worker_views.views(hits.workers, {})
        times.append(time.perf_counter())
        decision = self._policy.choose(request, shown)
        times.append(time.perf_counter())
        assert decision is not None
        return [after - before for before, after in itertools.pairwise(times)]

    def _random_tokens(self, num: int) -> Tokens:
        return self._tokens.integers(0, 150_000, num, dtype=np.uint32)

    def _hold(self, worker: InstanceId, tokens: Tokens) -> None:
        """``worker`` computed a prompt that came through here: its hashes were made then."""
        sequence = TokenSequence(ROOT, BLOCK_TOKENS, tokens, chain=self._hashes.chain)
        self._mirror.workers.apply(Stored(worker, [BlockHash(bytes([*h])) for h in sequence.block_hashes]))

    def _load(self) -> LoadTracker:
        tracker = LoadTracker()
        tracker.report(self._report())
        return tracker

    def _report(self) -> WorkerLoad:
        chance = self._chance
        return WorkerLoad(
            num_running=chance.randrange(32),
            num_waiting=chance.randrange(4),
            prefill_tokens_waiting=chance.randrange(20_000),
            blocks_free=chance.randrange(8192),
            blocks_total=8192,
            prefill_tokens_per_s=chance.choice((9_800.0, 10_000.0, 10_300.0)),
            decode_step_s=0.02,
            store_bytes_per_s=2e9,
        )


def measure(scene: Scene, kind: str, make: Callable[[], Tokens], num: int) -> dict[str, object]:
    """Percentiles over ``num`` decisions, and the median of each stage."""
    samples = []
    for _ in range(num):
        prompt = make()
        samples.append(scene.decide(prompt))
    wholes = [1e6 * sum(sample) for sample in samples]
    row: dict[str, object] = {"case": kind, "decisions": num, "p50_us": statistics.median(wholes)}
    row["p99_us"] = statistics.quantiles(wholes, n=100)[98]
    for name, column in zip(STAGES, zip(*samples, strict=True), strict=True):
        row[f"{name}_p50_us"] = 1e6 * statistics.median(column)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICY_NAMES, default="ttft-min")
    parser.add_argument("--workers", type=int, default=64, help="of each role")
    parser.add_argument("--decisions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="show where the time of extending decisions goes")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    load_before = os.getloadavg()
    scene = Scene(args.policy, args.workers, args.seed)
    if args.profile:
        prompts = [scene.extends() for _ in range(args.decisions)]
        with cProfile.Profile() as profile:
            for prompt in prompts:
                scene.decide(prompt)
        pstats.Stats(profile).sort_stats("tottime").print_stats(14)
        return
    garbage.begin()  # as a conductor does
    rows = [
        measure(scene, kind, make, args.decisions) for kind, make in (("new", scene.new), ("extends", scene.extends))
    ]
    for row in rows:
        print({name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()})
    if args.keep:
        print(report.keep("decision", rows, seed=args.seed, load_before=load_before, load_after=os.getloadavg()))


if __name__ == "__main__":
    main()
