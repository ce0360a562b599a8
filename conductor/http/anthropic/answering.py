"""The routes of the Messages API, and a message read from its call to its end, as a stream of events or whole.

`Blocks` is pure: parts of the answer come in, events go out; its blocks form a whole message. A block is open until
something of another kind follows:

    thinking | text | tool_use --content_block_start--> deltas --content_block_stop--> the next block
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response
from starlette.types import Scope

from tanghulu.conductor.http.anthropic.bodies import CountTokensBody, MessagesBody
from tanghulu.conductor.http.reply import named_event, note_sender, reading, reply, stream_error
from tanghulu.conductor.inference.generation import AnswerReader, GenerationCall, TextDelta
from tanghulu.conductor.inference.preprocess import parse_chat, tokenise
from tanghulu.conductor.inference.service import Service
from tanghulu.conductor.text.preparing import made_ready
from tanghulu.conductor.tools.events import TOOL_CALLS, AnswerEvent, CallArguments, CallBegin, CallEnd, ContentText
from tanghulu.errors import TanghuluError
from tanghulu.session.outputs import FinishReason

#: Type and field of the deltas of each type of block.
_DELTAS: Final = {kind: (f"{kind}_delta", kind) for kind in ("text", "thinking")}
_DELTAS["tool_use"] = ("input_json_delta", "partial_json")
#: Stop reasons by the names of the end of an answer; no reason of the API fits an aborted one.
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", TOOL_CALLS: "tool_use"}


def router(service: Service) -> APIRouter:
    """Build the routes."""
    api = APIRouter()

    @api.post("/v1/messages")
    async def messages(request: Request) -> Response:
        """Answer a conversation with the assistant's next message."""
        async with reading(request, service, MessagesBody) as body:
            model = await service.find_model(body.model)
            chat = await made_ready(body.is_large, body.chat)
            note_sender(chat, request)
            parsed = await parse_chat(chat, model, service.parsers, within_context=True)
        call = service.start(f"msg_{uuid.uuid4().hex}", parsed)
        reader = MessageReader(call, parsed.new_reader(), body.hides_thinking, request.scope)
        return reply(service, call, reader, body.stream)

    @api.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> dict[str, int]:
        """Return the number of tokens in the prompt of a message."""
        async with reading(request, service, CountTokensBody) as body:
            model = await service.find_model(body.model)
            chat = await made_ready(body.is_large, body.for_tokens)
            (tokens,) = await tokenise(chat, model, service.parsers)
        return {"input_tokens": len(tokens)}

    return api


class Blocks:
    """The content of one message."""

    def __init__(self, hides_thinking: bool = False) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._hides_thinking = hides_thinking
        self._is_open = False
        self._text: list[str] = []

    def take(self, events: Sequence[AnswerEvent]) -> list[dict[str, Any]]:
        """Append the next parts; return their events."""
        return [named for event in events for named in self._of(event)]

    def close(self) -> list[dict[str, Any]]:
        """End the open block, if any."""
        if not self._is_open:
            return []
        self._is_open, block, text = False, self.blocks[-1], "".join(self._text)
        block |= {"input": _input(text)} if block["type"] == "tool_use" else {block["type"]: text}
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _of(self, event: AnswerEvent) -> list[dict[str, Any]]:
        match event:
            case CallBegin(_, call_id, name):
                return self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                return self._delta(text)
            case CallEnd():
                return self.close()
            case ContentText(text):
                return self._grow({"type": "text", "text": ""}, text)
            case _:
                shown = "" if self._hides_thinking else event.text
                return self._grow({"type": "thinking", "thinking": "", "signature": ""}, shown)

    def _grow(self, block: dict[str, Any], text: str) -> list[dict[str, Any]]:
        begun = [] if self._is_open and self.blocks[-1]["type"] == block["type"] else self._begin(block)
        return begun + self._delta(text)

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self.close()
        self.blocks.append(block)
        self._is_open, self._text = True, []
        start = {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}
        return [*closed, start]

    def _delta(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        self._text.append(text)
        kind, field = _DELTAS[self.blocks[-1]["type"]]
        return [{"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, field: text}}]


def _input(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object: of a call that broke off, as far as they are complete.

    Arguments that are JSON, but no client could hold (half a character, too deep), are shown as the text ``raw``.
    """
    try:
        value = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        return {"raw": text}
    return value if isinstance(value, dict) else {"raw": text}


class MessageReader:
    """Reads the call of a message; ``scope`` is that of its request."""

    def __init__(self, call: GenerationCall, reader: AnswerReader, hides_thinking: bool, scope: Scope) -> None:
        self._call, self._reader, self._scope = call, reader, scope
        self._content = Blocks(hides_thinking)
        self._finish = FinishReason.ABORTED
        self._has_begun = False

    def take(self, index: int, delta: TextDelta) -> bytes:
        """Return the next events, under Anthropic's names."""
        start = [] if self._has_begun else [{"type": "message_start", "message": self._message([], self._usage())}]
        self._has_begun = True
        return _written([*start, *self._take(index, delta)])

    def end(self) -> bytes:
        """Return the events after the last block."""
        ended = {"type": "message_delta", "delta": self._stop(), "usage": self._usage(), **self._call.explanation}
        return _written([*self._content.close(), ended, {"type": "message_stop"}])

    def failed(self, error: TanghuluError) -> bytes:
        """Return the event of the error that cut the message short."""
        return stream_error(error, self._scope)

    async def whole(self) -> dict[str, Any]:
        """Return the whole message, once its text has ended."""
        await self._call.read_all(self._take)
        self._content.close()
        return self._message(self._content.blocks, self._usage()) | self._stop() | self._call.explanation

    def _take(self, _: int, delta: TextDelta) -> list[dict[str, Any]]:
        self._finish = delta.finish or self._finish
        return self._content.take(self._reader.take(delta))

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        head = {"id": self._call.id, "type": "message", "role": "assistant", "model": self._call.model.card.model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _stop(self) -> dict[str, Any]:
        """Return why the message ended."""
        matched, used = self._call.generations[0].matched, self._call.num_prompt_tokens + self._call.num_generated
        if self._finish is FinishReason.STOP and isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        reason = _REASONS.get(self._reader.reason(self._finish))
        if reason == "max_tokens" and used >= self._call.model.card.context_length:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Return the tokens so far; those found in a cache are known at the end, and count as computed until then."""
        cached = self._call.cached_tokens
        computed, generated = self._call.num_prompt_tokens - cached, self._call.num_generated
        cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return {"input_tokens": computed, **cache, "output_tokens": generated}


def _written(payloads: Sequence[dict[str, Any]]) -> bytes:
    return b"".join([named_event(payload) for payload in payloads])
