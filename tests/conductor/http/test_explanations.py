"""Explanations of cache misses: in answers of every API, in the stories of requests, and as shown by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tanghulu.cli import explain as command
from tests.conductor.cluster import running_cluster
from tests.conductor.http.test_keys import keyed_cluster
from tests.conductor.key_files import bearer

RULES = "These are the rules of the house, and whoever enters follows them. " * 4
ROUTES = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/completions": {"max_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
    "/generate": {"sampling_params": {"max_new_tokens": 2}},
}


def body_of(path: str, text: str) -> dict[str, Any]:
    name = {"/v1/completions": "prompt", "/v1/responses": "input", "/generate": "text"}.get(path, "messages")
    given = [{"role": "user", "content": text}] if name == "messages" else text
    return {"model": "tiny", name: given} | ROUTES[path]


def explanation_of(path: str, answer: dict[str, Any]) -> dict[str, Any] | None:
    where = answer["meta_info"] if path == "/generate" else answer
    return where.get("cache_explanation")


@pytest.mark.parametrize("path", ROUTES)
async def test_an_answer_explains_its_prompt_if_asked(cluster, path):
    await cluster.add()
    seen = []
    for fields, headers in (({}, {}), ({"explain_cache": True}, {}), ({}, {"x-explain-cache": "1"})):
        answer = await cluster.http.post(path, json=body_of(path, RULES) | fields, headers=headers)
        assert answer.status_code == 200, answer.text
        seen.append(explanation_of(path, answer.json()))
    assert seen[0] is None
    for explained in seen[1:]:
        runs = explained["runs"]
        assert sum(run["tokens"] for run in runs) == explained["prompt_tokens"]
        assert (runs[0]["source"], runs[-1]["cause"]) == ("worker", "tail")


async def test_a_header_that_is_neither_0_nor_1_is_rejected(cluster):
    await cluster.add()
    body = body_of("/v1/completions", RULES)
    assert (await cluster.http.post("/v1/completions", json=body, headers={"x-explain-cache": "0"})).status_code == 200
    answer = await cluster.http.post("/v1/completions", json=body, headers={"x-explain-cache": "true"})
    assert answer.status_code == 400
    assert "header x-explain-cache is 'true'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_explains_it_in_its_last_chunk(cluster, usage):
    await cluster.add()
    body = body_of("/v1/chat/completions", RULES) | {"stream": True, "explain_cache": True}
    answer = await cluster.http.post("/v1/chat/completions", json=body | {"stream_options": {"include_usage": usage}})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [bool(chunk.get("cache_explanation")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert (chunks[-1]["choices"], bool(chunks[-1].get("usage"))) == ([], usage)


async def test_several_prompts_have_an_explanation_each(cluster):
    await cluster.add()
    body = body_of("/v1/completions", RULES) | {"prompt": [RULES, "another"], "n": 2, "explain_cache": True}
    answer = (await cluster.http.post("/v1/completions", json=body)).json()
    lengths = [each["prompt_tokens"] for each in answer["cache_explanation"]]
    assert sum(lengths) == answer["usage"]["prompt_tokens"]
    assert len(lengths) == 2


async def ask_at(cluster, time: str, **more: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": f"It is 2026-11-28 {time}. {RULES}"},
        {"role": "user", "content": "And now?"},
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": 2, "explain_cache": True}
    answer = await cluster.http.post("/v1/chat/completions", json=body, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("quotes", [False, True])
async def test_a_time_of_day_in_the_first_message_is_named(tmp_path: Path, quotes):
    async with running_cluster(tmp_path, explain_text=quotes) as cluster:
        await cluster.add()
        await ask_at(cluster, "10:41:07")
        answer = await ask_at(cluster, "10:43:55")
        run = next(run for run in answer["cache_explanation"]["runs"] if run.get("cause") == "diverged")
        assert (run["detail"]["message"], run["detail"]["kind"]) == (0, "date")
        assert ("ours" in run["detail"]) is quotes
        if quotes:
            assert (run["detail"]["ours"][:4], run["detail"]["theirs"][:4]) == ("3:55", "1:07")
        story = (await cluster.http.get(f"/debug/requests/{answer['id']}")).json()["requests"][0]
        lines = "\n".join(line.plain for each in story["cache"]["runs"] for line in command.lines_of(each))
        assert "in message 0 (date)" in lines
        assert ("3:55" in lines) is quotes
        assert len(command.bar(story["cache"]["runs"], story["cache"]["prompt_tokens"])) >= 64


async def test_keys_are_told_what_their_rights_allow(tmp_path: Path):
    async with keyed_cluster(tmp_path, explain_text=True) as cluster:
        await cluster.add()
        await ask_at(cluster, "10:41:07", headers=bearer("user"))
        theirs = await ask_at(cluster, "10:41:07", headers=bearer("other"))
        causes = {run.get("cause", run.get("source")) for run in theirs["cache_explanation"]["runs"]}
        assert causes == {"new", "tail"}  # not that another tenant has asked the same
        own = await ask_at(cluster, "10:43:55", headers=bearer("user"))
        named = next(run for run in own["cache_explanation"]["runs"] if run.get("cause") == "diverged")
        assert named["detail"]["theirs"].startswith("1:07")
        path = f"/debug/requests/{theirs['id']}"
        shown = {}
        for name in ("watcher", "admin"):
            (story,) = (await cluster.http.get(path, headers=bearer(name))).json()["requests"]
            shown[name] = story["cache"]["runs"][0]
        assert shown["watcher"] == shown["admin"] | {"cause": "new", "detail": {}}
        assert shown["admin"]["cause"] == "other_name"


async def test_without_memory_nothing_is_explained(tmp_path: Path):
    async with running_cluster(tmp_path, explain_memory=0) as cluster:
        await cluster.add()
        answer = await ask_at(cluster, "10:41:07")
        assert answer["cache_explanation"] is None


def test_the_command_says_if_nobody_answers():
    result = CliRunner().invoke(command.COMMAND, ["some-id", "--url", "http://127.0.0.1:9"])
    assert result.exit_code != 0
    assert "does not answer" in str(result.exception)
