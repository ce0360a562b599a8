"""Tokens to text, stop strings, chat templates."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tanghulu.conductor.text.chat_template import ChatTemplate
from tanghulu.conductor.text.detokenizer import MAX_HELD, DetokenizerFactory, WindowDetokenizer, is_byte_level
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.conductor.text.stop_strings import StopMatcher
from tanghulu.errors import InvalidRequest, ModelUnsupported
from tanghulu.session.model_card import ModelCard
from tanghulu.types import Fingerprint
from tests.conductor.fake_worker import TEMPLATE, TOKENIZER


def _sentencepiece_like() -> Tokenizer:
    """Llama 2's decoder: metaspaces, bytes as a fallback, the first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "▁Hello", "▁wor", "ld", "▁a", "b", "é", "▁▁", "!"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


SENTENCEPIECE = _sentencepiece_like()
BYTES = DetokenizerFactory(TOKENIZER, byte_level=True)
WINDOW = DetokenizerFactory(SENTENCEPIECE, byte_level=False)


def _pieces(detokenizer, tokens, cuts):
    pieces, start = [], 0
    for cut in [*sorted(cuts), len(tokens)]:
        pieces.append(detokenizer.feed(tokens[start:cut]))
        start = max(start, cut)
    return [*pieces, detokenizer.flush()]


def test_the_way_is_chosen_by_the_decoder():
    assert is_byte_level(TOKENIZER.to_str())
    assert not is_byte_level(SENTENCEPIECE.to_str())
    assert not is_byte_level(json.dumps({"decoder": None}))


def test_a_character_is_never_shown_in_halves():
    detokenizer = BYTES.new()
    tokens = TOKENIZER.encode("a€😀é").ids
    pieces = [detokenizer.feed([t]) for t in tokens]
    assert "".join(pieces) == "a€😀é"
    assert [p for p in pieces if p] == ["a", "€", "😀", "é"]
    assert detokenizer.flush() == ""


@settings(max_examples=100)
@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 2), max_size=30), st.lists(st.integers(0, 30), max_size=8))
def test_byte_level_pieces_are_the_whole(tokens, cuts):
    pieces = _pieces(BYTES.new(), tokens, [min(c, len(tokens)) for c in cuts])
    assert "".join(pieces) == TOKENIZER.decode(tokens, skip_special_tokens=True)


@settings(max_examples=100)
@given(st.text(max_size=30))
def test_byte_level_text_comes_back_token_by_token(text):
    detokenizer = BYTES.new()
    pieces = [detokenizer.feed([t]) for t in TOKENIZER.encode(text, add_special_tokens=False).ids]
    if "<|" not in text:
        assert "".join(pieces) == text
        assert all("\ufffd" not in p for p in pieces) or "\ufffd" in text


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, SENTENCEPIECE.get_vocab_size() - 1), max_size=20), st.lists(st.integers(0, 20), max_size=8)
)
def test_window_pieces_are_the_whole(tokens, cuts):
    detokenizer = WINDOW.new()
    assert isinstance(detokenizer, WindowDetokenizer)
    pieces = _pieces(detokenizer, tokens, [min(c, len(tokens)) for c in cuts])
    assert "".join(pieces) == SENTENCEPIECE.decode(tokens, skip_special_tokens=True)


def test_window_holds_back_unfinished_bytes():
    detokenizer = WINDOW.new()
    euro = [SENTENCEPIECE.token_to_id(f"<0x{b:02X}>") for b in "€".encode()]
    assert [detokenizer.feed([t]) for t in (*euro, SENTENCEPIECE.token_to_id("!"))] == ["", "", "", "€!"]


def test_a_long_run_of_bytes_is_shown_in_whole_characters():
    tokens = [SENTENCEPIECE.token_to_id(f"<0x{b:02X}>") for b in ("你好" * 100).encode()]
    pieces = _pieces(WINDOW.new(), tokens, range(len(tokens)))
    assert "".join(pieces) == "你好" * 100
    assert max(map(len, pieces)) <= MAX_HELD // 3 + 1
    broken = [tokens[0]] * 1000
    assert "".join(_pieces(WINDOW.new(), broken, range(1000))) == "\ufffd" * 1000


def test_bytes_of_a_byte_token():
    assert WINDOW.token_bytes(SENTENCEPIECE.token_to_id("<0xE2>")) == b"\xe2"


def test_stop_strings_never_leak():
    matcher = StopMatcher(["END"])
    assert [matcher.feed(p) for p in ("a E", "N", "E", "ND!", "more")] == ["a ", "", "EN", "", ""]
    assert matcher.matched == "END"
    unmatched = StopMatcher(["END"])
    assert unmatched.feed("the EN") + unmatched.flush() == "the EN"


@settings(max_examples=100)
@given(
    st.text("abc", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 20), max_size=10),
)
def test_stopping_does_not_depend_on_the_cuts(text, stops, cuts):
    whole = StopMatcher(stops)
    expected = whole.feed(text) + whole.flush()
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if ends:
        assert text[: min(ends)].startswith(expected)
        assert text[len(expected) : min(ends)] == whole.matched
    else:
        assert expected == text
    matcher, shown, start = StopMatcher(stops), "", 0
    for cut in [*sorted(min(c, len(text)) for c in cuts), len(text)]:
        shown += matcher.feed(text[start:cut])
        start = cut
        assert (expected + "".join(stops)).startswith(shown) or shown == expected[: len(shown)]
        assert len(shown) <= len(expected)
    assert shown + matcher.flush() == expected
    assert matcher.matched == whole.matched


class TestChatTemplate:
    MESSAGES = ({"role": "user", "content": "hi"},)

    def test_it_renders_like_the_original(self):
        rendered = ChatTemplate(TEMPLATE, "<s>", "</s>").render(self.MESSAGES, {})
        assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        closed = ChatTemplate(TEMPLATE, "", "").render(self.MESSAGES, {"add_generation_prompt": False})
        assert closed == "<|im_start|>user\nhi<|im_end|>\n"

    def test_the_words_that_templates_use(self):
        source = (
            "{{ bos_token }}{{ tools | tojson(indent=None) }}{{ strftime_now('%Y') | length }}"
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
            "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        )
        messages = [{"role": "a", "content": "x"}, {"role": "b", "content": "<é>"}]
        rendered = ChatTemplate(source, "<s>", "").render(messages, {"tools": [{"é": "<"}]})
        assert rendered == '<s>[{"é": "<"}]4<é>'

    def test_what_it_refuses_is_the_client_s_fault(self):
        with pytest.raises(InvalidRequest, match="roles must alternate"):
            ChatTemplate("{{ raise_exception('roles must alternate') }}", "", "").render(self.MESSAGES, {})
        with pytest.raises(InvalidRequest, match="no chat template"):
            ChatTemplate("", "", "").render(self.MESSAGES, {})
        with pytest.raises(InvalidRequest, match="refuses"):
            ChatTemplate("{{ messages[0].content + 1 }}", "", "").render(self.MESSAGES, {})

    def test_it_is_sandboxed(self):
        with pytest.raises(InvalidRequest, match="refuses"):
            ChatTemplate("{{ ''.__class__.__mro__ }}", "", "").render(self.MESSAGES, {})
        with pytest.raises(ModelUnsupported):
            ChatTemplate("{% if %}", "", "")


async def test_a_truncation_in_the_card_cuts_no_prompt():
    """Nor does its padding fill one up: a trainer left them in the model's tokenizer.json."""
    saved = Tokenizer.from_str(TOKENIZER.to_str())
    saved.enable_truncation(3)
    saved.enable_padding(length=200)
    saved_zlib = zlib.compress(saved.to_str().encode())
    card = ModelCard("m", Fingerprint(b"f" * 16), "xxh3_128", 64, 512, 300, (), saved_zlib, "", "", "", False, 1)
    text = "a prompt of more than three tokens"
    assert (await ServedModel(card).encode(text, False)).tolist() == TOKENIZER.encode(
        text, add_special_tokens=False
    ).ids
