"""The prompts of a live replay: lengths by a scale, where models are small, and tokens for a trace's ids.

Traces name the blocks of their prompts by ids and hold no text. Equal ids become equal tokens, so prompts share exactly
the prefixes that they shared when the trace was taken: with ids (7, 8, 9) and 1,100 tokens a prompt is the 512 tokens
of 7, the 512 of 8 and the first 76 of 9; at a scale of 4 it is 128 + 128 + 19 tokens. Owns no I/O and no clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from tanghulu.conductor.replay.trace import BLOCK_TOKENS, TraceRequest
from tanghulu.errors import InvalidRequest


def scaled(requests: Sequence[TraceRequest], scale: int) -> list[TraceRequest]:
    """``requests`` with prompts and answers 1 / ``scale`` as long (at least a token each); ``scale`` is 1 to 512."""
    block_tokens = BLOCK_TOKENS // scale

    def shorter(request: TraceRequest) -> TraceRequest:
        blocks, rest = divmod(request.num_tokens, BLOCK_TOKENS)
        tokens = max(1, blocks * block_tokens + rest // scale)
        return dataclasses.replace(request, num_tokens=tokens, output_tokens=max(1, request.output_tokens // scale))

    return [shorter(request) for request in requests]


def check_lengths(requests: Sequence[TraceRequest], context_tokens: int, scale: int) -> None:
    """Raise InvalidRequest, with the scale that would do, if a request of ``requests`` exceeds the model's context."""
    longest = max(request.num_tokens + request.output_tokens for request in requests)
    if longest > context_tokens:
        enough = -(-longest * scale // context_tokens)
        raise InvalidRequest(
            f"the trace's longest request has {longest} tokens at --scale {scale}, the model takes {context_tokens}; "
            f"--scale {enough} or more makes them short enough"
        )


class Prompts:
    """Token ids for the prompts of one run: a function of ``seed``, ``run`` (its name) and the trace's ids alone.

    ``vocabulary``: the token ids to draw from. Runs under other names share no prefix, so none finds what another left.
    """

    def __init__(self, vocabulary: Sequence[int], scale: int, seed: int, run: str) -> None:
        assert vocabulary
        self._vocabulary = np.array(vocabulary, dtype=np.uint32)
        self._block_tokens = BLOCK_TOKENS // scale
        self._salt = f"{seed}/{run}"

    def tokens(self, request: TraceRequest, number: int) -> list[int]:
        """The prompt of ``request`` (one of ``scaled``), the trace's ``number``-th; what has no id is its own."""
        blocks = [self._block(name) for name in self._names(request, number)]
        found: list[int] = np.concatenate(blocks)[: request.num_tokens].tolist()
        return found

    def _names(self, request: TraceRequest, number: int) -> Iterator[str]:
        for position in range(-(-request.num_tokens // self._block_tokens)):
            known = position < len(request.blocks)
            yield f"id {request.blocks[position]}" if known else f"request {number} block {position}"

    def _block(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        draw = np.random.default_rng(xxhash.xxh3_64_intdigest(f"{self._salt}/{name}".encode()))
        return self._vocabulary[draw.integers(len(self._vocabulary), size=self._block_tokens)]
