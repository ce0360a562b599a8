"""One response: read from its call to its end, as a stream of events or whole, and stored if requested.

`OutputItems` is pure: parts of the answer and its end come in, (event, payload) pairs go out; its items form a whole
answer. An item is open until something of another kind follows:

    reasoning | message | function_call --added--> deltas --done--> the next item
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tanghulu.conductor.http import openai_format as shape
from tanghulu.conductor.http.reply import last_events, named_event
from tanghulu.conductor.http.responses.bodies import InputItem, ResponsesBody, messages_of
from tanghulu.conductor.inference.generation import GenerationCall, TextDelta
from tanghulu.conductor.inference.preprocess import ParsedRequest
from tanghulu.conductor.tools.events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    ReasoningText,
)
from tanghulu.errors import TanghuluError
from tanghulu.session.outputs import FinishReason
from tanghulu.web.errors import body_of

#: Name and payload of an event.
NamedEvent = tuple[str, dict[str, Any]]

_PARTS = {
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}


class OutputItems:
    """The items of one response."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._shown_logprobs: list[dict[str, Any]] = []  # of the open item

    def take(self, events: Sequence[AnswerEvent], logprobs: Sequence[dict[str, Any]] = ()) -> list[NamedEvent]:
        """Append the next parts; ``logprobs`` are those of their tokens, shown with the text of a message."""
        self._logprobs += logprobs
        return [named for event in events for named in self._of(event)]

    def finish(self, complete: bool) -> list[NamedEvent]:
        """End the last item. An answer that is not ``complete`` was truncated by its length limit."""
        return self._close("completed" if complete else "incomplete")

    def _of(self, event: AnswerEvent) -> list[NamedEvent]:
        match event:
            case ContentText(text):
                return self._grow("message", text)
            case ReasoningText(text):
                return self._grow("reasoning", text)
            case CallBegin(_, call_id, name):
                return [*self._close(), self._begin_call(call_id, name)]
            case CallArguments(_, text):
                self._text.append(text)
                return [("response.function_call_arguments.delta", self._place() | {"delta": text})]
            case CallEnd(_, complete):
                return self.finish(complete)

    def _begin_call(self, call_id: str, name: str) -> NamedEvent:
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress"}
        return self._begin({**item, "call_id": call_id, "name": name, "arguments": ""})

    def _begin(self, item: dict[str, Any]) -> NamedEvent:
        self.items.append(item)
        self._open, self._text, self._shown_logprobs = item, [], []
        return ("response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})

    def _grow(self, kind: str, text: str) -> list[NamedEvent]:
        named: list[NamedEvent] = []
        part, name = _PARTS[kind]
        if self._open is None or self._open["type"] != kind:
            named += [*self._close(), self._begin(_new(kind))]
            added = self._place() | {"content_index": 0, "part": _content(part, "", [])}
            named.append(("response.content_part.added", added))
        self._text.append(text)
        delta = self._place() | {"content_index": 0, "delta": text}
        if kind == "message":
            delta["logprobs"] = self._logprobs
            self._shown_logprobs += self._logprobs
            self._logprobs = []
        return [*named, (f"{name}.delta", delta)]

    def _close(self, status: str = "completed") -> list[NamedEvent]:
        if self._open is None:
            return []
        item, place, text = self._open, self._place(), "".join(self._text)
        self._open, item["status"] = None, status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = place | {"name": item["name"], "arguments": text}
            named = [("response.function_call_arguments.done", done)]
        else:
            part, name = _PARTS[item["type"]]
            content = _content(part, text, self._shown_logprobs)
            item["content"] = [content]
            place |= {"content_index": 0}
            done = place | {"text": text} | ({"logprobs": self._shown_logprobs} if part == "output_text" else {})
            named = [(f"{name}.done", done), ("response.content_part.done", place | {"part": content})]
        ended = {"output_index": place["output_index"], "item": dict(item)}
        return [*named, ("response.output_item.done", ended)]

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1}


def _new(kind: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    prefix, more = ("msg", message) if kind == "message" else ("rs", {"summary": []})
    return {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **more, "content": []}


def _content(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "output_text":
        return {"type": kind, "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": kind, "text": text}


class ResponseReader:
    """Reads a response's call. ``keep`` gets the whole response and its output as messages."""

    def __init__(
        self,
        call: GenerationCall,
        parsed: ParsedRequest,
        body: ResponsesBody,
        keep: Callable[[dict[str, Any], list[dict[str, Any]]], None],
    ) -> None:
        self._call, self._body, self._keep = call, body, keep
        self._reader = parsed.new_reader()
        self._output = OutputItems()
        self._created = int(time.time())
        self._num_events = 0
        self._finish = FinishReason.ABORTED
        self._reasoning_tokens = 0
        self._num_top = body.top_logprobs or 0

    def take(self, index: int, delta: TextDelta) -> bytes:
        """Return server-sent events, named and numbered as OpenAI's."""
        piece = b"" if self._num_events else self._opening()
        return piece + self._written(self._take(index, delta))

    def end(self) -> bytes:
        """Return the events after the text."""
        return self._written(self._end(self._finish))

    def failed(self, error: TanghuluError) -> bytes:
        """Return the end of the last item, the event for the failure, and the error in the format of all streams."""
        named = self._output.finish(complete=False)
        named.append(("response.failed", {"response": self._response("failed", error=error)}))
        return self._written(named) + last_events(error)

    async def whole(self) -> dict[str, Any]:
        """Return the whole response, once its text has ended."""
        await self._call.read_all(self._take)
        response: dict[str, Any] = self._end(self._finish)[-1][1]["response"]
        return response

    def _opening(self) -> bytes:
        response = self._response("in_progress")
        return self._written([(f"response.{name}", {"response": response}) for name in ("created", "in_progress")])

    def _take(self, _: int, delta: TextDelta) -> list[NamedEvent]:
        self._finish = delta.finish or self._finish
        events = self._reader.take(delta)
        thought = sum(len(event.text) for event in events if isinstance(event, ReasoningText))
        if thought:  # the answer may begin in the same delta
            ends = itertools.accumulate(map(len, delta.pieces))
            is_all = all(isinstance(event, ReasoningText) for event in events)
            self._reasoning_tokens += len(delta.tokens) if is_all else sum(end <= thought for end in ends)
        logprobs: list[dict[str, Any]] = []
        if self._body.shows_logprobs:
            logprobs = shape.chat_logprobs(self._call.model, delta.logprobs, self._num_top)["content"]
        return self._output.take(events, logprobs)

    def _end(self, finish: FinishReason) -> list[NamedEvent]:
        complete = finish is FinishReason.STOP
        named = self._output.finish(complete)
        response = self._response("completed" if complete else "incomplete", finish)
        items = [InputItem.model_validate(item) for item in response["output"]]
        self._keep(response, messages_of(items) if items else [])
        return [*named, (f"response.{response['status']}", {"response": response})]

    def _written(self, named: list[NamedEvent]) -> bytes:
        piece = b""
        for name, payload in named:
            shown = {"type": name, "sequence_number": self._num_events, **payload}
            piece += named_event(shown)
            self._num_events += 1
        return piece

    def _response(
        self, status: str, finish: FinishReason | None = None, error: TanghuluError | None = None
    ) -> dict[str, Any]:
        body, failure = self._body, body_of(error)["error"] if error is not None else None
        ended = finish is not None
        cut = {FinishReason.LENGTH: "max_output_tokens", FinishReason.ABORTED: "cancelled"}
        return {
            "id": self._call.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": {"code": "server_error", "message": failure["message"]} if failure is not None else None,
            "incomplete_details": {"reason": cut[finish]} if finish in cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self._call.model.card.model,
            "output": list(self._output.items) if ended or error is not None else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "service_tier": "default",
            "store": body.store,
            "temperature": self._sampling.temperature,
            "text": _dumped(body.text) if body.text is not None else {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_dumped(tool) for tool in body.tools or ()],
            "top_logprobs": self._num_top,
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            **(self._call.explanation if ended else {}),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    @property
    def _sampling(self) -> Any:
        return self._call.generations[0].request.sampling

    def _usage(self) -> dict[str, Any]:
        used = shape.usage(self._call)
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": used["total_tokens"],
        }


def _dumped(given: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = given.model_dump(by_alias=True, exclude_none=True)
    return dumped
