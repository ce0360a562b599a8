"""Computing half of the engine in torch: forward pass over the paged cache, then sampling; on the CPU or on a device.

Runners around another runner have its shape, and change how its steps are run: `ThreadedRunner` picks the number of CPU
threads of each step; `ProfiledRunner` traces the first steps with torch's profiler, for chrome://tracing or Perfetto.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, supported_activities

from tanghulu.runtime.clock import SystemClock
from tanghulu.workers.compute.cuda_graphs import DecodeGraphs
from tanghulu.workers.compute.device import upload, wait_for
from tanghulu.workers.compute.device_sampling import sample_on_device
from tanghulu.workers.compute.forward_batch import (
    DecodeShape,
    SequenceChunk,
    build_forward_batch,
    decode_batch,
    is_decode,
    pack_decodes,
)
from tanghulu.workers.compute.kv_cache import DeviceKvCache, KvCache
from tanghulu.workers.compute.lanes import MOST_LANES, LanedForward
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.compute.sampling import SamplingRow, sample
from tanghulu.workers.compute.thread_choice import ThreadChoice
from tanghulu.workers.engine.engine import Computed, ModelRunner, WrappedRunner
from tanghulu.workers.engine.kv_layout import KvBlocks, KvLayout
from tanghulu.workers.engine.step import PromptScoreArrays, Sampled, ScheduledRun, StepPlan

_log = structlog.get_logger(__name__)
_Announce = Callable[[Sequence[SequenceChunk]], None]


class _Runner(ABC):
    """A `ModelRunner` of ``model``, with a cache of blocks of ``layout``.

    If ``layout`` has several parts, as many tensor-parallel ranks share the model, of which this is rank 0;
    ``announce`` sends every step's token runs to the others.
    """

    cache: KvBlocks

    def __init__(self, model: Model, layout: KvLayout, announce: _Announce | None) -> None:
        self.model, self.layout = model, layout
        self.vocab, self.max_context = model.config.vocab, model.config.max_context
        self._announce = announce
        self._clock = SystemClock()

    def run(self, plan: StepPlan) -> Computed:
        """Compute the step and sample. On a GPU ``forward_s`` is the time to launch the kernels."""
        chunks = [_chunk_of(run, self.vocab) for run in plan.runs]
        return self._run(chunks, _rows_of(plan))

    def _run(self, chunks: Sequence[SequenceChunk], rows: Sequence[SamplingRow]) -> Computed:
        started = self._clock.now_s()
        if self._announce is not None:
            self._announce(chunks)
        device = self.model.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            logits = self._forward(chunks)
            computed = self._clock.now_s()
            sampled = self._sample(logits, rows)
        scores = tuple(chunk.scores for chunk in chunks if chunk.scores is not None)
        return Computed(sampled, computed - started, self._clock.now_s() - computed, scores)

    @abstractmethod
    def _forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """Return the requested logits."""

    @abstractmethod
    def _sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """Draw a token for each row."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model.config.architecture} on {self.model.device}, {self.cache!r})"


class TorchRunner(_Runner):
    """Runs on the CPU, over ``num_blocks`` blocks in ``buffer`` (or own memory)."""

    def __init__(
        self,
        model: Model,
        layout: KvLayout,
        num_blocks: int,
        buffer: memoryview | bytearray | None = None,
        announce: _Announce | None = None,
    ) -> None:
        super().__init__(model, layout, announce)
        self.cache: KvCache = KvCache(layout, num_blocks, buffer)
        self._lanes = LanedForward(model, self.cache, most_lanes=MOST_LANES if layout.num_parts == 1 else 1)

    def _forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        return self._lanes(chunks)

    def _sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        return sample(logits, rows) if rows else Sampled([], [])


class DeviceRunner(_Runner):
    """Runs on a device, with ``blocks`` in its memory (or as many): sampling there, one copy back per step.

    A step has been computed when `run` returns: it waits for the sampled tokens or, if none are sampled, for the
    device. So blocks that the engine commits afterwards may be copied out, and those it gives back may be copied into,
    without ordering these copies after the computation. ``graphs`` replays decode steps from CUDA graphs if the device
    has them.

    The first step for which memory does not suffice halves the tokens of a pass: it and larger steps are computed in
    several. If memory runs out again, or with several ranks, which are in the middle of their sums, `run` raises.
    """

    def __init__(
        self,
        model: Model,
        layout: KvLayout,
        blocks: int | DeviceKvCache,
        announce: _Announce | None = None,
        *,
        graphs: bool = True,
    ) -> None:
        super().__init__(model, layout, announce)
        made = blocks if isinstance(blocks, DeviceKvCache) else DeviceKvCache(layout, blocks, model.device)
        self.cache: DeviceKvCache = made
        #: Most tokens of a pass: set once memory has run out.
        self._most_tokens: int | None = None
        can_record = graphs and layout.num_parts == 1 and model.is_static and model.device.type == "cuda"
        self._graphs = DecodeGraphs(model, self.cache) if can_record else None

    def _run(self, chunks: Sequence[SequenceChunk], rows: Sequence[SamplingRow]) -> Computed:
        """Run in as many passes as the memory demands."""
        if self._announce is not None:
            return super()._run(chunks, rows)
        if self._most_tokens is None:
            with contextlib.suppress(torch.OutOfMemoryError):
                return super()._run(chunks, rows)
            torch.cuda.empty_cache()  # behind the handler: the error keeps what the failed pass allocated
            self._most_tokens = max(1, sum(len(chunk.token_ids) for chunk in chunks) // 2)
            _log.warning("step.out_of_memory", most_tokens=self._most_tokens)
        passes = []
        for part in in_passes(chunks, self._most_tokens):
            count = sum(1 + chunk.num_more_logits for chunk in part if chunk.wants_logits)
            passes.append(super()._run(part, rows[:count]))
            rows = rows[count:]
        return passes[0] if len(passes) == 1 else _joined(passes)

    def record(self, max_num_seqs: int) -> None:
        """Record the graphs for steps of up to ``max_num_seqs`` sequences, before the first one."""
        if self._graphs is not None:
            with torch.cuda.device(self.model.device):
                self._graphs.record(max_num_seqs)

    def _forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        block_tokens, device = self.layout.block_tokens, self.model.device
        # All ranks must compute one shape; static shapes follow from the batch.
        if self._announce is not None or self.model.batch_invariant or not is_decode(chunks):
            return self.model.forward(build_forward_batch(chunks, block_tokens, device), self.cache)
        shape = DecodeShape.of(chunks, block_tokens)
        packed = pack_decodes(chunks, shape, block_tokens, self.cache.scratch)
        logits = self._graphs.forward(packed, shape) if self._graphs is not None else None
        if logits is None:
            logits = self.model.forward(decode_batch(upload(packed, device), block_tokens), self.cache)
        return logits[: len(chunks)]

    def _sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        if rows and self.model.batch_invariant:  # scans and sorts of several rows may round differently than of one
            drawn = [sample_on_device(logits[at : at + 1], [row]) for at, row in enumerate(rows)]
            return Sampled([each.tokens[0] for each in drawn], [each.logprobs[0] for each in drawn])
        if rows:
            return sample_on_device(logits, rows)
        wait_for(self.model.device)
        return Sampled([], [])


def in_passes(chunks: Sequence[SequenceChunk], most_tokens: int) -> Iterator[list[SequenceChunk]]:
    """Yield ``chunks`` in their order in passes of at most ``most_tokens``, cut where one does not fit.

    Tokens whose logits are requested stay in one pass, even if they are more.
    """
    ready: list[SequenceChunk] = []
    room = most_tokens
    for whole in chunks:
        chunk = whole
        while len(chunk.token_ids) > room:
            together = 1 + chunk.num_more_logits
            count = min(room, len(chunk.token_ids) - together)
            if count > 0:
                start, ids = chunk.start + count, chunk.token_ids
                head = replace(chunk, token_ids=ids[:count], wants_logits=False, num_more_logits=0)
                ready.append(head)
                chunk = replace(chunk, token_ids=ids[count:], start=start)
            if not ready:
                break
            yield ready
            ready, room = [], most_tokens
        ready.append(chunk)
        room = max(0, room - len(chunk.token_ids))
    yield ready


def _joined(passes: Sequence[Computed]) -> Computed:
    """Return the result of a step computed in ``passes``."""
    tokens = [token for each in passes for token in each.sampled.tokens]
    logprobs = [logprob for each in passes for logprob in each.sampled.logprobs]
    scores = {id(each): each for part in passes for each in part.scores}  # a prompt that was cut has one for all passes
    forward_s, sample_s = sum(each.forward_s for each in passes), sum(each.sample_s for each in passes)
    return Computed(Sampled(tokens, logprobs), forward_s, sample_s, tuple(scores.values()))


def _chunk_of(run: ScheduledRun, vocab: int) -> SequenceChunk:
    """Return the model's input for ``run``."""
    request = run.request
    tokens = request.sequence.tokens[run.start : run.start + run.num_tokens]
    if run.draft:
        tokens = np.append(tokens, np.asarray(run.draft, dtype=tokens.dtype))
    scores = PromptScoreArrays.of(run, vocab)
    return SequenceChunk(tokens, run.start, request.block_ids, run.samples, scores, num_more_logits=len(run.draft))


def _rows_of(plan: StepPlan) -> list[SamplingRow]:
    """Return the draws of a step, in the order of the logits that `_chunk_of` of its runs gives."""
    rows: list[SamplingRow] = []
    for run in plan.runs:
        if run.samples:
            rows += (SamplingRow.of(run.request, run.draft[:at]) for at in range(1 + len(run.draft)))
    return rows


#: Steps in a trace: some prefills and enough decodes to see their rhythm, in a file of some megabytes.
NUM_STEPS = 64


class ThreadedRunner(WrappedRunner):
    """Runs ``runner`` on at most ``num_threads`` threads, for models on the CPU. Only one thread may call `run`."""

    def __init__(self, runner: ModelRunner, num_threads: int) -> None:
        super().__init__(runner)
        self.choice = ThreadChoice(num_threads)
        self._threads = 0  # not set in the calling thread yet

    def run(self, plan: StepPlan) -> Computed:
        """Run the step on the number of threads that has proved best for steps of its size."""
        num_tokens = plan.num_tokens + plan.num_drafted
        threads = self.choice.threads(num_tokens)
        if threads != self._threads:
            torch.set_num_threads(threads)  # for the products that this thread starts from now on
            self._threads = threads
        computed = self._runner.run(plan)
        self.choice.took(num_tokens, computed.forward_s)
        return computed

    def __repr__(self) -> str:
        return f"ThreadedRunner({self._runner!r}, {self.choice.best})"


class ProfiledRunner(WrappedRunner):
    """Traces only the first ``num_steps`` steps of ``runner``; writes the trace to ``path``."""

    def __init__(self, runner: ModelRunner, path: Path, num_steps: int = NUM_STEPS) -> None:
        super().__init__(runner)
        self._path = path
        self._left = num_steps
        self._profiler: profile | None = None

    def run(self, plan: StepPlan) -> Computed:
        """Forward and sample, tracing the first steps."""
        if self._left == 0:
            return self._runner.run(plan)
        if self._profiler is None:
            lanes_too = _ExperimentalConfig(profile_all_threads=True)
            self._profiler = profile(activities=supported_activities(), acc_events=True, experimental_config=lanes_too)  # type: ignore[no-untyped-call]
            self._profiler.start()
        computed = self._runner.run(plan)
        self._left -= 1
        if self._left == 0:
            self._write(self._profiler)
        return computed

    def _write(self, profiler: profile) -> None:
        """Write the trace; if that fails, it is logged and requests continue."""
        profiler.stop()
        self._profiler = None
        try:
            profiler.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            _log.error("profile.failed", path=str(self._path), error=str(error))
        else:
            _log.info("profile.written", path=str(self._path))

    def __repr__(self) -> str:
        return f"ProfiledRunner({self._runner!r}, {self._left} steps left)"
