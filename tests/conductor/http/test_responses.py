"""The Responses API, with the openai package against the real HTTP server."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from pydantic import BaseModel

from tanghulu.conductor.http.responses.bodies import InputItem, messages_of
from tanghulu.conductor.http.responses.routes import FIELD_BYTES, KeptResponse, KeptResponses
from tanghulu.rpc.wire import Failure
from tests.conductor.fake_worker import TOKENIZER
from tests.conductor.http.test_tools import CALL, PARAMETERS, _add, _prompt, _served

TEXT = "Hello, wörld! "
NUM_TOKENS = len(TOKENIZER.encode(TEXT).ids) + 1
TOOL = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}


async def _post(cluster, **body) -> tuple[int, dict]:
    response = await cluster.http.post("/v1/responses", json=body)
    return response.status_code, response.json()


class TestText:
    async def test_a_whole_response(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, cluster):
            answer = await client.responses.create(model="tiny", input="hi", instructions="be brief", temperature=0)
            assert (answer.output_text, answer.status, answer.error) == (TEXT, "completed", None)
            assert [item.type for item in answer.output] == ["message"]
            assert answer.usage.output_tokens == NUM_TOKENS
            assert answer.usage.total_tokens == answer.usage.input_tokens + NUM_TOKENS
            assert answer.id.startswith("resp_")
            prompt = _prompt(cluster)
            assert "be brief" in prompt
            assert prompt.index("be brief") < prompt.index("hi<|im_end|>")

    async def test_a_stream_has_openais_events_in_order(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, _):
            events = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]
            names = [event.type for event in events if event.type != "response.output_text.delta"]
            assert names == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.completed",
            ]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT
            assert events[-1].response.output_text == TEXT
            async with client.responses.stream(model="tiny", input="hi") as stream:
                assert (await stream.get_final_response()).output_text == TEXT

    async def test_what_is_cut_is_incomplete(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, _):
            answer = await client.responses.create(model="tiny", input="hi", max_output_tokens=2)
            assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert answer.output[0].status == "incomplete"
            events = [
                e
                async for e in await client.responses.create(model="tiny", input="x", max_output_tokens=2, stream=True)
            ]
            assert events[-1].type == "response.incomplete"

    async def test_log_probabilities_stand_with_the_text(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, _):
            answer = await client.responses.create(
                model="tiny", input="hi", include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=2
            )
            shown = answer.output[0].content[0].logprobs
            assert [(one.token, one.logprob, len(one.top_logprobs)) for one in shown] == [
                ("H", -0.5, 2),
                ("e", -0.5, 2),
            ]

    async def test_a_schema(self, tmp_path):
        class Answer(BaseModel):
            a: int

        async with _served(tmp_path, '{"a": 3}') as (client, cluster):
            answer = await client.responses.parse(model="tiny", input="hi", text_format=Answer)
            assert answer.output_parsed == Answer(a=3)
            schema = json.loads(cluster.workers[0].submits[-1].sampling.json_schema)
            assert schema["properties"]["a"]["type"] == "integer"


class TestItems:
    async def test_parts_and_roles(self, tmp_path):
        items = [
            {"role": "developer", "content": "be kind"},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "three"}]},
            {"type": None, "role": "user", "content": "four"},
        ]
        async with _served(tmp_path, TEXT) as (client, cluster):
            await client.responses.create(model="tiny", input=items, instructions="be brief")
            prompt = _prompt(cluster)
            assert "<|im_start|>system\nbe brief\n\nbe kind<|im_end|>" in prompt
            assert "user\none two<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>" in prompt

    async def test_a_function_is_called_and_its_output_comes_back(self, tmp_path):
        async with _served(tmp_path, f"Let me look.\n{CALL}") as (client, cluster):
            answer = await client.responses.create(model="tiny", input="weather?", tools=[TOOL])
            message, call = answer.output
            assert message.content[0].text.strip() == "Let me look."
            assert (call.type, call.name, json.loads(call.arguments)) == (
                "function_call",
                "get_weather",
                {"city": "Köln"},
            )
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            history = [{"role": "user", "content": "weather?"}, *answer.output, output]
            await client.responses.create(model="tiny", input=history, tools=[TOOL])
            whole = _prompt(cluster)
            await client.responses.create(model="tiny", input=[output], previous_response_id=answer.id, tools=[TOOL])
            assert _prompt(cluster) == whole
            assert "<tool_response>\nrain" in whole
            assert '"city": "Köln"' in whole.split("weather?")[1]

    def test_all_reasoning_of_a_turn_is_shown(self):
        def reasoning(text: str) -> dict[str, object]:
            return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        turn = [reasoning("one"), {"role": "assistant", "content": "x"}, reasoning(" two"), call]
        items = [InputItem.model_validate(item) for item in turn]
        assert messages_of(items)[0]["reasoning_content"] == "one two"

    async def test_calls_in_a_stream(self, tmp_path):
        async with _served(tmp_path, f"{CALL}\n{CALL}") as (client, _):
            ask = {"model": "tiny", "input": "weather?", "tools": [TOOL], "stream": True}
            events = [e async for e in await client.responses.create(**ask)]
            calls = [e.item for e in events if e.type == "response.output_item.done"]
            assert [json.loads(call.arguments) for call in calls] == [{"city": "Köln"}] * 2
            pieces = [
                e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.output_index == 0
            ]
            assert "".join(pieces) == calls[0].arguments
            events = [e async for e in await client.responses.create(**ask, parallel_tool_calls=False)]
            assert len(events[-1].response.output) == 1

    async def test_reasoning_is_an_item_of_its_own(self, tmp_path):
        script = "<think>\nWell.\n</think>\n\nFine."
        async with _served(tmp_path, script, reasoning_parser="think") as (client, _):
            answer = await client.responses.create(model="tiny", input="how?")
            assert [item.type for item in answer.output] == ["reasoning", "message"]
            assert answer.output[0].content[0].text.strip() == "Well."
            assert answer.output_text.strip() == "Fine."
            assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens - len("Fine.")
            await client.responses.create(model="tiny", input=[*answer.output, {"role": "user", "content": "and?"}])

    @pytest.mark.parametrize(
        ("wrong", "param"),
        [
            ({"input": []}, "input"),
            ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
            ({"input": [{"type": "function_call", "call_id": "x"}]}, "input"),
            ({"tools": [{"type": "web_search"}]}, "tools"),
            ({"tool_choice": {"type": "function"}}, "tool_choice"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"previous_response_id": "resp_x"}, "previous_response_id"),
            ({"background": True}, "background"),
            ({"truncation": "auto"}, "truncation"),
            ({"top_logprobs": 21}, "top_logprobs"),
        ],
    )
    async def test_what_is_refused(self, cluster, wrong, param):
        await cluster.add()
        status, answer = await _post(cluster, **{"input": "x", **wrong})
        assert (status, answer["error"]["param"]) == (400, param), answer


class TestKept:
    async def test_the_turns_before_are_known_by_their_id(self, tmp_path):
        async with _served(tmp_path, TEXT) as (client, cluster):
            first = await client.responses.create(model="tiny", input="one", instructions="be brief")
            second = await client.responses.create(model="tiny", input="two", previous_response_id=first.id)
            prompt = _prompt(cluster)
            assert prompt.index("one<|im_end|>") < prompt.index("Hello, w") < prompt.index("two<|im_end|>")
            assert "be brief" not in prompt
            assert (await client.responses.retrieve(second.id)).output_text == TEXT
            await client.responses.delete(second.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(second.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(second.id)
            third = await client.responses.create(model="tiny", input="three", store=False)
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(model="tiny", input="x", previous_response_id=third.id)
            async with httpx.AsyncClient(base_url=str(client.base_url), trust_env=False) as other:
                response = await other.get(f"responses/{first.id}", headers={"authorization": "Bearer other"})
                assert response.status_code == 404, "it belongs to another key"

    def test_one_owner_does_not_push_out_another_s(self):
        kept = KeptResponses(max_bytes=4000)
        kept.add(KeptResponse({"id": "mine"}, [], "me"))
        for number in range(100):
            kept.add(KeptResponse({"id": str(number), "text": "x" * 500}, [], "them"))
            kept.check()
        assert kept.find("mine", "me") is not None
        assert 1 < len(kept) < 8
        many = KeptResponse({"id": "many"}, [{"role": "user", "content": "x"}] * 20, "me")
        kept.add(many)
        assert kept.find("many", "me") is None, "small messages take far more memory than their text"

    def test_they_are_bounded_and_the_last_used_stay(self):
        kept = KeptResponses(max_bytes=400 + 6 * FIELD_BYTES)
        for name in "abc":
            kept.add(KeptResponse({"id": name, "text": "x" * 100}, [], ""))
            kept.check()
        assert kept.find("a", "") is not None
        kept.add(KeptResponse({"id": "d", "text": "x" * 100}, [], ""))
        kept.check()
        assert [kept.find(name, "") is not None for name in "abcd"] == [True, False, True, True]
        kept.add(KeptResponse({"id": "huge", "text": "x" * 1200}, [], ""))
        assert kept.find("huge", "") is None
        assert len(kept) == 3
        assert kept.find("a", "somebody") is None
        assert kept.remove("a", "")
        kept.check()


async def test_an_error_in_a_stream_is_told(tmp_path):
    async with _served(tmp_path, TEXT) as (client, cluster):
        worker = cluster.workers[0]
        worker.hold()
        asked = asyncio.create_task(client.responses.create(model="tiny", input="hi", stream=True))
        await worker.until(lambda: worker.num_running == 1)
        worker.step()
        stream = await asked
        worker.fail_with = Failure("INVALID_REQUEST", "it cannot go on")
        worker.release()
        events = []

        async def read() -> None:
            async for event in stream:
                events.append(event)

        with pytest.raises(openai.APIError, match="it cannot go on"):
            await read()
        assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
        assert events[-1].response.error.message == "it cannot go on"
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        (item,) = events[-1].response.output
        assert text
        assert (item.status, item.content[0].text, item.model_extra) == ("incomplete", text, {})
        assert [event.type for event in events[-4:-1]] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]


async def test_without_a_worker(cluster):
    worker = await _add(cluster, TEXT)
    await worker.stop()
    cluster.workers.clear()
    await cluster.until(lambda: not cluster.registry.workers)
    status, answer = await _post(cluster, input="x", model="nosuch")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
