"""Acceptance with two real ``vllm serve``: what they answer directly is what the conductor in front of them answers.

The tests run in this order: the last ones stop servers.
"""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.engines.vllm_front.conftest import ANSWER_S, MARKS, Front, Server, eventually

pytestmark = MARKS
NUM_TOKENS = 60


def chat(text: str, **fields: object) -> dict:
    messages = [{"role": "user", "content": text}]
    return {"model": "smollm2", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}


def asked(http: httpx.Client, body: dict, path: str = "/v1/chat/completions") -> dict:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx.Client, body: dict, on_piece=lambda: None) -> tuple[str, dict, str]:
    """Text, usage and finish reason of a streamed chat."""
    text, usage, reason = "", {}, ""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/chat/completions", json=body | more) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
                on_piece()
    return text, counts(usage), reason


def counts(usage: dict) -> dict:
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def said(answer: dict) -> tuple[str, dict, str]:
    (choice,) = answer["choices"]
    return choice["message"]["content"], counts(answer["usage"]), choice["finish_reason"]


PROMPTS = [
    f"Tell me {number} facts about the {what}." for number in (2, 3) for what in ("moon", "sea", "bees", "Rhine")
]


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_chats_are_equal_whole_and_streamed(front: Front, servers: list[Server], prompt: str) -> None:
    direct = said(asked(servers[0].http, chat(prompt)))
    assert said(asked(front.http, chat(prompt))) == direct
    assert streamed(front.http, chat(prompt)) == direct


def test_completions_are_equal(front: Front, servers: list[Server]) -> None:
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 30, "temperature": 0, "logprobs": 2}
    direct, ours = (asked(http, body, "/v1/completions")["choices"][0] for http in (servers[0].http, front.http))
    assert (ours["text"], ours["finish_reason"]) == (direct["text"], direct["finish_reason"])
    for name in ("tokens", "text_offset"):
        assert ours["logprobs"][name] == direct["logprobs"][name]
    assert ours["logprobs"]["token_logprobs"] == pytest.approx(direct["logprobs"]["token_logprobs"], abs=1e-3)


def test_stop_strings_and_penalties_are_equal(front: Front, servers: list[Server]) -> None:
    body = chat("Count from one to ten in words.", stop=["four"], frequency_penalty=0.3, repetition_penalty=1.1)
    assert said(asked(front.http, body)) == said(asked(servers[0].http, body))


def test_tools(front: Front) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    body = chat("What is the weather in Paris?", tools=tools, tool_choice="required")
    (choice,) = asked(front.http, body)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("get_weather", "tool_calls")
    assert list(json.loads(call["function"]["arguments"])) == ["city"]
    text = ""
    with front.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        for line in answer.iter_lines():
            for each in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                text += "".join(one["function"].get("arguments") or "" for one in each["delta"].get("tool_calls") or ())
    assert json.loads(text) == json.loads(call["function"]["arguments"])


def test_second_turn_goes_where_the_first_was(front: Front, servers: list[Server]) -> None:
    first = chat("Write about tanghulu. " * 60)
    before = [prefixes(each) for each in servers]
    answer = asked(front.http, first)
    eventually(lambda: [prefixes(each) for each in servers] != before, 30.0)
    (where,) = [i for i, each in enumerate(servers) if prefixes(each) != before[i]]
    reply = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    second = first | {"messages": [*first["messages"], reply, {"role": "user", "content": "Go on."}]}

    def route() -> dict:
        return front.http.post("/route", json=second).json()

    def known() -> dict:
        return route()["hit_blocks"]["workers"]

    eventually(lambda: servers[where].id in known(), 30.0)
    blocks, reasons = known()[servers[where].id], route()
    usage = asked(front.http, second)["usage"]
    num_first = answer["usage"]["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == blocks * 64 >= num_first - num_first % 64, reasons
    assert list(known()) == [servers[where].id]


def prefixes(server: Server) -> float:
    return server.metric("vllm:prefix_cache_queries_total")


def test_leaving_and_joining(front: Front, servers: list[Server]) -> None:
    begun = threading.Event()
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(streamed, front.http, chat(each), begun.set) for each in PROMPTS[:4]]
        assert begun.wait(ANSWER_S)
        front.list(servers[1:])  # drained: what runs there ends there
        answers = [each.result() for each in running]
    front.until_workers(1)
    assert answers == [said(asked(servers[1].http, chat(each))) for each in PROMPTS[:4]]
    assert front.metric("tanghulu_migrations_total") == 0
    front.list(servers)
    front.until_workers(2)


def test_a_stopped_server_loses_its_requests_and_comes_back(front: Front, servers: list[Server]) -> None:
    direct = [said(asked(servers[0].http, chat(each))) for each in PROMPTS]
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(streamed, front.http, chat(each), begun.release) for each in PROMPTS]
        for _ in range(4 * len(PROMPTS)):
            begun.acquire()
        servers[0].signal(signal.SIGSTOP)
        try:
            answers = [each.result() for each in running]
        finally:
            servers[0].signal(signal.SIGCONT)
    assert answers == direct
    front.until_workers(2)


def test_a_killed_server_changes_nothing_that_clients_see(front: Front, servers: list[Server]) -> None:
    prompts = [f"{each} Be number {number}." for number in range(5) for each in PROMPTS[:4]]
    direct = [said(asked(servers[1].http, chat(each))) for each in prompts]
    begun = threading.Semaphore(0)
    before = front.metric("tanghulu_migrations_total", kind="ongoing_request", outcome="resumed")
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(streamed, front.http, chat(each), begun.release) for each in prompts]
        for _ in range(6 * len(prompts)):
            begun.acquire()
        servers[0].signal(signal.SIGKILL)
        answers = [each.result() for each in running]
    same = [ours == theirs for ours, theirs in zip(answers, direct, strict=True)]
    assert sum(same) == len(prompts) == 20
    assert front.metric("tanghulu_migrations_total", kind="ongoing_request", outcome="resumed") > before
    assert front.metric("tanghulu_migrations_total", exactness="same_model") > 0
