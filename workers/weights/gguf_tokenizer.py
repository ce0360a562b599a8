"""A `tokenizers.Tokenizer` from GGUF metadata: byte-level BPE (*gpt2*) or SentencePiece's (*llama*).

For byte-level BPE, GGUF keeps tokens, merges and token types, but only a name of the pre-tokenizer
(``tokenizer.ggml.pre``). The splits behind the names are those of the models' own tokenizer.json. An unknown name is
refused, and so is a file without one (llama.cpp's ``default``), because a wrong split yields plausible but different
tokens.

For SentencePiece (Llama 2, Mistral), GGUF keeps pieces with scores. SentencePiece's BPE repeatedly joins, of all
neighbours whose join is a piece, those whose piece has the highest score, until none is left. `tokenizers` joins by a
list of merges, so the list is made of the pieces: every way to cut a piece into two pieces is a merge, ordered by the
piece's score. Example: with the pieces ``l``, ``o``, ``w``, ``lo`` (-1) and ``low`` (-2) the merges are (l, o) and then
(lo, w).

A text's spaces become U+2581, and one is put before the text and after every special token, as llama.cpp does with
these files. Characters that are not pieces become their UTF-8 bytes, if the vocabulary has byte pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tanghulu.errors import ModelUnsupported
from tanghulu.model_files.fields import Fields, names_in
from tanghulu.model_files.hf_tokenizer import typed_errors

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u2581"


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split_by(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split_by(_LLAMA3_SPLIT),
    "qwen2": lambda: _split_by(_QWEN2_SPLIT),
    "deepseek-r1-qwen": lambda: _split_by(_QWEN2_SPLIT),
    "tekken": lambda: _split_by(_TEKKEN_SPLIT),
}
#: Whole words of the vocabulary take precedence over merges (as in the tokenizer.json of Llama 3 and Mistral Nemo).
_IGNORES_MERGES = frozenset({"llama-bpe", "tekken"})
#: Pre-tokenizers for which a missing flag adds BOS, as in llama.cpp.
_ADDS_BOS = frozenset({"llama-bpe", "tekken"})
#: Keys of ``tokenizer.ggml`` that do not affect how a text is cut.
_HARMLESS = names_in(
    """
    cls_token_id eom_token_id eos_token_id eot_token_id fim_mid_token_id fim_pad_token_id fim_pre_token_id
    fim_rep_token_id fim_sep_token_id fim_suf_token_id mask_token_id merges middle_token_id padding_token_id
    prefix_token_id scores seperator_token_id suffix_token_id token_type_count unknown_token_id
    """
)


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Build the tokenizer described by ``metadata``; also return whether it puts BOS in front of a text.

    Raises ModelUnsupported that names the unsupported tokenizer model or pre-tokenizer, or the malformed key.
    """
    fields = Fields(metadata, "GGUF metadata", "tokenizer.ggml.")
    with typed_errors("the vocabulary in the GGUF metadata cannot be built"):
        return _built(fields)


def _built(fields: Fields) -> tuple[Tokenizer, bool]:
    model, pre = fields.text("model"), fields.text("pre", "default")
    tokenizer = _sentencepiece(fields) if model == "llama" else _byte_level(fields, model, pre)
    tokens = fields.items("tokens", str, required=True)
    types = fields.items("token_type", int)
    if types and len(types) != len(tokens):
        raise fields.unusable("token_type", f"there are {len(tokens)} tokens")
    _add_tokens(tokenizer, tokens, types)
    add_bos = fields.flag("add_bos_token", model == "llama" or pre in _ADDS_BOS)
    fields.only("add_eos_token", False)
    fields.only("add_sep_token", False)
    fields.flag("add_space_prefix")
    special = {name: min(fields.ids(f"{name}_token_id"), default=None) for name in ("bos", "eos")}
    for name, index in special.items():
        if index is not None and index >= len(tokens):
            raise fields.unusable(f"{name}_token_id", f"the vocabulary has {len(tokens)} tokens")
    fields.refuse_others(_HARMLESS)
    if (bos_id := special["bos"]) is None:
        return tokenizer, False
    if add_bos:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer, add_bos


def _byte_level(fields: Fields, model: str, pre: str) -> Tokenizer:
    _require_buildable(model, pre)
    merges = [_pair(merge) for merge in fields.items("merges", str)]
    vocabulary = {token: index for index, token in enumerate(fields.items("tokens", str, required=True))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _IGNORES_MERGES))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _require_buildable(model: str, pre: str) -> None:
    if model != "gpt2":
        raise ModelUnsupported(
            f"GGUF tokenizer model {model!r} cannot be built, only gpt2 (byte-level BPE) and llama (SentencePiece); "
            "use the model's safetensors directory with its tokenizer.json"
        )
    if pre not in _PRE_TOKENIZERS:
        raise ModelUnsupported(
            f"GGUF pre-tokenizer {pre!r} (tokenizer.ggml.pre) cannot be built, only {', '.join(_PRE_TOKENIZERS)}; "
            "convert the model again, or use its safetensors directory with its tokenizer.json"
        )


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add tokens found in a text before it is split; control tokens are special, and left out on decoding."""
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=False):
        if kind == _CONTROL:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _sentencepiece(fields: Fields) -> Tokenizer:
    """Build the tokenizer of ``tokenizer.ggml.model`` *llama*, without added tokens and BOS.

    Raises ModelUnsupported if the pieces come without scores or types.
    """
    pieces: list[str] = fields.items("tokens", str, required=True)
    scores, types = fields.items("scores", float), fields.items("token_type", int)
    fields.only("remove_extra_whitespaces", False)
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
    prefixed = fields.flag("add_space_prefix", True)
    steps = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *steps] if prefixed else steps)
    tokenizer.decoder = _decoder(prefixed)
    return tokenizer


def _merges(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Return every cut of a piece into two, the piece of the highest score first, the lowest id among equals."""
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
