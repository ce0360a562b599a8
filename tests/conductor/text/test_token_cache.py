"""The cache of token ids: the same ids as without it, for whatever text, and bounded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tanghulu.conductor.text import token_cache
from tanghulu.conductor.text.token_cache import TokenCache
from tanghulu.workers.weights.source import resolve_model
from tanghulu.workers.weights.tokenizer_assets import load_tokenizer_assets
from tests.conductor.fake_worker import TOKENIZER

#: Tokens that begin, end and hold others, so that what is found depends on where one looks from.
NESTED = ("<a>", "<a><b>", "b><", "<b>", "<|im_end|>", "<|im_end|>\n")
PARTS = st.one_of(
    st.sampled_from(("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im", "_end|>", "\n", " ", "  ", "user\n")),
    st.sampled_from(("the", " the", "é", "ll", "<a", ">", "<a>", "<b>", "><", "> <", "b", "\u0301", "\r\n", "1234")),
    st.text(max_size=12),
)
TEXTS = st.lists(PARTS, max_size=60).map("".join)


def nested_tokenizer() -> Tokenizer:
    """Its normalizer joins characters, but none across a special token; one token is looked for behind it."""
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("> <", normalized=True, lstrip=True, rstrip=True)])
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in NESTED])
    return tokenizer


def cache_of(tokenizer: Tokenizer, max_characters: int = token_cache.MAX_CHARACTERS) -> TokenCache:
    found = TokenCache.of(tokenizer, tokenizer.to_str())
    assert found is not None
    found._max_characters = max_characters
    return found


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.from_buffer(load_tokenizer_assets(resolve_model("smollm2")).tokenizer_json)


@pytest.fixture(scope="module")
def real_cache(real: Tokenizer) -> TokenCache:
    return cache_of(real)


@pytest.fixture(scope="module")
def nested() -> TokenCache:
    return cache_of(nested_tokenizer(), 1000)


def same_ids(cache: TokenCache, texts: list[str]) -> None:
    for text in [*texts, "".join(texts)]:
        expected = cache._tokenizer.encode(text, add_special_tokens=False).ids
        assert cache.encode(text).tolist() == expected
        assert cache.encode(text).tolist() == expected, "and again, out of the cache"
        cache.check()


@pytest.fixture
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "SEGMENT_CHARACTERS", 1)


@pytest.mark.usefixtures("_short_segments")
class TestExactness:
    @settings(max_examples=150)
    @given(texts=st.lists(TEXTS, max_size=3))
    def test_of_tokens_that_overlap(self, nested: TokenCache, texts: list[str]) -> None:
        same_ids(nested, texts)

    @pytest.mark.needs_model
    @settings(max_examples=150)
    @given(texts=st.lists(TEXTS, max_size=3))
    def test_of_a_real_tokenizer(self, real_cache: TokenCache, texts: list[str]) -> None:
        same_ids(real_cache, texts)


@pytest.mark.needs_model
def test_a_conversation_s_next_turn_is_tokenised_from_the_last_cut(real: Tokenizer) -> None:
    cache = cache_of(real)
    turns = [f"<|im_start|>user\n{f'some words of turn {n} ' * 80}<|im_end|>\n" for n in range(9)]
    for count in range(1, 10):
        text = "".join(turns[:count])
        assert cache.encode(text).tolist() == real.encode(text, add_special_tokens=False).ids
        assert len(cache) == count
        assert cache.num_unknown(text) == len("\n"), "what stands behind the last special token"
        assert cache.num_unknown(text, b"another tenant") == len(text)


def test_it_forgets_what_was_used_least_recently() -> None:
    cache = cache_of(TOKENIZER, 3000)
    texts = [letter * 1200 + "<|im_end|>" for letter in "abc"]
    for text in (texts[0], texts[1], texts[0], texts[2]):
        cache.encode(text)
        cache.check()
    assert [cache.num_unknown(text) == 0 for text in texts] == [True, False, True]
    cache.encode("d" * 4000 + "<|im_end|>")
    assert len(cache) == 2, "what is larger than all the room is not kept"


def changed(**values: object) -> Tokenizer:
    return Tokenizer.from_str(json.dumps({**json.loads(TOKENIZER.to_str()), **values}))


def _metaspace() -> Tokenizer:
    tokenizer = changed()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def _stripping() -> Tokenizer:
    tokenizer = changed()
    tokenizer.add_special_tokens([AddedToken("<x>", special=True, normalized=False, lstrip=True)])
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("a", 0.0)]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<x>", special=True, normalized=False)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [_metaspace(), _stripping(), _unigram(), changed(added_tokens=[])],
    ids=["position", "strips", "model", "no token"],
)
def test_tokenizers_that_look_beyond_a_piece_are_left_alone(tokenizer: Tokenizer) -> None:
    assert TokenCache.of(tokenizer, tokenizer.to_str()) is None
