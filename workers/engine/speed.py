"""Speed of this worker, from its steps and transfers: tokens or bytes over seconds, the past fading.

The engine's thread owns it. Only steps of many tokens measure the speed of prefill: a prompt of 37 tokens takes about
as long as one of 5, because reading the weights dominates, and 84 tokens/s would be a wrong prediction for the next
2,000.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tanghulu.session.load import BusyShare, PeerRead, WorkerLoad
from tanghulu.workers.engine.step_model import NO_WORK, StepModel, StepWork

_FADE = 0.8  # of the past, at each new observation
_PREFILL_TOKENS = 128  # steps of at least this many tokens count as prefill
#: Assumed speed of reads from other workers, until something was read: it matters that this worker can at all.
ASSUMED_PEER_BYTES_PER_S = 1e9
#: Peers whose reads are counted between two reports.
MAX_READ_PEERS = 32
#: Default of the most tokens of a step.
DEFAULT_STEP_TOKENS = 512
_DECODE_TOKENS = 32  # steps of at most this many tokens, one per sequence, count as decode


class _Rate:
    """Amount over seconds, both fading: a large observation weighs more than a small one."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = _FADE * self._amount + amount
        self._seconds = _FADE * self._seconds + seconds

    @property
    def per_s(self) -> float:
        return self._amount / self._seconds if self._seconds > 0 else 0.0


class SpeedMeter:
    """Feed it steps (of at most ``max_step_tokens``) and fetches; read ``speeds``.

    Without ``reads_peers`` it reports that nothing can be read from other workers' caches.
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
        self._store.add(num_bytes, seconds)

    def read_from_peer(self, num_bytes: int, seconds: float, address: str = "") -> None:
        """Note that KV of ``num_bytes`` was loaded from the worker at ``address`` in ``seconds``."""
        self._peer.add(num_bytes, seconds)
        before = self._reads.get(address, PeerRead(address, 0, 0.0))
        if address and (before.num_bytes or len(self._reads) < MAX_READ_PEERS):
            self._reads[address] = PeerRead(address, before.num_bytes + num_bytes, before.seconds + seconds)

    def take_reads(self) -> tuple[PeerRead, ...]:
        """Return and clear the reads from peers since the last call, summed by peer."""
        reads = tuple(self._reads.values())
        self._reads.clear()
        return reads

    @property
    def speeds(self) -> WorkerLoad:
        """A load with the measured speeds alone; 0 while unknown, except for ``peer_bytes_per_s``."""
        steps_per_s = self._decode.per_s
        return WorkerLoad(
            prefill_tokens_per_s=self._prefill.per_s,
            decode_step_s=1 / steps_per_s if steps_per_s else 0.0,
            store_bytes_per_s=self._store.per_s,
            peer_bytes_per_s=(self._peer.per_s or ASSUMED_PEER_BYTES_PER_S) if self._reads_peers else 0.0,
            prefill=self._model.prefill,
            decode=self._model.decode,
            prefill_share=self._prefilling.at(self._now_s()),
        )
