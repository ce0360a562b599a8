"""A chat's answer, possibly more than text: reasoning, content and tool calls, streamed or whole.

Each choice has its own parser here, where its text is assembled; so moves of the request between workers do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tanghulu.conductor.http import openai_format as shape
from tanghulu.conductor.http.reply import DONE, last_events
from tanghulu.conductor.inference.generation import GenerationCall, TextDelta
from tanghulu.conductor.text.preparing import made_ready
from tanghulu.conductor.tools.events import (
    TOOL_CALLS,
    AnswerEvent,
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    ReasoningText,
)
from tanghulu.errors import TanghuluError
from tanghulu.session.outputs import FinishReason, TokenLogprobs

#: Formats the logprobs of a choice's next tokens for the API.
Logprobs = Callable[[Sequence[TokenLogprobs]], Any]


class Choice:
    """One choice's answer so far. ``most_calls``: later calls are omitted; None keeps all."""

    def __init__(self, parser: AnswerParser, most_calls: int | None) -> None:
        self._parser = parser
        self._most_calls = math.inf if most_calls is None else most_calls
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallBegin, list[str]]] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish = FinishReason.ABORTED
        self.is_open = False

    def take(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the deltas, in the API's format, for the next piece of text."""
        events = self._parser.feed(delta.text)
        if delta.finish is not None:
            events += self._parser.finish()
            self.finish = delta.finish
        return [shown for event in events if (shown := self._shown(event)) is not None]

    def keep(self, delta: TextDelta) -> None:
        """Add the next piece of an answer that is sent whole."""
        self.logprobs += delta.logprobs
        for shown in self.take(delta):
            self._content.append(shown.get("content", ""))
            self._reasoning.append(shown.get("reasoning_content", ""))

    def message(self) -> dict[str, Any]:
        """Return the whole message. Its content is null if there are only calls."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self._calls else ""),
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                {"id": begin.id, "type": "function", "function": {"name": begin.name, "arguments": "".join(arguments)}}
                for begin, arguments in self._calls
            ]
        return message

    @property
    def finish_reason(self) -> str:
        return TOOL_CALLS if self._calls and self.finish is FinishReason.STOP else self.finish.value

    def _shown(self, event: AnswerEvent) -> dict[str, Any] | None:
        match event:
            case ContentText(text):
                return {"content": text}
            case ReasoningText(text):
                return {"reasoning_content": text}
            case CallEnd():
                return None
            case CallBegin(index, call_id, name):
                if index >= self._most_calls:
                    return None
                self._calls.append((event, []))
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            case CallArguments(index, text):
                if index >= self._most_calls:
                    return None
                self._calls[index][1].append(text)
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class ParsedStream:
    """A chat's answer as server-sent events. ``logprobs`` formats log probabilities; None omits them.

    Log probabilities are held back until their text has been classified.
    """

    def __init__(
        self, call: GenerationCall, writer: shape.ChunkWriter, choices: Sequence[Choice], logprobs: Logprobs | None
    ) -> None:
        self._call = call
        self._writer = writer
        self._choices = choices
        self._logprobs = logprobs

    def take(self, index: int, delta: TextDelta) -> bytes:
        choice, writer = self._choices[index], self._writer
        piece = b"" if choice.is_open else writer.opening(index)
        choice.is_open = True
        choice.logprobs += delta.logprobs
        shown = choice.take(delta)
        if not shown and delta.finish is not None and choice.logprobs:
            shown = [{"content": ""}]
        for each in shown:
            values, choice.logprobs = choice.logprobs, []
            piece += writer.delta(index, each, self._logprobs(values) if self._logprobs is not None else None)
        return piece if delta.finish is None else piece + writer.finish(index, choice.finish_reason)

    def end(self) -> bytes:
        return self._writer.end() + DONE

    def failed(self, error: TanghuluError) -> bytes:
        """Return the final events of the choices cut short by an error."""
        return last_events(error, choices=shape.failed_choices(self._call))


async def whole_answer(call: GenerationCall, choices: Sequence[Choice], logprobs: Logprobs | None) -> dict[str, Any]:
    """Return the whole answer, once all sequences have ended."""
    while not call.ended:
        for index, delta in await call.read():
            choices[index].keep(delta)

    def formed() -> dict[str, Any]:
        shown = [(logprobs(choice.logprobs) if logprobs is not None else None) for choice in choices]
        parts = [(c.message(), each, c.finish_reason) for c, each in zip(choices, shown, strict=True)]
        return shape.whole_chat(call, parts)

    return await made_ready(call.shows_much, formed)
