"""OpenAI's answers as JSON: whole ones, and the chunks of a stream.

Owns the names and order of OpenAI's fields. A chunk's constant parts are built once per stream; only the text is
escaped for each token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from json.encoder import encode_basestring
from typing import Any

from tanghulu.conductor.http.reply import dumps, event, in_lines
from tanghulu.conductor.inference.generation import GenerationCall
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.session.outputs import TokenLogprobs


def usage(call: GenerationCall) -> dict[str, Any]:
    """Return the usage of all sequences of ``call`` so far."""
    prompt, generated = call.num_prompt_tokens, call.num_generated
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": call.cached_tokens},
    }


class ChunkWriter:
    """Writer for the chunks of one stream. ``is_chat``: text goes into ``{"delta": {"content"}}``, else ``{"text"}``.

    With ``include_usage`` the last chunk has the usage, with ``continuous_usage`` each has the usage so far.
    """

    def __init__(
        self, call: GenerationCall, is_chat: bool, include_usage: bool, continuous_usage: bool = False
    ) -> None:
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = {"id": call.id, "object": kind, "created": int(time.time()), "model": call.model.card.model}
        self._head = dumps(head)[:-1] + ',"choices":['
        self._tail = '],"usage":null}' if include_usage else "]}"
        self._around_text = ('"delta":{"content":', "}") if is_chat else ('"text":', "")
        self._call = call
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self.is_chat = is_chat

    def opening(self, index: int, echo: str | None = None, logprobs: Any = None) -> bytes:
        """Return a choice's beginning: its role in a chat, else the prompt's text if it is to be echoed."""
        if self.is_chat:
            return self._chunk(index, '"delta":{"role":"assistant","content":""}', None, None)
        return self.delta(index, {"content": echo}, logprobs) if echo is not None else b""

    def texts(self, index: int, pieces: Sequence[str]) -> bytes:
        """Return a chunk for each piece of text; their common parts are built once."""
        before, behind = self._around(index, None, None)
        opening, closing = self._around_text
        before, behind = before + opening, closing + behind
        return in_lines("".join([before + encode_basestring(text) + behind for text in pieces])).encode()

    def delta(self, index: int, delta: dict[str, Any], logprobs: Any = None) -> bytes:
        """Return a chunk with the next part of a chat's message; that of a completion has content alone."""
        part = f'"delta":{dumps(delta)}' if self.is_chat else f'"text":{dumps(delta["content"])}'
        return self._chunk(index, part, logprobs, None)

    def finish(self, index: int, reason: str) -> bytes:
        return self._chunk(index, '"delta":{}' if self.is_chat else '"text":""', None, reason)

    def end(self) -> bytes:
        """Return the chunk with the usage and the explanation of cache misses, as far as requested."""
        fields = {"usage": usage(self._call)} if self._include_usage else {}
        fields |= self._call.explanation
        return event(f"{self._head}],{dumps(fields)[1:]}") if fields else b""

    def _chunk(self, index: int, middle: str, logprobs: Any, reason: str | None) -> bytes:
        before, behind = self._around(index, logprobs, reason)
        return (before + middle + behind).encode()

    def _around(self, index: int, logprobs: Any, reason: str | None) -> tuple[str, str]:
        """Return the parts of an event before and after its delta or text."""
        finish = f'"{reason}"' if reason is not None else "null"
        probabilities = "null" if logprobs is None else dumps(logprobs)
        tail = self._tail if not self._continuous_usage else f'],"usage":{dumps(usage(self._call))}}}'
        behind = f',"logprobs":{probabilities},"finish_reason":{finish}}}{tail}\n\n'
        return f'data: {self._head}{{"index":{index},', behind


def failed_choices(call: GenerationCall) -> list[dict[str, Any]]:
    """Return the final entry of a stream for each choice cut short by an error."""
    cut = [index for index, generation in enumerate(call.generations) if not generation.ended]
    return [{"index": index, "delta": {}, "text": "", "logprobs": None, "finish_reason": "error"} for index in cut]


def whole(call: GenerationCall, is_chat: bool, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a chat.completion or a text_completion with ``choices``."""
    return {
        "id": call.id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": call.model.card.model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": usage(call),
        **call.explanation,
    }


def model_entry(model: ServedModel, created: int) -> dict[str, Any]:
    """Return one entry of /v1/models."""
    card = model.card
    return {
        "id": card.model,
        "object": "model",
        "created": created,
        "owned_by": "tanghulu",
        "max_model_len": card.context_length,
    }


def token_text(model: ServedModel, token: int) -> str:
    """Return the text of a single token, U+FFFD where it is not whole characters."""
    return model.detokenizers.token_bytes(token).decode(errors="replace")


def chat_logprobs(model: ServedModel, logprobs: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """Format ``logprobs`` for a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = model.detokenizers.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = []
    for one in logprobs:
        entries = [entry(t, p) for t, p in zip(one.token_ids, one.logprobs, strict=True)]
        if entries:
            content.append({**entries[0], "top_logprobs": entries[1 : 1 + num_top]})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Formats ``logprobs`` of a text completion's choice; tracks the length of the text, for ``text_offset``."""

    def __init__(self, model: ServedModel, skip_special_tokens: bool) -> None:
        self._model = model
        self._new_detokenizer = partial(model.detokenizers.new, skip_special_tokens=skip_special_tokens)
        self._detokenizer = self._new_detokenizer()
        self._offset = 0

    def of(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the log probabilities of the next tokens."""
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in logprobs:
            if one.token_ids:
                out["tokens"].append(token_text(self._model, one.token_ids[0]))
                out["token_logprobs"].append(one.logprobs[0])
                drawn, *top = zip(one.token_ids, one.logprobs, strict=True)
                out["top_logprobs"].append(self._top([*top, drawn]))
                out["text_offset"] += self._offsets(one.token_ids[:1])
        return out

    def _top(self, ranked: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return log probabilities by the tokens' text; of several tokens with the same text, the first."""
        top: dict[str, float] = {}
        for token, logprob in ranked:
            top.setdefault(token_text(self._model, token), logprob)
        return top

    def _offsets(self, tokens: Sequence[int]) -> list[int]:
        """Return the positions in the text, in characters, at which ``tokens`` begin.

        A token that ends within a character, or is omitted from the text, adds nothing to it.
        """
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.feed((token,)))
        return offsets
