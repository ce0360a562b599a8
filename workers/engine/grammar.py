"""Grammars: which tokens may follow, so that a text matches a JSON schema, a regular expression or a Lark grammar.

The one file that knows llguidance (extra ``grammar``), imported when the first request asks for a grammar. A grammar's
state is a function of the tokens generated so far, so a request may be preempted or go on at another worker: the state
catches up with whatever tokens there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import structlog

from tanghulu.errors import InvalidRequest
from tanghulu.runtime.extras import install_command

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = structlog.get_logger(__name__)

#: A longer schema or expression is refused.
MAX_GRAMMAR_CHARS = 65_536


class GrammarKind(Enum):
    """What a grammar's text is."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Grammar:
    """One request's grammar and how far its text is in it."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._num_consumed = 0
        self._left = False
        self._mask = np.zeros(-(-vocab // 32), dtype=np.int32)

    def allowed(self, generated: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Whether each token may follow ``generated``, which begins with what was given last time: [vocab].

        Where the text is complete only an end token may. All False if ``generated`` does not match the grammar.
        """
        fresh = generated[self._num_consumed :].tolist()
        self._num_consumed = len(generated)
        if fresh and not self._left and not self._matcher.consume_tokens(fresh):
            _log.warning("grammar.left", num_tokens=len(generated))  # the text was not made under it
            self._left = True
        if self._left:
            return np.zeros(self._vocab, dtype=np.bool_)
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        bits = np.unpackbits(self._mask.view(np.uint8), count=self._vocab, bitorder="little")
        return bits.view(np.bool_)


class GrammarCompiler:
    """Makes grammars over one tokenizer; ``eos_ids`` end a text that is complete."""

    def __init__(self, tokenizer_json: bytes, vocab: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab = vocab
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None

    def compile(self, kind: GrammarKind, text: str) -> Grammar:
        """The grammar at its beginning; raises InvalidRequest that says what is wrong with it.

        The first call takes about half a second for a vocabulary of 50,000, later ones milliseconds.
        """
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"a {kind.value} of {len(text)} characters is too long; at most {MAX_GRAMMAR_CHARS}")
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError as error:
            raise InvalidRequest(f"this worker has no grammars: {install_command('grammar')}") from error
        try:
            if kind is GrammarKind.REGEX:
                matcher = LLMatcher(self._opened(), LLMatcher.grammar_from_regex(text), log_level=0)
            elif kind is GrammarKind.LARK:
                matcher = LLMatcher(self._opened(), LLMatcher.grammar_from_lark(text), log_level=0)
            else:
                matcher = LLMatcher(self._opened(), LLMatcher.grammar_from_json_schema(text), log_level=0)
        except ValueError as error:
            raise InvalidRequest(f"the {kind.value} cannot be used: {error}") from error
        if matcher.is_error():
            raise InvalidRequest(f"the {kind.value} cannot be used: {matcher.get_error()}")
        return Grammar(matcher, self._vocab)

    def _opened(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            self._tokenizer = LLTokenizer(self._tokenizer_json.decode(), n_vocab=self._vocab, eos_token=self._eos_ids)
        return self._tokenizer
