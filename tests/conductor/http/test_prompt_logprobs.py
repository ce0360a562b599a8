"""Log probabilities of prompts in all three APIs, over hand-overs and lost workers."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec import structs

from tanghulu.types import Role
from tests.conductor.fake_worker import CONTEXT, TOKENIZER

PROMPT = "the café"
IDS = TOKENIZER.encode(PROMPT).ids
OUT = TOKENIZER.encode("Hello, wörld! ").ids
EXPECTED = [None, *(-p / 8 for p in range(1, len(IDS)))]


async def _completion(cluster, **body) -> dict:
    response = await cluster.http.post("/v1/completions", json={"prompt": PROMPT, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def _generate(cluster, **body) -> dict:
    response = await cluster.http.post("/generate", json={"text": PROMPT, "return_logprob": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


class TestCompletions:
    async def test_of_a_prompt_that_is_only_scored(self, cluster):
        """What lm-eval-harness asks for."""
        worker = await cluster.add()
        answer = await _completion(cluster, echo=True, logprobs=2, max_tokens=0)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        assert choice["logprobs"]["token_logprobs"] == EXPECTED
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert len(tokens) == len(offsets) == len(IDS)
        assert tokens[0] == "the"
        assert choice["logprobs"]["top_logprobs"][:2] == [None, {"!": 0.0, '"': -0.0625, tokens[1]: -0.125}]
        assert [PROMPT[at:][: len(token)] for token, at in zip(tokens, offsets, strict=True) if token.isascii()] == [
            token for token in tokens if token.isascii()
        ]
        assert answer["usage"]["completion_tokens"] == 0
        assert worker.submits[0].stop.max_new_tokens == 1

    async def test_in_front_of_those_of_the_text(self, cluster):
        await cluster.add()
        answer = await _completion(cluster, echo=True, logprobs=0, max_tokens=3)
        shown = answer["choices"][0]["logprobs"]
        assert answer["choices"][0]["text"] == PROMPT + "Hell"
        assert shown["token_logprobs"] == [*EXPECTED, -0.5, -0.5, -0.5]
        assert shown["text_offset"][len(IDS) :] == [len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 2]
        assert shown["tokens"][len(IDS) :] == ["H", "e", "ll"]

    async def test_in_a_stream_they_come_with_the_prompt(self, cluster):
        await cluster.add()
        body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 2, "stream": True}
        response = await cluster.http.post("/v1/completions", json=body)
        chunks = [json.loads(c[6:])["choices"][0] for c in response.text.split("\n\n")[:-2]]
        assert (chunks[0]["text"], chunks[0]["logprobs"]["token_logprobs"]) == (PROMPT, EXPECTED)
        later = [value for c in chunks[1:] if c["logprobs"] for value in c["logprobs"]["token_logprobs"]]
        assert later == [-0.5, -0.5]

    async def test_in_a_stream_they_come_though_the_prompt_has_no_text(self, cluster):
        await cluster.add()
        body = {"prompt": "<|im_start|><|im_end|>", "echo": True, "logprobs": 1, "max_tokens": 0, "stream": True}
        response = await cluster.http.post("/v1/completions", json=body)
        first = json.loads(response.text.split("\n\n")[0][6:])["choices"][0]
        assert (first["text"], len(first["logprobs"]["token_logprobs"])) == ("", 2)

    async def test_of_lists_and_of_single_tokens(self, cluster):
        await cluster.add()
        answer = await _completion(cluster, prompt=[IDS, [5]], echo=True, logprobs=1, max_tokens=0)
        assert [c["logprobs"]["token_logprobs"] for c in answer["choices"]] == [EXPECTED, [None]]

    async def test_under_vllms_name(self, cluster):
        await cluster.add()
        answer = await _completion(cluster, prompt_logprobs=1, max_tokens=1)
        shown = answer["choices"][0]["prompt_logprobs"]
        assert shown[0] is None
        assert shown[1] == {
            "0": {"logprob": 0.0, "rank": 1, "decoded_token": "!"},
            str(IDS[1]): {"logprob": -0.125, "rank": 3, "decoded_token": TOKENIZER.decode([IDS[1]])},
        }
        assert answer["choices"][0]["logprobs"] is None
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "prompt_logprobs": 0}
        answer = (await cluster.http.post("/v1/chat/completions", json=body)).json()
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        response = await cluster.http.post("/v1/chat/completions", json=body | {"stream": True})
        assert (response.status_code, "not available in a stream" in response.text) == (400, True)

    async def test_without_echo_nothing_of_the_prompt_is_computed(self, cluster):
        worker = await cluster.add()
        await _completion(cluster, logprobs=1, max_tokens=0)
        assert worker.submits[0].scoring is None


class TestGenerate:
    @pytest.mark.parametrize("start", [0, 2, len(IDS) - 1])
    async def test_from_a_token_on(self, cluster, start):
        await cluster.add()
        meta = (await _generate(cluster, logprob_start_len=start, sampling_params={"max_new_tokens": 1}))["meta_info"]
        shown = meta["input_token_logprobs"]
        assert [entry[1] for entry in shown] == IDS[start:]
        assert [entry[0] for entry in shown] == [None, *EXPECTED[start + 1 :]]
        assert meta["output_token_logprobs"] == [[-0.5, OUT[0], None]]
        assert "input_top_logprobs" not in meta

    async def test_of_the_likeliest_and_of_tokens_by_id(self, cluster):
        await cluster.add()
        body = {"logprob_start_len": 4, "top_logprobs_num": 1, "token_ids_logprob": [8, 9]}
        body |= {"return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 2}}
        meta = (await _generate(cluster, **body))["meta_info"]
        assert meta["input_top_logprobs"] == [None, *([[[0.0, 0, "!"]]] * (len(IDS) - 5))]
        named = [[-7.0, 8, TOKENIZER.decode([8])], [-7.0, 9, TOKENIZER.decode([9])]]
        assert meta["input_token_ids_logprobs"] == [None, *([named] * (len(IDS) - 5))]
        assert meta["output_token_ids_logprobs"] == [named] * 2
        assert meta["output_top_logprobs"] == [[[-1.0, 0, "!"]]] * 2

    async def test_of_some_of_a_batch(self, cluster):
        await cluster.add()
        body = {"text": ["the", "the café"], "logprob_start_len": [-1, 0], "token_ids_logprob": [[1], [2, 3]]}
        answers = await _generate(cluster, **body, sampling_params={"max_new_tokens": 0})
        assert [len(a["meta_info"]["input_token_logprobs"]) for a in answers] == [0, len(IDS)]
        assert [len(a["meta_info"]["input_token_ids_logprobs"]) for a in answers] == [0, len(IDS)]
        assert [a["text"] for a in answers] == ["", ""]

    @pytest.mark.parametrize("deltas", [False, True])
    async def test_in_a_stream_they_are_in_the_first_event(self, cluster, deltas):
        await cluster.add()
        body = {"text": PROMPT, "return_logprob": True, "logprob_start_len": 0, "stream": True, "stream_output": deltas}
        response = await cluster.http.post("/generate", json=body)
        events = [json.loads(e[6:])["meta_info"] for e in response.text.split("\n\n")[:-2]]
        counts = [len(e["input_token_logprobs"]) for e in events]
        assert counts == [len(IDS), *([0] * (len(counts) - 2)), 0 if deltas else len(IDS)]

    @pytest.mark.parametrize(
        "wrong", [{"token_ids_logprob": [10**6]}, {"token_ids_logprob": [[1]]}, {"token_ids_logprob": [1] * 129}]
    )
    async def test_tokens_that_are_refused(self, cluster, wrong):
        await cluster.add()
        response = await cluster.http.post("/generate", json={"text": "x", "return_logprob": True, **wrong})
        assert (response.status_code, "token_ids_logprob" in response.text) == (400, True)


class TestWorkers:
    async def test_the_prefill_worker_gives_them_and_the_decode_worker_owes_none(self, cluster):
        prefill, decode = await cluster.add(Role.PREFILL), await cluster.add(Role.DECODE)
        answer = await _completion(cluster, echo=True, logprobs=1, max_tokens=4)
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [*EXPECTED, *([-0.5] * 4)]
        assert prefill.submits[0].scoring.start == 1
        assert decode.submits[0].scoring is None

    async def test_the_rest_is_asked_of_another_worker(self, cluster):
        """The first worker dies with the log probabilities of two tokens told."""
        first = await cluster.add()
        first.hold()
        asked = asyncio.create_task(_completion(cluster, echo=True, logprobs=1, max_tokens=2))
        await first.until(lambda: first.num_running == 1)
        running = next(iter(first._running.values()))
        running.submit = structs.replace(running.submit, num_prompt_tokens=3)  # it comes as far as position 3
        first._score(running)
        flights = [entry.flight for entry in cluster.dispatcher._entries.values()]
        await cluster.until(lambda: flights[0].num_scored == 3)
        second = await cluster.add()
        first.die()
        answer = await asked
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [*EXPECTED, -0.5, -0.5]
        assert second.submits[0].scoring.start == 3

    async def test_a_worker_that_does_not_know_of_them_is_told_as_an_error(self, cluster):
        worker = await cluster.add()
        worker.scores = False
        body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 2}
        response = await cluster.http.post("/v1/completions", json=body)
        assert response.status_code == 503
        assert "log probabilities" in response.json()["error"]["message"]
        assert (await cluster.http.post("/v1/completions", json=body | {"echo": False})).status_code == 200

    async def test_a_prompt_of_the_whole_context_is_refused(self, cluster):
        await cluster.add()
        body = {"prompt": [1] * CONTEXT, "echo": True, "logprobs": 1, "max_tokens": 0}
        response = await cluster.http.post("/v1/completions", json=body)
        assert response.json()["error"]["code"] == "context_length_exceeded"
