"""A model as the conductor serves it: its card, its tokenizer, its chat template.

Owns text <-> tokens. Built once from the card that a worker describes itself with; immutable afterwards but for
the hashes of prompts that it remembers.

A chat template is rendered as Hugging Face's apply_chat_template does: sandboxed, with transformers' settings
(trim_blocks, lstrip_blocks, loop controls, ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``), so
that a template written for it renders alike.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from tanghulu.conductor.index.hash_cache import HashCache
from tanghulu.conductor.routing.requests import ModelCard
from tanghulu.conductor.text.detokenizer import DetokenizerFactory, is_byte_level
from tanghulu.errors import ContextLengthExceeded, InvalidRequest, ModelUnsupported
from tanghulu.hashing import HASH_FUNCTIONS, Tokens, TokenSequence, as_tokens, root_hash

#: Longer texts are tokenised in a thread: about a microsecond a character would stall everybody's streams.
INLINE_CHARACTERS = 8192
_MAX_TOKENIZER_BYTES = 256 << 20


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's template, compiled once. ``source`` may be empty: then chat is refused."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source) if source else None
        except jinja2.TemplateError as error:
            raise ModelUnsupported(f"the model's chat template cannot be compiled: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt, the assistant's turn opened. Raises InvalidRequest where the template refuses the messages."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        values = {"add_generation_prompt": True, "tools": None, "documents": None, **self._tokens, **variables}
        try:
            return self._template.render(messages=list(messages), **values)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error


class ServedModel:
    """Card, tokenizer and template of one model.

    ``card`` is that of the workers which serve it but for the context length, the longest that one of them has.
    """

    def __init__(self, card: ModelCard) -> None:
        if card.block_hash not in HASH_FUNCTIONS:
            raise ModelUnsupported(f"{card.model} hashes its blocks by {card.block_hash!r}, unknown here")
        tokenizer_json = _inflate(card)
        self.card = card
        self.tokenizer = _load(card, tokenizer_json)
        self.template = ChatTemplate(card.chat_template, card.bos_token, card.eos_token)
        self.detokenizers = DetokenizerFactory(self.tokenizer, is_byte_level(tokenizer_json))
        self._hashes = HashCache()
        self._bos = self.tokenizer.token_to_id(card.bos_token) if card.bos_token else None

    def __repr__(self) -> str:
        return f"<ServedModel {self.card.model} {self.card.fingerprint[:4].hex()}>"

    def differences(self, card: ModelCard) -> list[str]:
        """Names of what ``card`` says otherwise than this model's: no request of the one may go on at the other.

        The context length is not among them, since it depends on a worker's memory. May take long, for the tokenizer.
        """
        known = self.card
        names = [f.name for f in dataclasses.fields(card) if f.name not in ("context_length", "tokenizer_json_zlib")]
        found = [name for name in names if getattr(known, name) != getattr(card, name)]
        if known.tokenizer_json_zlib != card.tokenizer_json_zlib and _inflate(known) != _inflate(card):
            found.append("tokenizer")
        return found

    def set_context_length(self, tokens: int) -> None:
        """Change the context: workers with more or less memory came or went."""
        if tokens != self.card.context_length:
            self.card = dataclasses.replace(self.card, context_length=tokens)

    async def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        """Tokens of ``text``; with ``add_special_tokens`` as the model wants a bare text (its bos in front)."""
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> Tokens:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.card.add_bos and self._bos is not None and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return as_tokens(ids)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """The chat's prompt as text; to be encoded without special tokens, which are in it."""
        return self.template.render(messages, **variables)

    def checked_tokens(self, ids: Sequence[int]) -> Tokens:
        """Token ids from a client; raises InvalidRequest for one that the model does not have."""
        bad = next((i for i in ids if not 0 <= i < self.card.vocab_size), None)
        if bad is not None:
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {self.card.vocab_size}")
        return as_tokens(ids)

    def max_new_tokens(self, num_prompt_tokens: int, wanted: int | None) -> int:
        """The number of tokens that may be generated: ``wanted``, or up to the end of the context.

        Raises InvalidRequest for an empty prompt and ContextLengthExceeded where prompt and output do not fit.
        """
        context = self.card.context_length
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty: it has no token")
        most = context - num_prompt_tokens
        if most < 1:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {context} tokens and the prompt has {num_prompt_tokens}; "
                "shorten it"
            )
        return most if wanted is None else min(wanted, most)

    def empty_sequence(self, salt: bytes) -> TokenSequence:
        """The token sequence that this model's and tenant's block hashes grow from."""
        card = self.card
        root = root_hash(card.fingerprint, salt, card.block_hash)
        return TokenSequence(root, card.block_tokens, algorithm=card.block_hash, chain=self._hashes.chain)


def _inflate(card: ModelCard) -> str:
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(card.tokenizer_json_zlib, _MAX_TOKENIZER_BYTES)
        if not inflater.eof:
            raise ModelUnsupported(f"the tokenizer of {card.model} is cut off or above {_MAX_TOKENIZER_BYTES} bytes")
        return data.decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise ModelUnsupported(f"the tokenizer of {card.model} is not zlib of JSON: {error}") from error


def _load(card: ModelCard, tokenizer_json: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the Rust library raises Exception itself; it is typed here
        raise ModelUnsupported(f"the tokenizer of {card.model} cannot be read: {error}") from error
