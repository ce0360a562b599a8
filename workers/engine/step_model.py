"""Duration of a step, fitted to past steps: what a prefill or a decode would cost here.

Pure. A step that computes T tokens of prompts, which attend to P pairs of tokens (``end^2 - start^2`` of each run), and
one token of each of S sequences with C tokens of context together, is assumed to last

    prefill_fixed + token * T + pair * P + (sequence * S + context * C)      with prompts in it
    decode_fixed + sequence * S + context * C                                without

(the shape of Mooncake's estimate, FAST '25, section 4.1, for a step). Both are fitted by least squares of the
*relative* error, with constants of at least 0, over a fading past that fades only by steps of its own kind: an hour of
decoding does not erase the measurements of prefill. Example: 67 ms for the first 512 tokens of a prompt, 216 ms for the
first 2,048, and 240 ms for the 2,048 after those, are 20 ms + 90 us x T + 2.8 ns x P.

A prompt of n tokens in chunks of b takes n / b steps, so ``prefill`` adds ``prefill_fixed / b`` to each token.
"""

from __future__ import annotations

from msgspec import Struct

from tanghulu.session.load import DecodeProfile, PrefillProfile

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
