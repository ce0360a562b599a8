"""Workers that hand nothing over: whoever computes a prompt gives the answer, however much busier it is than others."""

from __future__ import annotations

import pytest

from tanghulu.discovery.base import WHOLE_REQUESTS
from tanghulu.session.load import WorkerLoad
from tanghulu.types import Role
from tests.conductor.fake_worker import FakeWorker


async def _add(cluster, name: str, load: WorkerLoad, attributes: dict[str, str]) -> FakeWorker:
    worker = FakeWorker(name, Role.BOTH, cluster.run_dir)
    worker.load, worker.attributes = load, attributes
    cluster.workers.append(worker)
    await worker.start(cluster.discovery)
    await cluster.until(lambda: worker.id in cluster.registry.workers and cluster.registry.workers[worker.id].usable)
    return worker


@pytest.mark.parametrize("attributes", [{}, {WHOLE_REQUESTS: "yes"}], ids=["hands over", "takes whole requests"])
async def test_a_busy_worker_that_computes_a_prompt_decodes_it_if_it_hands_nothing_over(cluster, attributes):
    decodes = WorkerLoad(blocks_total=1000, blocks_free=10, num_running=200, decode_step_s=1.0)
    computes = WorkerLoad(blocks_total=1000, blocks_free=1000, prefill_tokens_waiting=1_000_000)
    busy, other = await _add(cluster, "a", decodes, attributes), await _add(cluster, "b", computes, attributes)
    seen = (await cluster.http.post("/route", json={"model": "tiny", "prompt": "hello", "max_tokens": 9})).json()
    decoded_by = busy.id if attributes else other.id
    assert (seen["prefill"], seen["decode"]) == (busy.id, decoded_by)
    answer = await cluster.http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 9})
    assert answer.status_code == 200
    assert [submit.hand_over for submit in busy.submits] == [not attributes]


async def test_who_wishes_to_part_the_phases_of_a_whole_request_is_refused(cluster):
    one, two = [await _add(cluster, name, WorkerLoad(), {WHOLE_REQUESTS: "yes"}) for name in ("a", "b")]
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 9}
    for wish in ({"prefill_worker": one.id, "decode_worker": two.id}, {"decode_worker": two.id}):
        answer = await cluster.http.post("/v1/completions", json={**body, "routing": wish})
        assert answer.status_code == 400
        assert "takes requests whole" in answer.text
    for wish in ({"prefill_worker": two.id}, {"worker": two.id}):
        assert (await cluster.http.post("/v1/completions", json={**body, "routing": wish})).status_code == 200
    assert [submit.hand_over for submit in two.submits] == [False, False]
