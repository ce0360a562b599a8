"""A request is served by the model that it began with: workers of another one under its name are no substitute."""

from __future__ import annotations

import asyncio
import zlib

import pytest

from tanghulu.auth.cluster_secret import NO_SECRET, ClusterSecret
from tanghulu.types import Role
from tests.conductor.cluster import Cluster, running_cluster
from tests.conductor.fake_worker import CONTEXT, TEMPLATE, TOKENIZER, FakeWorker

PROMPT = "a prompt of some blocks"


async def _worker(cluster: Cluster, name: str, **card: object) -> FakeWorker:
    """A registered worker whose card differs by ``card``; it may be refused."""
    worker = FakeWorker(name, Role.BOTH, cluster.run_dir)
    worker.card = card
    worker.fingerprint = card.get("fingerprint", worker.fingerprint)
    cluster.workers.append(worker)
    await worker.start(cluster.discovery)
    return worker


async def _ask(cluster: Cluster, prompt: str = PROMPT, **more: object):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}
    return await cluster.http.post("/v1/completions", json=body)


def _usable(cluster: Cluster, worker: FakeWorker) -> bool:
    return worker.id in cluster.registry.workers and cluster.registry.workers[worker.id].usable


def _refusal(cluster: Cluster, worker: FakeWorker) -> str:
    return cluster.registry.workers[worker.id].last_error if worker.id in cluster.registry.workers else ""


async def test_neither_a_begun_nor_a_waiting_request_goes_on_at_another_model_of_its_name(tmp_path):
    async with running_cluster(tmp_path, max_in_flight=1) as cluster:
        old = await _worker(cluster, "old")
        await cluster.until(lambda: _usable(cluster, old))
        old.hold()
        begun = asyncio.create_task(_ask(cluster, stream=True))
        await cluster.until(lambda: old.submits)
        waiting = asyncio.create_task(_ask(cluster))
        await cluster.until(lambda: cluster.dispatcher.num_requests == 2)
        old.step(3)
        await old.until(lambda: old.num_emitted == 3)
        new = await _worker(cluster, "new", fingerprint=b"x" * 16, kv_dtype="int8")
        await cluster.until(lambda: "fingerprint" in _refusal(cluster, new))
        assert "kv_dtype" in _refusal(cluster, new)
        await old.stop()
        assert "replaced" in (await begun).text
        assert (await waiting).status_code == 503
        assert not new.submits
        assert (await _ask(cluster)).status_code == 200
        assert len(new.submits) == 1
        cluster.workers.remove(old)


async def test_workers_that_hash_otherwise_take_over_when_the_last_of_the_others_is_gone(tmp_path):
    async with running_cluster(tmp_path) as cluster:
        old = await _worker(cluster, "old")
        await cluster.until(lambda: _usable(cluster, old))
        new = await _worker(cluster, "new", block_hash="sha256")
        await cluster.until(lambda: "block_hash" in _refusal(cluster, new))
        await old.stop()
        cluster.workers.remove(old)
        await cluster.until(lambda: _usable(cluster, new))
        assert (await _ask(cluster)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        model = cluster.registry.models["tiny"]
        hashes = model.empty_sequence(b"")
        hashes.append(TOKENIZER.encode(PROMPT).ids)
        await cluster.until(lambda: cluster.dispatcher.mirror.hits(hashes.block_hashes).workers.get(new.id))


async def test_a_card_that_differs_in_what_text_is_made_of_is_refused(tmp_path):
    async with running_cluster(tmp_path) as cluster:
        await cluster.add()
        for name, field, value in (
            ("template", "chat_template", TEMPLATE + "x"),
            ("ends", "eos_token", "<|im_end|>"),
            ("tokenizer", "tokenizer_json_zlib", zlib.compress(f"{TOKENIZER.to_str()} ".encode())),
            ("unknown", "block_hash", "md5"),
        ):
            worker = await _worker(cluster, name, **{field: value})
            await cluster.until(lambda w=worker, f=field: f.removesuffix("_json_zlib") in _refusal(cluster, w))
        same = await _worker(cluster, "same", tokenizer_json_zlib=zlib.compress(TOKENIZER.to_str().encode(), 1))
        await cluster.until(lambda: _usable(cluster, same))
        assert len(cluster.registry.usable(cluster.registry.models["tiny"])) == 2


@pytest.mark.parametrize("own", ["", "s" * 32])
async def test_a_worker_with_another_cluster_secret_is_refused(tmp_path, own):
    """It would give its blocks other names, and no prefix would ever be found."""
    ours = ClusterSecret(own)
    async with running_cluster(tmp_path, cluster_secret=own) as cluster:
        for name, theirs in (("other", ClusterSecret("t" * 32)), ("none", NO_SECRET)):
            if theirs == ours:
                continue
            worker = await _worker(cluster, name, secret_check=theirs.check_value)
            await cluster.until(lambda w=worker: "same --cluster-secret" in _refusal(cluster, w))
        same = await _worker(cluster, "same", secret_check=ours.check_value)
        await cluster.until(lambda: _usable(cluster, same))


async def test_a_prompt_goes_to_a_worker_whose_context_holds_it(tmp_path):
    """Their contexts depend on their memory, so they may differ; the model's is the longest there is."""
    async with running_cluster(tmp_path) as cluster:
        small = await _worker(cluster, "small", context_length=64)
        await cluster.until(lambda: _usable(cluster, small))
        assert (await _ask(cluster, "x" * 100)).json()["error"]["code"] == "context_length_exceeded"
        large = await _worker(cluster, "large")
        await cluster.until(lambda: _usable(cluster, large))
        assert cluster.registry.models["tiny"].card.context_length == CONTEXT
        small.submits.clear()
        for number in range(4):
            assert (await _ask(cluster, f"{number}" * 100)).status_code == 200
        assert (len(small.submits), len(large.submits)) == (0, 4)
        await large.stop()
        cluster.workers.remove(large)
        await cluster.until(lambda: cluster.registry.models["tiny"].card.context_length == 64)
        assert (await _ask(cluster, "x" * 100)).json()["error"]["code"] == "context_length_exceeded"


async def test_a_worker_that_comes_back_with_another_model_is_described_anew(tmp_path):
    async with running_cluster(tmp_path) as cluster:
        worker = await _worker(cluster, "worker")
        await cluster.until(lambda: _usable(cluster, worker))
        worker.hold()
        begun = asyncio.create_task(_ask(cluster, stream=True))
        await worker.until(lambda: worker.submits)
        worker.card = {"fingerprint": b"x" * 16}
        worker.release()
        worker.end_sessions()
        assert "replaced" in (await begun).text
        assert len(worker.submits) == 1


async def test_a_model_that_nobody_serves_any_more_is_not_the_default(tmp_path):
    async with running_cluster(tmp_path) as cluster:
        old = await _worker(cluster, "old", model="old")
        await cluster.until(lambda: _usable(cluster, old))
        new = await _worker(cluster, "new", model="new")
        await cluster.until(lambda: _usable(cluster, new))
        await old.stop()
        cluster.workers.remove(old)
        await cluster.until(lambda: old.id not in cluster.registry.workers)
        answer = await cluster.http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 2}})
        assert answer.status_code == 200
        assert (await cluster.http.get("/model_info")).json()["model_path"] == "new"
        assert (await _ask(cluster)).json()["error"]["message"].endswith("this cluster serves new")
