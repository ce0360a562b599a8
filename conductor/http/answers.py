"""Answers to completions and chats, streamed or whole: text, and in a chat also reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tanghulu.conductor.http import openai_format as shape
from tanghulu.conductor.http.prompt_logprobs import with_prompt_logprobs
from tanghulu.conductor.http.reply import DONE, last_events
from tanghulu.conductor.inference.generation import AnswerReader, GenerationCall, TextDelta
from tanghulu.conductor.text.preparing import made_ready
from tanghulu.conductor.tools.events import AnswerEvent, CallArguments, CallBegin, CallEnd, ContentText, ReasoningText
from tanghulu.errors import TanghuluError
from tanghulu.session.outputs import FinishReason, TokenLogprobs

#: Formats the log probabilities of a choice's next tokens.
Logprobs = Callable[[Sequence[TokenLogprobs]], Any]


class Choice:
    """One choice as far as it has been read. Its text begins with ``echo``; without ``logprobs`` none are shown."""

    def __init__(self, reader: AnswerReader, logprobs: Logprobs | None = None, echo: str | None = None) -> None:
        self.reader, self.logprobs, self.echo = reader, logprobs, echo
        #: Log probabilities of tokens whose text has not been shown yet.
        self.pending: list[TokenLogprobs] = []
        self.is_open = False
        self._content: list[str] = [echo or ""]
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallBegin, list[str]]] = []
        self._finish = FinishReason.ABORTED

    def take_logprobs(self) -> Any:
        """Return the pending log probabilities as the API shows them."""
        pending, self.pending = self.pending, []
        return self.logprobs(pending) if self.logprobs is not None else None

    def keep(self, delta: TextDelta) -> None:
        """Add the next piece of an answer that is sent whole."""
        self.pending += delta.logprobs
        self._finish = delta.finish or self._finish
        for event in self.reader.take(delta):
            match event:
                case ContentText(text):
                    self._content.append(text)
                case ReasoningText(text):
                    self._reasoning.append(text)
                case CallBegin():
                    self._calls.append((event, []))
                case CallArguments(index, text):
                    self._calls[index][1].append(text)

    def whole(self, is_chat: bool) -> dict[str, Any]:
        """Return the choice, once it has ended."""
        content = {"message": self._message()} if is_chat else {"text": "".join(self._content)}
        return {**content, "logprobs": self.take_logprobs(), "finish_reason": self.reader.reason(self._finish)}

    def _message(self) -> dict[str, Any]:
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


def _delta_of(event: AnswerEvent) -> dict[str, Any] | None:
    match event:
        case ContentText(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning_content": text}
        case CallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnd():
            return None


class ChoicesAnswer:
    """The choices as server-sent events or whole. In a stream each begins with its role or its echo.

    Text alone gives an event for each token with visible text. Log probabilities are held back with their text. With
    ``prompt_logprobs`` a whole answer has that many of the prompt's log probabilities a token, under vLLM's name.
    """

    def __init__(
        self,
        call: GenerationCall,
        writer: shape.ChunkWriter,
        choices: Sequence[Choice],
        prompt_logprobs: int | None = None,
    ) -> None:
        self._call, self._writer, self._choices, self._prompt_logprobs = call, writer, choices, prompt_logprobs

    def take(self, index: int, delta: TextDelta) -> bytes:
        choice, writer = self._choices[index], self._writer
        piece = b""
        if not choice.is_open:
            choice.is_open = True
            piece = writer.opening(index, choice.echo, choice.take_logprobs() if choice.echo is not None else None)
        if choice.reader.is_plain and choice.logprobs is None:
            piece += writer.texts(index, delta.pieces)
        else:
            piece += self._parsed(index, choice, delta)
        return piece if delta.finish is None else piece + writer.finish(index, choice.reader.reason(delta.finish))

    def end(self) -> bytes:
        return self._writer.end() + DONE

    def failed(self, error: TanghuluError) -> bytes:
        """Return the final events of the choices cut short by an error."""
        return last_events(error, choices=shape.failed_choices(self._call))

    async def whole(self) -> dict[str, Any]:
        await self._call.read_all(lambda index, delta: self._choices[index].keep(delta))
        return await made_ready(self._call.shows_much, self._whole)

    def _whole(self) -> dict[str, Any]:
        is_chat = self._writer.is_chat
        answer = shape.whole(self._call, is_chat, [choice.whole(is_chat) for choice in self._choices])
        return with_prompt_logprobs(answer, self._call, self._prompt_logprobs)

    def _parsed(self, index: int, choice: Choice, delta: TextDelta) -> bytes:
        choice.pending += delta.logprobs
        shown = [part for event in choice.reader.take(delta) if (part := _delta_of(event)) is not None]
        if not shown and delta.finish is not None and choice.pending:
            shown = [{"content": ""}]
        return b"".join([self._writer.delta(index, part, choice.take_logprobs()) for part in shown])
