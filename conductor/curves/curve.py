"""The hit-rate curve of one model: how many prompt tokens would be cached at 0.1 to 10 times the current memory.

Blocks are sampled by their names (SHARDS, Waldspurger et al., FAST'15): a name belongs to the sample if it is below a
threshold. Every size of cache is then played with the sampled blocks and as small a share of the memory.

*Prefixes.* A block is a hit only if all blocks before it are. A sample that kept whole prefix trees would hang on
whether it holds the few large ones: one system prompt may be half of all tokens. Single blocks are sampled instead,
with those of their ancestors that are in the sample. This loses nothing for LRU used tail first and for the optimum:
both keep a prefix longer than its continuation, so that a block's own fate is that of its chain. A policy that breaks
chains evicts blocks of one request together, so the sampled ancestors stand for the others.

*Misses, not hits, are scaled up*: tokens cached = all tokens - tokens of sampled misses / rate. The blocks of a popular
prefix hit at almost every size, so it does not matter whether they are in the sample.

*LRU* comes from stack distances, at all sizes at once, and has the largest sample. Each size of another policy has a
cache in miniature with a smaller sample (about MINI_BLOCKS blocks of capacity), and only its difference from LRU on the
same uses is taken. So is that of *the optimum*, computed over the latest uses when the curve is requested.

The rate begins at 1 and falls when the bounds of memory or work demand it. Each use is weighed by the rate of its time.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from tanghulu.conductor.curves.caches import Miniature, optimal_hits
from tanghulu.conductor.curves.distances import StackDistances
from tanghulu.eviction import make_policy
from tanghulu.types import ChunkKey

Names = npt.NDArray[np.uint64]

#: Sizes of the curve, as multiples of the current memory: four for each factor of ten.
SIZES: Final = tuple(round(10 ** (step / 4), 3) for step in range(-4, 5))
LRU: Final = "lru"
OPTIMUM: Final = "optimum"
#: Tenants of a model with a curve of their own; further ones share one.
MAX_TENANTS: Final = 32
OTHERS: Final = "(others)"
_WHOLE: Final = 1 << 64
#: Bins of distances for each doubling.
_BINS: Final = 128
_NUM_BINS: Final = _BINS * 32
#: Requests between two looks at the work that the sample makes.
_WORK_REQUESTS: Final = 64
_BLOCK_BYTES: Final = 220
_MINI_BYTES: Final = 1600
_USE_BYTES: Final = 24
#: Share of the blocks of which the latest uses are kept in any case.
_LEAST_RATE: Final = 1 / 64


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one model's curve, in blocks: of the LRU sample, of a miniature, and in uses of the latest ones.

    ``uses_per_request``: mean number of sampled blocks of a request; a miniature gets at most ``mini_share`` of them.
    """

    stack_blocks: int
    mini_blocks: int
    recent_uses: int
    uses_per_request: float = math.inf
    mini_share: float = 1.0

    @classmethod
    def of_bytes(
        cls,
        num_bytes: float,
        uses_per_request: float = math.inf,
        most_recent: int = 1 << 40,
        mini_share: float = 1.0,
    ) -> Bounds:
        """Divide ``num_bytes`` of memory: a third for each part."""
        third = num_bytes / 3
        return cls(
            max(256, int(third / _BLOCK_BYTES)),
            max(64, int(third / _MINI_BYTES / len(SIZES))),
            max(1024, min(most_recent, int(third / _USE_BYTES))),
            uses_per_request,
            mini_share,
        )


@dataclass(slots=True)
class _Tally:
    """Tokens of one tenant: all, those of blocks without a name, and of uses by the distance that LRU must cover.

    ``gains[i]``: tokens that the policy has cached at size i beyond LRU. ``pending``: tokens of requests since the last
    one with a block in the sample.
    """

    num_requests: float = 0.0
    tokens: float = 0.0
    unnamed: float = 0.0
    pending: float = 0.0
    gains: list[float] = field(default_factory=lambda: [0.0] * len(SIZES))
    bins: array[float] = field(default_factory=lambda: array("d", bytes(8 * (_NUM_BINS + 1))))

    def cached(self, num_blocks: float) -> float:
        """Return the share of tokens that LRU has cached with that many blocks."""
        if not self.tokens:
            return 0.0
        place = min(_NUM_BINS, _BINS * math.log2(max(1.0, num_blocks + 0.5)))
        whole = int(place)
        missed = self.unnamed + math.fsum(self.bins[whole:]) - (place - whole) * self.bins[whole]
        return min(1.0, max(0.0, 1 - missed / self.tokens))

    def add(self, other: _Tally) -> None:
        self.num_requests += other.num_requests
        self.tokens += other.tokens
        self.unnamed += other.unnamed
        self.gains = [a + b for a, b in zip(self.gains, other.gains, strict=True)]
        self.bins = array("d", (np.frombuffer(self.bins) + np.frombuffer(other.bins)).tobytes())

    def fade(self, kept: float) -> None:
        self.num_requests, self.tokens, self.unnamed = (
            kept * x for x in (self.num_requests, self.tokens, self.unnamed)
        )
        self.gains = [kept * gain for gain in self.gains]
        self.bins = array("d", (kept * np.frombuffer(self.bins)).tobytes())


@dataclass(frozen=True, slots=True)
class Curve:
    """Shares of prompt tokens cached at ``SIZES`` times ``memory_blocks``, by policy."""

    num_requests: float
    prompt_tokens: float
    shares: dict[str, list[float]]


class _Recent:
    """The latest uses of a sample of the blocks, oldest first, for the optimum.

    A request has its tenant's tokens since its last one with a block in the sample. Where there are too many uses, the
    sample is halved down to ``_LEAST_RATE``, as many requests are worth more than many blocks; then the oldest go.
    """

    def __init__(self) -> None:
        self.rate = 1.0
        self.blocks = array("Q")
        self.tokens = array("f")
        self.needed = array("d")
        self.starts = array("Q")
        self.tenants = array("H")
        self.all_tokens = array("d")
        self.is_whole = True

    def add(
        self, tenant: int, all_tokens: float, keys: Sequence[int], tokens: Sequence[float], needed: Sequence[float]
    ) -> None:
        self.starts.append(len(self.blocks))
        self.tenants.append(tenant)
        self.all_tokens.append(all_tokens)
        self.blocks.extend(keys)
        self.tokens.extend(tokens)
        self.needed.extend(needed)

    def keep(self, most: int, rate: float) -> None:
        """Have at most a quarter more uses than ``most``, of blocks that are sampled at ``rate`` before."""
        if len(self.blocks) <= most * 1.25:
            return
        if min(rate, self.rate) > _LEAST_RATE:
            self._thin(min(rate, self.rate) / 2)
            return
        first = next(i for i, start in enumerate(self.starts) if start >= len(self.blocks) - most)
        start = self.starts[first]
        self.starts = array("Q", [each - start for each in self.starts[first:]])
        self.tenants, self.all_tokens = self.tenants[first:], self.all_tokens[first:]
        self.blocks, self.tokens, self.needed = self.blocks[start:], self.tokens[start:], self.needed[start:]
        self.is_whole = False

    def _thin(self, rate: float) -> None:
        """Keep the uses of blocks below ``rate`` alone."""
        old, self.rate = _Recent(), rate
        old.__dict__, self.__dict__ = self.__dict__, old.__dict__ | {"rate": rate, "is_whole": self.is_whole}
        limit, pending = int(rate * _WHOLE), dict[int, float]()
        for row, (start, end) in enumerate(pairwise([*old.starts, len(old.blocks)])):
            tenant = old.tenants[row]
            tokens = pending.pop(tenant, 0.0) + old.all_tokens[row]
            chosen = [at for at in range(start, end) if old.blocks[at] < limit]
            if chosen:
                blocks, needed = [old.blocks[at] for at in chosen], [old.needed[at] for at in chosen]
                self.add(tenant, tokens, blocks, [old.tokens[at] for at in chosen], needed)
            else:
                pending[tenant] = tokens


class ModelCurve:
    """Curves of a model's requests, of each tenant and of all; ``policy`` is the eviction policy in use.

    Pure: not safe for several threads at once.
    """

    def __init__(self, policy: str, memory_blocks: float, bounds: Bounds) -> None:
        self.policy = policy
        self.rate = 1.0
        self._bounds = bounds
        self._memory = memory_blocks
        self._stack = StackDistances()
        self._tallies: dict[str, _Tally] = {}
        self._recent = _Recent()
        self._minis: list[tuple[float, Miniature] | None] = [None] * len(SIZES)
        self._num_requests = self._num_uses = 0
        self.resize(memory_blocks, bounds)

    @property
    def memory_blocks(self) -> float:
        """The current memory, in blocks; 0 while it is unknown."""
        return self._memory

    def resize(self, memory_blocks: float, bounds: Bounds | None = None) -> None:
        """Change the current memory or the bounds."""
        self._memory, self._bounds = memory_blocks, bounds or self._bounds
        self._sizes = [max(1, round(size * memory_blocks)) if memory_blocks else 0 for size in SIZES]
        if self.policy == LRU or not memory_blocks:
            return
        for at, blocks in enumerate(self._sizes):
            rate = min(self.rate * self._bounds.mini_share, self._bounds.mini_blocks / blocks)
            self._minis[at] = self._mini(self._minis[at], rate, max(1, round(blocks * rate)))

    def _mini(self, known: tuple[float, Miniature] | None, rate: float, capacity: int) -> tuple[float, Miniature]:
        if known is None or abs(known[1].capacity - capacity) > 0.1 * capacity:
            policy = make_policy(self.policy)
            policy.sampled(rate)
            return rate, Miniature(policy, capacity)
        _, mini = known
        for block in [each for each in mini.policy.victims() if int(each) >= rate * _WHOLE]:
            mini.policy.remove(block, evicted=False)
        mini.resize(capacity)
        return rate, mini

    def add(self, tenant: str, names: Names, num_tokens: int, num_named: int, block_tokens: int) -> None:
        """Count a request of ``num_tokens`` prompt tokens.

        ``names`` are evenly spread numbers of its blocks: ``num_named`` of the prompt, then those filled by the answer.
        Its last token is always computed.
        """
        tally = self._tally(tenant)
        most = num_tokens - 1
        tally.num_requests += 1
        tally.tokens += num_tokens
        tally.pending += num_tokens
        tally.unnamed += num_tokens - min(most, num_named * block_tokens)
        places = np.flatnonzero(names < np.uint64(min(_WHOLE - 1, int(self.rate * _WHOLE))))
        self._num_requests += 1
        if len(places):
            self._num_uses += len(places)
            ends = np.minimum(places * block_tokens + block_tokens, most)
            tokens = np.where(places < num_named, np.maximum(0, ends - places * block_tokens), 0)
            self._use(tally, self._index(tenant), names[places].tolist(), tokens.tolist())
        self._lower_rate()

    def _use(self, tally: _Tally, tenant: int, keys: list[int], tokens: list[int]) -> None:
        scale, needed, most = 1 / self.rate, list[float](), 0.0
        distance = self._stack.distance
        for key, num_tokens in zip(keys, tokens, strict=True):
            found = distance(key)
            most = math.inf if found is None else max(most, (found + 1) * scale)
            needed.append(most)
            tally.bins[min(_NUM_BINS, int(_BINS * math.log2(most))) if most < math.inf else _NUM_BINS] += (
                num_tokens * scale
            )
        for key in reversed(keys):
            self._stack.use(key)
        limit = self._recent.rate * _WHOLE
        if chosen := [use for use in zip(keys, tokens, needed, strict=True) if use[0] < limit]:
            self._recent.add(tenant, tally.pending, *zip(*chosen, strict=True))
            tally.pending = 0.0
        least = min(keys)
        for at, known in enumerate(self._minis):
            if known is not None and least < known[0] * _WHOLE:
                tally.gains[at] += self._gain(*known, self._sizes[at], keys, tokens, needed)

    def _gain(
        self, rate: float, mini: Miniature, size: float, keys: list[int], tokens: list[int], needed: list[float]
    ) -> float:
        """Return the tokens that the miniature has cached beyond LRU, scaled up."""
        limit = rate * _WHOLE
        chosen = [i for i, key in enumerate(keys) if key < limit]
        hits = mini.request(cast(list[ChunkKey], [keys[i] for i in chosen]))
        gained = sum(tokens[i] for i in chosen[:hits]) - sum(tokens[i] for i in chosen if needed[i] <= size)
        return gained / rate

    def _tally(self, tenant: str) -> _Tally:
        if tenant not in self._tallies and len(self._tallies) >= MAX_TENANTS:
            tenant = OTHERS
        return self._tallies.setdefault(tenant, _Tally())

    def _index(self, tenant: str) -> int:
        names = list(self._tallies)
        return names.index(tenant) if tenant in self._tallies else names.index(OTHERS)

    def _lower_rate(self) -> None:
        """Lower the rate if the sample is larger, or makes more work, than allowed."""
        bounds, rate = self._bounds, self.rate
        most = min(bounds.stack_blocks, 1.05 * self._sizes[-1] * rate) if self._memory else bounds.stack_blocks
        if len(self._stack) > 1.25 * most + 64:
            self._stack.keep(int(most) + 64) if most < bounds.stack_blocks else None
        if len(self._stack) > 1.25 * bounds.stack_blocks:
            rate *= 0.8
        allowed = bounds.uses_per_request * _WORK_REQUESTS
        if self._num_requests >= _WORK_REQUESTS or self._num_uses > 4 * allowed:
            if self._num_uses > bounds.uses_per_request * self._num_requests:
                rate *= max(0.1, bounds.uses_per_request * self._num_requests / self._num_uses)
            self._num_requests = self._num_uses = 0
        self._recent.keep(bounds.recent_uses, self.rate)
        if rate < self.rate:
            self.rate, limit = rate, rate * _WHOLE
            self._stack.keep(len(self._stack), lambda block: block < limit)
            self.resize(self._memory)

    def fade(self, kept: float) -> None:
        """Make everything counted so far weigh ``kept`` as much."""
        for tally in self._tallies.values():
            tally.fade(kept)

    def curves(self) -> dict[str, Curve]:
        """Return the curves of each tenant, and under "*" that of all requests; computes the optimum (seconds)."""
        whole = _Tally()
        for tally in self._tallies.values():
            whole.add(tally)
        gains = self._optimal_gains()
        found = {name: self._curve(tally, gains[at]) for at, (name, tally) in enumerate(self._tallies.items())}
        return {"*": self._curve(whole, gains[-1])} | found

    def _curve(self, tally: _Tally, optimal: npt.NDArray[np.float64]) -> Curve:
        lru = [tally.cached(size) for size in self._sizes]
        shares = {LRU: lru}
        if self.policy != LRU:
            gains = (gain / tally.tokens if tally.tokens else 0.0 for gain in tally.gains)
            shares[self.policy] = [_bounded(a + b) for a, b in zip(lru, gains, strict=True)]
        best = (_bounded(a + max(0.0, b)) for a, b in zip(lru, optimal, strict=True))
        shares[OPTIMUM] = list(accumulate(best, max))
        return Curve(tally.num_requests, tally.tokens, shares)

    def _optimal_gains(self) -> npt.NDArray[np.float64]:
        """Return the optimum's gain over LRU as a share of tokens: a row for each tenant, the last for all."""
        recent, num_tenants = self._recent, len(self._tallies)
        gains = np.zeros((num_tenants + 1, len(SIZES)))
        if not (self._memory and recent.blocks):
            return gains
        blocks = np.frombuffer(recent.blocks, np.uint64)
        tokens, needed = np.frombuffer(recent.tokens, np.float32), np.frombuffer(recent.needed, np.float64)
        owners = np.repeat(np.arange(len(recent.starts)), np.diff([*recent.starts, len(blocks)]))
        first = 0 if recent.is_whole else len(recent.starts) // 2  # the first half fills the cache
        seen = np.ones(len(blocks), bool)
        seen[np.unique(blocks, return_index=True)[1]] = False  # neither cache has what the latest uses do not show
        rows = np.frombuffer(recent.tenants, np.uint16)
        whole = np.bincount(rows[first:], recent.all_tokens[first:], num_tenants)
        whole = np.maximum(1e-9, np.append(whole, whole.sum()))
        for at, capacity in enumerate(self._sizes):
            rate = min(self.rate, recent.rate, max(1, self._bounds.recent_uses >> 4) / capacity)
            chosen = blocks < np.uint64(min(_WHOLE - 1, int(rate * _WHOLE)))
            hit = _hits(blocks[chosen], owners[chosen], max(1, round(capacity * rate)))
            gained = hit - ((needed[chosen] <= capacity) & seen[chosen])
            gained *= tokens[chosen] * (owners[chosen] >= first) / rate
            found = np.bincount(rows[owners[chosen]], gained, num_tenants)
            gains[:, at] = np.append(found, found.sum()) / whole
        return gains

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self._stack.check()
        for known in self._minis:
            if known is not None:
                known[1].policy.check()
                assert len(known[1].policy) <= known[1].capacity
        assert 0 < self.rate <= 1


def _hits(blocks: Names, owners: npt.NDArray[np.intp], capacity: int) -> npt.NDArray[np.float64]:
    """Return 1 for each use that the optimum has cached, else 0; ``owners`` numbers the requests of the uses."""
    firsts = np.flatnonzero(np.diff(owners, prepend=-1))
    chains = [chain.tolist() for chain in np.split(blocks, firsts[1:])] if len(blocks) else []
    hits = np.repeat(optimal_hits(chains, capacity), [len(chain) for chain in chains])
    places = np.arange(len(blocks)) - np.repeat(firsts, [len(chain) for chain in chains])
    return (places < hits).astype(np.float64)


def _bounded(share: float) -> float:
    return min(1.0, max(0.0, float(share)))


def spread(ids: Sequence[int]) -> Names:
    """Return evenly spread names for any whole numbers (the mixing function of splitmix64)."""
    mixed = np.array([each & (_WHOLE - 1) for each in ids], dtype=np.uint64)
    mixed = (mixed + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(_WHOLE - 1)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
