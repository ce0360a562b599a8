"""Clients that programs are written with: langchain and litellm, of both faces, against the real HTTP server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.conductor.http.test_tools import CALL, PARAMETERS, _served, _template

TEXT = "Hello, wörld! "
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "?", "parameters": PARAMETERS}}


class Answer(BaseModel):
    """What is asked for."""

    a: int


class TestLangChain:
    @pytest.fixture
    def chat_class(self) -> type:
        return pytest.importorskip("langchain_openai", reason="extra: langchain-openai is not installed").ChatOpenAI

    async def test_text_and_stream(self, tmp_path: Path, chat_class: type) -> None:
        async with _served(tmp_path, TEXT) as (client, _):
            for more in ({}, {"use_responses_api": True}):
                chat = chat_class(model="tiny", base_url=str(client.base_url), api_key="x", max_retries=0, **more)
                answer = await chat.ainvoke("hi")
                assert answer.text == TEXT
                assert answer.usage_metadata["output_tokens"] > 0
                assert "".join([chunk.text async for chunk in chat.astream("hi")]) == TEXT

    async def test_bind_tools(self, tmp_path: Path, chat_class: type) -> None:
        async with _served(tmp_path, CALL) as (client, _):
            for more in ({}, {"use_responses_api": True}):
                chat = chat_class(model="tiny", base_url=str(client.base_url), api_key="x", max_retries=0, **more)
                bound = chat.bind_tools([TOOL])
                answer = await bound.ainvoke("weather?")
                assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
                    ("get_weather", {"city": "Köln"})
                ]
                output = {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "rain"}
                assert (await bound.ainvoke([("user", "weather?"), answer, output])).tool_calls

    async def test_with_structured_output(self, tmp_path: Path, chat_class: type) -> None:
        async with _served(tmp_path, '{"a": 3}') as (client, cluster):
            chat = chat_class(model="tiny", base_url=str(client.base_url), api_key="x", max_retries=0)
            for method in ("json_schema", "json_mode"):
                assert await chat.with_structured_output(Answer, method=method).ainvoke("give json") == Answer(a=3)
            worker = cluster.workers[0]
            assert json.loads(worker.submits[-1].sampling.json_schema)["type"] == "object"


class TestLangChainAnthropic:
    @pytest.fixture
    def chat_class(self) -> type:
        reason = "extra: langchain-anthropic is not installed"
        return pytest.importorskip("langchain_anthropic", reason=reason).ChatAnthropic

    def _chat(self, chat_class: type, client: Any) -> Any:
        url = str(client.base_url).removesuffix("v1/")
        return chat_class(model="tiny", base_url=url, api_key="x", max_retries=0, max_tokens=500)

    async def test_text_and_stream(self, tmp_path: Path, chat_class: type) -> None:
        async with _served(tmp_path, TEXT) as (client, _):
            chat = self._chat(chat_class, client)
            answer = await chat.ainvoke([("system", "be brief"), ("user", "hi")])
            assert answer.text == TEXT
            assert answer.response_metadata["stop_reason"] == "end_turn"
            again = await chat.ainvoke([("system", "be brief"), ("user", "hi")])
            assert again.usage_metadata["input_tokens"] == answer.usage_metadata["input_tokens"] > 0
            assert again.usage_metadata["input_token_details"]["cache_read"] > 0
            assert "".join([chunk.text async for chunk in chat.astream("hi")]) == TEXT

    async def test_bind_tools(self, tmp_path: Path, chat_class: type) -> None:
        async with _served(tmp_path, f"<think>Hm.</think>{CALL}", _template("qwen3")) as (client, _):
            bound = self._chat(chat_class, client).bind_tools([TOOL])
            answer = await bound.ainvoke("weather?")
            assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("get_weather", {"city": "Köln"})]
            output = {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "rain"}
            assert (await bound.ainvoke([("user", "weather?"), answer, output])).tool_calls
            chunks = [chunk async for chunk in bound.astream("weather?")]
            whole = sum(chunks[1:], start=chunks[0])
            assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Köln"})]

    async def test_with_structured_output(self, tmp_path: Path, chat_class: type) -> None:
        async with _served(tmp_path, '{"a": 3}') as (client, cluster):
            for method in ("json_schema", "function_calling"):
                chat = self._chat(chat_class, client).with_structured_output(Answer, method=method)
                assert await chat.ainvoke("give json") == Answer(a=3)
                assert cluster.workers[0].submits[-1].sampling.json_schema


class TestLiteLLM:
    @pytest.fixture
    def litellm(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        module = pytest.importorskip("litellm", reason="extra: litellm is not installed")
        monkeypatch.setattr(module, "disable_aiohttp_transport", True, raising=False)
        return module

    async def test_completion_and_stream(self, tmp_path: Path, litellm) -> None:
        async with _served(tmp_path, TEXT) as (client, _):
            ask = {"model": "openai/tiny", "api_base": str(client.base_url), "api_key": "x", "messages": MESSAGES}
            answer = await litellm.acompletion(**ask)
            assert answer.choices[0].message.content == TEXT
            stream = await litellm.acompletion(**ask, stream=True)
            assert "".join([c.choices[0].delta.content or "" async for c in stream]) == TEXT
            response = await litellm.aresponses(**{k: v for k, v in ask.items() if k != "messages"}, input="hi")
            assert response.output[0].content[0].text == TEXT

    async def test_tools(self, tmp_path: Path, litellm) -> None:
        async with _served(tmp_path, CALL) as (client, _):
            ask = {"model": "openai/tiny", "api_base": str(client.base_url), "api_key": "x", "messages": MESSAGES}
            answer = await litellm.acompletion(**ask, tools=[TOOL])
            call = answer.choices[0].message.tool_calls[0].function
            assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Köln"})

    async def test_its_face_of_anthropic(self, tmp_path: Path, litellm) -> None:
        async with _served(tmp_path, f"Let me look.\n{CALL}") as (client, _):
            url = str(client.base_url).removesuffix("/v1/")
            ask = {"model": "anthropic/tiny", "api_base": url, "api_key": "x", "messages": MESSAGES, "max_tokens": 500}
            first = (await litellm.acompletion(**ask, tools=[TOOL])).choices[0].message
            assert (first.content, first.tool_calls[0].function.name) == ("Let me look.", "get_weather")
            result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
            turns = [*MESSAGES, first.model_dump(), result]
            assert (await litellm.acompletion(**{**ask, "messages": turns}, tools=[TOOL])).choices[0].message.tool_calls
            stream = await litellm.acompletion(**ask, tools=[TOOL], stream=True)
            chunks = [chunk.choices[0].delta async for chunk in stream]
            assert "".join(chunk.content or "" for chunk in chunks) == "Let me look."
            pieces = [call.function.arguments or "" for chunk in chunks for call in chunk.tool_calls or ()]
            assert json.loads("".join(pieces)) == {"city": "Köln"}
            message = await litellm.anthropic.messages.acreate(**ask)
            assert message["content"][0]["text"] == f"Let me look.\n{CALL}"
