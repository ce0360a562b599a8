"""From a client's HTTP request to workers and back: streams, hand-over, moves, hang-ups."""

from __future__ import annotations

import asyncio
import json

import pytest

from tanghulu.rpc.wire import Failure
from tanghulu.session.messages import Submit
from tanghulu.types import Role
from tests.conductor.cluster import running_cluster
from tests.conductor.fake_worker import BLOCK_TOKENS, EOS, TOKENIZER, FakeWorker

TEXT = "Hello, wörld! "
NUM_TOKENS = len(TOKENIZER.encode(TEXT).ids)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
LONG = {"model": "tiny", "prompt": "a long prompt", "max_tokens": 40, "ignore_eos": True}
LONG_TEXT = TOKENIZER.decode((TOKENIZER.encode(TEXT).ids * 4)[:40])


def events(text: str) -> list[dict]:
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def stream(cluster, body: dict) -> tuple[str, str, dict]:
    """(text, finish reason, usage) of a streamed completion."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = await cluster.http.post("/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    chunks = events(response.text)
    assert "error" not in chunks[-1], chunks[-1]
    text = "".join(c["choices"][0]["text"] for c in chunks[:-1])
    return text, chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]


async def test_a_chat_streams(cluster):
    await cluster.add()
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    response = await cluster.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == TEXT
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "stop"
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == NUM_TOKENS + 1  # with the end-of-sequence token
    assert usage["total_tokens"] == usage["prompt_tokens"] + NUM_TOKENS + 1
    assert all(c["usage"] is None for c in chunks[:-1])
    assert cluster.metric("requests_total", outcome="stop") == 1
    assert cluster.metric("ttft_seconds_count") == 1
    assert cluster.metric("tbt_seconds_count") == NUM_TOKENS
    assert cluster.metric("generated_tokens_total") == NUM_TOKENS + 1


async def test_the_first_token_streams_before_the_second_exists(cluster):
    worker = await cluster.add()
    worker.hold()
    worker.step()
    async with cluster.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.aiter_lines()
        first = json.loads((await anext(lines)).removeprefix("data: "))
        assert first["choices"][0]["text"] == "H"
        assert worker.num_emitted == 1
        worker.release()
        assert [line async for line in lines][-2] == "data: [DONE]"


async def test_prefill_hands_over_to_decode(cluster):
    prefill = await cluster.add(Role.PREFILL)
    decode = await cluster.add(Role.DECODE)
    text, reason, usage = await stream(cluster, LONG)
    assert (text, reason, usage["completion_tokens"]) == (LONG_TEXT, "length", 40)
    (first,), (second,) = prefill.submits, decode.submits
    assert first.hand_over
    assert not second.hand_over
    assert second.source.instance_id == prefill.id
    assert second.source.export_id == 101
    assert second.num_prompt_tokens == first.num_prompt_tokens == usage["prompt_tokens"]
    assert len(second.tokens) == len(first.tokens) + 4
    assert prefill.releases == []
    assert cluster.metric("hand_overs_total") == 1


@pytest.mark.parametrize("is_lost", [False, True])
async def test_the_decode_worker_is_the_one_that_was_reserved_unless_it_is_lost(cluster, is_lost):
    prefill, decoders = await cluster.add(Role.PREFILL), [await cluster.add(Role.DECODE) for _ in range(2)]
    prefill.hold()
    answer = asyncio.create_task(stream(cluster, LONG))
    await prefill.until(lambda: len(prefill.submits) == 1)
    loads = {worker.id: cluster.registry.workers[worker.id].load for worker in decoders}
    reserved, other = sorted(
        decoders, key=lambda worker: not loads[worker.id].view(worker.id, worker.role, 0).coming_requests
    )
    if is_lost:
        await reserved.stop()
        await cluster.until(lambda: reserved.id not in cluster.registry.workers)
    else:  # it would not be chosen anew
        reserved.reports(num_running=900, blocks_free=1)
        reserved.report()
        await cluster.until(lambda: loads[reserved.id].reported.num_running == 900)
    prefill.release()
    assert (await answer)[0] == LONG_TEXT
    taken = other if is_lost else reserved
    assert [len(worker.submits) for worker in decoders] == [int(worker is taken) for worker in decoders]


async def test_a_hand_over_names_who_else_has_the_prompt(cluster):
    """Whom to ask where the KV is gone: neither the prefill worker, which is asked first, nor the decode worker."""
    prefill, decode = await cluster.add(Role.PREFILL), await cluster.add(Role.DECODE)
    other = await cluster.add(Role.PREFILL)
    body = {"model": "tiny", "prompt": "a prompt of some blocks", "max_tokens": 3}

    async def ask(worker: FakeWorker) -> Submit:
        answer = await cluster.http.post("/v1/completions", json=body | {"routing": {"prefill_worker": worker.id}})
        assert answer.status_code == 200, answer.text
        return decode.submits[-1]

    alone = await ask(other)
    assert alone.source is not None
    assert alone.holder is None
    both = await ask(prefill)
    assert both.source.instance_id == prefill.id
    assert both.holder.address == str(other.instance.address)
    assert both.holder.num_blocks == prefill.submits[-1].num_prompt_tokens // BLOCK_TOKENS


async def test_a_failed_hand_over_releases_the_export_and_the_text_is_whole(cluster):
    prefill = await cluster.add(Role.PREFILL)
    decode = await cluster.add(Role.DECODE)
    decode.fail_sources = True
    text, reason, usage = await stream(cluster, LONG)
    assert (text, reason, usage["completion_tokens"]) == (LONG_TEXT, "length", 40)
    await prefill.until(lambda: prefill.releases == [101])
    assert cluster.migrations("ongoing_request", "resumed") == 1


async def test_one_kind_alone_does_both(cluster):
    decode = await cluster.add(Role.DECODE)
    assert (await stream(cluster, LONG))[0] == LONG_TEXT
    assert not decode.submits[0].hand_over


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
async def test_a_worker_that_dies_mid_stream_is_not_noticed(cluster, num_tokens):
    first = await cluster.add()
    first.die_after_tokens = num_tokens
    worker = await cluster.add()
    first.reports(blocks_free=1000)
    worker.reports(prefill_tokens_waiting=10_000)  # the first one is asked first
    text, reason, usage = await stream(cluster, LONG)
    assert (text, reason) == (LONG_TEXT, "length")
    assert usage["completion_tokens"] == 40
    assert first.num_emitted + worker.num_emitted == 40
    moved = worker.submits[-1]
    assert moved.num_prompt_tokens == usage["prompt_tokens"]
    assert len(moved.tokens) // 4 == usage["prompt_tokens"] + first.num_emitted
    kind = "ongoing_request" if num_tokens else "new_request"
    assert cluster.migrations(kind, "resumed") == (1 if first.submits else 0)


async def test_both_phases_may_die(cluster):
    prefill = await cluster.add(Role.PREFILL)
    decode = await cluster.add(Role.DECODE)
    spare = await cluster.add(Role.DECODE)
    decode.die_after_tokens = 3
    spare.die_after_tokens = 4
    text, _, usage = await stream(cluster, LONG)
    assert text == LONG_TEXT
    assert usage["completion_tokens"] == 40
    assert {len(w.submits) > 0 for w in (prefill, decode, spare)} == {True}


async def test_moving_is_bounded(tmp_path):
    async with running_cluster(tmp_path, max_redispatches=2) as cluster:
        worker = await cluster.add()
        worker.fail_with = Failure("NODE_UNAVAILABLE", "my store is gone")
        response = await cluster.http.post("/v1/completions", json=LONG)
        assert response.status_code == 503
        assert "moved 2 times without a new token" in response.json()["error"]["message"]
        assert len(worker.submits) == 3


async def test_an_error_behind_the_first_token_is_an_event(tmp_path):
    async with running_cluster(tmp_path, max_redispatches=0) as cluster:
        worker = await cluster.add()
        worker.die_after_tokens = 3
        response = await cluster.http.post("/v1/completions", json={**LONG, "stream": True})
        assert response.status_code == 200
        assert events(response.text)[-1]["error"]["code"] == "node_unavailable"


async def test_a_request_waits_for_a_worker_to_come_back(cluster):
    worker = await cluster.add()
    await worker.stop()
    await cluster.until(lambda: not cluster.registry.workers)
    asked = asyncio.create_task(stream(cluster, LONG))
    await cluster.until(lambda: cluster.dispatcher.num_requests == 1)
    assert (await cluster.http.get("/ready")).status_code == 503
    await cluster.add()
    assert (await asked)[0] == LONG_TEXT


async def test_no_worker_comes(tmp_path):
    async with running_cluster(tmp_path, queue_timeout_s=0.05) as cluster:
        early = await cluster.http.post("/v1/completions", json=LONG)
        assert early.status_code == 503
        worker = await cluster.add()
        await worker.stop()
        await cluster.until(lambda: not cluster.registry.workers)
        response = await cluster.http.post("/v1/completions", json={**LONG, "stream": True})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "no worker" in response.json()["error"]["message"]


async def test_a_worker_that_leaves_finishes_what_it_has(cluster):
    leaving = await cluster.add()
    leaving.hold()
    asked = asyncio.create_task(stream(cluster, LONG))
    await leaving.until(lambda: leaving.num_running == 1)
    await leaving.unregister()
    await cluster.until(lambda: cluster.registry.workers[leaving.id].leaving)
    other = await cluster.add()
    leaving.release()
    assert (await asked)[0] == LONG_TEXT
    assert not other.submits
    assert (await stream(cluster, LONG))[0] == LONG_TEXT
    assert len(other.submits) == 1


async def test_a_worker_that_leaves_is_not_silent_between_two_of_its_beats(cluster):
    """A step may take as long as a beat, and a beat come late: both are no hang."""
    leaving = await cluster.add()
    leaving.beat_s = 30.0
    leaving.end_sessions()
    await cluster.until(lambda: cluster.registry.workers[leaving.id].beat_s == 30.0)
    leaving.hold()
    asked = asyncio.create_task(stream(cluster, LONG))
    await leaving.until(lambda: leaving.num_running == 1)
    await leaving.unregister()
    known = cluster.registry.workers[leaving.id]
    await cluster.until(lambda: known.leaving)
    patience_s = known.silence.when() - asyncio.get_running_loop().time()
    leaving.release()
    assert (await asked)[0] == LONG_TEXT
    assert patience_s > 30.0


async def test_a_hung_worker_is_left_when_its_lease_is_over(cluster):
    hung = await cluster.add()
    hung.hold()
    asked = asyncio.create_task(stream(cluster, LONG))
    await hung.until(lambda: hung.num_running == 1)
    hung.step(3)
    await hung.until(lambda: hung.num_emitted == 3)
    await cluster.add()
    await hung.unregister()
    text, _, usage = await asked
    assert (text, usage["completion_tokens"]) == (LONG_TEXT, 40)
    assert hung.id not in cluster.registry.workers


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_hangs_up_ends_its_request_at_the_worker(cluster, streaming):
    worker = await cluster.add()
    worker.hold()
    asked = asyncio.create_task(cluster.http.post("/v1/completions", json={**LONG, "stream": streaming}))
    await worker.until(lambda: worker.num_running == 1)
    worker.step(2)
    await worker.until(lambda: worker.num_emitted == 2)
    asked.cancel()
    await worker.until(lambda: worker.aborts == [worker.submits[0].request_id])
    assert cluster.dispatcher.num_requests == 0
    assert not cluster.conductor.service.calls
    assert cluster.metric("requests_total", outcome="abort") == 1


async def test_a_client_that_hangs_up_while_it_waits_leaves_the_queue(tmp_path):
    async with running_cluster(tmp_path, max_in_flight=1) as cluster:
        worker = await cluster.add()
        worker.hold()
        first = asyncio.create_task(stream(cluster, LONG))
        await worker.until(lambda: worker.num_running == 1)
        second = asyncio.create_task(stream(cluster, LONG))
        await cluster.until(lambda: cluster.dispatcher.num_requests == 2)
        cluster.dispatcher.check()
        second.cancel()
        await cluster.until(lambda: cluster.dispatcher.num_requests == 1)
        worker.release()
        assert (await first)[0] == LONG_TEXT
        assert len(worker.submits) == 1


async def test_the_queue_is_bounded(tmp_path):
    async with running_cluster(tmp_path, max_in_flight=1, max_queued=1) as cluster:
        worker = await cluster.add()
        worker.hold()
        asked = [asyncio.create_task(stream(cluster, LONG)) for _ in range(2)]
        await cluster.until(lambda: cluster.dispatcher.num_requests == 2)
        refused = await cluster.http.post("/v1/completions", json=LONG)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "overloaded"
        worker.release()
        assert [a[0] for a in await asyncio.gather(*asked)] == [LONG_TEXT] * 2


async def test_a_stop_string_over_chunk_borders_does_not_leak_and_stops_the_worker(cluster):
    worker = await cluster.add()
    worker.hold()
    asked = asyncio.create_task(stream(cluster, {**LONG, "stop": ["wör", "never"]}))
    await worker.until(lambda: worker.num_running == 1)
    stop_at = len(TOKENIZER.encode("Hello, wör").ids)
    worker.step(stop_at)
    text, reason, usage = await asked
    assert (text, reason) == ("Hello, ", "stop")
    assert usage["completion_tokens"] == stop_at
    await worker.until(lambda: worker.aborts)


async def test_stop_tokens_and_held_back_text(cluster):
    await cluster.add()
    comma = TOKENIZER.token_to_id(",")
    text, reason, usage = await stream(cluster, {**LONG, "stop_token_ids": [comma]})
    assert (text, reason, usage["completion_tokens"]) == ("Hello", "stop", 5)
    assert (await stream(cluster, {**LONG, "max_tokens": 6, "stop": "lo, world"}))[0] == "Hello, "
    assert TOKENIZER.encode("Hello").ids[0] != EOS


async def test_a_gap_in_the_events_brings_a_new_snapshot_and_moves_no_request(cluster):
    worker = await cluster.add()
    await stream(cluster, LONG)
    worker.skip_sequence = 1
    text, _, usage = await stream(cluster, {**LONG, "prompt": "another prompt"})
    assert (text, usage["completion_tokens"]) == (LONG_TEXT, 40)
    await cluster.until(lambda: cluster.dispatcher.mirror.workers.num_blocks == len(worker.cached))
    assert (len(worker.submits), len(worker.sessions)) == (2, 1)


async def test_cached_tokens_are_told_and_routing_prefers_who_has_them(cluster):
    one, two = await cluster.add(), await cluster.add()
    prompt = "a prompt of some blocks, long enough to be worth it"
    _, _, cold = await stream(cluster, {**LONG, "prompt": prompt})
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    _, _, warm = await stream(cluster, {**LONG, "prompt": prompt})
    assert warm["prompt_tokens_details"]["cached_tokens"] == warm["prompt_tokens"] // 4 * 4
    assert sorted(len(w.submits) for w in (one, two)) == [0, 2]
    assert (await cluster.http.post("/flush_cache")).json()["num_blocks"] > 0
    assert (one.dropped, two.dropped) == (1, 1)
    await cluster.until(lambda: cluster.dispatcher.mirror.workers.num_blocks == 0)


async def test_a_worker_of_other_weights_is_not_mixed_in(cluster):
    await cluster.add()
    other = FakeWorker("other", Role.BOTH, cluster.run_dir)
    other.fingerprint = b"x" * 16
    cluster.workers.append(other)
    await other.start(cluster.discovery)
    await cluster.until(lambda: other.id in cluster.registry.workers and cluster.registry.workers[other.id].last_error)
    assert "fingerprint" in cluster.registry.workers[other.id].last_error
    assert (await stream(cluster, LONG))[0] == LONG_TEXT
    assert not other.submits


async def test_a_submission_counts_until_a_report_says_that_it_holds_it(cluster):
    worker = await cluster.add()
    worker.hold()
    worker.taken = 0
    asked = [asyncio.create_task(stream(cluster, {**LONG, "prompt": "x" * 40})) for _ in range(2)]
    await worker.until(lambda: len(worker.submits) == 2)
    load = cluster.registry.workers[worker.id].load
    for running in (1, 2, 3):
        worker.reports(num_running=running)
        worker.report()
    await cluster.until(lambda: load.reported.num_running == 3)
    assert load.view(worker.id, Role.BOTH, 0).num_requests == 5
    worker.taken = 1
    worker.reports(num_running=4)
    worker.report()
    await cluster.until(lambda: load.reported.num_running == 4)
    assert load.view(worker.id, Role.BOTH, 0).num_requests == 5
    worker.release()
    await asyncio.gather(*asked)
