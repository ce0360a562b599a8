"""The names of prompts' blocks: from bodies of all APIs, with a tokenizer and template of a model's folder, or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tanghulu.conductor.endpoint_picker.prompts import PromptReader, Unread, read_card
from tanghulu.conductor.routing.overrides import RoutingPolicies, parse_weights
from tanghulu.conductor.routing_service.api import Hasher, RouterApi
from tanghulu.conductor.routing_service.service import ANYBODY, RoutingClient, RoutingQuery, RoutingService
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.errors import InvalidRequest, ModelUnsupported
from tanghulu.hashing import BlockExtras
from tanghulu.types import BlockHash
from tests.conductor.endpoint_picker.rig import model_folder
from tests.virtual.clock import ManualClock

HASHER = Hasher(BlockHash(b"root"), 2, "xxh3_128")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def reader(folder: Path | None) -> PromptReader:
    service = RoutingService(RoutingPolicies("ttft-min", parse_weights("")), 2, 1)
    model = None if folder is None else ServedModel(read_card(folder, 2))
    return PromptReader(RouterApi(service, HASHER, ManualClock()), model, {"sql": "/sql"}.get)


async def read(prompts: PromptReader, path: str, caller=ANYBODY, **body: Any) -> RoutingQuery:
    return (await prompts.query(path, json.dumps(body).encode(), caller))[0]


def named(folder: Path, text: str, **extras: str) -> list[BlockHash]:
    tokens = ServedModel(read_card(folder, 2))._encode(text, False)
    return HASHER.hashes(tokens, BlockExtras(**extras))


async def test_every_api_is_read_as_the_engine_reads_it(folder: Path):
    prompts = reader(folder)
    chat = await read(prompts, "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    assert chat.hashes == named(folder, "<user>hello<assistant>")
    assert chat.num_tokens == len("<user>hello<assistant>")
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = await read(prompts, "/v1/messages?beta=1", messages=[{"role": "user", "content": parts}])
    assert messages.hashes == chat.hashes
    lines = await read(prompts, "/v1/chat/completions", messages=[{"role": "user", "content": parts}])
    assert lines.hashes == named(folder, "<user>hel\nlo<assistant>"), "as vLLM joins them"
    for prompt in ("some text", ["some text", "another"]):
        text = await read(prompts, "/v1/completions", prompt=prompt)
        assert text.hashes == named(folder, "some text")
    ids = await read(prompts, "/prefix/v1/completions", prompt=[1, 2, 3, 4, 5])
    assert (len(ids.hashes), ids.num_tokens) == (2, 5)


async def test_tools_of_both_apis_make_the_same_prompt(folder: Path):
    prompts, schema = reader(folder), {"type": "object", "properties": {}}
    function = {"name": "now", "description": "The time", "parameters": schema}
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    openai = await read(
        prompts,
        "/v1/chat/completions",
        tools=[{"type": "function", "function": function}],
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "time?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
            {"role": "user", "content": "thanks"},
        ],
    )
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "noon"}]}
    anthropic = await read(
        prompts,
        "/v1/messages",
        system=[{"type": "text", "text": "Be kind."}],
        tools=[{"name": "now", "description": "The time", "input_schema": schema}],
        messages=[
            {"role": "user", "content": "time?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "now", "input": {}}]},
            {"role": "user", "content": [result, {"type": "text", "text": "thanks"}]},
        ],
    )
    assert anthropic.hashes == openai.hashes


@pytest.mark.parametrize("has_model", [True, False])
async def test_salts_adapters_images_and_tenants_are_apart(folder: Path, has_model: bool):
    prompts = reader(folder if has_model else None)

    async def first(content: Any = "hello world " * 4, caller=ANYBODY, **fields: str) -> BlockHash:
        messages = [{"role": "user", "content": content}]
        query = await read(prompts, "/v1/chat/completions", caller, messages=messages, **fields)
        return query.hashes[-1]

    plain = await first()
    assert plain == await first(model="base")
    images = [[{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?" * 40}] for url in "ab"]
    others = [
        await first(cache_salt="s"),
        await first(cache_salt="t"),
        await first(model="sql"),
        await first(caller=RoutingClient("key", "acme")),
        await first(images[0]),
        await first(images[1]),
    ]
    assert len({plain, *others}) == 7
    assert await first(images[0]) == others[4]


async def test_without_a_model_a_common_beginning_has_common_names():
    prompts = reader(None)
    first = await read(prompts, "/v1/completions", prompt="once upon a time " * 4)
    second = await read(prompts, "/v1/completions", prompt="once upon a time " * 4 + "there was")
    common = sum(a == b for a, b in zip(first.hashes, second.hashes, strict=False))
    assert common >= len(first.hashes) - 1 > 4
    with pytest.raises(Unread):
        await read(prompts, "/v1/chat/completions", input="x")
    assert first.num_tokens == pytest.approx(len("once upon a time " * 4) / 4, abs=16)


async def test_what_cannot_be_read(folder: Path):
    prompts = reader(folder)
    for body in (b"{", b"[]", b"\xff"):
        with pytest.raises(InvalidRequest, match="JSON"):
            await prompts.query("/v1/chat/completions", body, ANYBODY)
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}),
        ("/v1/completions", {"prompt": [[1, -1]]}),
        ("/v1/messages", {"messages": [{"role": "user"}]}),
        ("/v1/messages", {"messages": "hello"}),
    ):
        with pytest.raises(Unread):
            await prompts.query(path, json.dumps(body).encode(), ANYBODY)
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises((Unread, InvalidRequest)):
        await prompts.query("/v1/chat/completions", deep, ANYBODY)
    with pytest.raises(Unread, match="size"):
        await prompts.query("/v1/chat/completions", b'{"a":[' + b"1," * (1 << 20) + b"1]}", ANYBODY)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ModelUnsupported):
        read_card(tmp_path, 2)
