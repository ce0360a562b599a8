"""Deadlines of requests and silence of workers: the decisions in virtual time, and what clients see."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from tanghulu.conductor.dispatch.deadlines import LEAST_BEATS, Deadlines, Liveness
from tanghulu.conductor.routing.requests import NO_TIMEOUTS, Timeouts
from tests.conductor.cluster import running_cluster

ASK = {"model": "tiny", "prompt": "x", "max_tokens": 8, "ignore_eos": True}


class TestDeadlines:
    def test_each_is_missed_in_its_turn(self):
        deadlines = Deadlines(Timeouts(60, 10, 5), 100.0)
        assert deadlines.due_s == 110
        assert deadlines.missed(109.9) == ""
        assert "no token came within 10 s" in deadlines.missed(110)
        deadlines.came(107.0)
        assert deadlines.due_s == 112
        assert "no further token came within 5 s" in deadlines.missed(112)
        for now_s in range(108, 160):
            deadlines.came(float(now_s))
            assert deadlines.missed(float(now_s)) == ""
        assert deadlines.due_s == 160
        assert "did not end within 60 s" in deadlines.missed(160)

    def test_without_limits_nothing_is_due(self):
        deadlines = Deadlines(NO_TIMEOUTS, 0.0)
        assert math.isinf(deadlines.due_s)
        deadlines.came(1e9)
        assert deadlines.missed(1e12) == ""

    def test_a_request_can_only_shorten_what_the_conductor_allows(self):
        most = Timeouts(60, 0, 5)
        assert Timeouts(90, 7, 2).within(most) == Timeouts(60, 7, 2)
        assert NO_TIMEOUTS.within(most) == most


class TestLiveness:
    def look(self, liveness: Liveness, since_s: float, until_s: float, has_work: bool) -> float | None:
        """The first look at which it counts as silent; looks come in time."""
        now_s = since_s
        while now_s < until_s:
            now_s += liveness.period_s
            if liveness.look(now_s, has_work):
                return now_s
        return None

    def test_with_work_and_without_a_step(self):
        assert self.look(Liveness(10.0, 0.0, 0.0), 0.0, 100.0, has_work=True) == 10.0
        spoke = Liveness(10.0, 0.0, 0.0)
        assert self.look(spoke, 0.0, 7.5, has_work=True) is None
        spoke.on_step(7.5)
        assert self.look(spoke, 7.5, 100.0, has_work=True) == 17.5

    def test_idle_ones_are_judged_if_they_promise_a_beat(self):
        idle = Liveness(10.0, 0.0, 0.0)
        assert self.look(idle, 0.0, 100.0, has_work=False) is None
        assert self.look(idle, 100.0, 200.0, has_work=True) == 110.0, "its time begins with its work"
        assert self.look(Liveness(10.0, 1.0, 0.0), 0.0, 100.0, has_work=False) == 10.0

    def test_a_limit_is_at_least_some_beats(self):
        assert Liveness(0.5, 1.0, 0.0).limit_s == LEAST_BEATS

    def test_a_look_that_comes_late_is_the_looker_s_own_silence(self):
        liveness = Liveness(10.0, 1.0, 0.0)
        liveness.on_step(1.5)
        assert not liveness.look(2.5, True)
        assert not liveness.look(40.0, True)
        assert self.look(liveness, 40.0, 100.0, has_work=True) == 47.5


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_client_sees_of_a_deadline(tmp_path, path, stream):
    """Some tokens come, then none; and before the first token it is an HTTP error in any case."""
    async with running_cluster(tmp_path, token_timeout_s=0.3) as cluster:
        worker = await cluster.add()
        worker.hold()
        body = {**ASK, "stream": stream}
        if path == "/generate":
            body = {"text": "x", "stream": stream, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        elif path == "/v1/chat/completions":
            body = {key: body[key] for key in body if key != "prompt"} | {
                "messages": [{"role": "user", "content": "x"}]
            }
        asked = asyncio.create_task(cluster.http.post(path, json=body))
        await worker.until(lambda: worker.num_running == 1)
        worker.step(2)
        answer = await asked
        await worker.until(lambda: len(worker.aborts) == 1)
        assert not cluster.dispatcher.num_requests
        if not stream:
            assert answer.status_code == 504
            assert "no further token came" in answer.json()["error"]["message"]
        else:
            *_, last, done = [line[6:] for line in answer.text.split("\n\n") if line]
            assert (answer.status_code, done) == (200, "[DONE]")
            said = json.loads(last)
            assert said["error"]["code"] == "deadline_exceeded"
            if path == "/generate":
                assert said["meta_info"]["finish_reason"]["status_code"] == 504
            else:
                assert [(c["index"], c["finish_reason"]) for c in said["choices"]] == [(0, "error")]
        late = await cluster.http.post(path, json={**body, "first_token_timeout": 0.05})
        assert late.status_code == 504
        assert "no token came within 0.05 s" in late.json()["error"]["message"]


async def test_the_whole_request_has_a_deadline_wherever_it_is(tmp_path):
    async with running_cluster(tmp_path, request_timeout_s=600.0, max_in_flight=1) as cluster:
        worker = await cluster.add()
        worker.hold()
        short = {**ASK, "request_timeout": 0.3}
        both = [asyncio.create_task(cluster.http.post("/v1/completions", json=short)) for _ in range(2)]
        await cluster.until(lambda: cluster.dispatcher.num_waiting == 1)
        answers = await asyncio.gather(*both)
        assert [answer.status_code for answer in answers] == [504, 504], "at the worker, and in the queue"
        assert cluster.metric("requests_total", outcome="deadline_exceeded") == 2
        worker.release()
        assert (await cluster.http.post("/v1/completions", json=ASK)).status_code == 200


async def test_requests_leave_a_worker_whose_engine_hangs_and_it_gets_none_until_it_computes(tmp_path):
    async with running_cluster(tmp_path, worker_timeout_s=0.4) as cluster:
        hung, other = await cluster.add(), await cluster.add()
        hung.hold()
        hung_here = {"routing": {"worker": hung.id}}
        asked = asyncio.create_task(cluster.http.post("/v1/completions", json={**ASK, **hung_here}))
        await hung.until(lambda: hung.num_running == 1)
        hung.step()
        answer = await asked
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert len(other.submits[0].tokens) > len(hung.submits[0].tokens), "with the token that had come"
        for _ in range(4):
            assert (await cluster.http.post("/v1/completions", json=ASK)).status_code == 200
        assert len(hung.submits) == 1, "on a busy machine the other one may have been silent, too, but not this one"
        await hung.until(lambda: hung.probes)
        hung.release()
        await cluster.until(lambda: cluster.registry.workers[hung.id].usable)
        again = await cluster.http.post("/v1/completions", json={**ASK, **hung_here})
        assert (again.status_code, len(hung.submits)) == (200, 2)


async def test_a_worker_that_hung_while_idle_swallows_nobody(tmp_path):
    """It has promised beats and sends none: it is lost before anybody comes."""
    async with running_cluster(tmp_path, worker_timeout_s=0.3) as cluster:
        hung = await cluster.add()
        await cluster.add()
        hung.hold()
        hung.beat_s = 0.05
        hung.end_sessions()
        await hung.until(lambda: hung.probes)
        assert not cluster.registry.workers[hung.id].usable
        answers = [await cluster.http.post("/v1/completions", json=ASK) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert not hung.submits
        hung.release()
