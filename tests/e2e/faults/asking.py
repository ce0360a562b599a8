"""Requests of every API, and what became of them: whole and equal to the undisturbed ones, or an honest error."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

APIS = ("/v1/chat/completions", "/v1/completions", "/generate")
MAX_TOKENS = 48
PROMPT_CHARS = 150


@dataclass(frozen=True)
class Ask:
    """One request; equal ones get equal texts."""

    api: str
    stream: bool
    greedy: bool
    number: int = 0
    max_tokens: int = MAX_TOKENS
    model: str = "mock"

    def body(self, salt: str = "", routing: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The request's body; with another ``salt`` no worker has its prompt in its cache."""
        name = f"{self.api} {self.stream} {self.greedy} {self.number}"
        prompt = name + "".join(random.Random(name).choices("abcdefgh ", k=PROMPT_CHARS))
        sampling = {"temperature": 0.0 if self.greedy else 1.0, "ignore_eos": True}
        body: dict[str, Any] = {"model": self.model, "stream": self.stream}
        if self.api == "/generate":
            body |= {"text": prompt, "sampling_params": sampling | {"max_new_tokens": self.max_tokens}}
            body["sampling_params"]["sampling_seed"] = self.number + 7
        else:
            body |= {"max_tokens": self.max_tokens, "seed": self.number + 7, **sampling}
            body |= {"stream_options": {"include_usage": True}} if self.stream else {}
            chat = self.api.endswith("chat/completions")
            body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        if salt:
            body["cache_salt"] = salt
        if routing:
            body["routing"] = dict(routing)
        return body


@dataclass
class Answer:
    """What a client got; ``num_done`` counts the [DONE]s, ``cut`` says how the connection broke."""

    status: int = 0
    text: str = ""
    finishes: list[str] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    num_done: int = 0
    cut: str = ""


KINDS = tuple(Ask(api, stream, greedy) for api in APIS for stream in (True, False) for greedy in (True, False))


async def ask(http: httpx.AsyncClient, url: str, one: Ask, **more: Any) -> Answer:
    """Send a request and read its answer to the end, whatever that is."""
    try:
        reply = await http.post(url + one.api, json=one.body(**more))
    except httpx.HTTPError as error:
        return Answer(cut=repr(error))
    return read(one, reply.status_code, reply.text)


def read(one: Ask, status: int, body: str) -> Answer:
    """The answer in ``body``."""
    answer = Answer(status)
    events = [event.removeprefix("data: ") for event in body.split("\n\n") if event]
    if status != 200 or not one.stream:
        events = [body]
    for event in events:
        if event == "[DONE]":
            answer.num_done += 1
        else:
            _take(one, answer, json.loads(event))
    return answer


def _take(one: Ask, answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.errors.append(event["error"])
    if one.api == "/generate":
        answer.text = event.get("text", answer.text)  # all of it again in each event
        meta = event.get("meta_info", {})
        if finish := meta.get("finish_reason"):
            answer.finishes.append(finish["type"])
        answer.usage = {name: meta[name] for name in ("prompt_tokens", "completion_tokens") if name in meta}
        return
    for choice in event.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        answer.text += part.get("content") or part.get("text") or ""
        if choice.get("finish_reason"):
            answer.finishes.append(choice["finish_reason"])
    if usage := event.get("usage"):
        answer.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


def objection_to_whole(one: Ask, answer: Answer, wanted: Answer) -> str:
    """Why ``answer`` is not the undisturbed one; "" if it is."""
    return "" if answer == wanted else f"{one}: {answer} instead of {wanted}"


def objection_to_error(one: Ask, answer: Answer, wanted: Answer) -> str:
    """Why ``answer`` is no honest error; "" if it is one."""
    honest = bool(answer.errors) and not answer.cut and len(answer.errors) == 1
    if answer.status == 200:  # the stream had begun
        ends = ["abort" if one.api == "/generate" else "error"]
        honest = honest and one.stream and answer.num_done == 1 and answer.finishes == ends
    else:
        honest = honest and answer.status in (422, 503, 504) and not answer.finishes
    return "" if honest and wanted.text.startswith(answer.text) else f"{one}: no honest error: {answer}"
