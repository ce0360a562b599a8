"""Log probabilities of a text completion, with tokens that are parts of characters or left out of the text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tanghulu.conductor.http.openai_format import CompletionLogprobs
from tanghulu.conductor.text.detokenizer import DetokenizerFactory
from tanghulu.session.outputs import TokenLogprobs
from tests.conductor.fake_worker import TOKENIZER

EMOJI = TOKENIZER.encode("\U0001f600", add_special_tokens=False).ids
END = TOKENIZER.token_to_id("<|im_end|>")


def _shown(tokens: list[int], skip_special_tokens: bool = True) -> dict[str, list]:
    model = SimpleNamespace(detokenizers=DetokenizerFactory(TOKENIZER, byte_level=True))
    logprobs = CompletionLogprobs(model, skip_special_tokens)
    parts = [logprobs.of([TokenLogprobs((token,), (-1.0,))]) for token in tokens]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def test_a_character_of_several_tokens_counts_once():
    assert len(EMOJI) > 1
    a, b = (TOKENIZER.encode(text, add_special_tokens=False).ids[0] for text in "ab")
    assert _shown([a, *EMOJI, b])["text_offset"] == [0, *[1] * len(EMOJI), 2]


@pytest.mark.parametrize(("skipped", "width"), [(True, 0), (False, len("<|im_end|>"))])
def test_a_special_token_counts_where_the_text_has_it(skipped: bool, width: int):
    a = TOKENIZER.encode("a", add_special_tokens=False).ids[0]
    assert _shown([a, END, a], skipped)["text_offset"] == [0, 1, 1 + width]


def test_of_several_tokens_with_one_text_the_likeliest_is_shown_and_the_drawn_one_always():
    model = SimpleNamespace(detokenizers=DetokenizerFactory(TOKENIZER, byte_level=True))
    first, second = EMOJI[:2]  # both are U+FFFD alone
    a, b = (TOKENIZER.encode(text, add_special_tokens=False).ids[0] for text in "ab")
    one = TokenLogprobs((b, first, a, second), (-7.0, -1.0, -2.0, -3.0))
    assert CompletionLogprobs(model, True).of([one])["top_logprobs"] == [{"\ufffd": -1.0, "a": -2.0, "b": -7.0}]
