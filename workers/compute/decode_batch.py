"""A step in which every sequence decodes one token, as one tensor of static shape.

Shapes are rounded up to powers of two, so that a few captured graphs (`cuda_graphs`) serve all steps. What fills up is
harmless: a filling row is a sequence of one token in the scratch block, which nobody else reads; a filling column names
the scratch block, and the mask hides it.

The tensor is int64 [sequences, 2 + blocks]: token, position, block table. All else follows from it on the device, so a
step uploads nothing more. Worked example, blocks of 4 tokens, scratch block 50: sequence A (blocks 7, 2) decodes its
7th token 11, B (block 9) its 3rd token 12, C (blocks 4, 5, 6) its 9th token 13. Filled up to 4 sequences of 4 blocks:

    [[11, 6, 7, 2, 50, 50],
     [12, 2, 9, 50, 50, 50],
     [13, 8, 4, 5, 6, 50],
     [0, 0, 50, 50, 50, 50]]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tanghulu.workers.compute.forward_batch import DecodeTables, ForwardBatch, SequenceChunk

#: The narrowest table: fewer blocks cost nothing to hide, and every width is a graph of its own.
MIN_BLOCKS = 4
_NUM_FIELDS = 2


class DecodeShape(NamedTuple):
    """The shape of a batch of decodes: its number of sequences, and of blocks of each."""

    num_sequences: int
    num_blocks: int

    @classmethod
    def of(cls, chunks: Sequence[SequenceChunk], block_tokens: int) -> DecodeShape:
        """Return the smallest shape of powers of two into which ``chunks`` fit."""
        widest = max(-(-chunk.end // block_tokens) for chunk in chunks)
        return cls(_power_of_two(len(chunks)), max(MIN_BLOCKS, _power_of_two(widest)))

    @property
    def packed(self) -> tuple[int, int]:
        return (self.num_sequences, _NUM_FIELDS + self.num_blocks)


def is_decode(chunks: Sequence[SequenceChunk]) -> bool:
    """Whether every sequence computes one token and wants its logits."""
    return all(len(chunk.token_ids) == 1 and chunk.wants_logits and chunk.scores is None for chunk in chunks)


def pack_decodes(
    chunks: Sequence[SequenceChunk], shape: DecodeShape, block_tokens: int, scratch: int
) -> npt.NDArray[np.int64]:
    """Lay ``chunks`` (`is_decode`) as rows into an array of ``shape``, filled up with block ``scratch``."""
    packed = np.zeros(shape.packed, dtype=np.int64)
    packed[:, _NUM_FIELDS:] = scratch
    for row, chunk in zip(packed, chunks, strict=False):
        num_blocks = -(-chunk.end // block_tokens)
        row[:_NUM_FIELDS] = chunk.token_ids[0], chunk.start
        row[_NUM_FIELDS : _NUM_FIELDS + num_blocks] = chunk.block_ids[:num_blocks]
    return packed


def decode_batch(packed: torch.Tensor, block_tokens: int) -> ForwardBatch:
    """Make the batch that ``packed`` describes, by operations on its device alone. Logits of all rows are wanted."""
    token_ids, positions, tables = packed[:, 0], packed[:, 1], packed[:, _NUM_FIELDS:]
    blocks = tables.gather(1, (positions // block_tokens)[:, None])[:, 0]
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        blocks=blocks,
        offsets=positions % block_tokens,
        spans=(),
        logit_rows=torch.arange(len(packed), device=packed.device),
        decodes=DecodeTables(tables, positions + 1),
    )


def _power_of_two(count: int) -> int:
    """The least power of two that is at least ``count``."""
    return 1 << (count - 1).bit_length()
