"""Computing half of the engine on a device of its own: forward pass, sampling there, one copy back per step.

A step has been computed when `run` returns: it waits for the sampled tokens or, if none are sampled, for the device. So
blocks that the engine commits afterwards may be copied out, and those it gives back may be copied into, without
ordering these copies after the computation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import structlog
import torch

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
from tanghulu.workers.compute.kv_cache import DeviceKvCache
from tanghulu.workers.compute.models.registry import Model, kv_dtype_name
from tanghulu.workers.compute.torch_runner import chunk_of, rows_of, scores_of
from tanghulu.workers.engine.engine import Computed
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.step import Sampled, StepPlan

_log = structlog.get_logger(__name__)


class DeviceRunner:
    """A `ModelRunner` of ``model`` with ``num_blocks`` of cache of ``kv_dtype`` in its device's memory.

    ``kv_dtype`` is as in ``--kv-dtype``. ``num_parts`` tensor-parallel ranks share the model, of which this is rank 0;
    ``announce`` sends every step's token runs to the others. ``graphs`` replays decode steps from CUDA graphs if the
    device has them.
    """

    def __init__(
        self,
        model: Model,
        *,
        block_tokens: int,
        kv_dtype: str = "auto",
        num_blocks: int,
        graphs: bool = True,
        num_parts: int = 1,
        announce: Callable[[Sequence[SequenceChunk]], None] | None = None,
    ) -> None:
        self.model = model
        self.vocab, self.max_context = model.config.vocab, model.config.max_context
        self.layout = KvLayout.of(model.config, block_tokens, kv_dtype_name(kv_dtype, model.dtype), num_parts)
        self.cache = DeviceKvCache(self.layout, num_blocks, model.device)
        self._announce = announce
        self._clock = SystemClock()
        self._graphs: DecodeGraphs | None = None
        # The number of rows of an expert must be read from the device, which no graph can do.
        routed = model.config.experts is not None
        if graphs and model.device.type == "cuda" and num_parts == 1 and not model.batch_invariant and not routed:
            self._graphs = DecodeGraphs(model, self.cache)

    def run(self, plan: StepPlan) -> Computed:
        """Compute the step and sample. On a GPU ``forward_s`` is the time to launch the kernels."""
        started = self._clock.now_s()
        chunks = [chunk_of(run, self.vocab) for run in plan.runs]
        if self._announce is not None:
            self._announce(chunks)
        with _current(self.model.device):
            logits = self._forward(chunks)
            launched = self._clock.now_s()
            sampled = self._sample(plan, logits)
        return Computed(sampled, launched - started, self._clock.now_s() - launched, scores_of(chunks))

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

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> Sampled:
        rows = rows_of(plan)
        if rows and self.model.batch_invariant:  # scans and sorts of several rows may round differently than of one
            return _joined([sample_on_device(logits[at : at + 1], [row]) for at, row in enumerate(rows)])
        if rows:
            return sample_on_device(logits, rows)
        wait_for(self.model.device)
        return Sampled([], [])

    def __repr__(self) -> str:
        return f"DeviceRunner({self.model.config.architecture} on {self.model.device}, {self.cache!r})"


def _joined(samples: Sequence[Sampled]) -> Sampled:
    """Join ``samples``, in their order."""
    tokens = [token for each in samples for token in each.tokens]
    return Sampled(tokens, [logprobs for each in samples for logprobs in each.logprobs])


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` the calling thread's current one within the context."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
