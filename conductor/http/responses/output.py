"""The output of a response as it grows: its items, and the events that tell of them.

Pure: parts of the answer and its end come in, (event, payload) pairs go out; the items are what a whole answer shows.
An item is open until something of another kind follows:

    reasoning | message | function_call --added--> deltas --done--> the next item
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from tanghulu.conductor.tools.events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    ReasoningText,
)

#: An event's name and what it says.
Told = tuple[str, dict[str, Any]]

_PARTS = {
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}


class OutputItems:
    """The items of one response. ``most_calls``: later calls are left out; None: all count."""

    def __init__(self, most_calls: int | None) -> None:
        self.items: list[dict[str, Any]] = []
        self._most_calls = most_calls
        self._num_calls = 0
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def take(self, events: Sequence[AnswerEvent], logprobs: Sequence[dict[str, Any]] = ()) -> list[Told]:
        """Grow by the next parts; ``logprobs`` are of their tokens, and stand with the text of a message."""
        self._logprobs += logprobs
        return [told for event in events for told in self._of(event)]

    def finish(self, complete: bool) -> list[Told]:
        """End the last item. An answer that is not ``complete`` was cut at its length."""
        return self._close("completed" if complete else "incomplete")

    def _of(self, event: AnswerEvent) -> list[Told]:
        match event:
            case ContentText(text):
                return self._grow("message", text)
            case ReasoningText(text):
                return self._grow("reasoning", text)
            case CallBegin(_, call_id, name):
                self._num_calls += 1
                return [] if self._is_left_out else [*self._close(), *self._begin_call(call_id, name)]
            case CallArguments(_, text):
                if self._is_left_out:
                    return []
                self._text.append(text)
                return [("response.function_call_arguments.delta", self._place() | {"delta": text})]
            case CallEnd(_, complete):
                return [] if self._is_left_out else self._close("completed" if complete else "incomplete")

    @property
    def _is_left_out(self) -> bool:
        """Whether the call at which the answer stands is one too many."""
        return self._most_calls is not None and self._num_calls > self._most_calls

    def _begin_call(self, call_id: str, name: str) -> list[Told]:
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress"}
        return [self._begin({**item, "call_id": call_id, "name": name, "arguments": ""})]

    def _begin(self, item: dict[str, Any]) -> Told:
        self.items.append(item)
        self._open, self._text = item, []
        return ("response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})

    def _grow(self, kind: str, text: str) -> list[Told]:
        told: list[Told] = []
        part, name = _PARTS[kind]
        if self._open is None or self._open["type"] != kind:
            told += [*self._close(), self._begin(_new(kind)), ("response.content_part.added", self._part(part, "", []))]
        self._text.append(text)
        delta = self._part_place() | {"delta": text}
        if kind == "message":
            delta["logprobs"] = self._logprobs
            self._shown_logprobs().extend(self._logprobs)
            self._logprobs = []
        return [*told, (f"{name}.delta", delta)]

    def _close(self, status: str = "completed") -> list[Told]:
        item, self._open = self._open, None
        if item is None:
            return []
        text, index = "".join(self._text), len(self.items) - 1
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            place = {"item_id": item["id"], "output_index": index, "name": item["name"], "arguments": text}
            return [
                ("response.function_call_arguments.done", place),
                ("response.output_item.done", {"output_index": index, "item": dict(item)}),
            ]
        part, name = _PARTS[item["type"]]
        logprobs = item.pop("_logprobs", [])
        content = _content(part, text, logprobs)
        item["content"] = [content]
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        done = place | {"text": text} | ({"logprobs": logprobs} if part == "output_text" else {})
        return [
            (f"{name}.done", done),
            ("response.content_part.done", place | {"part": content}),
            ("response.output_item.done", {"output_index": index, "item": dict(item)}),
        ]

    def _shown_logprobs(self) -> list[dict[str, Any]]:
        assert self._open is not None
        found: list[dict[str, Any]] = self._open.setdefault("_logprobs", [])
        return found

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1}

    def _part_place(self) -> dict[str, Any]:
        return self._place() | {"content_index": 0}

    def _part(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return self._part_place() | {"part": _content(kind, text, logprobs)}


def _new(kind: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    prefix, more = ("msg", message) if kind == "message" else ("rs", {"summary": []})
    return {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **more, "content": []}


def _content(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "output_text":
        return {"type": kind, "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": kind, "text": text}
