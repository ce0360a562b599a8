"""SGLang's /generate as its clients use it: lists, log probabilities, streams, and what the server tells of itself."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from tanghulu.conductor.http.sglang_api import GROWTH_SHARE, _Answer
from tanghulu.conductor.inference.generation import TextDelta
from tanghulu.session.outputs import FinishReason
from tests.conductor.fake_worker import CONTEXT, EOS, MODEL, TOKENIZER

TEXT = "Hello, wörld! "
IDS = TOKENIZER.encode(TEXT).ids


async def _post(cluster, **body):
    response = await cluster.http.post("/generate", json=body)
    return response.status_code, response.json()


async def _events(cluster, **body) -> list[dict]:
    response = await cluster.http.post("/generate", json={"stream": True, **body})
    assert response.status_code == 200, response.text
    pieces = response.text.split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    return [json.loads(piece[6:]) for piece in pieces[:-2]]


class TestLists:
    async def test_parameters_and_ids_of_each_prompt(self, cluster):
        worker = await cluster.add()
        params = [{"max_new_tokens": 2, "temperature": 0.5}, {"max_new_tokens": 5, "stop": "o"}]
        status, answers = await _post(cluster, text=["a", "b"], sampling_params=params, rid=["one", "two"])
        assert status == 200
        assert [a["meta_info"]["id"] for a in answers] == ["one", "two"]
        assert [a["text"] for a in answers] == ["He", "Hell"]
        assert [s.sampling.temperature for s in worker.submits] == [0.5, 1.0]
        status, answers = await _post(cluster, text=["a", "b"], sampling_params={"n": 2}, rid=["one", "two"])
        assert [a["meta_info"]["id"] for a in answers] == ["one-0", "one-1", "two-0", "two-1"]

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"text": ["a", "b"], "rid": ["x"]}, None),
            ({"text": ["a", "b"], "rid": ["x", "x"]}, None),
            ({"text": "a", "rid": ["x"]}, None),
            ({"text": ["a", "b"], "sampling_params": [{}]}, None),
            ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "n"),
            ({"text": "a", "sampling_params": {"stop": ["x"] * 65}}, "sampling_params"),
        ],
    )
    async def test_lists_that_do_not_fit(self, cluster, body, param):
        await cluster.add()
        status, answer = await _post(cluster, **body)
        assert (status, answer["error"]["param"]) == (400, param)

    async def test_one_of_a_batch_is_aborted_by_its_id(self, cluster):
        worker = await cluster.add()
        worker.hold()
        body = {"text": ["a", "b"], "rid": ["one", "two"], "sampling_params": {"max_new_tokens": 3}}
        asked = asyncio.create_task(cluster.http.post("/generate", json=body))
        await worker.until(lambda: worker.num_running == 2)
        assert (await _post(cluster, text="c", rid="two"))[0] == 400
        answer = await cluster.http.post("/abort_request", json={"rid": "one"})
        assert answer.json() == {"aborted": 1}
        await worker.until(lambda: worker.num_running == 1)
        worker.release()
        answers = (await asked).json()
        assert [a["meta_info"]["finish_reason"]["type"] for a in answers] == ["abort", "length"]
        assert (await _post(cluster, text="c", rid="two"))[0] == 200


class TestLogprobs:
    async def test_of_the_generated_tokens(self, cluster):
        await cluster.add()
        ask = {"text": "x", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
        _, answer = await _post(cluster, **ask)
        meta = answer["meta_info"]
        assert meta["output_token_logprobs"] == [[-0.5, IDS[0], None], [-0.5, IDS[1], None]]
        assert meta["input_token_logprobs"] == []
        assert "output_top_logprobs" not in meta
        more = {"top_logprobs_num": 2, "return_text_in_logprobs": True, "logprob_start_len": 1}
        _, answer = await _post(cluster, **ask, **more)
        meta = answer["meta_info"]
        assert meta["output_token_logprobs"][0] == [-0.5, IDS[0], "H"]
        assert meta["output_top_logprobs"] == [[[-1.0, 0, "!"], [-2.0, 1, '"']]] * 2
        _, answer = await _post(cluster, text="x")
        assert "output_token_logprobs" not in answer["meta_info"]

    async def test_for_some_of_a_batch_and_in_a_stream(self, cluster):
        await cluster.add()
        ask = {"text": ["x", "y"], "sampling_params": {"max_new_tokens": 2}, "return_logprob": [False, True]}
        _, answers = await _post(cluster, **ask)
        assert [len(a["meta_info"].get("output_token_logprobs", ())) for a in answers] == [0, 2]
        events = await _events(cluster, **ask)
        last = next(e for e in reversed(events) if e["index"] == 1)
        assert last["meta_info"]["output_token_logprobs"] == answers[1]["meta_info"]["output_token_logprobs"]

    @pytest.mark.parametrize("wrong", [{"logprob_start_len": -2}, {"top_logprobs_num": 21}, {"top_logprobs_num": -1}])
    async def test_numbers_out_of_their_range_are_refused_where_they_count(self, cluster, wrong):
        await cluster.add()
        status, answer = await _post(cluster, text="x", return_logprob=True, **wrong)
        assert (status, answer["error"]["param"]) == (400, next(iter(wrong)))
        assert (await _post(cluster, text="x", return_logprob=False, **wrong))[0] == 200


class TestStreams:
    async def test_as_deltas(self, cluster):
        await cluster.add()
        ask = {"text": "x", "sampling_params": {"max_new_tokens": 6}, "return_logprob": True}
        events = await _events(cluster, **ask, stream_output=True)
        assert "".join(e["text"] for e in events) == TOKENIZER.decode(IDS[:6])
        assert list(itertools.chain(*(e["output_ids"] for e in events))) == IDS[:6]
        assert sum(len(e["meta_info"]["output_token_logprobs"]) for e in events) == 6
        assert [e["meta_info"]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 1)

    async def test_cumulative_ones_end_with_everything(self, cluster):
        await cluster.add()
        events = await _events(cluster, text="x", sampling_params={"max_new_tokens": 150, "ignore_eos": True})
        _, whole = await _post(cluster, text="x", sampling_params={"max_new_tokens": 150, "ignore_eos": True})
        assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
        texts = [e["text"] for e in events]
        assert all(b.startswith(a) for a, b in itertools.pairwise(texts))

    def test_their_bytes_grow_with_the_text_and_not_with_its_square(self):
        told = {}
        for num_tokens in (4_000, 16_000):
            answer, total = _Answer(), 0
            for number in range(num_tokens):
                finish = FinishReason.LENGTH if number == num_tokens - 1 else None
                answer.add(TextDelta(["word"], [number % 10], [], finish), [])
                if answer.is_due:
                    answer.shown_bytes = answer.num_bytes
                    total += answer.num_bytes
            told[num_tokens] = total
        assert told[16_000] < 16_000 * 8 * (GROWTH_SHARE + 8)
        assert told[16_000] < 6 * told[4_000]

    async def test_text_of_all_kinds_is_json(self, cluster):
        worker = await cluster.add()
        worker.script = TOKENIZER.encode('"quo\\te"\n\u2028é%b{}').ids
        events = await _events(cluster, text="x")
        assert events[-1]["text"] == '"quo\\te"\n\u2028é%b{}'
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


class TestWhatTheServerTells:
    async def test_of_the_model(self, cluster):
        await cluster.add()
        told = (await cluster.http.get("/get_model_info")).json()
        assert told == (await cluster.http.get("/model_info")).json()
        assert (told["model_path"], told["is_generation"], told["max_model_len"]) == (MODEL, True, CONTEXT)
        assert told["preferred_sampling_params"]["temperature"] == 1.0

    async def test_of_itself(self, cluster):
        told = (await cluster.http.get("/server_info")).json()
        assert (told["models"], told["missing"]) == ([], ["no worker is registered"])
        worker = await cluster.add()
        told = (await cluster.http.get("/get_server_info")).json()
        assert [w["id"] for w in told["workers"]] == [worker.id]
        assert (told["model_path"], told["missing"]) == (MODEL, [])

    async def test_models_go_with_their_workers(self, cluster):
        worker = await cluster.add()
        assert [m["id"] for m in (await cluster.http.get("/v1/models")).json()["data"]] == [MODEL]
        await worker.unregister()
        await cluster.until(lambda: not cluster.registry.workers)
        assert (await cluster.http.get("/v1/models")).json()["data"] == []
