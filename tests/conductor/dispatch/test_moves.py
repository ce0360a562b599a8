"""What moves of requests look like from outside: refusals, deaths one behind another, and how they are counted."""

from __future__ import annotations

import asyncio

from tanghulu.rpc.wire import Failure
from tanghulu.types import Role
from tests.conductor.cluster import running_cluster

ASK = {"model": "tiny", "prompt": "x", "max_tokens": 8, "ignore_eos": True}


async def test_a_request_that_all_refuse_waits_until_one_takes_it(tmp_path):
    async with running_cluster(tmp_path, max_redispatches=0) as cluster:
        workers = [await cluster.add() for _ in range(2)]
        for worker in workers:
            worker.fail_with = Failure("OVERLOADED", "1024 requests wait already")
        asked = asyncio.create_task(cluster.http.post("/v1/completions", json=ASK))
        await cluster.until(lambda: sum(len(w.submits) for w in workers) >= 4)
        assert all(worker.submits for worker in workers)
        workers[0].fail_with = None
        assert (await asked).status_code == 200
        assert not cluster.migrations("new_request", "resumed")


async def test_it_does_not_wait_for_longer_than_the_queue_allows(tmp_path):
    async with running_cluster(tmp_path, max_redispatches=0, queue_timeout_s=0.4) as cluster:
        worker = await cluster.add()
        worker.fail_with = Failure("OVERLOADED", "1024 requests wait already")
        assert (await cluster.http.post("/v1/completions", json=ASK)).status_code == 429
        assert len(worker.submits) > 1


async def test_a_request_that_kills_worker_after_worker_is_refused_and_the_rest_live(tmp_path):
    async with running_cluster(tmp_path, max_redispatches=9) as cluster:
        workers = [await cluster.add() for _ in range(4)]
        for worker in workers:
            worker.die_after_tokens = 0
        answer = await cluster.http.post("/v1/completions", json=ASK)
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["code"] == "request_kills_workers"
        assert len([worker for worker in workers if worker.submits]) == 3
        assert cluster.migrations("new_request", "lost_again") == 1
        assert cluster.migrations("new_request", "failed") == 1


async def test_a_long_stream_outlives_more_workers_than_the_limit(tmp_path):
    async with running_cluster(tmp_path, max_redispatches=1) as cluster:
        for number in range(5):
            worker = await cluster.add()
            worker.die_after_tokens = 5 + number
        last = await cluster.add(Role.BOTH)
        last.reports(prefill_tokens_waiting=10_000)  # asked last
        last.report()
        answer = await cluster.http.post("/v1/completions", json={**ASK, "max_tokens": 60})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 60
        dead = [worker for worker in cluster.workers if worker.submits and worker is not last]
        assert cluster.migrations("ongoing_request", "resumed") == len(dead) > 1
        assert all(submit.moved for submit in last.submits)
        metrics = cluster.conductor.service.metrics
        assert metrics.get_sample_value("tanghulu_migration_pause_seconds_count") == len(dead)
        assert metrics.get_sample_value("tanghulu_migration_tokens_total") > 0


async def test_an_orderly_end_does_not_count(tmp_path):
    async with running_cluster(tmp_path, max_redispatches=0) as cluster:
        ending = await cluster.add()
        ending.hold()
        asked = asyncio.create_task(cluster.http.post("/v1/completions", json=ASK))
        await ending.until(lambda: ending.num_running == 1)
        ending.step(2)
        other = await cluster.add()
        await ending.unregister()
        await cluster.until(lambda: cluster.registry.workers[ending.id].leaving)
        ending.die()
        answer = await asked
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 8)
        assert len(other.submits) == 1
