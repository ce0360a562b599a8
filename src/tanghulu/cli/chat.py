"""``tanghulu chat``: a conversation with the model over the conductor's public HTTP API."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from tanghulu.errors import ConfigError, NodeUnavailable, TanghuluError, error_from_code
from tanghulu.runtime.config import command, option
from tanghulu.runtime.master_options import HttpClientOptions
from tanghulu.types import parse_url
from tanghulu.web.event_stream import EventReader

#: Timeout in seconds for listing the models.
_ANSWER_S = 10.0
_HELP = "/new starts afresh, /system TEXT sets the system prompt, /quit or Ctrl-D ends"


@dataclass(frozen=True, kw_only=True)
class ChatConfig(HttpClientOptions):
    """The options of ``tanghulu chat``."""

    url: str = option("http://127.0.0.1:8000", "the conductor's HTTP address")
    model: str = option("", "the model to talk to; default: the first that is served")
    system: str = option("", "system prompt")
    message: str = option("", "send this message, print the answer and exit")
    max_tokens: int = option(512, "longest answer in tokens", least=1)
    temperature: float = option(0.7, "0 always picks the most likely token", most=2)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {self.url} has no scheme; use --url http://{self.url}")
        parse_url(self.url, path=True)

    @property
    def base_url(self) -> str:
        """The address without the trailing /v1 that clients of OpenAI's API include."""
        return parse_url(self.url, path=True).removesuffix("/v1")


class Conversation:
    """The turns so far, and the connection to the conductor."""

    def __init__(self, http: httpx.Client, config: ChatConfig, model: str) -> None:
        self._http = http
        self._config = config
        self.model = model
        self.messages: list[dict[str, str]] = []
        self.usage: dict[str, Any] = {}
        self.reset(config.system)

    def reset(self, system: str) -> None:
        """Drop all turns; begin with ``system`` if it is not empty."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> Iterator[str]:
        """Send ``text`` and yield the answer's pieces; both become turns once the answer is complete."""
        turn = [*self.messages, {"role": "user", "content": text}]
        body = {
            "model": self.model,
            "messages": turn,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
        }
        answer = ""
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise error_of(response)
            for chunk in _events(response):
                self.usage = chunk.get("usage") or self.usage
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content") or ""
                    answer += piece
                    yield piece
        self.messages = [*turn, {"role": "assistant", "content": answer}]


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    events = EventReader()
    for piece in response.iter_bytes():
        for event in map(json.loads, events.feed(piece)):
            if "error" in event:
                raise error_from_code(str(event["error"].get("code", "")), event["error"]["message"])
            yield event


def error_of(response: httpx.Response) -> TanghuluError:
    """Return the error of an answer that is none."""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return NodeUnavailable(f"the conductor answered {response.status_code}: {response.text[:200]}")
    return error_from_code(str(error.get("code") or "").upper(), error["message"])


def _answer(conversation: Conversation, text: str, console: Console) -> None:
    start_s, first_s = time.monotonic(), 0.0
    for piece in conversation.say(text):
        first_s = first_s or time.monotonic() - start_s
        console.out(piece, end="", highlight=False)
    console.out("")
    usage = conversation.usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    seconds = max(time.monotonic() - start_s - first_s, 1e-9)
    speed = usage.get("completion_tokens", 0) / seconds
    prompt = f"{usage.get('prompt_tokens', 0)} tokens in ({cached} cached)"
    note = f"{prompt}, first after {first_s:.2f} s, {speed:.0f} tokens/s"
    if console.is_terminal:
        console.print(f"[dim]{note}[/]", highlight=False)


def _first_model(http: httpx.Client) -> str:
    answer = http.get("/v1/models", timeout=_ANSWER_S)
    if answer.status_code in (401, 403):
        raise error_of(answer)
    try:
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (LookupError, TypeError, ValueError) as error:
        raise NodeUnavailable(f"{answer.url} lists no model: {error!r}; is that a conductor?") from error


def _loop(conversation: Conversation, console: Console) -> None:
    console.print(f"[bold]{conversation.model}[/]  [dim]{_HELP}[/]", highlight=False)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            conversation.reset("")
        elif text.startswith("/system "):
            conversation.reset(text.removeprefix("/system "))
        elif text.startswith("/"):
            console.print(_HELP, markup=False)
        elif text:
            _turn(conversation, text, console)


def _turn(conversation: Conversation, text: str, console: Console) -> None:
    try:
        _answer(conversation, text, console)
    except KeyboardInterrupt:
        console.print("[dim](stopped)[/]")
    except TanghuluError as error:
        console.print(f"[red]{error.message}[/]")


def _piped() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8: {error}") from error


def run(config: ChatConfig) -> None:
    """Converse until the user quits, or answer one --message."""
    console = Console()
    try:
        with httpx.Client(
            base_url=config.base_url,
            timeout=httpx.Timeout(600, connect=5),
            trust_env=False,
            headers=config.shown,
            verify=config.verified_by,
        ) as http:
            model = config.model or _first_model(http)
            conversation = Conversation(http, config, model)
            message = config.message or ("" if sys.stdin.isatty() else _piped())
            if message:
                _answer(conversation, message, console)
            else:
                _loop(conversation, console)
    except httpx.HTTPError as error:
        raise NodeUnavailable(f"no model answers at {config.url}: {error}; is `tanghulu up` running?") from error


COMMAND = command("chat", ChatConfig, run, "Talk to a running conductor. " + _HELP.capitalize() + ".")
