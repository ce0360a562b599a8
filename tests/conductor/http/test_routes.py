"""The routes one by one: shapes, errors, bounds."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from tanghulu.hashing import joined
from tanghulu.types import Role
from tests.conductor.cluster import running_cluster
from tests.conductor.fake_worker import CONTEXT, EOS, TOKENIZER

TEXT = "Hello, wörld! "
IDS = TOKENIZER.encode(TEXT).ids
ASK = {"model": "tiny", "prompt": "x", "max_tokens": 4}


BAD_COMPLETIONS = [
    ({"model": "nosuch"}, 404, "model_not_found", None),
    ({"prompt": 7}, 400, "invalid_request", "prompt"),
    ({"prompt": []}, 400, "invalid_request", "prompt"),
    ({"prompt": [100_000]}, 400, "invalid_request", "prompt"),
    ({"prompt": [1] * CONTEXT}, 400, "context_length_exceeded", "prompt"),
    ({"prompt": ""}, 400, "invalid_request", "prompt"),
    ({"max_tokens": "4"}, 400, "invalid_request", "max_tokens"),
    ({"max_tokens": -1}, 400, "invalid_request", "max_tokens"),
    ({"temperature": -1}, 400, "invalid_request", "temperature"),
    ({"temperature": True}, 400, "invalid_request", "temperature"),
    ({"top_p": 0}, 400, "invalid_request", "top_p"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, "invalid_request", "stop"),
    ({"stop": [""]}, 400, "invalid_request", "stop"),
    ({"logit_bias": {"x": 1}}, 400, "invalid_request", "logit_bias"),
    ({"logit_bias": {"1": 101}}, 400, "invalid_request", "logit_bias"),
    ({"n": 17}, 400, "invalid_request", "n"),
    ({"n": 16, "prompt": ["x"] * 9}, 400, "invalid_request", "n"),
    ({"best_of": 3}, 400, "invalid_request", None),
    ({"echo": True, "logprobs": 21}, 400, "invalid_request", "logprobs"),
    ({"response_format": {"type": "xml"}}, 400, "invalid_request", "response_format"),
    ({"response_format": {"type": "json_schema"}}, 400, "invalid_request", "response_format"),
    ({"response_format": {"type": "json_object"}, "regex": "a+"}, 400, "invalid_request", "regex"),
    ({"json_schema": "{}", "regex": "a+"}, 400, "invalid_request", "regex"),
]


async def _post(cluster, path: str, **body) -> tuple[int, dict]:
    response = await cluster.http.post(path, json=body)
    return response.status_code, response.json()


class TestErrors:
    async def test_bad_completions(self, cluster):
        await cluster.add()
        for change, status, code, param in BAD_COMPLETIONS:
            got, body = await _post(cluster, "/v1/completions", **{**ASK, **change})
            assert got == status, (change, body)
            assert set(body) == {"error"}
            assert set(body["error"]) == {"message", "type", "code", "param"}
            assert (body["error"]["code"], body["error"]["param"]) == (code, param), change
            assert body["error"]["type"] == "invalid_request_error"

    async def test_what_is_no_request_at_all(self, cluster):
        await cluster.add()
        malformed = await cluster.http.post("/v1/chat/completions", content=b"{oops")
        assert malformed.status_code == 400
        assert "JSON" in malformed.json()["error"]["message"]
        assert (await cluster.http.post("/v1/completions", content=b"[]")).status_code == 400
        assert (await cluster.http.post("/v1/chat/completions", content=b"\xff")).status_code == 400
        for path, method, status, code in [
            ("/nosuch", "GET", 404, "not_found"),
            ("/v1/completions", "GET", 405, "method_not_allowed"),
            ("/v1/models/nosuch", "GET", 404, "model_not_found"),
        ]:
            response = await cluster.http.request(method, path)
            assert response.status_code == status
            assert response.json()["error"]["code"] == code

    async def test_bodies_are_bounded(self, tmp_path):
        async with running_cluster(tmp_path, max_body_size=1000) as cluster:
            await cluster.add()
            announced = await cluster.http.post("/v1/completions", json={**ASK, "prompt": "x" * 2000})
            assert announced.status_code == 413
            assert announced.json()["error"]["code"] == "body_too_large"

            async def chunks():
                for _ in range(20):
                    yield b"x" * 100

            assert (await cluster.http.post("/v1/completions", content=chunks())).status_code == 413
            assert (await cluster.http.post("/v1/completions", json=ASK)).status_code == 200

    async def test_unknown_and_null_fields_are_fine(self, cluster):
        await cluster.add()
        more = {"user": "me", "store": False, "stop": None, "n": None, "stream": None, "logprobs": None, "seed": -5}
        status, body = await _post(cluster, "/v1/completions", **ASK, **more)
        assert status == 200, body
        message = {"role": "user", "content": "hi", "name": "me"}
        status, body = await _post(cluster, "/v1/chat/completions", messages=[message], max_tokens=2, stop=[])
        assert status == 200, body

    async def test_a_picture_is_refused(self, cluster):
        await cluster.add()
        part = {"type": "image_url", "image_url": {"url": "x"}}
        status, body = await _post(cluster, "/v1/chat/completions", messages=[{"role": "user", "content": [part]}])
        assert (status, body["error"]["param"]) == (400, "messages")
        assert "parts of type 'image_url' are not supported" in body["error"]["message"]


class TestCompletions:
    async def test_defaults_and_usage(self, cluster):
        worker = await cluster.add()
        status, body = await _post(cluster, "/v1/completions", model="tiny", prompt="abc", ignore_eos=True)
        assert status == 200
        (choice,) = body["choices"]
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
        usage = {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}
        assert body["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
        assert worker.submits[0].stop.max_new_tokens == 16
        assert worker.submits[0].sampling.temperature == 1.0
        await _post(cluster, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        submit = worker.submits[1]
        assert submit.stop.max_new_tokens == CONTEXT - submit.num_prompt_tokens

    async def test_sampling_reaches_the_worker(self, cluster):
        worker = await cluster.add()
        fields = {"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "seed": 11, "frequency_penalty": 0.5}
        more = {"presence_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {"3": -100}, "min_tokens": 2}
        await _post(
            cluster, "/v1/completions", **ASK, **fields, **more, stop_token_ids=[9], cache_salt="me", priority=-2
        )
        submit = worker.submits[0]
        sampling, stop = submit.sampling, submit.stop
        assert {name: getattr(sampling, name) for name in fields} == fields
        assert (sampling.presence_penalty, sampling.repetition_penalty) == (-0.5, 1.5)
        assert dict(sampling.logit_bias) == {3: -100}
        assert (list(stop.stop_token_ids), stop.min_tokens, stop.ignore_eos) == ([9], 2, False)
        assert (submit.salt, submit.priority) == (joined(b"me", b""), -2)
        await _post(cluster, "/v1/completions", **ASK, top_k=-1)
        assert worker.submits[1].sampling.top_k == 0
        assert worker.submits[1].sampling.seed is not None  # a random one, the same wherever the request goes on

    @pytest.mark.parametrize("prompt", ["ab", ["ab", "c"], [65, 66], [[65, 66], [67]]])
    async def test_kinds_of_prompt(self, cluster, prompt):
        await cluster.add()
        status, body = await _post(cluster, "/v1/completions", **{**ASK, "prompt": prompt})
        assert status == 200
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        assert [c["index"] for c in body["choices"]] == ([0, 1] if several else [0])
        assert {c["text"] for c in body["choices"]} == {TOKENIZER.decode(IDS[:4])}
        assert body["usage"]["prompt_tokens"] == (3 if several else 2)

    async def test_n_choices_count_the_prompt_once(self, cluster):
        worker = await cluster.add()
        status, body = await _post(cluster, "/v1/completions", **{**ASK, "prompt": "abc"}, n=3, seed=5)
        assert (status, len(body["choices"])) == (200, 3)
        assert body["usage"]["prompt_tokens"] == 3
        assert body["usage"]["completion_tokens"] == 12
        assert sorted(s.sampling.seed for s in worker.submits) == [5, 6, 7]
        response = await cluster.http.post("/v1/completions", json={**ASK, "n": 2, "stream": True})
        chunks = [json.loads(c[6:]) for c in response.text.split("\n\n")[:-2]]
        for index in range(2):
            text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index)
            assert text == TOKENIZER.decode(IDS[:4])

    async def test_echo_and_logprobs(self, cluster):
        await cluster.add()
        _, body = await _post(cluster, "/v1/completions", **{**ASK, "prompt": "abc"}, echo=True)
        assert body["choices"][0]["text"] == "abc" + TOKENIZER.decode(IDS[:4])
        _, body = await _post(cluster, "/v1/completions", **ASK, logprobs=2)
        logprobs = body["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["H", "e", "ll", "o"]
        assert logprobs["token_logprobs"] == [-0.5] * 4
        assert logprobs["text_offset"] == [0, 1, 2, 4]
        assert [list(top) for top in logprobs["top_logprobs"]] == [["!", '"', token] for token in logprobs["tokens"]]
        messages = [{"role": "user", "content": "x"}]
        chat = {"messages": messages, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
        _, body = await _post(cluster, "/v1/chat/completions", **chat)
        content = body["choices"][0]["logprobs"]["content"]
        assert [c["token"] for c in content] == ["H", "e"]
        assert content[0]["bytes"] == [72]
        assert len(content[0]["top_logprobs"]) == 1
        response = await cluster.http.post("/v1/chat/completions", json={**chat, "stream": True})
        chunks = [json.loads(c[6:]) for c in response.text.split("\n\n")[:-2]]
        told = [t["token"] for c in chunks if (p := c["choices"][0].get("logprobs")) for t in p["content"]]
        assert told == ["H", "e"]


class TestGenerate:
    async def test_whole(self, cluster):
        await cluster.add()
        status, body = await _post(cluster, "/generate", text="abc", sampling_params={"max_new_tokens": 3})
        assert status == 200
        assert body["text"] == TOKENIZER.decode(IDS[:3])
        assert body["output_ids"] == IDS[:3]
        meta = body["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 3, 0)
        assert meta["finish_reason"] == {"type": "length", "length": 3}
        assert meta["e2e_latency"] > 0
        _, body = await _post(cluster, "/generate", input_ids=[1, 2], sampling_params={"stop": "wör"})
        assert body["text"] == "Hello, "
        assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wör"}
        _, body = await _post(cluster, "/generate", text="abc")
        assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}

    async def test_a_stream_is_cumulative(self, cluster):
        await cluster.add()
        body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        response = await cluster.http.post("/generate", json=body)
        pieces = response.text.split("\n\n")
        assert pieces[-2:] == ["data: [DONE]", ""]
        answers = [json.loads(p[6:]) for p in pieces[:-2]]
        texts = [a["text"] for a in answers]
        assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
        assert texts[-1] == TOKENIZER.decode(IDS[:8])
        assert answers[-1]["meta_info"]["finish_reason"]["type"] == "length"
        assert answers[0]["meta_info"]["finish_reason"] is None

    async def test_a_batch(self, cluster):
        await cluster.add()
        _, answers = await _post(cluster, "/generate", text=["a", "bc"], sampling_params={"max_new_tokens": 2})
        assert [a["meta_info"]["prompt_tokens"] for a in answers] == [1, 2]
        status, _ = await _post(cluster, "/generate", text="a", input_ids=[1])
        assert status == 400

    async def test_abort(self, cluster):
        worker = await cluster.add()
        worker.hold()
        body = {"text": "abc", "rid": "mine", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
        asked = asyncio.create_task(cluster.http.post("/generate", json=body))
        await worker.until(lambda: worker.num_running == 1)
        worker.step(2)
        await worker.until(lambda: worker.num_emitted == 2)
        twice, _ = await _post(cluster, "/generate", **body)
        assert twice == 400
        assert (await _post(cluster, "/abort_request", rid="nobody"))[1] == {"aborted": 0}
        assert (await _post(cluster, "/abort_request", rid="mine"))[1] == {"aborted": 1}
        answer = (await asked).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        await worker.until(lambda: len(worker.aborts) == 1)


class TestAdministration:
    async def test_health_and_readiness(self, cluster):
        assert (await cluster.http.get("/live")).json() == {"status": "ok"}
        health = await cluster.http.get("/health")
        assert (health.status_code, health.json()["missing"]) == (503, ["no worker is registered"])
        not_ready = await cluster.http.get("/ready")
        assert (not_ready.status_code, not_ready.json()["missing"]) == (503, ["no worker is registered"])
        await cluster.add()
        assert (await cluster.http.get("/ready")).json() == {"ready": True, "missing": []}
        assert (await cluster.http.get("/health")).json() == {"status": "ok"}

    async def test_models(self, cluster):
        await cluster.add()
        listed = (await cluster.http.get("/v1/models")).json()
        assert [(m["id"], m["max_model_len"]) for m in listed["data"]] == [("tiny", CONTEXT)]
        assert (await cluster.http.get("/v1/models/tiny")).json() == listed["data"][0]

    async def test_tokenize_and_back(self, cluster):
        await cluster.add()
        _, body = await _post(cluster, "/tokenize", prompt=TEXT)
        assert (body["tokens"], body["count"], body["max_model_len"]) == (IDS, len(IDS), CONTEXT)
        _, back = await _post(cluster, "/detokenize", tokens=IDS)
        assert back["prompt"] == back["text"] == TEXT
        _, chat = await _post(cluster, "/tokenize", messages=[{"role": "user", "content": "hi"}])
        assert TOKENIZER.decode(chat["tokens"], skip_special_tokens=False).endswith("<|im_start|>assistant\n")
        assert (await _post(cluster, "/tokenize"))[0] == 400

    async def test_metrics(self, cluster):
        await cluster.add()
        await _post(cluster, "/v1/completions", **ASK)
        cluster.dispatcher.observe()
        text = (await cluster.http.get("/metrics")).text
        assert 'tanghulu_conductor_requests_total{outcome="length"} 1.0' in text
        assert 'tanghulu_conductor_workers{worker_role="worker"} 1.0' in text
        assert "tanghulu_conductor_ttft_seconds_bucket" in text

    async def test_route_explains_and_changes_nothing(self, cluster):
        prefill, decode = await cluster.add(Role.PREFILL), await cluster.add(Role.DECODE)
        status, body = await _post(cluster, "/route", prompt="some prompt of many tokens")
        assert status == 200
        assert (body["prefill"], body["decode"], body["policy"]) == (prefill.id, decode.id, "ttft-min")
        assert {c["phase"] for c in body["candidates"]} == {"prefill", "decode"}
        assert body["hit_blocks"] == {"workers": {}, "store": 0}
        got = await cluster.http.get("/route", params={"prompt": "some prompt of many tokens", "model": "tiny"})
        assert got.json()["num_prompt_tokens"] == body["num_prompt_tokens"]
        chat = await _post(cluster, "/route", messages=[{"role": "user", "content": "hi"}])
        assert chat[1]["prefill"] == prefill.id
        assert (await cluster.http.get("/route")).status_code == 400
        assert not prefill.submits
