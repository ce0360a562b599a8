"""From a request's body to the names of its prompt's blocks.

A body is tokenised as the engine does: with the model's own tokenizer and chat template. Parts that are not text stand
in the prompt as a mark with their hash, so that prompts with different images differ. Without a model's files, four
bytes of the prompt's JSON count as a token: such names match among themselves, and with nothing that engines publish.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from tanghulu.conductor.engines.model import ModelFolder, ServerFacts
from tanghulu.conductor.http.anthropic.bodies import CountTokensBody
from tanghulu.conductor.inference.preprocess import tokenise
from tanghulu.conductor.inference.schema import ChatPrompt, TokenizeBody
from tanghulu.conductor.pool_router.demand import is_token_ids, parse_body
from tanghulu.conductor.routing.overrides import NO_OVERRIDES
from tanghulu.conductor.routing_service.api import RouterApi
from tanghulu.conductor.routing_service.service import RoutingClient, RoutingQuery
from tanghulu.conductor.text.preparing import INLINE_BYTES, made_ready
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.conductor.tools.choosing import ParserNames
from tanghulu.errors import InvalidRequest
from tanghulu.hashing import TOKEN_BYTES, BlockExtras, Tokens, as_tokens, joined
from tanghulu.session.model_card import ModelCard
from tanghulu.web.errors import BadField

#: A picker does not bound prompts by a context: the engine does.
_ANY_CONTEXT: Final = 1 << 31
#: Fields that make a prompt, the first ones first in it.
_PROMPT_FIELDS: Final = ("tools", "system", "messages", "prompt")
#: A template that reads the parts of a content itself; vLLM joins the texts by line ends for others.
_READS_PARTS: Final = re.compile(r"\bin\s+\w+(\.content\b|\[['\"]content['\"]\])")
#: Parts of a content that are read by their types; others are marked.
_READ: Final = ("text", "refusal", "tool_use", "tool_result", "thinking", "redacted_thinking")
_CHAT, _COMPLETION, _ANTHROPIC = PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")


class Unread(Exception):
    """The body has no prompt that could be tokenised here: the request is routed by load. The text is a label."""


def read_card(folder: Path, block_tokens: int) -> ModelCard:
    """Return the description of the model in ``folder``. Raises ModelUnsupported for unreadable files."""
    return ModelFolder.read(folder, "").card(ServerFacts(folder.name, str(folder), _ANY_CONTEXT, block_tokens), b"")


class PromptReader:
    """Reads the bodies of requests. ``adapters`` returns a LoRA's path by its name; None for any other model."""

    def __init__(self, api: RouterApi, model: ServedModel | None, adapters: Callable[[str], str | None]) -> None:
        self._api, self._model, self._adapters = api, model, adapters

    async def query(self, path: str, body: bytes, caller: RoutingClient) -> tuple[RoutingQuery, str]:
        """Return the query for a request to ``path``, and the adapter it names ("" without).

        Raises Unread, and InvalidRequest for a body that is not a JSON object.
        """
        api = next((each for each in PATHS if path.partition("?")[0].endswith(each)), "")
        if not api:
            raise Unread("path")
        is_large = len(body) > INLINE_BYTES
        try:
            given = await made_ready(is_large, parse_body, body)
        except BadField:
            raise Unread("size") from None
        named, salt, session = (_text(given, name) for name in ("model", "cache_salt", "prompt_cache_key"))
        lora_path = self._adapters(named)
        extras = BlockExtras(salt, "" if lora_path is None else named, lora_path or "")
        tokens = await self._tokens(api, given, is_large, joined(caller.tenant.encode(), salt.encode()))
        return self._api.query(tokens, NO_OVERRIDES, session, caller, extras), extras.lora

    async def _tokens(self, api: str, given: dict[str, Any], is_large: bool, salt: bytes) -> Tokens:
        prompt = given.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = given["prompt"] = prompt[0]  # engines compute the prompts of one request at one place
        if api == _COMPLETION and is_token_ids(prompt):
            return as_tokens(prompt)
        try:
            if self._model is None:
                return await made_ready(is_large, _as_text, given)
            joint = "" if _READS_PARTS.search(self._model.card.chat_template) else "\n"
            parsed = await made_ready(is_large, _parsed, api, given, joint)
            if is_large:
                parsed.set_large()
            return (await tokenise(parsed, self._model, ParserNames(), salt))[0]
        except (ValidationError, InvalidRequest, TypeError, AttributeError, RecursionError):  # the engine may accept it
            raise Unread("fields") from None


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    return value if isinstance(value, str) else ""


def _as_text(given: Mapping[str, Any]) -> Tokens:
    data = json.dumps([given[name] for name in _PROMPT_FIELDS if given.get(name)]).encode()
    if not any(given.get(name) for name in ("messages", "prompt")):
        raise TypeError
    return as_tokens(data[: len(data) // TOKEN_BYTES * TOKEN_BYTES])


def _parsed(api: str, given: Mapping[str, Any], joint: str) -> TokenizeBody:
    """Return the prompt as a body of /tokenize, the texts of a chat's message joined by ``joint``.

    Raises ValidationError, BadField, TypeError.
    """
    if api == _COMPLETION:
        return TokenizeBody.model_validate({name: given.get(name) for name in ("prompt", "add_special_tokens")})
    fields = {name: value for name, value in given.items() if name in _FIELDS[api]}
    fields["messages"] = [{**each, "content": _marked(each.get("content"))} for each in given.get("messages") or ()]
    if api == _CHAT:
        for each in fields["messages"]:
            if isinstance(each["content"], list):
                each["content"] = joint.join(part.get("text") or part.get("refusal") or "" for part in each["content"])
        return TokenizeBody.model_validate(fields)
    return CountTokensBody.model_validate(fields).for_tokens()


_FIELDS: Final = {_CHAT: ChatPrompt.model_fields, _ANTHROPIC: CountTokensBody.model_fields}


def _marked(content: Any) -> Any:
    """Return a content with all parts that are not text replaced by texts with their hashes."""
    return [_part(part) for part in content] if isinstance(content, list) else content


def _part(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") in _READ:
        return part
    digest = hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=16).hexdigest()
    return {"type": "text", "text": f"<{part.get('type')} {digest}>"}
