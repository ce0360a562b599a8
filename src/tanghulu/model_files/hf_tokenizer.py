"""Reads ``tokenizer.json`` and the files beside it as transformers 5 does.

Truncation and padding that a trainer left in the file are removed. Tokens named in other files are added: those of
``added_tokens_decoder`` in tokenizer_config.json or, if that has none, of added_tokens.json; then the special tokens of
tokenizer_config.json and, in the second case, of special_tokens_map.json.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from tokenizers import AddedToken, Tokenizer

from tanghulu.errors import ModelUnsupported
from tanghulu.model_files.fields import Fields, is_integer, read_json, shown

_log = structlog.get_logger(__name__)

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens in the files beside tokenizer.json; ``named`` are those with a name of their own."""

    tokens: tuple[AddedToken, ...]
    named: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any]) -> SpecialTokens:
        """Read those of ``config``, a tokenizer_config.json; raises ModelUnsupported."""
        map_path, where = folder / "special_tokens_map.json", "tokenizer_config.json"
        if "added_tokens_decoder" not in config and map_path.exists():
            config, where = {**config, **read_json(map_path)}, f"{where} or special_tokens_map.json"
        own = [key for key, value in config.items() if key.endswith("_token") and isinstance(value, str) and value]
        names = [*(key for key in _NAMED if config.get(key)), *(key for key in own if key not in _NAMED)]
        named = {key: _token(config[key], key, where) for key in names}
        key = "extra_special_tokens" if config.get("extra_special_tokens") else "additional_special_tokens"
        more = config.get(key) or []
        if isinstance(more, dict):
            named |= {name: _token(value, name, where) for name, value in more.items()}
            more = []
        if not isinstance(more, list):
            raise ModelUnsupported(f"{where} has {key!r} = {shown(more)}; it must be a list or an object of tokens")
        tokens = (*named.values(), *(_token(value, key, where) for value in more))
        return cls(tokens, {name: token.content for name, token in named.items()})

    def set_in(self, template: str) -> str:
        """Return ``template`` with its special tokens set, except for the two passed to every template."""
        missing = [name for name in self.named if name in template and name not in ("bos_token", "eos_token")]
        own = [name for name in missing if name.isidentifier()]
        return (
            "".join(f"{{%- set {name} = {json.dumps(self.named[name], ensure_ascii=False)} -%}}" for name in own)
            + template
        )


def read_tokenizer(
    folder: Path, config: Mapping[str, Any], special: SpecialTokens, vocab: int | None = None
) -> Tokenizer:
    """Read the tokenizer of ``folder``, with its files' added tokens; ``config`` is its tokenizer_config.json.

    A special token with a number beyond the model's ``vocab`` tokens is left out: the model cannot compute it. Raises
    ModelUnsupported that names the file and the key.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelUnsupported(
            f"{folder} has no tokenizer.json; convert its tokenizer with transformers' save_pretrained"
        )
    with typed_errors(f"cannot read {path}"):
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise ModelUnsupported(
            f"{path} has 'dropout' = {dropout}: a text would get other tokens each time; set it to null"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    Fields(config, "tokenizer_config.json").only("split_special_tokens", None, False)
    for number, token in _added(folder, config, special):
        _add(tokenizer, token, number, vocab)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in special.tokens:
        if token.content not in known:
            _add(tokenizer, token, None, vocab)
    return tokenizer


@contextlib.contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Raise ModelUnsupported that begins with ``what`` for anything that the Rust of `tokenizers` raises inside.

    It raises Exception itself, and panics, which are not subclasses of Exception.
    """
    try:
        yield
    except (ModelUnsupported, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ModelUnsupported(f"{what}: {error}") from error


def _added(folder: Path, config: Mapping[str, Any], special: SpecialTokens) -> Iterator[tuple[int, AddedToken]]:
    """Return the tokens with numbers added by a file beside tokenizer.json, in the order of their numbers."""
    if "added_tokens_decoder" in config:
        where, section = "tokenizer_config.json, added_tokens_decoder", config["added_tokens_decoder"]
        if not isinstance(section, dict):
            raise ModelUnsupported(f"{where} is {shown(section)}; it must be an object")
        found = {_number(key, where): _token(value, key, where) for key, value in section.items()}
    else:
        path = folder / "added_tokens.json"
        names = {token.content for token in special.tokens}
        found = {
            _number(number, f"{path}, {text!r}"): AddedToken(text, normalized=text not in names, special=text in names)
            for text, number in (read_json(path) if path.exists() else {}).items()
        }
    yield from sorted(found.items())


def _add(tokenizer: Tokenizer, token: AddedToken, number: int | None, vocab: int | None) -> None:
    """Add ``token``, whose number is ``number`` in its file; as in transformers it still gets the next free one."""
    got = tokenizer.token_to_id(token.content)
    if got is None:
        added = max(tokenizer.get_added_tokens_decoder(), default=-1) + 1
        got = max(added, tokenizer.get_vocab_size(with_added_tokens=False))
        if vocab is not None and got >= vocab:
            return
    if number not in (None, got):
        _log.warning("tokenizer.number_differs", token=token.content, number=got, in_its_file=number)
    tokenizer.add_tokens([token])


def _number(value: object, where: str) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not is_integer(number, 0):
        raise ModelUnsupported(f"{where} has {shown(value)} where a token id must be")
    assert isinstance(number, int)
    return number


def _token(value: object, key: str, where: str) -> AddedToken:
    """Return a token from text, which makes it a special one, or from an object with its properties."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=True)
    fields = Fields(value, f"{where}, {key!r}")
    flags = {name: fields.flag(name) for name in _FLAGS if name in fields}
    return AddedToken(fields.text("content"), **{"special": key in _NAMED, **flags})
