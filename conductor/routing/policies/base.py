"""The contract of a routing policy: views in, a decision out. No clock, no I/O, no unseeded randomness.

The same classes run live, in replay (virtual time) and in tests. The dispatcher builds the views: only workers that are
alive and serve the model; ``can_prefill`` and ``can_decode`` already allow both phases when only one kind is alive.

A policy examines every worker for every request, so it computes plain floats; the explanation for people (one Candidate
per worker, with its terms) is built when a decision's ``candidates`` are requested.

The cost of a hand-over is a small pure formula shared by policies and replay:

    hand-over = max(move - prefill * (1 - chunk / rest),  move of the last chunk)

KV goes to the decode worker while it is computed: from the end of the first chunk to the end of the last one the
transfer overlaps the prefill, and at least the last chunk is left then. So the larger of the two counts, not their sum.
A prompt of one chunk is moved after its prefill. Example: a prompt of 8000 tokens that takes 0.864 s in chunks of 512,
whose KV takes 1 s: 0.864 * (1 - 512 / 8000) = 0.81 s of it are hidden and 0.19 s left; over a link ten times as fast,
512 / 8000 of 0.1 s is left.
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

#: Tokens prefilled at a time: the worker's default, as it does not report its own; and the least seconds for them.
ASSUMED_CHUNK_TOKENS, LEAST_CHUNK_S = 512, 1e-6


def hidden_s(prefill_s: float, rest_tokens: int) -> float:
    """Return the seconds of a prefill of ``rest_tokens`` that overlap the transfer of its KV."""
    return prefill_s * (1 - ASSUMED_CHUNK_TOKENS / rest_tokens) if rest_tokens > ASSUMED_CHUNK_TOKENS else 0.0


def hand_over_s(num_tokens: int, token_s: float, behind_s: float) -> float:
    """Return seconds from the end of a prefill until the KV of ``num_tokens`` has arrived, at ``token_s`` each.

    ``behind_s`` is the result of `hidden_s` for the prefill.
    """
    left_s = num_tokens * token_s - behind_s
    last_s = min(num_tokens, ASSUMED_CHUNK_TOKENS) * token_s
    return left_s if left_s > last_s else last_s


#: Assumed speed of a worker without its own measurement.
ASSUMED_PREFILL_TOKENS_PER_S = 2000.0
ASSUMED_STORE_BYTES_PER_S = 1e9
ASSUMED_DECODE_STEP_S = 0.02
#: One more sequence in a batch slows its step by this share (attention and sampling; weights are read once anyway).
STEP_SHARE_OF_A_SEQUENCE = 1 / 16
#: And it adds at least as much as this many tokens of a prefill (measured: 4 on a CPU, 6 with an 8B model on a GPU).
PREFILL_TOKENS_OF_A_SEQUENCE = 4
#: Future tokens over which a decode choice is judged, or the answer's if that is shorter.
JUDGED_TOKENS = 64
#: And by at least this share where its cost was measured: equals are still distinguished by their batches.
LEAST_SHARE_OF_A_SEQUENCE = 1 / 64
#: Share of a worker's time spent on prompts that disturbs half of its answers: users notice the longest tenth of gaps.
DISTURBED_SHARE = 0.1
#: Share of a worker's cache from which a prompt's copy displaces as many blocks in use as it has.
CROWDED_SHARE = 1 / 16
#: Bits one ``random()`` takes from its generator: two words of 32 bits (tested, as it is not guaranteed).
_DRAW_BITS = 64
#: Profiles are built once per speed: workers measure a new one every few seconds, but are examined all the time.
_profile_of_speed = functools.lru_cache(maxsize=4096)(PrefillProfile.of_speed)


@dataclass(slots=True)
class WorkerView:
    """A worker as seen by routing: its last report plus the work sent to it since. Speeds are 0 while unknown.

    Only the WorkerViews that owns a view (worker_views.py) changes it, between two decisions.

    ``hit_blocks`` are leading blocks of the prompt present on the worker; ``coming_blocks`` are those present or being
    computed there for earlier requests (0 if not tracked). ``active_blocks`` are used by requests in progress, and
    ``active_hit_blocks`` of them are the request's own. ``queue_s`` is None if only tokens are known.
    ``peer_bytes_per_s`` is 0 if workers cannot fetch from each other; ``send_wait_s`` and ``receive_wait_s`` are the
    seconds for which its NIC is busy or, below 0, has been idle. ``coming_requests`` of the ``num_requests`` are still
    prefilled elsewhere and will decode here; blocks are reserved for them. ``context_tokens`` are attended to by
    requests in progress (0 while unknown). ``max_num_seqs`` is the number of seats, the most requests in one step (0 if
    unknown). ``num_waiting`` of the ``num_requests`` have not begun. ``prefill_share`` is the share of recent time in
    which its steps computed prompts. A worker that ``keeps_requests`` decodes what it prefills, and nothing else.

    Derived from these: ``match_blocks``, the leading blocks that a request sent here now will find when its turn comes;
    ``wait_s``, the estimated time until a new request's prefill would begin; ``cost``, the profile or its default;
    ``batch_s``, the seconds that present sequences add to a new request's decoding over JUDGED_TOKENS; ``seat_s``, the
    wait for a seat in seconds per token of a mean answer. (Of M seats, one becomes free every answer / M; the k-th
    waiting request waits k times that. Example: 34 requests in 32 seats, steps of 20 ms, answers of 256 tokens: the
    next is the third to wait, 3 / 32 * 0.02 * 256 = 0.48 s.)

    Derived for a worker of both phases: ``batch``, the number of sequences that decode there; ``slowdown``, the factor
    by which they lengthen a prefill; ``disturbance``, r / (r + DISTURBED_SHARE) if prompts take the share r of its time
    (users notice an answer's longest gaps, so once a tenth of them contains a prompt, more prompts change little);
    ``gap_s``, the time between tokens of one more sequence, with a chunk of a prompt in that share of its steps;
    ``answer_s``, that gap and the seconds that the sequence adds to a step of the others; and ``answer_context_s``,
    what each token of its context adds to them.
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
    num_waiting: int = 0
    prefill_share: float = 0.0
    keeps_requests: bool = False
    match_blocks: int = field(init=False)
    wait_s: float = field(init=False)
    cost: PrefillProfile = field(init=False)
    batch_s: float = field(init=False)
    seat_s: float = field(init=False)
    batch: int = field(init=False, default=0)
    slowdown: float = field(init=False, default=1.0)
    gap_s: float = field(init=False, default=0.0)
    answer_s: float = field(init=False, default=0.0)
    answer_context_s: float = field(init=False, default=0.0)
    disturbance: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.found(self.hit_blocks, self.coming_blocks)
        self.derive()

    def found(self, hit_blocks: int, coming_blocks: int) -> None:
        """Set the number of leading prompt blocks present, and of those present or coming."""
        self.hit_blocks, self.coming_blocks = hit_blocks, coming_blocks
        self.match_blocks = hit_blocks if hit_blocks > coming_blocks else coming_blocks

    def derive(self) -> None:
        """Compute the fields derived from load and speeds, after these were set."""
        profile = self.profile
        speed = self.prefill_tokens_per_s
        if not speed:
            speed = 1 / profile.token_s if profile is not None and profile.token_s else ASSUMED_PREFILL_TOKENS_PER_S
        queue_s = self.queue_s
        self.wait_s = self.queue_tokens / speed if queue_s is None else queue_s
        self.cost = profile or _profile_of_speed(speed)
        step_s = self.decode_step_s or ASSUMED_DECODE_STEP_S
        if self.decode_profile is None:
            self.batch_s = JUDGED_TOKENS * self._assumed_sequence_s(step_s) * self.num_requests
        else:
            self.batch_s = JUDGED_TOKENS * self._measured_batch_s(step_s, self.decode_profile)
        seats = self.max_num_seqs
        self.seat_s = step_s * (self.num_requests + 1 - seats) / seats if 0 < seats <= self.num_requests else 0.0
        if self.can_prefill and self.can_decode:
            self._derive_mixed(step_s)

    def _derive_mixed(self, step_s: float) -> None:
        """Derive how prefills and decodes of the same worker slow each other."""
        self.batch = max(0, self.num_requests - self.num_waiting)
        # Measurements of whole prompts may find all of their time in the other constants.
        whole_s = self.cost.seconds(ASSUMED_CHUNK_TOKENS, 0)
        decode, chunk_s = self.decode_profile, max(ASSUMED_CHUNK_TOKENS * self.cost.token_s, whole_s / 2, LEAST_CHUNK_S)
        if decode is None:
            decode = DecodeProfile(step_s, self._assumed_sequence_s(step_s))
        # Steps of one batch size alone reveal nothing about the cost of a sequence.
        sequence_s = max(decode.sequence_s, LEAST_SHARE_OF_A_SEQUENCE * step_s)
        context_s = decode.token_s * self.context_tokens
        self.slowdown = 1 + (sequence_s * self.batch + context_s) / chunk_s
        self.disturbance = self.prefill_share / (self.prefill_share + DISTURBED_SHARE)
        # Waiting requests will decode beside a new one.
        alone_s = decode.fixed_s + sequence_s * (self.num_requests + 1) + context_s
        self.gap_s = alone_s + self.disturbance * chunk_s
        self.answer_s = self.gap_s + sequence_s * self.num_requests
        self.answer_context_s = decode.token_s * self.num_requests
        self.seat_s *= self.gap_s / step_s

    def _assumed_sequence_s(self, step_s: float) -> float:
        """Return the seconds that a sequence adds to a step, without a measurement."""
        return max(STEP_SHARE_OF_A_SEQUENCE * step_s, PREFILL_TOKENS_OF_A_SEQUENCE * self.cost.token_s)

    def _measured_batch_s(self, step_s: float, decode: DecodeProfile) -> float:
        """Return the seconds that the present sequences add to a step."""
        added_s = decode.sequence_s * self.num_requests + decode.token_s * self.context_tokens
        return max(added_s, LEAST_SHARE_OF_A_SEQUENCE * step_s * self.num_requests)

    def crowding(self, num_blocks: int) -> float:
        """Return how far a copy of ``num_blocks`` displaces blocks in use: 1 from CROWDED_SHARE of the cache on."""
        return min(1.0, num_blocks / (CROWDED_SHARE * self.blocks_total)) if self.blocks_total else 1.0

    def prefill_s(self, request: RequestView, hit_blocks: int) -> float:
        """Return the estimated time to prefill ``request`` here with ``hit_blocks`` reused."""
        return self.cost.seconds(request.num_tokens, hit_blocks * request.block_tokens)


class RequestView(Struct, frozen=True):
    """A request as seen by routing. ``store_hit_blocks``: leading blocks that the store can give to any worker.

    ``session`` names the conversation ("" if unknown), ``place`` is where the request arrived. ``named_blocks`` have a
    hash and so could be hit: all except, usually, a partial last one; 0 if unknown. ``mean_output``: tokens of a mean
    answer, ``expected_output``: of this one, ``most_output``: the request's own limit; 0 if unknown. ``links``: speeds
    of KV transfers between places, None without measurements; ``kv_place``: the place of the request's KV after its
    prefill, and ``hidden_s``: seconds for which it is transferred while the prefill still computes.
    """

    num_tokens: int
    block_tokens: int
    block_bytes: int
    store_hit_blocks: int = 0
    session: str = ""
    place: Place = Place()
    named_blocks: int = 0
    mean_output: float = 0.0
    expected_output: float = 0.0
    most_output: int = 0
    links: LinkSpeeds | None = None
    kv_place: Place | None = None
    hidden_s: float = 0.0

    @property
    def judged_share(self) -> float:
        """Share of JUDGED_TOKENS that the answer will have: one of 8 tokens shares its steps for 8 steps."""
        return min(1.0, self.decoded_tokens / JUDGED_TOKENS)

    @property
    def answer_tokens(self) -> float:
        """Tokens of a mean answer, for which a seat is occupied; JUDGED_TOKENS while unknown."""
        return self.mean_output or JUDGED_TOKENS

    @property
    def decoded_tokens(self) -> float:
        """Tokens that this answer is expected to have, within the request's own limit; a mean answer's if unknown."""
        expected = self.expected_output or self.answer_tokens
        return min(expected, self.most_output) if self.most_output else expected

    @property
    def num_blocks(self) -> int:
        """Number of blocks the request needs, including a partial last one."""
        return -(-self.num_tokens // self.block_tokens)

    def link_bytes_per_s(self, source: Place | None, target: Place) -> float:
        """Return the measured speed between these places; 0 if unknown."""
        return self.links.bytes_per_s(source, target) if self.links is not None and source is not None else 0.0

    def rest_tokens(self, hit_blocks: int) -> int:
        """Return the tokens left to compute after ``hit_blocks``; the last one is always computed."""
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
    """A fetch that the prefill worker makes first: its missing blocks of the first ``num_blocks``, from ``source``."""

    source: InstanceId
    num_blocks: int


def _nothing() -> tuple[Candidate, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The prefill worker and the decode worker (possibly the same), and the reasons.

    ``fetch`` is decided only among workers that can fetch from each other; a worker fetches from the store by itself.
    ``explain`` builds the ``candidates`` from the views, so it is valid until the next decision or worker report.
    """

    prefill: InstanceId
    decode: InstanceId
    fetch: PeerFetch | None = None
    explain: Callable[[], tuple[Candidate, ...]] = field(default=_nothing, compare=False, repr=False)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Judgements of each worker for each phase; () for a policy that does not score."""
        return self.explain()


class RoutingPolicy(Protocol):
    """A routing policy.

    ``ranks``: it takes the best worker, so that with very many workers it may be shown a shortlist of the best-matching
    and least loaded ones (``conductor/routing/worker_views.py``).
    """

    name: str
    ranks: bool

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Decision | None:
        """Choose workers for both phases; None if no worker can take one of them."""

    def choose_decode(self, request: RequestView, workers: Sequence[WorkerView]) -> InstanceId | None:
        """Choose a worker to continue with KV held elsewhere; None if there is none."""


def _load_bytes_per_s(worker: WorkerView) -> float:
    """Return the worker's fastest way to load KV, as far as it has measured one."""
    return max(worker.store_bytes_per_s, worker.peer_bytes_per_s)


class Ranked(list[WorkerView]):
    """Workers able to do one phase, with separate ranking data: most need not be examined themselves.

    ``waits``, ``batch_times`` and ``token_times`` are each one's ``wait_s``, ``batch_s`` and ``cost.token_s``;
    ``holders`` are the places, ascending, of those that have or will have some of the prompt, ``longest`` is the most
    blocks of it on any of them; ``may_fetch`` is False if certainly none can fetch from another; no worker loads faster
    than ``fastest``, in bytes/s; ``place_of`` maps ids to places; ``mixed`` are the places of those of both phases.
    """

    def __init__(self, workers: Iterable[WorkerView]) -> None:
        super().__init__(workers)
        self.waits = array("d", [w.wait_s for w in self])
        self.batch_times = array("d", [w.batch_s for w in self])
        self.token_times = array("d", [w.cost.token_s for w in self])
        self.holders = [place for place, w in enumerate(self) if w.match_blocks]
        self.longest = max([self[place].match_blocks for place in self.holders], default=0)
        self.may_fetch = any(w.peer_bytes_per_s for w in self)
        self.fastest = max([ASSUMED_STORE_BYTES_PER_S, *map(_load_bytes_per_s, self)])
        self.place_of = {w.id: place for place, w in enumerate(self)}
        self.mixed = [place for place, w in enumerate(self) if w.can_prefill and w.can_decode]

    def loaded(self, place: int) -> None:
        """Apply a changed load or speed of the worker at ``place``; the holders are unchanged."""
        worker = self[place]
        self.waits[place], self.batch_times[place] = worker.wait_s, worker.batch_s
        self.token_times[place] = worker.cost.token_s
        self.may_fetch |= worker.peer_bytes_per_s > 0
        self.fastest = max(self.fastest, _load_bytes_per_s(worker))


class Shown(list[WorkerView]):
    """All workers, and those of each phase already separated, as cached by WorkerViews from decision to decision.

    ``holders``: the places, ascending, of those that have or will have some of the prompt.
    """

    def __init__(self, workers: Iterable[WorkerView]) -> None:
        super().__init__(workers)
        self.prefill = Ranked(w for w in self if w.can_prefill)
        self.decode = Ranked(w for w in self if w.can_decode)
        self.holders = [place for place, w in enumerate(self) if w.match_blocks]


def prefillers(workers: Sequence[WorkerView]) -> Ranked:
    """Return the workers that may prefill."""
    return workers.prefill if isinstance(workers, Shown) else Ranked(w for w in workers if w.can_prefill)


def decoders(workers: Sequence[WorkerView]) -> Ranked:
    """Return the workers that may decode."""
    return workers.decode if isinstance(workers, Shown) else Ranked(w for w in workers if w.can_decode)


def place_of_least(scores: Sequence[float] | Sequence[tuple[float, ...]], ties: random.Random) -> int:
    """Return the place of the lowest score. Ties go to the lowest draw, so that parallel conductors choose differently.

    Every score has a draw, needed or not, so that later draws do not depend on earlier scores. ``scores`` is not empty.
    """
    least = min(scores)
    if scores.count(least) == 1:
        ties.getrandbits(_DRAW_BITS * len(scores))  # advances the generator by that many draws at once
        return scores.index(least)
    draw = ties.random
    draws = [draw() for _ in scores]
    return min((d, at) for at, (score, d) in enumerate(zip(scores, draws, strict=True)) if score == least)[1]


def any_of_least(scores: Sequence[float], ties: random.Random) -> int:
    """Like ``place_of_least``, but draws only among equal scores."""
    least = min(scores)
    if scores.count(least) == 1:
        return scores.index(least)
    return ties.choice([at for at, score in enumerate(scores) if score == least])


def nearness(one: Place, other: Place) -> float:
    """Return 1 on the same host, 2/3 in the same rack, 1/3 in the same zone, else 0."""
    if one.zone != other.zone:
        return 0.0
    if one.rack != other.rack:
        return 1 / 3
    return 1.0 if one.host == other.host else 2 / 3
