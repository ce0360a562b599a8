"""Computing half of the engine without a model: it takes as long as a real one, and its KV can be checked.

Everything around it is real: scheduler, block pool, prefix cache, KV events, transfers, store. The KV of a token is a
short pattern made of the token and its position, written into the paged cache like a model's; with ``checks`` every
step that samples compares the whole sequence's KV with the expected pattern, so that a block lost, mixed up or torn on
its way between workers or through the store ends the process instead of passing unnoticed.

The time of a step comes from a model with five constants, in seconds (`MockTiming`). A step that computes, for each
sequence, ``n`` tokens after ``p`` existing ones takes

    step_s + sum(token_s * n + pair_s * ((p + n)^2 - p^2))    over sequences in prefill
           + sum(sequence_s + context_s * p)                  over sequences in decode

which is the latency model of Mooncake's paper (FAST '25, table 1) applied to a step of chunked prefill and decode
together. Example with ``gpu-70b``: a prompt of 8,000 tokens, computed at once, takes 20 ms + 8,000 x 95 us
+ 64e6 x 2.1 ns = 0.91 s; a decode step of 8 sequences at 8,000 tokens each
20 ms + 8 x 0.1 ms + 64,000 x 29 ns = 22.7 ms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from tanghulu.session.outputs import TokenLogprobs
from tanghulu.workers.engine.engine import Computed
from tanghulu.workers.engine.kv_layout import KvLayout, KvMemory
from tanghulu.workers.engine.requests import EngineRequest
from tanghulu.workers.engine.step import PromptScoreArrays, Sampled, ScheduledRun, StepPlan


@dataclass(frozen=True, slots=True)
class MockTiming:
    """The constants, in seconds, and their divisor."""

    step_s: float
    token_s: float
    pair_s: float
    sequence_s: float
    context_s: float
    speedup: float = 1.0

    def step_seconds(self, plan: StepPlan) -> float:
        return (self.step_s + sum(map(self._run_seconds, plan.runs))) / self.speedup

    def _run_seconds(self, run: ScheduledRun) -> float:
        if run.num_tokens == 1 and run.samples:
            return self.sequence_s + self.context_s * run.start
        end = run.start + run.num_tokens
        return self.token_s * run.num_tokens + self.pair_s * (end * end - run.start * run.start)


#: ``cpu-135m``: SmolLM2-135M in float32 on two cores without bfloat16, measured with this engine. ``gpu-8b`` and
#: ``gpu-70b``: Llama shapes on 8 x A800 at an MFU of one half (22 l d^2 and 4 l d floating-point operations a token
#: and a pair), decode bound by memory.
TIMINGS = {
    "cpu-135m": MockTiming(step_s=0.045, token_s=1.9e-3, pair_s=2.5e-8, sequence_s=0.008, context_s=4e-6),
    "gpu-8b": MockTiming(step_s=0.006, token_s=9.5e-6, pair_s=4.2e-10, sequence_s=6e-5, context_s=8e-9),
    "gpu-70b": MockTiming(step_s=0.020, token_s=9.5e-5, pair_s=2.1e-9, sequence_s=1e-4, context_s=2.9e-8),
}


#: Shortest sleep worth its overhead.
_LEAST_SLEEP_S = 50e-6


class MockRunner:
    """A `ModelRunner` that sleeps for ``timing`` and draws uniformly from ``text_ids``.

    A request's n-th token is a function of (its prompt, n) if ``deterministic``, else of (its seed, n): the same on
    every worker, so that a request may continue anywhere.
    """

    def __init__(
        self,
        layout: KvLayout,
        buffer: memoryview,
        timing: MockTiming,
        *,
        text_ids: Sequence[int],
        vocab: int,
        max_context: int,
        deterministic: bool = False,
        checks: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.layout = layout
        self.cache = KvMemory(layout, layout.num_blocks_in(buffer.nbytes), buffer)
        self.vocab = vocab
        self.max_context = max_context
        self._timing = timing
        self._text_ids = text_ids
        self._deterministic = deterministic
        self._checks = checks
        self._sleep = sleep
        # One row per token; the K half of a block precedes its V half, and the mock keeps its pattern in both.
        words = layout.layer_bytes // (2 * layout.block_tokens * 4)
        shape = (self.cache.num_blocks, 2, layout.block_tokens, words)
        used = buffer[: self.cache.capacity_bytes]
        self._kv: npt.NDArray[np.uint32] = np.frombuffer(used, np.uint32).reshape(shape)

    def run(self, plan: StepPlan) -> Computed:
        """Write the patterns, draw the tokens, and wait for the rest of a real model's time."""
        started = time.monotonic()
        for run in plan.runs:
            self._write(run)
        sampling = [run.request for run in plan.runs if run.samples]
        if self._checks:
            for request in sampling:
                self._rows(request, 0, request.num_tokens, write=False)
        sampled = self._sample(sampling)
        seconds = self._timing.step_seconds(plan)
        left_s = started + seconds - time.monotonic()
        if left_s > _LEAST_SLEEP_S:
            self._sleep(left_s)
        return Computed(sampled, seconds, 0.0, self._scores(plan))

    # --- KV

    def _write(self, run: ScheduledRun) -> None:
        if run.num_tokens == 1 and run.samples:
            index, row = divmod(run.start, self.layout.block_tokens)
            self._kv[run.request.block_ids[index], :, row] = _pattern(run.request.sequence.last, run.start)
            return
        self._rows(run.request, run.start, run.start + run.num_tokens, write=True)

    def _rows(self, request: EngineRequest, start: int, end: int, *, write: bool) -> None:
        """Write, or compare, the patterns of tokens ``start .. end``, block by block."""
        size = self.layout.block_tokens
        expected = _patterns(request.sequence.tokens[start:end], start)
        for index in range(start // size, -(-end // size)):
            first, last = max(start, index * size), min(end, (index + 1) * size)
            rows = self._kv[request.block_ids[index], :, first - index * size : last - index * size]
            wanted = expected[first - start : last - start, None]  # every word of a row is the same
            if write:
                rows[:] = wanted
            else:
                assert (rows == wanted).all(), f"wrong KV in block {index} of request {request.request_id}"

    # --- tokens

    def _sample(self, requests: Sequence[EngineRequest]) -> Sampled:
        tokens = [self._token(request) for request in requests]
        return Sampled(tokens, [self._logprobs(r, token) for r, token in zip(requests, tokens, strict=True)])

    def _token(self, request: EngineRequest) -> int:
        seed = request.sampling.seed or 0
        if self._deterministic:
            seed = xxhash.xxh3_64_intdigest(request.sequence.tokens[: request.num_prompt_tokens].tobytes())
        position = request.num_generated.to_bytes(8, "little")
        return self._text_ids[xxhash.xxh3_64_intdigest(position, seed=seed & (2**64 - 1)) % len(self._text_ids)]

    def _logprobs(self, request: EngineRequest, token: int) -> TokenLogprobs | None:
        """Return the logprobs of a uniform distribution over the tokens of texts."""
        count = request.sampling.num_logprobs
        if count is None:
            return None
        ids = (token, *self._text_ids[:count], *request.sampling.logprob_token_ids)
        return TokenLogprobs(ids, (self._logprob,) * len(ids))

    @property
    def _logprob(self) -> float:
        return -math.log(len(self._text_ids))

    def _scores(self, plan: StepPlan) -> tuple[PromptScoreArrays, ...]:
        """Return the scores due for the plan's runs, of the same distribution."""
        scored = [run for run in plan.runs if run.request.scoring is not None]
        found = [scores for run in scored if (scores := PromptScoreArrays.of(run, len(self._text_ids))) is not None]
        for scores in found:
            for values in (scores.logprobs, scores.top_logprobs, scores.named_logprobs):
                values.fill(self._logprob)
            scores.ranks.fill(1)
            scores.top_ids[:] = self._text_ids[: scores.num_top]
        return tuple(found)

    def __repr__(self) -> str:
        return f"MockRunner({self._timing}, {self.cache!r})"


def _pattern(token: int, position: int) -> int:
    """Return one of `_patterns`."""
    return (token + 1) * 2654435761 & 0xFFFFFFFF ^ position * 40503 & 0xFFFFFFFF


def _patterns(tokens: npt.NDArray[np.uint32], start: int) -> npt.NDArray[np.uint32]:
    """Return one word for each token, a function of the token and its position: [n]."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint32)
    mixed: npt.NDArray[np.uint32] = (tokens + np.uint32(1)) * np.uint32(2654435761) ^ positions * np.uint32(40503)
    return mixed
