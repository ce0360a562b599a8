"""vLLM behind a real conductor: the API, prefixes, hang-ups, restarts, and a worker that is killed in mid-answer.

One cluster for the whole file, and the tests go on from one another: each vLLM takes half a minute of CPU to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal

import numpy as np
import pytest

from tanghulu.hashing import VLLM_SHA256_CBOR, TokenSequence, root_hash
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.rpc.methods import PROTOCOL_VERSION
from tanghulu.session.messages import (
    DESCRIBE,
    SESSION,
    DescribeRequest,
    FromWorker,
    SessionHello,
    SessionWelcome,
    ToWorker,
)
from tanghulu.session.model_card import ModelCard
from tanghulu.types import Address, BlockHash, Fingerprint
from tests.engines.vllm_worker.conftest import ANSWER_S, BLOCK_TOKENS, Served, VllmWorker, cached_tokens, eventually

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(3000)]
#: Tokens of SmolLM2 that stand for text, not for structure.
ORDINARY = (1000, 40_000)
REQUESTS_RUNNING = "tanghulu_worker_requests_running"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(*ORDINARY, num_tokens).tolist()
    return tokens


def names_of(tokens: list[int]) -> list[BlockHash]:
    root = root_hash(Fingerprint(b""), b"", VLLM_SHA256_CBOR)
    return TokenSequence(root, BLOCK_TOKENS, tokens, VLLM_SHA256_CBOR).block_hashes


async def describe(worker: VllmWorker) -> tuple[ModelCard, set[bytes]]:
    """The worker's card, and the names with which it welcomes a conductor."""
    connection = await AsyncFastConnection.connect(Address.parse(worker.address))
    card = await connection.call(DESCRIBE.number, DescribeRequest(), DESCRIBE.reply, deadline_s=ANSWER_S)
    hello = ToWorker(SessionHello("test", PROTOCOL_VERSION))
    first = await connection.call(SESSION.number, hello, FromWorker, deadline_s=ANSWER_S)
    await connection.close()
    assert isinstance(first.message.message, SessionWelcome)
    return card.message, set(first.message.message.cached_blocks)


def test_the_api(served: Served) -> None:
    two = served.chat("Say hi.", n=2, max_tokens=4, temperature=0.7, seed=1)
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert two["usage"]["completion_tokens"] == 8
    drawn = served.complete(prompt_of(700, 7), 2, temperature=1.0, seed=3)
    assert drawn["usage"]["completion_tokens"] == 2, "a seed, and a prompt of two steps"

    said = served.chat("Say hi.", max_tokens=3, logprobs=True, top_logprobs=2)["choices"][0]
    content = said["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == said["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"], "greedy: the best one is taken"

    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    person = json.loads(
        served.chat("A person.", max_tokens=80, response_format=form)["choices"][0]["message"]["content"]
    )
    assert person.keys() == {"name", "age"}

    counted = served.complete("1, 2, 3, 4, 5, 6, 7,", 30, stop=["11"])["choices"][0]
    assert (counted["text"], counted["finish_reason"]) == (" 8, 9, 10, ", "stop")
    body = {"model": "smollm2", "prompt": "1, 2, 3, 4, 5, 6, 7,", "max_tokens": 6, "temperature": 0, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    streamed = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    assert streamed == served.complete("1, 2, 3, 4, 5, 6, 7,", 6)["choices"][0]["text"]

    refused = served.http.post("/v1/completions", json=body | {"stream": False, "prompt": prompt_of(5000, 0)})
    assert refused.status_code == 400, "longer than the context"


def test_a_second_question_finds_the_document_and_the_store_has_it(served: Served) -> None:
    document = prompt_of(1536, 1)
    assert cached_tokens(served.complete([*document, 1001, 1002], 4)) == 0
    assert cached_tokens(served.complete([*document, 1003, 1004], 4)) >= 1472
    eventually(lambda: served.metric("tanghulu_conductor_prefix_index_blocks") >= 2 * 24)
    text = served.http.get("/metrics").text
    (line,) = [each for each in text.splitlines() if 'prefix_index_blocks{holders="store"}' in each]
    assert float(line.rpartition(" ")[2]) >= 24


def test_who_hangs_up_is_not_computed_for(served: Served) -> None:
    body = {"model": "smollm2", "prompt": prompt_of(100, 2), "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: what reads the answer hangs up when it is forgotten
        next(lines)
        eventually(lambda: served.workers[0].metric(REQUESTS_RUNNING) == 1)
    eventually(lambda: served.workers[0].metric(REQUESTS_RUNNING) == 0)


def test_a_welcome_holds_what_is_cached(served: Served) -> None:
    (worker,) = served.workers
    assert served.http.post("/flush_cache").status_code == 200
    prompts = [prompt_of(length, 3 + length) for length in (64, 200, 321)]
    expected = set[bytes]()
    for prompt in prompts:
        answer = served.http.post(
            "/generate",
            json={"input_ids": prompt, "sampling_params": {"max_new_tokens": 70, "ignore_eos": True, "temperature": 0}},
        )
        assert answer.status_code == 200, answer.text
        # The last token was never computed, so that a block that it fills is not cached.
        expected |= set(names_of((prompt + answer.json()["output_ids"])[:-1]))
    # Not asyncio.run, which would drop a loop that a client's library has left.
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        card, welcomed = loop.run_until_complete(describe(worker))
    eventually(lambda: served.metric("tanghulu_conductor_prefix_index_blocks") > 0)
    assert welcomed == expected
    assert (card.block_hash, card.block_tokens, card.model) == (VLLM_SHA256_CBOR, BLOCK_TOKENS, "smollm2")
    logged = worker.log_text().partition("blocks are kept at ")[2].partition("kv/")[2][:16]
    assert card.fingerprint[:8].hex() == logged, "the card's name of the bytes is that of the store's keys"

    served.http.close()
    served.conductor.kill()
    served.start_conductor()
    served.until_connected()
    assert cached_tokens(served.complete([*prompts[2], 1001], 2)) >= 320


def test_a_killed_worker_s_answer_goes_on_with_the_same_text(served: Served) -> None:
    prompt = prompt_of(1550, 9)
    whole = served.complete(prompt, 80, ignore_eos=True)["choices"][0]["text"]
    served.add()
    for seed in range(20, 24):  # each prompt twice: the second time where its prefix is
        served.complete(prompt_of(300, seed), 2)
        assert cached_tokens(served.complete(prompt_of(300, seed), 2)) >= 256
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": 80,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    pieces: list[str] = []
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
            if len(pieces) == 1:  # the first worker has the prompt, but the other may be faster with the store's blocks
                (computes,) = [each for each in served.workers if each.metric(REQUESTS_RUNNING) == 1]
            if len(pieces) == 20:
                computes.kill()
    assert "".join(pieces) == whole
    assert served.metric("tanghulu_migrations_total") >= 1
    assert served.survivor().metric(REQUESTS_RUNNING) == 0


def test_a_worker_whose_vllm_dies_deregisters_and_ends(served: Served) -> None:
    worker = served.survivor()
    for child in worker.children:
        child.send_signal(signal.SIGKILL)
    assert worker.popen.wait(120) == 1
    assert "worker.engine_failed" in worker.log_text()
    eventually(lambda: served.metric("tanghulu_conductor_workers") == 0)
