"""Decode steps replayed from CUDA graphs: the launches of a whole forward pass, recorded once for each shape.

A small model's decode step is some hundred kernels, each shorter than its launch; a graph launches all at once. Shapes
are rounded up (`DecodeShape`), so few graphs serve all steps, `MAX_GRAPHS` at most; a worker records them at its start,
since each recording takes some tenths of a second. All share one memory pool and one result tensor: a step's results
are read before the next replay overwrites them.

If recording fails, or shapes are more than graphs, steps run as they would without, and the log gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog
import torch

from tanghulu.workers.compute.device import staged_for
from tanghulu.workers.compute.forward_batch import DecodeShape, decode_batch, pack_decodes
from tanghulu.workers.compute.kv_cache import DeviceKvCache
from tanghulu.workers.compute.models.model import Model

#: Most recorded shapes: the 19 sizes of up to 128 sequences in 5 widths, or the 7 of up to 32 in more than there are.
MAX_GRAPHS = 96
#: Passes before the recording: the first chooses kernels and allocates workspaces.
_WARM_UPS = 2

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded graph: replaying it computes ``logits`` from the content of ``packed`` at that moment."""

    graph: torch.cuda.CUDAGraph
    packed: torch.Tensor
    logits: torch.Tensor


class DecodeGraphs:
    """Graphs of ``model`` over ``cache``; used by the engine's thread alone, with the device current."""

    def __init__(self, model: Model, cache: DeviceKvCache) -> None:
        self._model = model
        self._cache = cache
        self._graphs: dict[DecodeShape, _Recorded] = {}
        self._results: torch.Tensor | None = None
        self._pool = torch.cuda.graph_pool_handle()
        #: For all warm-ups: every stream that multiplies keeps a workspace.
        self._beside = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
        self._failed = self._full = False

    def record(self, max_num_seqs: int) -> None:
        """Record the shapes of steps of up to ``max_num_seqs`` sequences of any context that fits into the cache."""
        tokens = min(self._model.config.max_context, self._cache.num_blocks * self._cache.layout.block_tokens)
        for shape in DecodeShape.up_to(max_num_seqs, -(-tokens // self._cache.layout.block_tokens)):
            if shape not in self._graphs and self._record(shape) is None:
                return

    def forward(self, packed: npt.NDArray[np.int64], shape: DecodeShape) -> torch.Tensor | None:
        """Compute the logits of all rows of ``packed``, valid until the next call; None if this shape has no graph."""
        recorded = self._graphs.get(shape) or self._record(shape)
        if recorded is None:
            return None
        recorded.packed.copy_(staged_for(packed, self._model.device), non_blocking=True)
        recorded.graph.replay()
        return recorded.logits

    def _record(self, shape: DecodeShape) -> _Recorded | None:
        if self._failed or self._full:
            return None
        if len(self._graphs) >= MAX_GRAPHS:
            self._full = True
            _log.warning("cuda_graphs.full", num_graphs=MAX_GRAPHS, not_recorded=tuple(shape))
            return None
        try:
            recorded = self._recorded(shape)
        except RuntimeError as error:  # torch's CUDA errors, including out of memory
            self._failed = True
            _log.warning("cuda_graphs.failed", shape=tuple(shape), error=str(error).splitlines()[0])
            return None
        self._graphs[shape] = recorded
        _log.info("cuda_graphs.recorded", shape=tuple(shape), num_graphs=len(self._graphs))
        return recorded

    def _recorded(self, shape: DecodeShape) -> _Recorded:
        """Record with a batch of filling only: it reads and writes the scratch block."""
        block_tokens, device = self._cache.layout.block_tokens, self._model.device
        filling = pack_decodes([], shape, block_tokens, self._cache.scratch)
        packed = torch.from_numpy(filling).to(device)
        beside = self._beside
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                logits = self._model.forward(decode_batch(packed, block_tokens), self._cache)
        torch.cuda.current_stream(device).wait_stream(beside)
        if self._results is None or len(self._results) < len(logits):
            self._results = torch.empty_like(logits)
        results = self._results[: len(logits)]
        graph = torch.cuda.CUDAGraph()
        # Other threads copy KV meanwhile: only this thread's calls may disturb the recording.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results.copy_(self._model.forward(decode_batch(packed, block_tokens), self._cache))
        return _Recorded(graph, packed, results)
