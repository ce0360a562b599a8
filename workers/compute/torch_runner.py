"""Computing half of the engine in torch: forward pass over the paged cache, then sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tanghulu.runtime.clock import SystemClock
from tanghulu.workers.compute.forward_batch import SequenceChunk
from tanghulu.workers.compute.kv_cache import KvCache
from tanghulu.workers.compute.lanes import MOST_LANES, LanedForward
from tanghulu.workers.compute.models.registry import Model, kv_dtype_name
from tanghulu.workers.compute.sampling import SamplingRow, sample
from tanghulu.workers.engine.engine import Computed
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.step import PromptScoreArrays, Sampled, ScheduledRun, StepPlan


class TorchRunner:
    """A `ModelRunner` of ``model``, with ``kv_capacity_bytes`` of cache laid out in ``cache_buffer`` (or own memory).

    ``kv_dtype`` is as in ``--kv-dtype``. ``num_parts`` tensor-parallel ranks share the model, of which this is rank 0;
    ``announce`` sends every step's token runs to the others. Raises ConfigError with the figures if not even one block
    fits.
    """

    def __init__(
        self,
        model: Model,
        *,
        block_tokens: int,
        kv_dtype: str = "auto",
        kv_capacity_bytes: int,
        cache_buffer: memoryview | bytearray | None = None,
        num_parts: int = 1,
        announce: Callable[[Sequence[SequenceChunk]], None] | None = None,
    ) -> None:
        self.model = model
        self.vocab, self.max_context = model.config.vocab, model.config.max_context
        self.layout = KvLayout.of(model.config, block_tokens, kv_dtype_name(kv_dtype, model.dtype), num_parts)
        self._announce = announce
        self.cache = KvCache(self.layout, self.layout.num_blocks_in(kv_capacity_bytes), cache_buffer)
        self._forward = LanedForward(model, self.cache, most_lanes=MOST_LANES if num_parts == 1 else 1)
        self._clock = SystemClock()

    def run(self, plan: StepPlan) -> Computed:
        started = self._clock.now_s()
        chunks = [chunk_of(run, self.vocab) for run in plan.runs]
        if self._announce is not None:
            self._announce(chunks)
        logits = self._forward(chunks)
        computed = self._clock.now_s()
        sampled = self._sample(plan, logits)
        return Computed(sampled, computed - started, self._clock.now_s() - computed, scores_of(chunks))

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> Sampled:
        rows = rows_of(plan)
        return sample(logits, rows) if rows else Sampled([], [])

    def __repr__(self) -> str:
        return f"TorchRunner({self.model.config.architecture}, {self.cache!r})"


def chunk_of(run: ScheduledRun, vocab: int) -> SequenceChunk:
    """Return the model's input for ``run``."""
    request = run.request
    tokens = request.sequence.tokens[run.start : run.start + run.num_tokens]
    if run.draft:
        tokens = np.append(tokens, np.asarray(run.draft, dtype=tokens.dtype))
    scores = PromptScoreArrays.of(run, vocab)
    return SequenceChunk(tokens, run.start, request.block_ids, run.samples, scores, num_more_logits=len(run.draft))


def rows_of(plan: StepPlan) -> list[SamplingRow]:
    """Return the draws of a step, in the order of the logits that `chunk_of` of its runs gives."""
    rows: list[SamplingRow] = []
    for run in plan.runs:
        if run.samples:
            rows.append(SamplingRow.of(run.request))
            rows += (SamplingRow.behind(run.request, run.draft[: at + 1]) for at in range(len(run.draft)))
    return rows


def scores_of(chunks: Sequence[SequenceChunk]) -> tuple[PromptScoreArrays, ...]:
    """Return the log probabilities of prompts filled in by computing ``chunks``."""
    return tuple(chunk.scores for chunk in chunks if chunk.scores is not None)
