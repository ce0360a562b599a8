"""What stands around every answer: ids, counts, other origins, other kinds of body, routes that are not here."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from tanghulu.errors import NodeUnavailable
from tests.conductor.cluster import running_cluster

ASK = {"model": "tiny", "prompt": "x", "max_tokens": 2}
PATH = "/v1/completions"


class TestRequestId:
    async def test_the_client_s_comes_back(self, cluster):
        await cluster.add()
        for body in (ASK, ASK | {"stream": True}, ASK | {"n": 0}):
            response = await cluster.http.post(PATH, json=body, headers={"X-Request-ID": "mine-1"})
            assert response.headers["x-request-id"] == "mine-1"
        assert (await cluster.http.get("/nosuch", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"

    @pytest.mark.parametrize("given", [{}, {"x-request-id": ""}, {"x-request-id": "a b"}, {"x-request-id": "x" * 129}])
    async def test_without_a_good_one_there_is_a_new_one(self, cluster, given):
        told = {(await cluster.http.get("/live", headers=given)).headers["x-request-id"] for _ in range(2)}
        assert len(told) == 2
        assert all(len(each) == 32 for each in told)

    async def test_it_stands_in_the_log(self, cluster):
        await cluster.add()
        with structlog.testing.capture_logs() as lines:
            await cluster.http.post(PATH, json=ASK | {"n": 0}, headers={"x-request-id": "bad"})
            good = await cluster.http.post(PATH, json=ASK, headers={"x-request-id": "good"})
        (failed,) = [line for line in lines if line["event"] == "request.failed"]
        assert (failed["x_request_id"], failed["status"]) == ("bad", 400)
        answered = {line["x_request_id"]: line for line in lines if line["event"] == "http.answered"}
        assert answered["bad"]["status"] == 400
        line = answered["good"]
        assert (line["status"], line["model"], line["request"]) == (200, "tiny", good.json()["id"])


class TestCounts:
    async def test_by_route_status_and_model(self, cluster):
        await cluster.add()
        for body in (ASK, ASK, ASK | {"n": 0}, ASK | {"model": "nosuch"}):
            await cluster.http.post(PATH, json=body)
        await cluster.http.get("/v1/models/tiny")
        for number in range(3):
            await cluster.http.get(f"/no/{number}")
        counted = {"method": "POST", "route": PATH}
        assert cluster.metric("http_requests_total", status="200", model="tiny", **counted) == 2
        assert cluster.metric("http_requests_total", status="400", model="", **counted) == 1
        assert cluster.metric("http_requests_total", status="404", model="", method="POST", route="") == 1
        assert cluster.metric("http_requests_total", status="404", model="", method="GET", route="") == 3
        route = "/v1/models/{name:path}"
        assert cluster.metric("http_requests_total", status="200", model="", method="GET", route=route) == 1
        assert cluster.metric("http_request_seconds_count", status="200", model="tiny", **counted) == 2

    async def test_a_client_that_hangs_up_counts_as_gone(self, cluster):
        worker = await cluster.add()
        worker.hold()
        for stream in (False, True):
            asked = asyncio.create_task(cluster.http.post(PATH, json=ASK | {"stream": stream}))
            await worker.until(lambda: worker.num_running == 1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await worker.until(lambda: worker.num_running == 0)
        gone = {"method": "POST", "route": PATH, "status": "499", "model": "tiny"}
        await cluster.until(lambda: cluster.metric("http_requests_total", **gone) == 2)

    async def test_a_stream_that_fails_counts_as_failed(self, cluster):
        worker = await cluster.add()
        worker.hold()
        asked = asyncio.create_task(cluster.http.post(PATH, json=ASK | {"stream": True, "ignore_eos": True}))
        await worker.until(lambda: worker.num_running == 1)
        worker.step()
        await worker.until(lambda: worker.num_emitted == 1)
        await cluster.until(lambda: cluster.metric("generated_tokens_total") or cluster.metric("ttft_seconds_count"))
        await cluster.registry.close()
        cluster.conductor.dispatcher.fail_all(NodeUnavailable("all workers are gone"))
        assert '"error"' in (await asked).text
        counted = {"method": "POST", "route": PATH, "status": "503", "model": "tiny"}
        await cluster.until(lambda: cluster.metric("http_requests_total", **counted) == 1)


class TestOtherOrigins:
    async def test_they_are_let_in_where_they_are_named(self, tmp_path):
        async with running_cluster(tmp_path, cors_origins="https://a.example, https://b.example") as cluster:
            asked = {"origin": "https://b.example", "access-control-request-method": "POST"}
            asked["access-control-request-headers"] = "authorization,content-type"
            response = await cluster.http.options("/v1/chat/completions", headers=asked)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "https://b.example"
            response = await cluster.http.get("/live", headers={"origin": "https://b.example"})
            assert "x-request-id" in response.headers["access-control-expose-headers"]
            response = await cluster.http.get("/live", headers={"origin": "https://c.example"})
            assert "access-control-allow-origin" not in response.headers

    async def test_else_not(self, cluster):
        response = await cluster.http.get("/live", headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in response.headers


class TestKindsOfBody:
    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; b=x"])
    @pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/generate", "/tokenize", "/abort_request"])
    async def test_what_is_no_json_is_refused(self, cluster, kind, path):
        response = await cluster.http.post(path, content=b"{}", headers={"content-type": kind})
        assert (response.status_code, response.json()["error"]["code"]) == (415, "wrong_content_type")
        assert "application/json" in response.json()["error"]["message"]

    @pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/x+json", ""])
    async def test_json_by_its_names(self, cluster, kind):
        response = await cluster.http.post("/abort_request", content=b"{}", headers={"content-type": kind})
        assert response.status_code == 200


class TestRoutesThatAreNotHere:
    @pytest.mark.parametrize(
        ("path", "hint"),
        [
            ("/v1/responses/resp_1/cancel", "there is POST /v1/responses"),
            ("/v1/conversations", "use /v1/responses"),
            ("/v1/embeddings", "embeddings are not served"),
            ("/v1/audio/speech", "audio is not served"),
            ("/chat/completions", "did you mean /v1/chat/completions?"),
            ("/v1/generate", "did you mean /generate?"),
            ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
            ("/what", "see /docs"),
        ],
    )
    async def test_they_say_what_is(self, cluster, path, hint):
        response = await cluster.http.post(path, json={})
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("not_found", "invalid_request_error")
        assert hint in error["message"]


class TestMethods:
    @pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/metrics", "/v1/models", "/v1/models/tiny"])
    async def test_head_is_served_where_get_is(self, cluster, path):
        await cluster.add()
        got, head = await cluster.http.get(path), await cluster.http.head(path)
        assert (got.status_code, head.status_code, head.content) == (200, 200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
        assert (await cluster.http.head("/live/no")).status_code == 404

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("GET", "/v1/chat/completions", "POST"),
            ("HEAD", "/v1/completions", "POST"),
            ("OPTIONS", "/generate", "POST"),
            ("GET", "/flush_cache", "POST"),
            ("POST", "/live", "GET, HEAD"),
        ],
    )
    async def test_a_405_says_what_is_allowed(self, cluster, method, path, allowed):
        answer = await cluster.http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
