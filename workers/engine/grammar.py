"""Grammars: tokens allowed next, so that a text matches a JSON schema, a regular expression or a Lark grammar.

The one file that uses llguidance (extra ``worker``), imported on the first request with a grammar. A grammar's state is
a function of the tokens generated so far, so a request may be preempted or continue at another worker: the state
catches up with the existing tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import structlog

from tanghulu.errors import InvalidRequest
from tanghulu.runtime.extras import install_command

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = structlog.get_logger(__name__)

#: Longest schema or expression accepted.
MAX_GRAMMAR_CHARS = 65_536
#: Compiled grammars kept for further requests; one takes up to 20 MB.
MAX_KNOWN = 32
#: Of the thread that compiles: llguidance recurses along chains of rules, of which a text may have thousands.
_STACK_BYTES = 256 << 20

_NO_TEXT = "it allows no text here; check it for rules that refer only to themselves"
#: llguidance's names for states without an exit.
_STUCK = frozenset(("NoExtension", "NoExtensionBias"))


class GrammarKind(Enum):
    """Kind of a grammar's text."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Grammar:
    """One request's grammar and the position of its text in it."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._num_consumed = 0
        #: Why the text cannot, or did not, continue under the grammar; None while it can.
        self.failure: str | None = None
        self._mask = np.zeros(-(-vocab // 32), dtype=np.int32)

    def allowed(self, generated: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Return whether each token may follow ``generated``, which extends the previous call's: [vocab].

        If the text is complete, only an end token may. All False, with the reason in ``failure``, if ``generated`` does
        not match the grammar or nothing can follow it: the next token is then the request's last one.
        """
        fresh = generated[self._num_consumed :].tolist()
        self._num_consumed = len(generated)
        if fresh and self.failure is None and not self._matcher.consume_tokens(fresh):
            self._fail("the text does not match it")  # it was not made under it
        if self.failure is None:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if self._matcher.is_error():  # the mask then admits the end token
                self._fail(_reason(self._matcher))
        if self.failure is not None:
            return np.zeros(self._vocab, dtype=np.bool_)
        bits = np.unpackbits(self._mask.view(np.uint8), count=self._vocab, bitorder="little").view(np.bool_)
        if not bits.any():
            self._fail(_NO_TEXT)
        return bits

    def _fail(self, why: str) -> None:
        _log.warning("grammar.failed", num_tokens=self._num_consumed, reason=why)
        self.failure = why


def _reason(matcher: LLMatcher) -> str:
    """Return the first line of llguidance's message; a dump of its parser's state follows."""
    first = matcher.get_error().partition("\n")[0]
    return _NO_TEXT if first in _STUCK else first


class GrammarCompiler:
    """Makes grammars over one tokenizer; ``eos_ids`` end a complete text.

    They are compiled in a thread, which takes milliseconds, or seconds for thousands of properties; the first one takes
    half a second more for a vocabulary of 50,000.
    """

    def __init__(self, tokenizer_json: bytes, vocab: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab = vocab
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._known: dict[tuple[GrammarKind, str], LLMatcher] = {}

    def compiling(self, kind: GrammarKind, text: str) -> Future[LLMatcher] | None:
        """Begin to compile a grammar unless it is known; once that has ended, `compile` takes no time."""
        return None if (kind, text) in self._known else self._thread.submit(self._compile, kind, text)

    def compile(self, kind: GrammarKind, text: str) -> Grammar:
        """Return the grammar at its beginning; raises InvalidRequest that names its fault."""
        known = self._known.get((kind, text)) or self._thread.submit(self._compile, kind, text).result()
        return Grammar(known.deep_copy(), self._vocab)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        thread, size = ThreadPoolExecutor(1, "tanghulu-grammars"), threading.stack_size(_STACK_BYTES)
        thread.submit(int).result()  # it begins with its first task
        threading.stack_size(size)
        return thread

    def _compile(self, kind: GrammarKind, text: str) -> LLMatcher:
        if (known := self._known.get((kind, text))) is not None:
            return known
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"a {kind.value} of {len(text)} characters is too long; the limit is {MAX_GRAMMAR_CHARS}"
            )
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError as error:
            raise InvalidRequest(f"this worker cannot use grammars: {install_command('grammar')}") from error
        try:
            if kind is GrammarKind.REGEX:
                matcher = LLMatcher(self._opened(), LLMatcher.grammar_from_regex(text), log_level=0)
            elif kind is GrammarKind.LARK:
                matcher = LLMatcher(self._opened(), LLMatcher.grammar_from_lark(text), log_level=0)
            else:
                matcher = LLMatcher(self._opened(), LLMatcher.grammar_from_json_schema(text), log_level=0)
        except BaseException as error:  # a panic of llguidance is no Exception
            raise InvalidRequest(f"the {kind.value} cannot be used: {error}") from error
        if matcher.is_error():
            raise InvalidRequest(f"the {kind.value} cannot be used: {matcher.get_error()}")
        grammar = Grammar(matcher.deep_copy(), self._vocab)
        grammar.allowed(np.empty(0, np.uint32))  # some faults appear only in the first mask
        if grammar.failure is not None:
            raise InvalidRequest(f"the {kind.value} cannot be used: {grammar.failure}")
        if len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[kind, text] = matcher
        return matcher

    def _opened(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            self._tokenizer = LLTokenizer(self._tokenizer_json.decode(), n_vocab=self._vocab, eos_token=self._eos_ids)
        return self._tokenizer
