"""Speed of this worker, from its steps and transfers: rates, and a model of a step's duration.

Rates are tokens or bytes over seconds, of the last few observations. Only steps of many tokens measure the rate of
prefill: a prompt of 37 tokens takes about as long as one of 5, because reading the weights dominates, and 84 tokens/s
would be a wrong prediction for the next 2,000.

The model (`StepModel`): a step that computes T tokens of prompts, which attend to P pairs of tokens (``end^2 -
start^2`` of each run), and one token of each of S sequences with C tokens of context together, is assumed to last

    prefill_fixed + token * T + pair * P + (sequence * S + context * C)      with prompts in it
    decode_fixed + sequence * S + context * C                                without

(the shape of Mooncake's estimate, FAST '25, section 4.1, for a step). Both are fitted by least squares of the
*relative* error, with constants of at least 0, over a fading past that fades only by steps of its own kind: an hour of
decoding does not erase the measurements of prefill. Example: 67 ms for the first 512 tokens of a prompt, 216 ms for the
first 2,048, and 240 ms for the 2,048 after those, are 20 ms + 90 us x T + 2.8 ns x P.

A prompt of n tokens in chunks of b takes n / b steps, so ``prefill`` adds ``prefill_fixed / b`` to each token.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from tanghulu.session.load import BusyShare, DecodeProfile, PeerRead, PrefillProfile, WorkerLoad

#: Share of the past kept at each step of the kind.
FADE = 0.995
#: The constants are computed after MIN_STEPS, at each doubling, and at this interval: it takes 0.1 ms.
MIN_STEPS, EVERY = 8, 64
_SWEEPS = 30
#: Weight of the old constants against observations, where the steps cannot distinguish them.
_PRIOR = 1e-6


class StepWork(Struct, frozen=True):
    """Work of a step: see the module for T, P, S and C."""

    prefill_tokens: int = 0
    prefill_pairs: int = 0
    decode_sequences: int = 0
    decode_context: int = 0


NO_WORK = StepWork()


class _Fit:
    """Three constants of at least 0: least squares over the relative error, by descent along each in turn."""

    def __init__(self) -> None:
        self.constants = [0.0, 0.0, 0.0]
        self.num_steps = 0
        self._targets = 0.0, 0.0, 0.0
        self._products = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0  # aa, ab, ac, bb, bc, cc

    def add(self, features: tuple[float, float, float], seconds: float) -> bool:
        """Note a step of ``seconds``; return whether the constants were recomputed."""
        a, b, c = features
        a, b, c = a / seconds, b / seconds, c / seconds
        of_a, of_b, of_c = self._targets
        aa, ab, ac, bb, bc, cc = self._products
        self._targets = FADE * of_a + a, FADE * of_b + b, FADE * of_c + c
        self._products = (
            FADE * aa + a * a,
            FADE * ab + a * b,
            FADE * ac + a * c,
            FADE * bb + b * b,
            FADE * bc + b * c,
            FADE * cc + c * c,
        )
        self.num_steps += 1
        num_steps = self.num_steps
        if num_steps < MIN_STEPS or (num_steps % EVERY and num_steps & (num_steps - 1)):
            return False
        self._solve()
        return True

    def _solve(self) -> None:
        constants = self.constants
        of_a, of_b, of_c = self._targets
        aa, ab, ac, bb, bc, cc = self._products
        rows = (0, 1, 2, of_a, aa, ab, ac), (1, 2, 0, of_b, bb, bc, ab), (2, 0, 1, of_c, cc, ac, bc)
        terms = [row for row in rows if row[4] > 0]
        for _ in range(_SWEEPS):
            for i, j, k, target, own, by_j, by_k in terms:
                others = by_j * constants[j] + by_k * constants[k]
                towards = target - others + _PRIOR * own * constants[i]
                constants[i] = max(0.0, towards / (own * (1 + _PRIOR)))


class StepModel:
    """Feed it steps; read ``prefill`` and ``decode``. ``budget``: the most tokens of a step, in which prompts are cut.

    Both are None until there were enough steps with prompts, ``decode`` until some had none. ``prefill.token_s``
    includes the fixed part of a chunk's step.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._prefill, self._decode = _Fit(), _Fit()
        self.prefill: PrefillProfile | None = None
        self.decode: DecodeProfile | None = None

    def step(self, work: StepWork, seconds: float) -> None:
        """Note that a step did ``work`` in ``seconds``."""
        if seconds <= 0:
            return
        if not work.prefill_tokens:
            if work.decode_sequences:
                self._note(self._decode.add((1.0, work.decode_sequences, work.decode_context), seconds))
            return
        _, sequence_s, context_s = self._decode.constants
        own_s = seconds - sequence_s * work.decode_sequences - context_s * work.decode_context
        if own_s > seconds / 4:  # else it reveals little about prefill
            self._note(self._prefill.add((1.0, work.prefill_tokens, work.prefill_pairs), own_s))

    def _note(self, is_new: bool) -> None:
        if is_new and self._prefill.num_steps >= MIN_STEPS:
            fixed_s, token_s, pair_s = self._prefill.constants
            self.prefill = PrefillProfile(fixed_s, token_s + fixed_s / self._budget, pair_s)
            if self._decode.constants[0]:
                self.decode = DecodeProfile(*self._decode.constants)


#: Observations that a rate is made of; the slowest and the fastest of them do not count.
_RATE_OF = 5
_PREFILL_TOKENS = 128  # steps of at least this many tokens count as prefill
#: Assumed speed of reads from other workers, until something was read: it matters that this worker can at all.
ASSUMED_PEER_BYTES_PER_S = 1e9
#: Peers whose reads are counted between two reports.
MAX_READ_PEERS = 32
#: Default of the most tokens of a step.
DEFAULT_STEP_TOKENS = 512
_DECODE_TOKENS = 32  # steps of at most this many tokens, one per sequence, count as decode


class _Rate:
    """Amount over seconds of the last few observations; a large one weighs more, and no single one decides.

    Example: prompts of 500 tokens took 1, 60, 1, 1 and 2 s: 1,500 tokens in 4 s. The 60 s were a moment of the machine.
    """

    def __init__(self) -> None:
        self.per_s = 0.0
        self._last: deque[tuple[float, float, float]] = deque(maxlen=_RATE_OF)

    def add(self, amount: float, seconds: float) -> None:
        if seconds <= 0:
            return
        self._last.append((amount / seconds, amount, seconds))
        counted = sorted(self._last)[1:-1] if len(self._last) > 2 else [max(self._last)]
        self.per_s = sum(each[1] for each in counted) / sum(each[2] for each in counted)


class SpeedMeter:
    """Feed it steps (of at most ``max_step_tokens``) and fetches; read ``speeds``.

    Without ``reads_peers`` it reports that nothing can be read from other workers' caches. Any thread may report a
    fetch; all else is the engine's thread's.
    """

    def __init__(
        self,
        max_step_tokens: int = DEFAULT_STEP_TOKENS,
        reads_peers: bool = True,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now_s = now_s
        self._prefilling = BusyShare()
        self._reads_peers = reads_peers
        self._model = StepModel(max_step_tokens)
        self._prefill, self._decode, self._store, self._peer = _Rate(), _Rate(), _Rate(), _Rate()
        self._lock = threading.Lock()  # of reads, their rates and the store's
        self._reads: dict[str, PeerRead] = {}

    def step(self, num_tokens: int, num_sequences: int, seconds: float, work: StepWork = NO_WORK) -> None:
        """Note a step of ``num_tokens`` of ``num_sequences`` requests in ``seconds``; ``work`` has the details."""
        self._model.step(work, seconds)
        if num_tokens > num_sequences:
            self._prefilling.add(seconds, self._now_s())
        if num_tokens >= _PREFILL_TOKENS:
            self._prefill.add(num_tokens, seconds)
        elif num_tokens == num_sequences and num_tokens <= _DECODE_TOKENS:
            self._decode.add(1, seconds)

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Note that a prefix of ``num_bytes`` was loaded from the store in ``seconds``."""
        with self._lock:
            self._store.add(num_bytes, seconds)

    def read_from_peer(self, num_bytes: int, seconds: float, address: str = "") -> None:
        """Note that KV of ``num_bytes`` was loaded from the worker at ``address`` in ``seconds``."""
        with self._lock:
            self._peer.add(num_bytes, seconds)
            before = self._reads.get(address, PeerRead(address, 0, 0.0))
            if address and (before.num_bytes or len(self._reads) < MAX_READ_PEERS):
                self._reads[address] = PeerRead(address, before.num_bytes + num_bytes, before.seconds + seconds)

    def take_reads(self) -> tuple[PeerRead, ...]:
        """Return and clear the reads from peers since the last call, summed by peer."""
        with self._lock:
            reads = tuple(self._reads.values())
            self._reads.clear()
            return reads

    @property
    def speeds(self) -> WorkerLoad:
        """A load with the measured speeds alone; 0 while unknown, except for ``peer_bytes_per_s``."""
        steps_per_s = self._decode.per_s
        with self._lock:
            store, peer = self._store.per_s, self._peer.per_s
        return WorkerLoad(
            prefill_tokens_per_s=self._prefill.per_s,
            decode_step_s=1 / steps_per_s if steps_per_s else 0.0,
            store_bytes_per_s=store,
            peer_bytes_per_s=(peer or ASSUMED_PEER_BYTES_PER_S) if self._reads_peers else 0.0,
            prefill=self._model.prefill,
            decode=self._model.decode,
            prefill_share=self._prefilling.at(self._now_s()),
        )
