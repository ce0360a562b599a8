"""Acceptance with two real ``vllm serve``: what they answer directly is what the conductor in front of them answers.

The tests run in this order: the last ones stop servers. Both serve SmolLM2 in float32: greedy answers are equal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engines.vllm.conftest import CACHE, MODEL
from tests.free_ports import free_port
from tests.store.cluster import Process

VLLM = CACHE / "vllm" / "bin" / "vllm"
pytestmark = [
    pytest.mark.engine_vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM's environment is not built: tools/engine_venv.py vllm"),
]
START_S, ANSWER_S = 900.0, 600.0
NUM_TOKENS = 60


class Server:
    """One ``vllm serve`` with KV events, ready after ``wait``."""

    def __init__(self, folder: Path) -> None:
        self.port, events, replay = (free_port() for _ in range(3))
        source = {"enable_kv_cache_events": True, "publisher": "zmq"}
        source |= {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
        flags = [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--served-model-name",
            "smollm2",
            "--dtype",
            "float32",
        ]
        flags += ["--enforce-eager", "--max-model-len", "4096", "--block-size", "64", "--enable-prompt-tokens-details"]
        flags += ["--kv-events-config", json.dumps(source)]
        self.log = folder / f"vllm-{self.port}.log"
        env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen([VLLM, "serve", MODEL, *flags], stdout=log, stderr=log, env=env)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=ANSWER_S, trust_env=False)

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait(self) -> None:
        def is_up() -> bool:
            assert self.popen.poll() is None, self.log.read_text()[-5000:]
            try:
                return self.http.get("/health").status_code == 200
            except httpx.HTTPError:
                return False

        eventually(is_up, START_S)

    def signal(self, number: int) -> None:
        for each in [*psutil.Process(self.popen.pid).children(recursive=True), psutil.Process(self.popen.pid)]:
            each.send_signal(number)

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.signal(signal.SIGKILL)
        self.popen.wait()
        self.http.close()


class Front:
    """The conductor in front of the servers named in its file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "engines.json"
        self.list([])
        self.log_requests: list[str] = []
        flags = ["--port", "0", "--engines", str(self.file), "--worker-timeout-s", "5", "--notice-s", "0"]
        self.process = Process(
            "tanghulu.conductor.main", *flags, "--first-token-timeout-s", "0", "--token-timeout-s", "0"
        )
        url = f"http://{self.process.address}"
        self.http = httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False, limits=httpx.Limits())

    def list(self, servers: list[Server]) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps([f"vllm={each.http.base_url}".rstrip("/") for each in servers]))
        fresh.replace(self.file)

    def metric(self, name: str, **labels: str) -> float:
        text = self.http.get("/metrics").text
        lines = [each for each in text.splitlines() if each.startswith((f"{name} ", name + "{"))]
        wanted = [each for each in lines if all(f'{key}="{value}"' in each for key, value in labels.items())]
        return sum(float(each.rpartition(" ")[2]) for each in wanted)

    def until_workers(self, num: int) -> None:
        eventually(lambda: self.metric("tanghulu_conductor_workers") == num, 60.0)


def eventually(condition, within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, "it did not come"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("vllm")
    made = [Server(folder), Server(folder)]
    try:
        for each in made:
            each.wait()
        yield made
    finally:
        for each in made:
            each.stop()
            print(each.log.read_text()[-3000:])


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, servers: list[Server]) -> Iterator[Front]:
    made = Front(tmp_path_factory.mktemp("front"))
    try:
        made.list(servers)
        made.until_workers(2)
        yield made
    finally:
        made.http.close()
        print(made.process.log_text()[-8000:])
        made.process.kill()


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

    def known() -> dict:
        return front.http.post("/route", json=second).json()["hit_blocks"]["workers"]

    eventually(lambda: servers[where].id in known(), 30.0)
    blocks = known()[servers[where].id]
    usage = asked(front.http, second)["usage"]
    num_first = answer["usage"]["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == blocks * 64 >= num_first - num_first % 64
    assert list(known()) == [servers[where].id]


def prefixes(server: Server) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(each.rpartition(" ")[2]) for each in lines if each.startswith("vllm:prefix_cache_queries_total"))


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
