"""Clients that programs are written with: langchain-openai and litellm, against the real HTTP server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.conductor.http.test_tools import CALL, PARAMETERS, _served

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
