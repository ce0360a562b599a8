"""The stories of requests as an operator reads them: phases that add up, however a request ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from tanghulu.conductor.stories import book
from tanghulu.rpc.wire import Failure
from tanghulu.session.outputs import PhaseTimes
from tanghulu.types import Role
from tests.conductor.cluster import Cluster, running_cluster
from tests.conductor.http.test_keys import keyed_cluster
from tests.conductor.key_files import bearer

ASK = {"model": "tiny", "prompt": "a secret prompt", "max_tokens": 6, "ignore_eos": True}
PATH = "/v1/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
TOLD = PhaseTimes(queue_s=1e-6, kv_load_s=1e-6, prefill_s=1e-6, kv_store_s=1e-6, decode_s=1e-6)


async def the_story(cluster: Cluster, name: str) -> dict[str, Any]:
    """The one story of that name, once it is over."""
    stories = cluster.dispatcher.stories
    await cluster.until(lambda: stories.find(name) and all(story.is_over for story in stories.find(name)))
    stories.check()
    (story,) = (await cluster.http.get(f"/debug/requests/{name}")).json()["requests"]
    assert sum(story["phases"].values()) == pytest.approx(story["seconds"], abs=2e-5)
    for visit in story["workers"]:
        assert sum(visit["phases"].values()) == pytest.approx(visit["seconds"], abs=2e-5)
    return story


def observed(cluster: Cluster, phase: str, status: str) -> float:
    labels = {"model": "tiny", "phase": phase, "status": status}
    name = "tanghulu_request_phase_seconds_count"
    return cluster.conductor.service.metrics.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_served_request(cluster, stream):
    worker = await cluster.add()
    worker.phases = TOLD
    headers = {"x-request-id": "mine", "traceparent": TRACEPARENT}
    answer = await cluster.http.post(PATH, json=ASK | {"stream": stream}, headers=headers)
    assert answer.status_code == 200
    story = await the_story(cluster, "mine")
    assert (story["status"], story["x_request_id"], story["model"]) == ("served", "mine", "tiny")
    assert (story["generated_tokens"], story["error"]) == (6, "")
    assert story["name"].startswith("cmpl-")
    assert list(story["phases"]) == [
        *("receive", "tokenise", "queue", "route", "transit", "worker_queue", "kv_load", "prefill", "kv_store"),
        *("decode", "detokenise", "send"),
    ]
    assert [visit["worker"] for visit in story["workers"]] == [worker.id]
    assert story["traceparent"].startswith(f"00-{TRACE}-")
    assert answer.headers["traceresponse"] == story["traceparent"] == worker.submits[0].traceparent
    assert worker.submits[0].x_request_id == "mine"
    assert "secret" not in str(story)
    assert (await the_story(cluster, TRACE))["id"] == story["id"]
    assert observed(cluster, "prefill", "served") == 1
    assert cluster.metric("request_seconds_count") == 1


async def test_a_hand_over_shows_both_workers(cluster):
    prefill, decode = await cluster.add(Role.PREFILL), await cluster.add(Role.DECODE)
    prefill.phases = decode.phases = TOLD
    assert (await cluster.http.post(PATH, json=ASK, headers={"x-request-id": "mine"})).status_code == 200
    story = await the_story(cluster, "mine")
    assert [(visit["worker"], visit["left"]) for visit in story["workers"]] == [
        (prefill.id, "handed_over"),
        (decode.id, "ended"),
    ]
    assert {"worker_queue", "kv_load", "prefill", "hand_over", "decode"} <= story["phases"].keys()
    assert "prefill" not in story["workers"][1]["phases"]


async def test_a_moved_request_shows_each_worker(cluster):
    first = await cluster.add()
    first.phases, first.die_after_tokens = TOLD, 3
    asked = asyncio.create_task(cluster.http.post(PATH, json=ASK, headers={"x-request-id": "mine"}))
    await cluster.until(lambda: not cluster.registry.workers[first.id].usable)
    second = await cluster.add()
    assert (await asked).status_code == 200
    story = await the_story(cluster, "mine")
    assert [(visit["worker"], visit["left"]) for visit in story["workers"]] == [
        (first.id, "lost"),
        (second.id, "ended"),
    ]
    assert "unreported" in story["workers"][0]["phases"]
    assert story["generated_tokens"] == 6
    traces = {submit.traceparent for worker in (first, second) for submit in worker.submits}
    assert traces == {story["traceparent"]}


async def test_aborted_refused_and_failed_ones_are_not_served(tmp_path):
    async with running_cluster(tmp_path, max_in_flight=1, max_queued=1) as cluster:
        worker = await cluster.add()
        worker.hold()
        asked = []
        for name in ("aborted", "waiting"):
            asked.append(asyncio.create_task(cluster.http.post(PATH, json=ASK, headers={"x-request-id": name})))
            await cluster.until(lambda name=name: cluster.dispatcher.stories.find(name))
        under_way = (await cluster.http.get("/debug/requests")).json()["requests"]
        assert [(s["x_request_id"], s["status"]) for s in under_way] == [
            ("aborted", "under_way"),
            ("waiting", "under_way"),
        ]
        assert sum(under_way[0]["phases"].values()) == pytest.approx(under_way[0]["seconds"], abs=2e-5)
        refused = await cluster.http.post(PATH, json=ASK, headers={"x-request-id": "refused"})
        assert refused.status_code == 429
        asked[0].cancel()
        await asyncio.gather(asked[0], return_exceptions=True)
        await the_story(cluster, "aborted")
        worker.fail_with = Failure("INTERNAL", "a bug")
        worker.release()
        assert (await asked[1]).status_code == 500
        told = {name: await the_story(cluster, name) for name in ("aborted", "refused", "waiting")}
        assert {name: story["status"] for name, story in told.items()} == {
            "aborted": "aborted",
            "refused": "refused",
            "waiting": "failed",
        }
        assert told["refused"]["workers"] == []
        assert told["refused"]["error"] == "overloaded"
        assert told["aborted"]["workers"][0]["phases"].keys() == {"unreported"}
        assert told["waiting"]["error"] == "internal"
        for status in ("aborted", "refused", "failed"):
            assert observed(cluster, "queue", status) == 1
        assert observed(cluster, "queue", "served") == 0
        assert cluster.metric("request_seconds_count") == 0


async def test_sequences_of_one_call_have_a_story_each(cluster):
    worker = await cluster.add()
    await cluster.http.post(PATH, json=ASK | {"n": 3}, headers={"traceparent": TRACEPARENT})
    found = cluster.dispatcher.stories.find(TRACE)
    await cluster.until(lambda: all(story.is_over for story in found))
    assert len({story.origin.trace.span_id for story in found}) == len(found) == 3
    assert {submit.traceparent for submit in worker.submits} == {story.origin.trace.header for story in found}


async def test_a_bad_traceparent_begins_a_new_trace(cluster):
    answer = await cluster.http.get("/live", headers={"traceparent": TRACEPARENT + "-more"})
    assert TRACE not in answer.headers["traceresponse"]


async def test_who_is_not_known_is_said(cluster):
    answer = await cluster.http.get("/debug/requests/nosuch")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
    assert (await cluster.http.get("/debug/requests?limit=0")).status_code == 400
    assert (await cluster.http.get("/debug/requests")).json() == {"requests": []}
    assert (await cluster.http.get(f"/debug/requests?limit={book.MAX_KEPT}")).status_code == 200


async def test_they_are_an_operators(tmp_path: Path):
    async with keyed_cluster(tmp_path) as cluster:
        await cluster.add()
        answer = await cluster.http.post(PATH, json=ASK, headers=bearer("user") | {"x-request-id": "mine"})
        assert answer.status_code == 200
        for name, status in (("user", 403), ("other", 403), ("watcher", 200), ("admin", 200)):
            for path in ("/debug/requests", "/debug/requests/mine"):
                assert (await cluster.http.get(path, headers=bearer(name))).status_code == status, (path, name)


async def test_they_stand_in_the_log_on_request(tmp_path: Path):
    for wanted in (False, True):
        async with running_cluster(tmp_path, log_requests=wanted) as cluster:
            await cluster.add()
            with structlog.testing.capture_logs() as lines:
                await cluster.http.post(PATH, json=ASK, headers={"x-request-id": "mine"})
                await the_story(cluster, "mine")
        told = [line for line in lines if line["event"] == "request.story"]
        assert [line["x_request_id"] for line in told] == ["mine"] * wanted
        assert not wanted or told[0]["phases"].keys() >= {"queue", "send"}
