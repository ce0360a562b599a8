"""Trial at start with ``--batch-invariant``: whether this machine's kernels compute a token alike in any batch.

Every kernel of a step takes part: the model's first layers and its head run over a few tokens in each of the ways in
which requests are served: alone, in chunks, token by token, with others, in lanes, on one thread and on all. KV and
logits must be the same bits. Their hash names the kernels' arithmetic: a machine that rounds differently gets another
fingerprint for its KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash

from tanghulu.errors import ConfigError
from tanghulu.workers.compute.attention.invariant import KEY_SPAN
from tanghulu.workers.compute.forward_batch import SequenceChunk, build_forward_batch
from tanghulu.workers.compute.kv_cache import DeviceKvCache
from tanghulu.workers.compute.lanes import LanedForward
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.engine.kv_layout import KvLayout

_BLOCK_TOKENS = 16
#: The sequence ends after a span of keys, and the lengths of the other sequences suffice for several lanes.
_NUM_TOKENS, _COMPANY = KEY_SPAN + 21, (1, 37)
#: Ends of its chunks.
_CHUNKS = ((_NUM_TOKENS,), (64, _NUM_TOKENS), (3, 40, *range(_NUM_TOKENS - 3, _NUM_TOKENS + 1)))

_Answer = tuple[torch.Tensor, torch.Tensor]


def require_invariance(model: Model, num_threads: int, kv_dtype: str) -> bytes:
    """Raise ConfigError unless all ways of computing a sequence gave the same bits; return a hash of these.

    ``num_threads``: the most that the worker will use; ``kv_dtype``: the type of its cache. Restores torch's setting.
    """
    model = model.with_layers(min(2, model.config.num_layers))
    threads = torch.get_num_threads()
    try:
        first: _Answer | None = None
        for name, answer in _answers(model, num_threads, kv_dtype):
            first = first or answer
            if not all(map(torch.equal, first, answer)):
                raise ConfigError(
                    f"--batch-invariant: torch {torch.__version__} on this {model.device.type} computes other bits "
                    f"{name} than alone in one chunk; use another --dtype or --device, or drop the option"
                )
    finally:
        torch.set_num_threads(threads)
    assert first is not None
    return xxhash.xxh3_128_digest(b"".join(part.view(torch.uint8).numpy().tobytes() for part in first))


def _answers(model: Model, num_threads: int, kv_dtype: str) -> Iterator[tuple[str, _Answer]]:
    """Yield ways to compute one sequence, each with its KV and last logits."""
    for threads in sorted({1, num_threads}):
        torch.set_num_threads(threads)
        for ends in _CHUNKS:
            for company in (False, True):
                beside = "in company" if company else "alone"
                answer = _computed(model, ends, kv_dtype, company=company)
                yield f"{beside} in {len(ends)} chunks on {threads} threads", answer


def _computed(model: Model, ends: Sequence[int], kv_dtype: str, *, company: bool) -> _Answer:
    """Return KV and last logits of the sequence, computed in chunks that end at ``ends``."""
    layout = KvLayout.of(model.config, _BLOCK_TOKENS, kv_dtype)
    needed = -(-_NUM_TOKENS // _BLOCK_TOKENS)
    cache = DeviceKvCache(layout, needed * (1 + len(_COMPANY)), model.device)
    forward = LanedForward(model, cache)
    tokens = np.random.default_rng(7).integers(0, model.config.vocab, _NUM_TOKENS)
    own = range(needed)
    others = [
        SequenceChunk(tokens[:length], 0, range(needed * (1 + at), needed * (2 + at)), wants_logits=True)
        for at, length in enumerate(_COMPANY)
    ]
    start, logits = 0, torch.empty(0)
    for end in ends:
        beside = company and (start == 0 or end == _NUM_TOKENS)
        chunks = [SequenceChunk(tokens[start:end], start, own, wants_logits=end == _NUM_TOKENS)]
        if beside:
            chunks = [*others[:1], *chunks, *others[1:]]
        if model.device.type == "cpu":
            logits = forward(chunks)
        else:
            logits = model.forward(build_forward_batch(chunks, _BLOCK_TOKENS, model.device), cache)
        start = end
    kv = cache.blocks[: needed - 1]
    return kv.cpu(), logits[1 if company else 0].cpu()
