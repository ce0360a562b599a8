"""tokenizer.json and the files beside it give transformers' tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tanghulu.conductor.text.chat_template import ChatTemplate
from tanghulu.model_files.assets import assets_of_folder

TEXT = "hello lower <x> world <y>. <pad> </s> Hello <x>lower<|end|>"
X, Y = ({"content": f"<{name}>", "lstrip": False, "rstrip": False, "normalized": False} for name in "xy")
NUM_TRAINED = 300


def write(folder: Path, change: Callable[[Tokenizer], object], files: dict[str, Any]) -> None:
    """Write a byte-level tokenizer with ``<s>`` and ``</s>``, changed, and the files beside it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TRAINED,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello lower world " * 9], trainer)
    change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in ({"config": {"model_type": "llama"}, "tokenizer_config": {}} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def nothing(_: Tokenizer) -> None:
    pass


def trained(number: int) -> str:
    return str(NUM_ADDED + number)


#: The number of the first token that is added.
NUM_ADDED = 272
FOLDERS: dict[str, tuple[Callable[[Tokenizer], object], dict[str, Any]]] = {
    "nothing beside it": (nothing, {}),
    "truncation": (lambda tokenizer: tokenizer.enable_truncation(4), {}),
    "padding": (lambda tokenizer: tokenizer.enable_padding(length=40, pad_token="<s>"), {}),
    "added_tokens.json": (nothing, {"added_tokens": {"<y>": NUM_ADDED + 1, "<x>": NUM_ADDED}}),
    "a special one there": (
        nothing,
        {"added_tokens": {"<x>": NUM_ADDED}, "tokenizer_config": {"additional_special_tokens": ["<x>"]}},
    ),
    "added_tokens_decoder": (
        nothing,
        {"tokenizer_config": {"added_tokens_decoder": {trained(0): X | {"special": True}, trained(1): Y}}},
    ),
    "added_tokens_decoder alone counts": (
        nothing,
        {
            "tokenizer_config": {"added_tokens_decoder": {trained(0): X}, "eos_token": "</s>"},
            "added_tokens": {"<y>": NUM_ADDED + 1},
            "special_tokens_map": {"bos_token": "<s>", "pad_token": "<pad>"},
        },
    ),
    "other properties": (
        lambda tokenizer: tokenizer.add_tokens([AddedToken("<x>", normalized=True)]),
        {"tokenizer_config": {"added_tokens_decoder": {trained(0): X | {"lstrip": True, "special": True}}}},
    ),
    "a pad_token of its own": (nothing, {"tokenizer_config": {"pad_token": "<pad>"}}),
    "a pad_token as an object": (nothing, {"tokenizer_config": {"pad_token": X | {"__type": "AddedToken"}}}),
    "special_tokens_map.json": (
        nothing,
        {"special_tokens_map": {"bos_token": X, "eos_token": "</s>", "pad_token": "<pad>"}},
    ),
    "special_tokens_map.json goes first": (
        nothing,
        {"special_tokens_map": {"eos_token": "<y>"}, "tokenizer_config": {"eos_token": "</s>"}},
    ),
    "additional_special_tokens": (nothing, {"tokenizer_config": {"additional_special_tokens": ["<x>", "<y>"]}}),
    "extra_special_tokens": (nothing, {"tokenizer_config": {"extra_special_tokens": ["<x>"]}}),
    "named ones": (nothing, {"tokenizer_config": {"extra_special_tokens": {"x_token": "<x>"}, "y_token": "<y>"}}),
    "an empty list": (nothing, {"tokenizer_config": {"additional_special_tokens": [], "bos_token": None}}),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write(tmp_path, *FOLDERS[name])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assets = assets_of_folder(tmp_path, None, [])
    ours = Tokenizer.from_buffer(assets.tokenizer_json)
    for text in (TEXT, TEXT * 3, "<x>", " <x> <y>", "plain"):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs(text, add_special_tokens=False, padding=False)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert (assets.bos_token, assets.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert assets.eos_ids == (() if theirs.eos_token is None else (theirs.eos_token_id,))


def test_a_token_that_the_model_has_no_number_for_is_none(tmp_path: Path) -> None:
    """Alpaca's [PAD] is beyond the embedding: a prompt with it would end the worker."""
    write(tmp_path, nothing, {"tokenizer_config": {"pad_token": "<pad>"}, "added_tokens": {"<x>": NUM_ADDED}})
    for vocab, known in ((NUM_ADDED, []), (NUM_ADDED + 1, ["<x>"]), (NUM_ADDED + 2, ["<x>", "<pad>"])):
        tokenizer = Tokenizer.from_buffer(assets_of_folder(tmp_path, None, [], vocab=vocab).tokenizer_json)
        assert [token for token in ("<x>", "<pad>") if tokenizer.token_to_id(token) is not None] == known


def test_templates_have_all_special_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ pad_token }}{% macro m() %}{{ x_token }}{% endmacro %}{{ m() }}\n {{ eos_token }}|"
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "x_token": '<"x">'}
    config["chat_template"] = template + "{{ unk_token }}"
    write(tmp_path, nothing, {"tokenizer_config": config})
    from transformers import AutoTokenizer

    assets = assets_of_folder(tmp_path, None, [])
    messages = [{"role": "user", "content": "hello"}]
    assert assets.chat_template is not None
    ours = ChatTemplate(assets.chat_template, assets.bos_token or "", assets.eos_token or "").render(messages, {})
    assert ours == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
