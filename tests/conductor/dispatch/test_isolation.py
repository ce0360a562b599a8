"""What goes wrong with one request, or in one worker's session, stays there: others go on, and the log says so."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from tanghulu.conductor.dispatch import worker_session
from tanghulu.errors import Overloaded
from tanghulu.hashing import joined
from tanghulu.types import RequestId, Role
from tests.conductor.cluster import running_cluster
from tests.conductor.fake_worker import FakeWorker


def _body(prompt: str, **more: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 3, **more}


async def test_a_request_that_cannot_be_routed_fails_alone(tmp_path, monkeypatch):
    """Two wait for a place. The one in front breaks the choice of a worker; the other is served, at the same worker."""
    async with running_cluster(tmp_path, max_in_flight=1) as cluster:
        worker = await cluster.add()
        worker.hold()
        choose = cluster.dispatcher.router.choose

        def breaks(flight, model):
            assert flight.request.salt != joined(b"broken", b"")
            return choose(flight, model)

        monkeypatch.setattr(cluster.dispatcher.router, "choose", breaks)

        async def ask(prompt: str, **more: object) -> int:
            return (await cluster.http.post("/v1/completions", json=_body(prompt, **more))).status_code

        first = asyncio.create_task(ask("first"))
        await cluster.until(lambda: worker.submits)
        broken = asyncio.create_task(ask("broken", cache_salt="broken"))
        await cluster.until(lambda: cluster.dispatcher.num_requests == 2)
        good = asyncio.create_task(ask("good"))
        await cluster.until(lambda: cluster.dispatcher.num_requests == 3)
        with structlog.testing.capture_logs() as logs:
            worker.release()
            assert await asyncio.gather(first, broken, good) == [200, 500, 200]
        assert [line["log_level"] for line in logs if line["event"] == "request.broken"] == ["error"]
        assert len(worker.sessions) == 1
        assert cluster.dispatcher.num_requests == 0
        assert await ask("broken", cache_salt="broken") == 500
        assert await ask("after it") == 200


async def test_an_answer_ends_though_its_recorder_fails(tmp_path):
    async with running_cluster(tmp_path) as cluster:
        await cluster.add()

        def breaks(_):
            raise AssertionError("cannot be")

        cluster.dispatcher.when_ended.append(breaks)
        asked = cluster.http.post("/v1/completions", json=_body("a prompt"))
        assert (await asyncio.wait_for(asked, 30)).status_code == 200
        assert cluster.dispatcher.num_requests == 0


async def test_requests_that_wait_for_one_model_do_not_keep_out_those_of_another(tmp_path):
    async with running_cluster(tmp_path, max_queued=1) as cluster:
        gone = await cluster.add()
        gone.hold()
        await gone.stop()
        cluster.workers.remove(gone)
        await cluster.until(lambda: not cluster.registry.workers)
        waiting = asyncio.create_task(cluster.http.post("/v1/completions", json=_body("waits")))
        await cluster.until(lambda: cluster.dispatcher.num_waiting == 1)
        assert (await cluster.http.post("/v1/completions", json=_body("too many"))).status_code == 429
        other = FakeWorker("other", Role.BOTH, cluster.run_dir)
        other.card = {"model": "other"}
        cluster.workers.append(other)
        await other.start(cluster.discovery)
        await cluster.until(lambda: other.id in cluster.registry.workers and cluster.registry.workers[other.id].usable)
        for _ in range(2):
            answer = await cluster.http.post("/v1/completions", json={**_body("x"), "model": "other"})
            assert answer.status_code == 200, answer.text
        waiting.cancel()


async def test_a_step_that_cannot_be_taken_ends_its_session_and_another_begins(tmp_path, monkeypatch):
    async with running_cluster(tmp_path) as cluster:
        worker = await cluster.add()
        take = cluster.dispatcher.mirror.worker_events
        broken: list[int] = []

        def breaks_once(*arguments):
            if not broken:
                broken.append(1)
                raise AssertionError("cannot be")
            return take(*arguments)

        monkeypatch.setattr(cluster.dispatcher.mirror, "worker_events", breaks_once)
        with structlog.testing.capture_logs() as logs:
            answer = await cluster.http.post("/v1/completions", json=_body("a prompt of some blocks"))
        assert answer.status_code == 200, answer.text
        assert broken
        assert [line["worker"] for line in logs if line["event"] == "worker.session_broken"] == [worker.id]
        assert cluster.registry.workers[worker.id].usable


async def test_a_request_can_be_ended_though_its_worker_takes_no_messages(tmp_path, monkeypatch):
    async with running_cluster(tmp_path) as cluster:
        worker = await cluster.add()
        worker.hold()
        asked = asyncio.create_task(cluster.http.post("/v1/completions", json=_body("x", rid="r1")))
        await cluster.until(lambda: worker.submits)
        session = cluster.registry.workers[worker.id].session

        def full(_):
            raise Overloaded("full")

        monkeypatch.setattr(session, "abort", full)
        (request_id,) = list(cluster.dispatcher._entries)
        assert cluster.dispatcher.abort(RequestId(request_id))
        await asked
        assert cluster.dispatcher.num_requests == 0
        cluster.dispatcher.check()
        worker.release()
        assert (await cluster.http.post("/v1/completions", json=_body("y"))).status_code == 200


async def test_unsent_messages_are_bounded_in_bytes(tmp_path, monkeypatch):
    """Its worker reads nothing until more waits for it than may wait."""
    async with running_cluster(tmp_path) as cluster:
        worker = await cluster.add()
        worker.hold()
        monkeypatch.setattr(worker_session, "MAX_UNSENT_BYTES", 2000)
        session = cluster.registry.workers[worker.id].session
        num_sent = 0

        def send_for_ever():
            nonlocal num_sent
            while True:  # no turn of the loop between them: the worker, in the same loop, does not read meanwhile
                session.abort(f"{num_sent:01900}")
                num_sent += 1

        with pytest.raises(Overloaded, match=r"\d+ bytes are unsent"):
            send_for_ever()
        await worker.until(lambda: len(worker.aborts) == num_sent)
        session.abort("again")
        await worker.until(lambda: "again" in worker.aborts)
