"""Token ids of earlier texts: a part of a conversation already tokenised is not tokenised again.

A text is cut after special tokens, and each segment is tokenised by itself. That gives the same ids, because a
tokenizer of the kinds accepted here does so itself: first it finds its added tokens in the text (the leftmost, and of
those the longest), then each piece between them goes through normalizer, pre-tokenizer and model separately. So the
text on one side of an added token does not affect the other. Cuts elsewhere, as between words, are not safe.

A segment ends at the first special token after SEGMENT_CHARACTERS characters, so texts with a common beginning are cut
at the same places. Example: a chat of 28,000 characters makes some 25 segments; its next turn finds all of them but the
last, and 1,500 characters are tokenised instead of 29,500. Like cached blocks, segments are visible only to requests of
one salt: otherwise the time of an answer would reveal the prompts of others.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from tanghulu.hashing import Tokens, as_tokens

SEGMENT_CHARACTERS: Final = 1024
#: Characters of all cached segments; each takes up to four bytes, and one or two more for its ids.
MAX_CHARACTERS: Final = 8 << 20
#: Pre-tokenizers that depend on one piece alone. Metaspace is excluded: it depends on the start of the text.
_LOCAL: Final = frozenset(("ByteLevel", "Digits", "Punctuation", "Split", "Whitespace", "WhitespaceSplit"))


class TokenCache:
    """The segments of earlier texts, with LRU eviction. May be shared by threads."""

    def __init__(self, tokenizer: Tokenizer, cuts: re.Pattern[str], max_characters: int = MAX_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._max_characters = max_characters
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bytes, str], Tokens] = OrderedDict()
        self._num_characters = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, tokenizer_json: str) -> TokenCache | None:
        """Return the cache for a tokenizer; None if segments might be tokenised differently from the whole text."""
        found = json.loads(tokenizer_json)
        cuts = _cuts(found.get("added_tokens") or [])
        return cls(tokenizer, cuts) if cuts is not None and _is_local(found) else None

    def __len__(self) -> int:
        return len(self._known)

    def encode(self, text: str, salt: bytes = b"") -> Tokens:
        """Return the token ids of ``text``, without those that a tokenizer adds to a bare text."""
        parts: list[Tokens] = []
        end = 0
        for start, end in self._segments(text):
            segment = text[start:end]
            known = self._find(salt, segment)
            if known is None:
                known = self._plain(segment)
                self._keep(salt, segment, known)
            parts.append(known)
        if end < len(text):
            parts.append(self._plain(text[end:]))
        return np.concatenate(parts) if parts else as_tokens(())

    def num_unknown(self, text: str, salt: bytes = b"") -> int:
        """Return the number of characters of ``text`` that ``encode`` would tokenise now."""
        known = sum(end - start for start, end in self._segments(text) if self._find(salt, text[start:end]) is not None)
        return len(text) - known

    def check(self) -> None:
        with self._lock:
            assert self._num_characters == sum(len(segment) for _, segment in self._known) <= self._max_characters

    def _segments(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the segments, without the text after the last one, as the next turn continues there."""
        start = 0
        for match in self._cuts.finditer(text):
            if match.end() - start >= SEGMENT_CHARACTERS:
                yield start, match.end()
                start = match.end()

    def _find(self, salt: bytes, segment: str) -> Tokens | None:
        key = (salt, segment)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        return known

    def _keep(self, salt: bytes, segment: str, ids: Tokens) -> None:
        if len(segment) > self._max_characters:
            return
        with self._lock:
            if self._known.setdefault((salt, segment), ids) is ids:
                self._num_characters += len(segment)
            while self._num_characters > self._max_characters:
                (_, oldest), _ = self._known.popitem(last=False)
                self._num_characters -= len(oldest)

    def _plain(self, text: str) -> Tokens:
        # Only the call for many texts releases the interpreter to other threads meanwhile.
        return as_tokens(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _cuts(added: list[dict[str, Any]]) -> re.Pattern[str] | None:
    """Return a pattern that finds added tokens like the tokenizer; None if matches depend on adjacent text.

    Tokens searched in normalized text split the pieces between these, and do not matter.
    """
    first = [token for token in added if not token["normalized"]]
    if not first or any(token[name] for token in first for name in ("single_word", "lstrip", "rstrip")):
        return None
    # Of alternatives at one position an expression takes the first that fits, so the longest come first.
    contents = sorted((token["content"] for token in first), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, contents)))


def _is_local(found: dict[str, Any]) -> bool:
    """Return whether each piece between added tokens is tokenised alone, the same way every time, and whole."""
    model, outer = found.get("model") or {}, found.get("pre_tokenizer")
    kinds = [] if outer is None else outer.get("pretokenizers", [outer])
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and found.get("truncation") is None
        and found.get("padding") is None
        and all(kind.get("type") in _LOCAL for kind in kinds)
    )
