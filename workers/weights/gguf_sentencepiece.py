"""A `tokenizers.Tokenizer` out of the SentencePiece vocabulary in GGUF metadata (Llama 2, Mistral): pieces with scores.

SentencePiece's BPE joins, of all neighbours whose join is a piece, those whose piece has the highest score, until none
is left. `tokenizers` joins by a list of merges, so the list is made of the pieces: every way to cut a piece into two
pieces is a merge, ordered by the piece's score. Example: with the pieces ``l``, ``o``, ``w``, ``lo`` (-1) and ``low``
(-2) the merges are (l, o) and then (lo, w).

A text's spaces become U+2581, and one is put in front of the text and behind every special token, as llama.cpp does
with these files. Characters that are no piece become their UTF-8 bytes, where the vocabulary has byte pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from tanghulu.errors import ModelUnsupported

_NORMAL, _UNKNOWN, _USER_DEFINED, _BYTE = 1, 2, 4, 6
_SPACE = "\u2581"


def build_sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer of ``tokenizer.ggml.model`` *llama*, without added tokens and BOS.

    Raises ModelUnsupported if the pieces come without scores or types.
    """
    pieces: list[str] = metadata["tokenizer.ggml.tokens"]
    scores, types = (metadata.get(f"tokenizer.ggml.{name}", ()) for name in ("scores", "token_type"))
    if not len(pieces) == len(scores) == len(types):
        raise ModelUnsupported(
            f"a GGUF vocabulary of SentencePiece needs a score and a type for each of its {len(pieces)} pieces; "
            f"there are {len(scores)} scores and {len(types)} types"
        )
    unknown = next((piece for piece, kind in zip(pieces, types, strict=True) if kind == _UNKNOWN), None)
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = _merges(pieces, scores, types)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in types)
    )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *steps] if prefixed else steps)
    tokenizer.decoder = _decoder(prefixed)
    return tokenizer


def _merges(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every cut of a piece into two, the piece of the highest score first; of equal ones the one of the lowest id."""
    joinable = {piece for piece, kind in zip(pieces, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    order = sorted(range(len(pieces)), key=lambda index: -scores[index])
    return [
        (piece[:cut], piece[cut:])
        for piece in (pieces[index] for index in order)
        if piece in joinable
        for cut in range(1, len(piece))
        if piece[:cut] in joinable and piece[cut:] in joinable
    ]


def _decoder(prefixed: bool) -> Any:
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
