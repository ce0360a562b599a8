"""From a request's body to the names of its prompt's blocks, as the engine itself will name them.

A body is tokenised as the engine does: with the model's own tokenizer and chat template. Parts that are not text stand
in the prompt as a mark with their hash, so that prompts with different images differ. Without a model's files, four
bytes of the prompt's JSON count as a token: such names match among themselves, and with nothing that engines publish.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from tanghulu.conductor.inference.json_marks import check_marks
from tanghulu.conductor.inference.preprocess import tokenise
from tanghulu.conductor.inference.schema import TokenizeBody
from tanghulu.conductor.pool_router.demand import parse_body
from tanghulu.conductor.routing.overrides import NO_OVERRIDES
from tanghulu.conductor.routing_service.api import RouterApi
from tanghulu.conductor.routing_service.service import RoutingClient, RoutingQuery
from tanghulu.conductor.text.preparing import INLINE_BYTES, made_ready
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.conductor.tools.choosing import ParserNames
from tanghulu.errors import ContextLengthExceeded, InvalidRequest
from tanghulu.hashing import BlockExtras, Tokens, as_tokens, joined
from tanghulu.model_files.assets import assets_of_folder
from tanghulu.session.model_card import ModelCard
from tanghulu.types import Fingerprint

#: A tokenizer has no context length: texts are bounded as bodies are.
_ANY_CONTEXT: Final = 1 << 31
_BYTES_PER_TOKEN: Final = 4


class Unread(Exception):
    """The body names no prompt that could be tokenised here: the request is routed by load."""


def read_model(folder: Path) -> ServedModel:
    """Return the tokenizer and chat template in ``folder``. Raises ModelUnsupported for unreadable files."""
    assets = assets_of_folder(folder, None, ())
    return ServedModel(
        ModelCard(
            model=folder.name,
            fingerprint=Fingerprint(bytes(16)),
            block_hash="xxh3_128",
            block_tokens=1,
            context_length=_ANY_CONTEXT,
            vocab_size=_ANY_CONTEXT,
            eos_token_ids=assets.eos_ids,
            tokenizer_json_zlib=zlib.compress(assets.tokenizer_json, 1),
            chat_template=assets.chat_template or "",
            bos_token=assets.bos_token or "",
            eos_token=assets.eos_token or "",
            add_bos=assets.add_bos,
            block_bytes=0,
        )
    )


class PromptReader:
    """Reads the bodies of requests. ``adapters`` returns a LoRA's path by its name; None for any other model."""

    def __init__(self, api: RouterApi, model: ServedModel | None, adapters: Callable[[str], str | None]) -> None:
        self._api, self._model, self._adapters = api, model, adapters

    async def query(self, path: str, body: bytes, caller: RoutingClient) -> tuple[RoutingQuery, str]:
        """Return the query for a request to ``path``, and the adapter it names ("" without).

        Raises Unread for a path or a body without a prompt known here, InvalidRequest for one that is not a JSON
        object.
        """
        form = next((form for end, form in _FORMS.items() if path.partition("?")[0].endswith(end)), None)
        if form is None:
            raise Unread("path")
        try:
            check_marks(body)
        except InvalidRequest:
            raise Unread("size") from None
        is_large = len(body) > INLINE_BYTES
        given = await made_ready(is_large, parse_body, body)
        prompt = await made_ready(is_large, _prompt, form, given)
        named = _text(given, "model")
        path_of_adapter = self._adapters(named)
        extras = BlockExtras(_text(given, "cache_salt"), named * (path_of_adapter is not None), path_of_adapter or "")
        tokens = await self._tokens(prompt, is_large, joined(caller.tenant.encode(), extras.salt.encode()))
        return self._api.query(tokens, NO_OVERRIDES, _text(given, "prompt_cache_key"), caller, extras), extras.lora

    async def _tokens(self, prompt: Mapping[str, Any], is_large: bool, salt: bytes) -> Tokens:
        ids = prompt.get("prompt")
        if isinstance(ids, list) and all(type(each) is int and 0 <= each < 1 << 32 for each in ids):
            return as_tokens(ids)
        if self._model is None:
            data = json.dumps(prompt, sort_keys=True).encode()
            return as_tokens(data[: len(data) // _BYTES_PER_TOKEN * _BYTES_PER_TOKEN])
        try:
            parsed = TokenizeBody.model_validate(prompt)
            if is_large:
                parsed.set_large()
            return (await tokenise(parsed, self._model, ParserNames(), salt))[0]
        except (ValidationError, InvalidRequest, ContextLengthExceeded):  # the engine may accept it, or answer better
            raise Unread("fields") from None


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    return value if isinstance(value, str) else ""


_CHAT_FIELDS: Final = (
    *("messages", "tools", "tool_choice", "documents", "reasoning_effort"),
    *("chat_template_kwargs", "add_generation_prompt"),
)


def _prompt(form: Callable[[dict[str, Any]], dict[str, Any]], given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a TokenizeBody. Raises Unread."""
    try:
        return form(given)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError):
        raise Unread("fields") from None


def _completion(given: dict[str, Any]) -> dict[str, Any]:
    """Return the first prompt: engines compute those of one request at one place."""
    prompt = given["prompt"]
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        prompt = prompt[0]
    return {"prompt": prompt, "add_special_tokens": given.get("add_special_tokens", True)}


def _chat(given: dict[str, Any]) -> dict[str, Any]:
    messages = [{**message, "content": _content(message.get("content"))} for message in given["messages"]]
    return {name: given[name] for name in _CHAT_FIELDS if given.get(name) is not None} | {"messages": messages}


def _content(content: Any) -> Any:
    return "".join(map(_part, content)) if isinstance(content, list) else content


def _part(part: Mapping[str, Any]) -> str:
    """Return the text of a part, or a mark with the hash of any other."""
    text = part.get("text")
    if isinstance(text, str):
        return text
    digest = hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=16).hexdigest()
    return f"<{part.get('type')} {digest}>"


def _anthropic(given: dict[str, Any]) -> dict[str, Any]:
    """Return the chat in a body of Anthropic's API."""
    messages: list[dict[str, Any]] = []
    if given.get("system"):
        messages.append({"role": "system", "content": _content(given["system"])})
    for message in given["messages"]:
        messages += _anthropic_turn(message["role"], message["content"])
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": tool["input_schema"],
            },
        }
        for tool in given.get("tools") or ()
    ]
    return {"messages": messages, **({"tools": tools} if tools else {})}


def _anthropic_turn(role: str, content: Any) -> Iterator[dict[str, Any]]:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if part["type"] == "tool_result":
            yield {"role": "tool", "tool_call_id": part["tool_use_id"], "content": _content(part.get("content")) or ""}
    calls = [
        {"id": part["id"], "type": "function", "function": {"name": part["name"], "arguments": part["input"]}}
        for part in parts
        if part["type"] == "tool_use"
    ]
    text = _content([part for part in parts if part["type"] not in ("tool_result", "tool_use", "thinking")])
    if text or calls:
        yield {"role": role, "content": text or None, **({"tool_calls": calls} if calls else {})}


_FORMS: Final = {"/v1/chat/completions": _chat, "/v1/completions": _completion, "/v1/messages": _anthropic}
