"""A model as served by the conductor: its card, its tokenizer, its chat template.

Owns text <-> tokens. Built once from a worker's card; immutable afterwards, except for its cached hashes of prompts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs
from tokenizers import Tokenizer

from tanghulu.conductor.index.hash_cache import HashCache
from tanghulu.conductor.text.chat_template import ChatTemplate, TemplateTooCostly
from tanghulu.conductor.text.detokenizer import DetokenizerFactory, is_byte_level
from tanghulu.conductor.text.preparing import INLINE_BYTES, INLINE_CHARACTERS, in_thread
from tanghulu.conductor.text.template_bounds import INLINE, is_within
from tanghulu.conductor.text.token_cache import TokenCache
from tanghulu.errors import ContextLengthExceeded, InvalidRequest, ModelUnsupported
from tanghulu.hashing import HASH_FUNCTIONS, Tokens, TokenSequence, as_tokens, root_hash
from tanghulu.session.model_card import ModelCard

#: Most characters per token of any text on average; a longer text is refused before it is tokenised.
MAX_CHARACTERS_PER_TOKEN = 16
#: With more characters for each token of the context than this, a text is first counted piece by piece: tokenising it
#: all at once takes 200 bytes a token, and some tokenizers make a token of each character.
COUNTED_FROM_CHARACTERS_PER_TOKEN = 2
_COUNTED_CHARACTERS = 16_384
#: A cut through a word adds tokens, but hardly more than this.
_TOKENS_OF_A_CUT = 16
_MAX_TOKENIZER_BYTES = 256 << 20


class ServedModel:
    """Card, tokenizer and template of one model.

    ``card`` is that of the workers serving it, except for the context length, which is the longest of any of them.
    ``naming_key`` is the cluster secret's, see ``hashing.root_hash``.
    """

    def __init__(self, card: ModelCard, naming_key: bytes = b"") -> None:
        if card.block_hash not in HASH_FUNCTIONS:
            known = ", ".join(HASH_FUNCTIONS)
            raise ModelUnsupported(f"{card.model} hashes its blocks with {card.block_hash!r}; known here: {known}")
        tokenizer_json = _inflate(card)
        self.card = card
        self._naming_key = naming_key
        self.tokenizer = _load(card, tokenizer_json)
        self.template = ChatTemplate(card.chat_template, card.bos_token, card.eos_token)
        self.detokenizers = DetokenizerFactory(self.tokenizer, is_byte_level(tokenizer_json))
        self._cache = TokenCache.of(self.tokenizer, tokenizer_json)
        self._is_costly = False
        self._hashes = HashCache()
        self._bos = self.tokenizer.token_to_id(card.bos_token) if card.bos_token else None

    def __repr__(self) -> str:
        return f"<ServedModel {self.card.model} {self.card.fingerprint[:4].hex()}>"

    def differences(self, card: ModelCard) -> list[str]:
        """Return the names of card fields that differ from this model's: no request of one may continue at the other.

        The context length is not among them, since it depends on a worker's memory. May take long, for the tokenizer.
        """
        known = self.card
        names = [name for name in card.__struct_fields__ if name not in ("context_length", "tokenizer_json_zlib")]
        found = [name for name in names if getattr(known, name) != getattr(card, name)]
        if known.tokenizer_json_zlib != card.tokenizer_json_zlib and _inflate(known) != _inflate(card):
            found.append("tokenizer")
        return found

    def set_context_length(self, tokens: int) -> None:
        """Change the context: workers with more or less memory came or went."""
        if tokens != self.card.context_length:
            self.card = structs.replace(self.card, context_length=tokens)

    async def encode(
        self, text: str, add_special_tokens: bool, salt: bytes | None = None, *, in_loop: bool = True
    ) -> Tokens:
        """Return the tokens of ``text``; with ``add_special_tokens`` as for a bare text of the model (with its bos).

        Without them and with a ``salt``, common beginnings of requests with that salt are cached. A short text is
        tokenised in the event loop, unless others of the same body already were: then not ``in_loop``.

        Raises ContextLengthExceeded for a text far too long for the context, usually without tokenising it.
        """
        self._check_characters(len(text))
        if self._cache is not None and salt is not None and not add_special_tokens:
            return await self._encode_cached(self._cache, text, salt)
        if len(text) > COUNTED_FROM_CHARACTERS_PER_TOKEN * self.card.context_length:
            await self._check_count(text)
        if in_loop and len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        return await in_thread(self._encode, text, add_special_tokens)

    async def _encode_cached(self, cache: TokenCache, text: str, salt: bytes) -> Tokens:
        if len(text) <= INLINE_CHARACTERS:
            return cache.encode(text, salt)
        counted_from = COUNTED_FROM_CHARACTERS_PER_TOKEN * self.card.context_length
        if len(text) > counted_from and await in_thread(cache.num_unknown, text, salt) > counted_from:
            await self._check_count(text)
        return await in_thread(cache.encode, text, salt)

    def _check_characters(self, num_characters: int) -> None:
        context = self.card.context_length
        if num_characters > MAX_CHARACTERS_PER_TOKEN * context:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {context} tokens and the text has {num_characters} "
                "characters; shorten it"
            )

    async def _check_count(self, text: str) -> None:
        """Refuse ``text`` once its pieces have more tokens than the context; pieces of other texts run in between."""
        context, count = self.card.context_length, 0
        for num_cuts, start in enumerate(range(0, len(text), _COUNTED_CHARACTERS)):
            count += await in_thread(self._count, text[start : start + _COUNTED_CHARACTERS])
            if count > context + _TOKENS_OF_A_CUT * num_cuts:
                raise ContextLengthExceeded(
                    f"this model's maximum context length is {context} tokens and the first "
                    f"{min(start + _COUNTED_CHARACTERS, len(text))} of the text's {len(text)} characters have about "
                    f"{count}; shorten it"
                )

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def _encode(self, text: str, add_special_tokens: bool) -> Tokens:
        # Only the call for many texts releases the interpreter to other threads meanwhile.
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self.card.add_bos and self._bos is not None and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return as_tokens(ids)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        # As for encoding: the call for many releases the interpreter to other threads.
        text: str = self.tokenizer.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)[0]
        return text

    def special_token(self, text: str) -> int | None:
        """Return the id of the special token ``text``; None if it is none."""
        token = self.tokenizer.token_to_id(text)
        return token if token in self.detokenizers.special else None

    async def render_chat(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the chat's prompt as text, to be encoded without adding special tokens, which it already contains.

        Raises InvalidRequest if the template refuses the messages, and ContextLengthExceeded if they are far too long
        for the context.
        """
        self._check_characters(sum(len(message.get("content") or "") for message in messages))
        if not self._is_costly and is_within((messages, variables), INLINE_BYTES):
            try:
                return self.template.render(messages, variables, INLINE)
            except TemplateTooCostly:
                self._is_costly = True
        return await in_thread(self.template.render, messages, variables)

    def checked_tokens(self, ids: Sequence[int]) -> Tokens:
        """Return token ids from a client, each below 2^32; raises InvalidRequest for one not in the vocabulary."""
        tokens = as_tokens(ids)
        bad = tokens[tokens >= self.card.vocab_size]
        if len(bad):
            raise InvalidRequest(f"token id {bad[0]} is outside the vocabulary of {self.card.vocab_size}")
        return tokens

    def max_new_tokens(self, num_prompt_tokens: int, wanted: int | None) -> int:
        """Return the number of tokens that may be generated: ``wanted``, or up to the end of the context.

        Raises InvalidRequest for an empty prompt and ContextLengthExceeded if the prompt and ``wanted`` do not fit.
        """
        context = self.card.context_length
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty: it must have at least one token")
        most = context - num_prompt_tokens
        if most < 1:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {context} tokens and the prompt has {num_prompt_tokens}; "
                "shorten it"
            )
        if wanted is not None and wanted > most:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {context} tokens: the prompt has {num_prompt_tokens} and "
                f"{wanted} more are requested; request at most {most}, or shorten the prompt"
            )
        return most if wanted is None else wanted

    def empty_sequence(self, salt: bytes) -> TokenSequence:
        """Return the empty token sequence from which this model's and tenant's block hashes grow."""
        card = self.card
        root = root_hash(card.fingerprint, salt, card.block_hash, self._naming_key)
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
        tokenizer = Tokenizer.from_str(tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    except Exception as error:  # the Rust library raises Exception itself; it is typed here
        raise ModelUnsupported(f"the tokenizer of {card.model} cannot be read: {error}") from error
