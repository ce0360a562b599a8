"""The model of an engine server, described from its own files: card, tokenizer, chat template.

An engine sends no model card, so the conductor reads the model's folder as a worker does, and compares one fixed text
and one fixed conversation with the server's /tokenize: tokens, and with them text and cache, must never be mixed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from tanghulu.auth.cluster_secret import ClusterSecret
from tanghulu.conductor.engines.client import EngineClient
from tanghulu.conductor.engines.servers import EngineServer
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.errors import InvalidRequest, ModelUnsupported, NodeUnavailable
from tanghulu.hashing import joined
from tanghulu.model_files.assets import TokenizerAssets, assets_of_folder
from tanghulu.model_files.fields import Fields, read_json, read_text
from tanghulu.runtime.kv_endpoints import NO_EVENTS, EventEndpoints
from tanghulu.session.model_card import ModelCard
from tanghulu.types import Fingerprint

_log = structlog.get_logger(__name__)
#: The names of blocks stay inside the conductor, so that a fast hash serves; roots are keyed in any case.
BLOCK_HASH: Final = "xxh3_128"
_FILES: Final = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_TEMPLATE: Final = "chat_template.jinja"
#: Models kept in memory for further servers of theirs.
MAX_FOLDERS: Final = 64
CHECK_TEXT: Final = "Tanghulu: 12 hawthorns, naïve café, 糖葫芦 🍡\n\tdef f(x):  return x**2"
CHECK_CHAT: Final = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": CHECK_TEXT},
    {"role": "assistant", "content": "Sweet."},
    {"role": "user", "content": "And 你好?"},
]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's own description of its model, its cache, its events and its adapters.

    ``root`` is the server's path to the model's files, ``context_length`` in tokens. It ``caches`` prefixes or not.
    """

    name: str
    root: str
    context_length: int
    block_tokens: int
    num_blocks: int = 0
    max_num_seqs: int = 0
    events: EventEndpoints = NO_EVENTS
    adapters: Collection[str] = ()
    caches: bool = True


@dataclass(slots=True)
class ModelFolder:
    """The files of a folder, read: tokenizer, vocabulary, digest of the files. ``model`` is for comparing tokens."""

    assets: TokenizerAssets
    vocab_size: int
    digest: bytes
    model: ServedModel | None = None

    @classmethod
    def read(cls, path: Path, template: str) -> ModelFolder:
        """Read the folder; ``template`` is a file that replaces its chat template. Raises ModelUnsupported."""
        config = Fields(_text_config(read_json(path / "config.json")), str(path / "config.json"))
        bos = min(config.ids("bos_token_id"), default=None)
        vocab = config.integer("vocab_size")
        assets = assets_of_folder(path, bos, config.ids("eos_token_id"), vocab=vocab)
        if template:
            assets = replace(assets, chat_template=read_text(Path(template)))
        digest = hashlib.blake2b((path / "config.json").read_bytes() + assets.tokenizer_json, digest_size=16).digest()
        return cls(assets, vocab, digest)

    def card(self, facts: ServerFacts, secret_check: bytes) -> ModelCard:
        """Return the card of the model served as ``facts``."""
        fingerprint = hashlib.blake2b(joined(b"engine", facts.name.encode(), self.digest), digest_size=16).digest()
        return self.assets.card(
            model=facts.name,
            fingerprint=Fingerprint(fingerprint),
            block_hash=BLOCK_HASH,
            block_tokens=facts.block_tokens,
            context_length=facts.context_length,
            vocab_size=self.vocab_size,
            block_bytes=0,
            secret_check=secret_check,
        )


class ModelFolders:
    """The folders read so far; one that has changed is read again."""

    def __init__(self) -> None:
        self._read: dict[tuple[object, ...], ModelFolder] = {}

    def of(self, server: EngineServer, facts: ServerFacts) -> ModelFolder:
        """Return the folder of the server's model; takes a second. Raises ModelUnsupported naming the option."""
        path = Path(server.model or facts.root)
        if not (path / "config.json").is_file():
            whose = "given as model" if server.model else "the server's path to it"
            raise ModelUnsupported(
                f"{path}, {whose}, is no folder with a config.json here; name the folder of {facts.name} with its "
                f"tokenizer: --engine {server.engine}={server.url},model=FOLDER"
            )
        files = [path / name for name in (*_FILES, _TEMPLATE)] + ([Path(server.template)] if server.template else [])
        stamps = tuple((str(each), each.stat().st_mtime_ns) for each in files if each.is_file())
        if stamps not in self._read:
            if len(self._read) >= MAX_FOLDERS:
                self._read.clear()
            self._read[stamps] = ModelFolder.read(path, server.template)
        return self._read[stamps]


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part about text: models with images have it in a section of its own."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


async def card_of(client: EngineClient, facts: ServerFacts, folders: ModelFolders, secret: ClusterSecret) -> ModelCard:
    """Return the card of the server's model, whose tokens are the same here as there.

    Raises ModelUnsupported for files that cannot be read, NodeUnavailable for other tokens.
    """
    folder = await asyncio.to_thread(folders.of, client.server, facts)
    card = await asyncio.to_thread(folder.card, facts, secret.check_value)
    if folder.model is None:
        folder.model = await asyncio.to_thread(ServedModel, card)
    await _compare_tokens(client, facts, folder.model)
    return card


async def _compare_tokens(client: EngineClient, facts: ServerFacts, model: ServedModel) -> None:
    """Compare the fixed text and conversation, as far as the server tokenises for others."""
    ours = (await model.encode(CHECK_TEXT, True)).tolist()
    _compare(model, ours, await _tokens(client, {"model": facts.name, "prompt": CHECK_TEXT}), "a text", client)
    for chat in (CHECK_CHAT, CHECK_CHAT[1:]) if model.card.chat_template and client.server.engine == "vllm" else ():
        try:
            text = await model.render_chat(chat, {"tools": None, "add_generation_prompt": True})
        except InvalidRequest:  # some templates refuse a system message
            continue
        ours = (await model.encode(text, False)).tolist()
        theirs = await _tokens(client, {"model": facts.name, "messages": chat})
        _compare(model, ours, theirs, "a conversation", client)
        return


class _Tokenised(msgspec.Struct):
    tokens: list[int]


async def _tokens(client: EngineClient, body: dict[str, Any]) -> list[int] | None:
    """Return the server's tokens; None if it does not tokenise for others."""
    data = await client.call("/tokenize", body, optional=True)
    try:
        return msgspec.json.decode(data, type=_Tokenised).tokens if data else None
    except msgspec.MsgspecError as error:
        raise NodeUnavailable(f"{client.server.url} answers /tokenize without tokens: {error}") from error


def _compare(model: ServedModel, ours: list[int], theirs: list[int] | None, what: str, client: EngineClient) -> None:
    if theirs is None:
        _log.warning("engine.tokens_unchecked", server=client.server.url, hint="it has no /tokenize")
        return
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if at == len(ours) == len(theirs):
        return
    mine, other = (_shown(model, each[at : at + 8]) for each in (ours, theirs))
    raise NodeUnavailable(
        f"{client.server.url} tokenises {what} otherwise than the model's files here: from token {at} on it has "
        f"{other}, but here it is {mine}; name the folder (model=) and the chat template (template=) of the server"
    )


def _shown(model: ServedModel, tokens: list[int]) -> str:
    known = [token for token in tokens if 0 <= token < model.card.vocab_size]
    return f"{json.dumps(model.decode(known), ensure_ascii=False)} {tokens}"
