"""Tokens to text, piece by piece, without ever showing half a character.

Owns one sequence's decoding state. Two ways, chosen by the tokenizer's decoder:

* byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): every token is a fixed string of bytes, so an incremental UTF-8 decoder
  holds back the bytes of an unfinished character. Example: the euro sign E2 82 AC comes as tokens [E2 82] and [AC]:
  the pieces are "" and "€".
* all others (SentencePiece-like): decode a window that begins at the last piece that gave text, and emit what the new
  tokens add to it, unless that ends in U+FFFD, which may be an unfinished character (the method of Hugging Face TGI),
  or in a byte token: one bad byte spoils its whole run of byte tokens, so a run is shown once it has ended, or has
  MAX_HELD tokens.

Either way, the joined pieces are the result of decoding everything at once (of longer runs, if they are valid). Special
tokens are omitted, unless a request includes them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer

#: Tokens held back at most, each of which costs a decoding of all of them.
MAX_HELD = 32
#: Bytes of a character.
_MOST_BYTES = 4
_BROKEN = "\ufffd"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Detokenizer(Protocol):
    """One sequence's growing text."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text completed by ``tokens``; may be empty."""

    def flush(self) -> str:
        """End the sequence; return the text held back, with unfinished characters as U+FFFD."""


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's printable stand-ins for the 256 bytes, inverted (``bytes_to_unicode`` of its encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


class TokenBytes(dict[int, bytes]):
    """Mapping token id -> its bytes, for byte-level tokenizers; filled on demand, shared by all sequences.

    Empty for an omitted or unknown token.
    """

    def __init__(self, tokenizer: Tokenizer, left_out: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(left_out, b""))
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        known = self[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        try:
            return bytes(_BYTE_OF_CHARACTER[c] for c in text)
        except KeyError:  # an added token stands for itself
            return text.encode()


class ByteLevelDetokenizer:
    """Detokenizer for byte-level BPE: decodes the tokens' bytes as UTF-8. ``bytes_of`` gives those of a token."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._held = b""  # of an unfinished character

    def feed(self, tokens: Sequence[int]) -> str:
        data = self._held + b"".join(map(self._bytes_of, tokens))
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_decoded:]
        return text

    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text


class WindowDetokenizer:
    """Detokenizer for any decoder: the difference between the decoded window with and without the new tokens."""

    def __init__(self, tokenizer: Tokenizer, left_out: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._left_out = left_out
        self._emitted: list[int] = []  # the last tokens that gave text, and those before them that gave none
        self._fresh: list[int] = []  # not yet emitted

    def feed(self, tokens: Sequence[int]) -> str:
        return self._take(tokens, final=False)

    def flush(self) -> str:
        return self._take((), final=True)

    def _take(self, tokens: Sequence[int], final: bool) -> str:
        self._fresh.extend(t for t in tokens if t not in self._left_out)
        if not self._fresh:
            return ""
        before = self._decode(self._emitted)
        window = self._decode(self._emitted + self._fresh)
        if not final and (len(window) <= len(before) or window.endswith(_BROKEN) or self._ends_in_byte()):
            return self._take_whole_characters(before) if len(self._fresh) >= MAX_HELD else ""
        return self._emit(len(self._fresh), before, window)

    def _take_whole_characters(self, before: str) -> str:
        """Return the text of the held tokens, but for a last, unfinished character."""
        for num in range(len(self._fresh), len(self._fresh) - _MOST_BYTES, -1):
            window = self._decode(self._emitted + self._fresh[:num])
            if not window.endswith(_BROKEN):
                return self._emit(num, before, window)
        return self._emit(len(self._fresh), before, self._decode(self._emitted + self._fresh))

    def _emit(self, num: int, before: str, window: str) -> str:
        """Return what the first ``num`` tokens add to ``before`` in ``window``."""
        tokens, self._fresh = self._fresh[:num], self._fresh[num:]
        if len(window) > len(before):
            # Where the emitted part alone decodes to nothing (a stripped leading space), it stays in the window: the
            # next window must begin like this one, or the strip would be done twice.
            self._emitted = tokens if before or not self._emitted else self._emitted + tokens
        return window[len(before) :]

    def _ends_in_byte(self) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(self._fresh[-1]) or "") is not None

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False) if tokens else ""


def is_byte_level(tokenizer_json: str) -> bool:
    """Return whether the tokenizer's decoder is GPT-2's byte-level one and nothing else."""
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type") for part in parts] == ["ByteLevel"]


class MarkedDetokenizer:
    """Detokenizer for a decoder that omits special tokens: those in ``shown`` split the text, and are emitted."""

    def __init__(self, new_part: Callable[[], Detokenizer], shown: Mapping[int, str]) -> None:
        self._new_part = new_part
        self._part = new_part()
        self._shown = shown

    def feed(self, tokens: Sequence[int]) -> str:
        text, start = "", 0
        for position, token in enumerate(tokens):
            if token in self._shown:
                text += self._part.feed(tokens[start:position]) + self._part.flush() + self._shown[token]
                self._part, start = self._new_part(), position + 1
        return text + self._part.feed(tokens[start:])

    def flush(self) -> str:
        return self._part.flush()


class DetokenizerFactory:
    """Creates the appropriate detokenizer for each new sequence of one model."""

    def __init__(self, tokenizer: Tokenizer, byte_level: bool) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, what in added.items() if what.special)
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer, self.special) if byte_level else None
        self._all_bytes = TokenBytes(tokenizer, frozenset()) if byte_level else None

    def new(self, markers: Sequence[str] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a detokenizer that omits special tokens if requested, except those named in ``markers``."""
        if not skip_special_tokens:
            if self._all_bytes is not None:
                return ByteLevelDetokenizer(self._all_bytes.__getitem__)
            return WindowDetokenizer(self._tokenizer, frozenset())
        ids = {self._tokenizer.token_to_id(marker): marker for marker in markers}
        shown = {token: marker for token, marker in ids.items() if token in self.special}
        if self._token_bytes is not None:
            known = self._token_bytes.__getitem__
            if not shown:
                return ByteLevelDetokenizer(known)
            as_bytes = {token: marker.encode() for token, marker in shown.items()}
            return ByteLevelDetokenizer(lambda token: as_bytes.get(token) or known(token))
        if shown:
            return MarkedDetokenizer(lambda: WindowDetokenizer(self._tokenizer, self.special), shown)
        return WindowDetokenizer(self._tokenizer, self.special)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a single token, special ones by name, for log probabilities."""
        if token in self.special or self._token_bytes is None:
            text = self._tokenizer.id_to_token(token) or ""
            return bytes.fromhex(text[3:5]) if _BYTE_TOKEN.fullmatch(text) else text.replace("▁", " ").encode()
        return self._token_bytes[token]
