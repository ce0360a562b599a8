"""The contract of a routing policy: views in, a decision out. No clock, no I/O, no randomness but a seeded one.

The same classes run live, in replay (virtual time) and in tests. The dispatcher builds the views: only workers that are
alive and serve the model; ``can_prefill`` and ``can_decode`` already say that with one kind alone alive it does both.

A policy looks at every worker for every request, so it computes plain floats; what people want to read (a Candidate a
worker, with its terms) is made when somebody asks a decision for its ``candidates``.

The cost of a hand-over, as a small pure formula that policies and replay share.

    hand-over = max(move - prefill * (1 - chunk / rest),  move of the last chunk)

KV goes to the decode worker while it is computed: behind the first chunk until the end of the last one the wire works
beside the prefill, and what is left then is at least the last chunk. So of the two the larger counts, not their sum. A
prompt of one chunk is moved behind its prefill. Example: a prompt of 8000 tokens that takes 0.864 s in chunks of 512,
whose KV takes 1 s: 0.864 * (1 - 512 / 8000) = 0.81 s of it are hidden and 0.19 s left; over a wire ten times as fast
512 / 8000 of 0.1 s.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct

from tanghulu.conductor.routing.links import LinkSpeeds
from tanghulu.session.load import DecodeProfile, PrefillProfile
from tanghulu.types import InstanceId, Place

#: Tokens that a worker prefills at a time: its default, as it does not tell.
ASSUMED_CHUNK_TOKENS = 512


def hidden_s(prefill_s: float, rest_tokens: int) -> float:
    """Seconds of a prefill of ``rest_tokens`` during which its KV moves on already."""
    return prefill_s * (1 - ASSUMED_CHUNK_TOKENS / rest_tokens) if rest_tokens > ASSUMED_CHUNK_TOKENS else 0.0


def hand_over_s(num_tokens: int, token_s: float, behind_s: float) -> float:
    """Seconds from the end of a prefill until the KV of ``num_tokens`` is there, of which each moves in ``token_s``.

    ``behind_s`` is what `hidden_s` says of the prefill.
    """
    left_s = num_tokens * token_s - behind_s
    last_s = min(num_tokens, ASSUMED_CHUNK_TOKENS) * token_s
    return left_s if left_s > last_s else last_s


#: Speed of a worker that has not measured its own yet.
ASSUMED_PREFILL_TOKENS_PER_S = 2000.0
ASSUMED_STORE_BYTES_PER_S = 1e9
ASSUMED_DECODE_STEP_S = 0.02
#: A sequence more in a batch slows its step by this share (attention and sampling; weights are read once anyway).
STEP_SHARE_OF_A_SEQUENCE = 1 / 16
#: And it adds at least as much as this many tokens of a prefill (measured: 4 on a CPU, 6 with an 8B model on a GPU).
PREFILL_TOKENS_OF_A_SEQUENCE = 4
#: Coming tokens over which a decode choice is judged, or the answer's if that is shorter.
JUDGED_TOKENS = 64
#: And by at least this share where what it costs was measured: equals are still told apart by their batches.
LEAST_SHARE_OF_A_SEQUENCE = 1 / 64
#: What one ``random()`` takes from its generator: two words of 32 bits (tested, as nothing promises it).
_DRAW_BITS = 64
#: Profiles are made once for each speed: workers measure a new one every few seconds, and are looked at all the time.
_profile_of_speed = functools.lru_cache(maxsize=4096)(PrefillProfile.of_speed)


@dataclass(slots=True)
class WorkerView:
    """A worker as routing sees it: its last report plus what was sent to it since. Speeds are 0 while unknown.

    Only the WorkerViews that keeps a view (worker_views.py) changes it, between two decisions.

    ``hit_blocks`` lead the prompt and are there; ``coming_blocks`` lead it and are there or being computed there for
    requests in front (0 where that is not tracked). ``active_blocks`` are used by requests under way, and
    ``active_hit_blocks`` of them are the request's own. ``queue_s`` is None where only tokens are known.
    ``peer_bytes_per_s`` is 0 where workers cannot fetch from each other; ``send_wait_s`` and ``receive_wait_s`` are
    how long its NIC is taken, or, below 0, has been idle. ``coming_requests`` of the ``num_requests`` are still
    prefilled elsewhere and will decode here; blocks are kept for them. ``context_tokens`` are attended to by requests
    under way (0 while unknown). ``max_num_seqs`` is the number of seats, requests in one step at most (0 if unknown).

    Made from these: ``match_blocks``, the leading blocks that a request sent here now will find when its turn comes;
    ``wait_s``, the estimated time until a new request's prefill would begin; ``cost``, the profile or what is assumed;
    ``batch_s``, the seconds that present sequences add to a new request's decoding over JUDGED_TOKENS; ``seat_s``, the
    wait for a seat in seconds for each token of a mean answer. (Of M seats one becomes free every answer / M; who is
    the k-th to wait waits k times that. Example: 34 requests in 32 seats, steps of 20 ms, answers of 256 tokens: the
    next is the third to wait, 3 / 32 * 0.02 * 256 = 0.48 s.)
    """

    id: InstanceId
    can_prefill: bool
    can_decode: bool
    queue_tokens: int = 0
    num_requests: int = 0
    blocks_free: int = 0
    blocks_total: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    store_bytes_per_s: float = 0.0
    hit_blocks: int = 0
    coming_blocks: int = 0
    active_blocks: int = 0
    active_hit_blocks: int = 0
    queue_s: float | None = None
    profile: PrefillProfile | None = None
    decode_profile: DecodeProfile | None = None
    peer_bytes_per_s: float = 0.0
    send_wait_s: float = 0.0
    receive_wait_s: float = 0.0
    place: Place = Place()
    coming_requests: int = 0
    context_tokens: int = 0
    max_num_seqs: int = 0
    match_blocks: int = field(init=False)
    wait_s: float = field(init=False)
    cost: PrefillProfile = field(init=False)
    batch_s: float = field(init=False)
    seat_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.found(self.hit_blocks, self.coming_blocks)
        self.derive()

    def found(self, hit_blocks: int, coming_blocks: int) -> None:
        """Set the leading blocks of the prompt that are there, and those that are there or coming."""
        self.hit_blocks, self.coming_blocks = hit_blocks, coming_blocks
        self.match_blocks = hit_blocks if hit_blocks > coming_blocks else coming_blocks

    def derive(self) -> None:
        """Compute the fields that are derived from load and speeds, after these were set."""
        profile = self.profile
        speed = self.prefill_tokens_per_s
        if not speed:
            speed = 1 / profile.token_s if profile is not None and profile.token_s else ASSUMED_PREFILL_TOKENS_PER_S
        queue_s = self.queue_s
        self.wait_s = self.queue_tokens / speed if queue_s is None else queue_s
        self.cost = profile or _profile_of_speed(speed)
        step_s = self.decode_step_s or ASSUMED_DECODE_STEP_S
        if self.decode_profile is None:
            sequence_s = max(STEP_SHARE_OF_A_SEQUENCE * step_s, PREFILL_TOKENS_OF_A_SEQUENCE * self.cost.token_s)
            self.batch_s = JUDGED_TOKENS * sequence_s * self.num_requests
        else:
            self.batch_s = JUDGED_TOKENS * self._measured_batch_s(step_s, self.decode_profile)
        seats = self.max_num_seqs
        self.seat_s = step_s * (self.num_requests + 1 - seats) / seats if 0 < seats <= self.num_requests else 0.0

    def _measured_batch_s(self, step_s: float, decode: DecodeProfile) -> float:
        """Seconds that the present sequences add to a step."""
        added_s = decode.sequence_s * self.num_requests + decode.token_s * self.context_tokens
        return max(added_s, LEAST_SHARE_OF_A_SEQUENCE * step_s * self.num_requests)

    def prefill_s(self, request: RequestView, hit_blocks: int) -> float:
        """Estimated time to prefill ``request`` here with ``hit_blocks`` reused."""
        return self.cost.seconds(request.num_tokens, hit_blocks * request.block_tokens)


class RequestView(Struct, frozen=True):
    """A request as routing sees it. ``store_hit_blocks``: leading blocks that the store can give to any worker.

    ``session`` names the conversation ("" if unknown), ``place`` where the request came in. ``named_blocks`` have a
    hash and so could be hit: all but, mostly, a partial last one; 0 if that is not known.
    ``expected_output``: tokens that an answer has on the mean; 0 if that is not known. ``most_output``: tokens that the
    request lets its own answer have; 0 if that is not known. ``links``: how fast KV travels between places, None where
    nothing was measured; ``kv_place`` where the request's KV is, once it was prefilled, and ``hidden_s`` for how
    long it moves on while the prefill still computes.
    """

    num_tokens: int
    block_tokens: int
    block_bytes: int
    store_hit_blocks: int = 0
    session: str = ""
    place: Place = Place()
    named_blocks: int = 0
    expected_output: float = 0.0
    most_output: int = 0
    links: LinkSpeeds | None = None
    kv_place: Place | None = None
    hidden_s: float = 0.0

    @property
    def judged_share(self) -> float:
        """The share of JUDGED_TOKENS that the answer will have: one of 8 tokens shares its steps for 8 steps."""
        expected, most = self.expected_output, self.most_output
        tokens = min(expected, most) if expected and most else expected or most
        return min(1.0, tokens / JUDGED_TOKENS) if tokens else 1.0

    @property
    def answer_tokens(self) -> float:
        """Tokens of a mean answer, for which a seat is taken; JUDGED_TOKENS while nothing is known."""
        return self.expected_output or JUDGED_TOKENS

    @property
    def num_blocks(self) -> int:
        """Blocks that the request needs, a partial last one included."""
        return -(-self.num_tokens // self.block_tokens)

    def link_bytes_per_s(self, source: Place | None, target: Place) -> float:
        """The speed that was measured between these places; 0 where nothing is known."""
        return self.links.bytes_per_s(source, target) if self.links is not None and source is not None else 0.0

    def rest_tokens(self, hit_blocks: int) -> int:
        """Tokens left to compute behind ``hit_blocks``; the last one is always computed."""
        return max(1, self.num_tokens - hit_blocks * self.block_tokens)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy's judgement of one worker for one phase; ``terms`` are for people. The lowest score wins."""

    worker: InstanceId
    phase: str
    score: float
    terms: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PeerFetch:
    """A fetch that the prefill worker makes first: the leading ``num_blocks`` that it lacks, from ``source``."""

    source: InstanceId
    num_blocks: int


def _nothing() -> tuple[Candidate, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The worker that prefills and the one that decodes (it may be the same), and why.

    ``fetch`` is only decided among workers that can fetch from each other; what the store has, a worker fetches by
    itself. ``explain`` makes the ``candidates`` from the views, so it is right until the next decision is made or
    a worker reports.
    """

    prefill: InstanceId
    decode: InstanceId
    fetch: PeerFetch | None = None
    explain: Callable[[], tuple[Candidate, ...]] = field(default=_nothing, compare=False, repr=False)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The judgements of each worker for each phase; () of a policy that does not score."""
        return self.explain()


class RoutingPolicy(Protocol):
    """A routing policy.

    ``ranks``: it takes the best worker, so that of very many workers a shortlist of the best-matching and the least
    loaded ones may be shown to it (``conductor/routing/worker_views.py``).
    """

    name: str
    ranks: bool

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """Workers for both phases; None if nobody can take one of them."""

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        """A worker that goes on with KV which is held elsewhere; None if there is none."""


class Ranked(list[WorkerView]):
    """Workers that can do one phase, with what they are ranked by beside them: most need not be looked at themselves.

    ``waits``, ``batch_times`` and ``token_times`` are each one's ``wait_s``, ``batch_s`` and ``cost.token_s``;
    ``holders`` are the places, ascending, of those that have or will have some of the prompt, ``longest`` is the most
    blocks of it that one of them has or will have; ``may_fetch`` is False where surely none can fetch from another;
    nobody loads faster than ``fastest``, in bytes/s; ``place_of`` leads from ids to places.
    """

    def __init__(self, workers: Iterable[WorkerView]) -> None:
        super().__init__(workers)
        self.waits = array("d", [w.wait_s for w in self])
        self.batch_times = array("d", [w.batch_s for w in self])
        self.token_times = array("d", [w.cost.token_s for w in self])
        self.holders = [place for place, w in enumerate(self) if w.match_blocks]
        self.longest = max([self[place].match_blocks for place in self.holders], default=0)
        self.may_fetch = any(w.peer_bytes_per_s for w in self)
        self.fastest = max([ASSUMED_STORE_BYTES_PER_S, *[w.store_bytes_per_s for w in self]])
        self.place_of = {w.id: place for place, w in enumerate(self)}

    def loaded(self, place: int) -> None:
        """Take the changed load or speed of the worker at ``place``; the holders are unchanged."""
        worker = self[place]
        self.waits[place], self.batch_times[place] = worker.wait_s, worker.batch_s
        self.token_times[place] = worker.cost.token_s
        self.may_fetch |= worker.peer_bytes_per_s > 0
        if worker.store_bytes_per_s > self.fastest:
            self.fastest = worker.store_bytes_per_s


class Shown(list[WorkerView]):
    """All workers, and those of each phase already sorted out, as WorkerViews keeps them from decision to decision.

    ``holders``: the places, ascending, of those that have or will have some of the prompt.
    """

    def __init__(self, workers: Iterable[WorkerView]) -> None:
        super().__init__(workers)
        self.prefill = Ranked(w for w in self if w.can_prefill)
        self.decode = Ranked(w for w in self if w.can_decode)
        self.holders = [place for place, w in enumerate(self) if w.match_blocks]


def prefillers(workers: Sequence[WorkerView]) -> Ranked:
    """The workers that may prefill."""
    return workers.prefill if isinstance(workers, Shown) else Ranked(w for w in workers if w.can_prefill)


def decoders(workers: Sequence[WorkerView]) -> Ranked:
    """The workers that may decode."""
    return workers.decode if isinstance(workers, Shown) else Ranked(w for w in workers if w.can_decode)


def place_of_least(scores: Sequence[float] | Sequence[tuple[float, ...]], ties: random.Random) -> int:
    """The place of the least score. Of equal ones the least draw: conductors side by side do not all take the same.

    Every score has a draw, needed or not, so that the luck of later requests does not depend on earlier scores.
    ``scores`` is not empty.
    """
    least = min(scores)
    if scores.count(least) == 1:
        ties.getrandbits(_DRAW_BITS * len(scores))  # as far as that many draws, at once
        return scores.index(least)
    draw = ties.random
    draws = [draw() for _ in scores]
    return min((d, at) for at, (score, d) in enumerate(zip(scores, draws, strict=True)) if score == least)[1]


def any_of_least(scores: Sequence[float], ties: random.Random) -> int:
    """As ``place_of_least``, but draws only among equal scores."""
    least = min(scores)
    if scores.count(least) == 1:
        return scores.index(least)
    return ties.choice([at for at, score in enumerate(scores) if score == least])


def nearness(one: Place, other: Place) -> float:
    """1 on one host, 2/3 in one rack, 1/3 in one zone, else 0."""
    if one.zone != other.zone:
        return 0.0
    if one.rack != other.rack:
        return 1 / 3
    return 1.0 if one.host == other.host else 2 / 3
