"""Programs' own clients (openai, anthropic, litellm, langchain) against two plain vLLM servers behind the conductor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tests.engines.vllm_front.conftest import ANSWER_S, BLOCK_TOKENS, CONTEXT, MARKS, Front, Server

pytestmark = MARKS
ASK: list[Any] = [{"role": "user", "content": "Name three rivers of Europe."}]
#: More than one block, so that the second time finds some of it.
LONG: list[Any] = [{"role": "user", "content": "Rivers of Europe: Rhine, Danube, Volga, Loire. " * 12}]
PARAMETERS = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"]}
PARAMETERS |= {"$defs": {"City": {"type": "string"}}}
BAD = {"type": "object", "properties": {"city": {"type": "strin"}}, "required": ["city"]}
#: Spent on an answer that a schema keeps short.
ENOUGH = 200


def tool(parameters: dict[str, Any]) -> Any:
    function = {"name": "get_weather", "description": "The weather of a city", "parameters": parameters}
    return {"type": "function", "function": function}


class Answer(BaseModel):
    """A river."""

    river: str


class TestOpenAI:
    @pytest.fixture
    def clients(self, front: Front, servers: list[Server]) -> Iterator[list[Any]]:
        """Clients of the conductor, and of one server itself."""
        openai = pytest.importorskip("openai", reason="extra: openai is not installed")
        urls = [f"{http.base_url}/v1".replace("//v1", "/v1") for http in (front.http, servers[0].http)]
        made = [openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=ANSWER_S) for url in urls]
        yield made
        for each in made:
            each.close()

    def test_chat_as_from_the_server(self, clients: list[Any]) -> None:
        told, streamed = [], []
        for client in clients:
            body = {"model": "smollm2", "messages": ASK, "max_completion_tokens": 30, "temperature": 0}
            answer = client.chat.completions.create(**body)
            told.append((answer.choices[0].message.content, answer.choices[0].finish_reason, counts(answer.usage)))
            chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
            text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
            streamed.append((text, chunks[-2].choices[0].finish_reason, counts(chunks[-1].usage)))
        assert told == [told[0]] * 2 == streamed

    def test_completions_as_from_the_server(self, clients: list[Any]) -> None:
        told, streamed = [], []
        for client in clients:
            body = {"model": "smollm2", "prompt": ["One, two, three,", "The Rhine"], "max_tokens": 12, "temperature": 0}
            answer = client.completions.create(**body)
            told.append(([each.text for each in answer.choices], counts(answer.usage)))
            text = ["", ""]
            for chunk in client.completions.create(**body, stream=True):
                for choice in chunk.choices:
                    text[choice.index] += choice.text
            streamed.append(text)
        assert told == [told[0]] * 2
        assert streamed == [told[0][0]] * 2

    def test_responses(self, clients: list[Any]) -> None:
        chat = {"messages": ASK, "max_completion_tokens": 20}
        text = clients[0].chat.completions.create(model="smollm2", temperature=0, **chat).choices[0].message.content
        body = {"model": "smollm2", "input": ASK[0]["content"], "max_output_tokens": 20, "temperature": 0}
        assert clients[0].responses.create(**body).output_text == text
        with clients[0].responses.stream(**body) as stream:
            assert [event.text for event in stream if event.type == "response.output_text.done"] == [text]

    def test_cached_tokens(self, clients: list[Any]) -> None:
        body = {"model": "smollm2", "messages": LONG, "max_tokens": 2, "temperature": 0}
        usage = clients[0].chat.completions.create(**body).usage
        again = clients[0].chat.completions.create(**body).usage
        assert again.prompt_tokens == usage.prompt_tokens > 2 * BLOCK_TOKENS
        full = (usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert again.prompt_tokens_details.cached_tokens == full

    def test_tools(self, clients: list[Any]) -> None:
        body = {"model": "smollm2", "messages": ASK, "max_tokens": ENOUGH, "temperature": 0}
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            asked = body | {"tools": [tool(PARAMETERS)], "tool_choice": choice}
            (call,) = clients[0].chat.completions.create(**asked).choices[0].message.tool_calls
            assert (call.function.name, list(json.loads(call.function.arguments))) == ("get_weather", ["city"])
            with clients[0].chat.completions.stream(**asked) as stream:
                (same,) = stream.get_final_completion().choices[0].message.tool_calls
            assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)

    def test_errors(self, clients: list[Any]) -> None:
        import openai

        create = clients[0].chat.completions.create
        with pytest.raises(openai.NotFoundError, match="nosuch"):
            create(model="nosuch", messages=ASK)
        with pytest.raises(openai.BadRequestError, match=str(CONTEXT)) as too_long:
            clients[0].completions.create(model="smollm2", prompt=[5] * CONTEXT)
        assert too_long.value.code == "context_length_exceeded"
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="strin"):
                create(model="smollm2", messages=ASK, tools=[tool(BAD)], tool_choice="required", stream=stream)
        with pytest.raises(openai.BadRequestError, match="type object"):
            create(model="smollm2", messages=ASK, tools=[tool({"type": "nonsense"})])
        assert create(model="smollm2", messages=ASK, max_tokens=2).usage.completion_tokens == 2


def counts(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


class TestAnthropic:
    @pytest.fixture
    def client(self, front: Front) -> Iterator[Any]:
        anthropic = pytest.importorskip("anthropic", reason="extra: anthropic is not installed")
        with anthropic.Anthropic(base_url=str(front.http.base_url), api_key="x", max_retries=0) as made:
            yield made

    def test_message(self, client: Any, servers: list[Server]) -> None:
        direct = {"model": "smollm2", "messages": ASK, "max_tokens": 25, "temperature": 0}
        wanted = servers[0].http.post("/v1/chat/completions", json=direct).json()
        body = {"model": "smollm2", "messages": ASK, "max_tokens": 25, "extra_body": {"temperature": 0}}
        answer = client.messages.create(**body)
        assert answer.content[0].text == wanted["choices"][0]["message"]["content"]
        assert answer.stop_reason == ("max_tokens" if wanted["choices"][0]["finish_reason"] == "length" else "end_turn")
        assert answer.usage.output_tokens == wanted["usage"]["completion_tokens"]
        assert client.messages.count_tokens(model="smollm2", messages=ASK).input_tokens == answer.usage.input_tokens
        with client.messages.stream(**body) as stream:
            assert "".join(stream.text_stream) == answer.content[0].text

    def test_cached_tokens(self, client: Any) -> None:
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "Lakes: Garda, Como. " * 30}]}
        first, again = (client.messages.create(**body, max_tokens=2).usage for _ in range(2))
        assert again.cache_read_input_tokens >= BLOCK_TOKENS
        assert again.input_tokens + again.cache_read_input_tokens == first.input_tokens + first.cache_read_input_tokens

    def test_tools(self, client: Any) -> None:
        tools = [{"name": "get_weather", "description": "?", "input_schema": PARAMETERS}]
        body = {"model": "smollm2", "messages": ASK, "max_tokens": ENOUGH, "extra_body": {"temperature": 0}}
        body |= {"tools": tools, "tool_choice": {"type": "any"}}
        (block,) = client.messages.create(**body).content
        assert (block.type, block.name, list(block.input)) == ("tool_use", "get_weather", ["city"])
        with client.messages.stream(**body) as stream:
            (same,) = stream.get_final_message().content
        assert same.input == block.input

    def test_errors(self, client: Any) -> None:
        import anthropic

        body = {"model": "smollm2", "messages": ASK, "max_tokens": 2}
        with pytest.raises(anthropic.NotFoundError, match="nosuch"):
            client.messages.create(**body | {"model": "nosuch"})
        with pytest.raises(anthropic.BadRequestError, match=str(CONTEXT)):
            client.messages.create(**body | {"messages": [{"role": "user", "content": "a b c " * CONTEXT}]})
        bad = {"tools": [{"name": "get_weather", "input_schema": BAD}], "tool_choice": {"type": "any"}}
        with pytest.raises(anthropic.BadRequestError, match="strin"):
            client.messages.create(**body | bad)


@pytest.mark.parametrize("face", ["openai", "anthropic"])
class TestLiteLLM:
    @pytest.fixture
    def ask(self, front: Front, face: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        pytest.importorskip("litellm", reason="extra: litellm is not installed")
        url = str(front.http.base_url).rstrip("/") + ("/v1" if face == "openai" else "")
        common = {"api_base": url, "api_key": "x", "max_tokens": ENOUGH, "temperature": 0, "max_retries": 0}
        return {**common, "model": f"{face}/smollm2", "messages": ASK}

    def test_text_and_stream(self, ask: dict[str, Any]) -> None:
        import litellm

        body = ask | {"max_tokens": 20}
        answer = litellm.completion(**body)
        assert answer.usage.completion_tokens == 20
        text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**body, stream=True))
        assert text == answer.choices[0].message.content != ""

    def test_tools(self, ask: dict[str, Any]) -> None:
        import litellm

        answer = litellm.completion(**ask, tools=[tool(PARAMETERS)], tool_choice="required")
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, list(json.loads(call.function.arguments))) == ("get_weather", ["city"])

    def test_errors(self, ask: dict[str, Any], face: str) -> None:
        import litellm

        with pytest.raises(litellm.NotFoundError, match="nosuch"):
            litellm.completion(**ask | {"model": f"{face}/nosuch"})
        with pytest.raises(litellm.BadRequestError, match=str(CONTEXT)):
            litellm.completion(**ask | {"messages": [{"role": "user", "content": "a b c " * CONTEXT}]})
        with pytest.raises(litellm.BadRequestError, match="strin"):
            litellm.completion(**ask, tools=[tool(BAD)], tool_choice="required")


@pytest.mark.parametrize("face", ["openai", "anthropic"])
class TestLangChain:
    @pytest.fixture
    def chat(self, front: Front, face: str) -> Any:
        url = str(front.http.base_url).rstrip("/")
        common = {"model": "smollm2", "api_key": "x", "max_retries": 0, "temperature": 0, "max_tokens": ENOUGH}
        if face == "openai":
            module = pytest.importorskip("langchain_openai", reason="extra: langchain-openai is not installed")
            return module.ChatOpenAI(base_url=f"{url}/v1", **common)
        module = pytest.importorskip("langchain_anthropic", reason="extra: langchain-anthropic is not installed")
        return module.ChatAnthropic(base_url=url, **common)

    def test_text_and_stream(self, chat: Any) -> None:
        answer = chat.invoke("Name a river.", max_tokens=20)
        assert answer.usage_metadata["output_tokens"] == 20
        assert "".join(chunk.text for chunk in chat.stream("Name a river.", max_tokens=20)) == answer.text != ""

    def test_tools(self, chat: Any) -> None:
        bound = chat.bind_tools([tool(PARAMETERS)], tool_choice="any")
        (call,) = bound.invoke("How is the weather in Paris?").tool_calls
        assert (call["name"], list(call["args"])) == ("get_weather", ["city"])

    def test_structured_output(self, chat: Any) -> None:
        made = chat.with_structured_output(Answer, method="json_schema").invoke("Name a river, as JSON.")
        assert made.river

    def test_errors(self, chat: Any) -> None:
        with pytest.raises(Exception, match="strin"):
            chat.bind_tools([tool(BAD)], tool_choice="any").invoke("How is the weather?")
        with pytest.raises(Exception, match=str(CONTEXT)):
            chat.invoke("a b c " * CONTEXT)
