"""What operators see of requests that fail, and when clients are asked to come back."""

from __future__ import annotations

import asyncio

import structlog

from tanghulu.conductor.inference.service import LEAST_S, MOST_S, WINDOW_S, RetryAfter
from tanghulu.conductor.stories.recorder import EndedRequest
from tanghulu.errors import NodeUnavailable
from tests.conductor.cluster import running_cluster

ASK = {"model": "tiny", "prompt": "x", "max_tokens": 4}


async def test_a_request_that_fails_has_a_line_in_the_log(cluster):
    worker = await cluster.add()
    worker.hold()
    with structlog.testing.capture_logs() as lines:
        body = {"text": "x", "rid": "mine"}
        whole = asyncio.create_task(cluster.http.post("/generate", json=body))
        streamed = asyncio.create_task(cluster.http.post("/v1/completions", json={**ASK, "stream": True}))
        await cluster.until(lambda: len(worker.submits) == 2)
        worker.step()
        await asyncio.sleep(0)
        cluster.dispatcher.fail_all(NodeUnavailable("all workers are gone"))
        assert (await whole).status_code == 503
        assert "all workers are gone" in (await streamed).text
    failed = [line for line in lines if line["event"] == "request.failed"]
    assert {line["path"] for line in failed} == {"/generate", "/v1/completions"}
    for line in failed:
        assert (line["log_level"], line["status"], line["code"]) == ("warning", 503, "NODE_UNAVAILABLE")
        assert line["request"] == "mine" or line["request"].startswith("cmpl-")


async def test_a_client_s_own_mistake_is_not_worth_one(cluster):
    await cluster.add()
    with structlog.testing.capture_logs() as lines:
        assert (await cluster.http.post("/v1/completions", json={**ASK, "n": 0})).status_code == 400
    assert [line["log_level"] for line in lines if line["event"] == "request.failed"] == ["debug"]


class TestRetryAfter:
    def test_it_is_the_queue_over_the_rate(self):
        ends = RetryAfter(0.0)
        assert ends.seconds(0, 0.0) == LEAST_S
        assert ends.seconds(1, 0.0) == MOST_S  # nothing ends
        for second in range(100):
            for _ in range(4):
                ends.ended(float(second))
        assert ends.seconds(40, 100.0) == 10
        assert ends.seconds(1, 100.0) == LEAST_S
        assert ends.seconds(1_000_000, 100.0) == MOST_S
        assert ends.seconds(40, 100.0 + WINDOW_S) == MOST_S  # none for a window

    def test_more_ends_than_it_remembers(self):
        ends = RetryAfter(0.0)
        for number in range(10_000):
            ends.ended(number / 1000)
        assert ends.seconds(5000, 10.0) == 5

    async def test_a_full_queue_says_so(self, tmp_path):
        async with running_cluster(tmp_path, max_in_flight=1, max_queued=2) as cluster:
            worker = await cluster.add()
            worker.hold()
            ended: list[EndedRequest] = []
            cluster.dispatcher.when_ended.append(ended.append)
            tasks = [asyncio.create_task(cluster.http.post("/v1/completions", json=ASK)) for _ in range(3)]
            await cluster.until(lambda: cluster.dispatcher.num_waiting == 2)
            refused = await cluster.http.post("/v1/completions", json=ASK)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, str(MOST_S))
            worker.release()
            assert [(await task).status_code for task in tasks] == [200, 200, 200]
            assert len(ended) == 3, "one that was refused is no sample of how long answers take"
            assert cluster.conductor.service.retry_after_s() == LEAST_S


async def test_template_variables_that_have_another_door_are_refused(cluster):
    await cluster.add()
    messages = [{"role": "user", "content": "hi"}]
    for name in ("messages", "tools", "self"):
        body = {"messages": messages, "max_tokens": 2, "chat_template_kwargs": {name: None}}
        response = await cluster.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400, (name, response.text)
        assert response.json()["error"]["param"] == "chat_template_kwargs"
    fine = {"messages": messages, "max_tokens": 2, "chat_template_kwargs": {"enable_thinking": False}}
    assert (await cluster.http.post("/v1/chat/completions", json=fine)).status_code == 200
