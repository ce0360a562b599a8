"""Twelve causes, injected into a cluster of virtual workers behind the real dispatcher, and what is said of them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from tanghulu.conductor.explain import explainer as explaining
from tanghulu.conductor.explain.explainer import Explainer
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.conductor.stories.account import Audience, Cause, Source
from tanghulu.errors import NodeUnavailable
from tanghulu.hashing import as_tokens
from tanghulu.store.directory_feed import DirectoryEvent, DirectoryEventKind
from tanghulu.types import RequestId, kv_chunk_key
from tests.conductor.virtual_workers import BLOCK_TOKENS, VirtualCluster

SIZE = BLOCK_TOKENS


class Explained(VirtualCluster):
    """A cluster whose requests are explained, one after the other."""

    def __init__(self, num_workers: int = 1, num_blocks: int = 1000, max_bytes: int = 64 << 20) -> None:
        super().__init__("ttft-min", num_workers, num_blocks)
        self.explainer = Explainer(self.dispatcher, max_bytes, ConductorMetrics(CollectorRegistry()), shows_text=False)
        self.number = 0
        self.stream = None

    def start(self, prompt, num_tokens: int = 2, **fields):
        """Submit a prompt, and return its story."""
        self.number += 1
        fields.setdefault("client", "key a")
        self.stream = self.ask(self.number, as_tokens(prompt), num_tokens, lambda cached: None, **fields)
        return self.stream.story

    def runs(self, prompt, audience: Audience = Audience.ADMIN, **fields):
        """Serve a prompt; return its runs as (why, tokens, certain, detail)."""
        story = self.start(prompt, **fields)
        self.time.run()
        self.check()
        explained = story.explanation
        assert sum(run.tokens for run in explained.runs) == len(prompt)
        return [
            (run.get("source") or run["cause"], run["tokens"], run.get("certain", True), run.get("detail", {}))
            for run in explained.shown(audience)["runs"]
        ]


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, num_tokens).tolist()


def brief(runs):
    return [(why, tokens) for why, tokens, _, _ in runs]


@pytest.fixture
async def cluster():
    return Explained()


async def test_a_first_prompt_is_new(cluster):
    assert cluster.runs(prompt_of(1, 200)) == [("new", 192, True, {}), ("tail", 8, True, {})]


async def test_a_repeated_prompt_is_in_the_cache_but_for_its_tail(cluster):
    cluster.runs(prompt_of(1, 200))
    assert brief(cluster.runs(prompt_of(1, 200))) == [("worker", 192), ("tail", 8)]


async def test_of_a_prompt_of_whole_blocks_the_last_one_is_computed(cluster):
    cluster.runs(prompt_of(1, 192))
    assert brief(cluster.runs(prompt_of(1, 192))) == [("worker", 128), ("tail", 64)]


async def test_a_prompt_that_continues_another_is_new_behind_it(cluster):
    cluster.runs(prompt_of(1, 200))
    longer = prompt_of(1, 200) + prompt_of(2, 200)
    # The first has its answer behind token 200, the second goes on in another way.
    why = cluster.runs(longer)
    assert brief(why) == [("worker", 192), ("diverged", 192), ("tail", 16)]
    assert why[1][3]["token"] == 200


async def test_a_prompt_diverges_at_a_token(cluster):
    cluster.runs(prompt_of(1, 400))
    other = prompt_of(1, 400)
    other[150] += 1
    _, run, _ = cluster.runs(other)
    assert run[:3] == ("diverged", 256, True)
    assert (run[3]["block"], run[3]["token"]) == (2, 150)


@pytest.mark.parametrize(
    ("num_ours", "client", "cause"),
    [(2, "key a", "diverged"), (5, "key a", "diverged"), (40, "key a", "new"), (2, "key b", "new")],
)
async def test_a_time_of_day_opens_the_prompt(cluster, num_ours, client, cause):
    opening, rest = prompt_of(1, 6), prompt_of(2, 400)
    cluster.runs([*opening, 250, 251, *rest])
    run, _ = cluster.runs([*opening, *[252] * num_ours, *rest], client=client)
    assert run[0] == cause
    if cause == "diverged":
        assert (run[3]["block"], run[3]["token"]) == (0, 6)


async def test_another_client_is_told_the_block_alone(cluster):
    cluster.runs(prompt_of(1, 400))
    other = prompt_of(1, 400)
    other[150] += 1
    _, run, _ = cluster.runs(other, Audience.OPERATOR, client="key b")
    assert run == ("diverged", 256, True, {"block": 2})


async def test_another_salt_gives_another_name(cluster):
    cluster.runs(prompt_of(1, 400), salt=b"one")
    longer = prompt_of(1, 200) + prompt_of(2, 100)
    runs = cluster.runs(longer, salt=b"two")
    assert [run[:3] for run in runs] == [("other_name", 192, True), ("new", 64, True), ("tail", 44, True)]
    assert runs[0][3] == {"differs": ["salt"]}


@pytest.mark.parametrize("num_shared", [0, 200, 400])
@pytest.mark.parametrize("earlier", ["nothing", "a prompt that begins alike", "the same prompt under another salt"])
async def test_prompts_of_other_clients_change_nothing_of_one_s_explanation(num_shared, earlier):
    prompt, explained = prompt_of(1, 400), []
    for others in (0, 2):
        cluster = Explained()
        if earlier != "nothing":
            mine = prompt[:300] if "same" in earlier else prompt[:10] + prompt_of(3, 100)
            cluster.runs(mine, salt=b"mine" if "same" in earlier else b"two", client="key b")
        for number in range(others):
            cluster.runs(prompt[:num_shared] + prompt_of(2 + number, 400 - num_shared), salt=b"%d" % number)
        explained.append(cluster.runs(prompt, Audience.OPERATOR, salt=b"two", client="key b"))
        if others and num_shared and earlier == "nothing":
            shown = cluster.stream.story.explanation.shown(Audience.ADMIN)["runs"]
            assert shown[0]["cause"] == "other_name", "administrators see it"
    assert explained[0] == explained[1]


async def test_an_evicted_prefix_names_who_needed_the_room():
    cluster = Explained(num_blocks=20)
    cluster.runs(prompt_of(1, 640))
    cluster.time.after(60.0, lambda: None)
    cluster.time.run()
    cluster.runs(prompt_of(2, 1270))
    evicted, tail = cluster.runs(prompt_of(1, 640))
    assert evicted[:3] == ("evicted", 576, True)
    detail = evicted[3]
    assert (detail["where"], detail["tier"], detail["pressure"], detail["uses"]) == ("worker-0", "worker", "r2", 1)
    assert detail["age_s"] >= 60
    assert tail[0] == "tail"


async def test_what_left_with_its_worker_is_evicted():
    cluster = Explained(num_workers=2)
    first = cluster.start(prompt_of(1, 640))
    cluster.time.run()
    gone = first.visits[0].worker
    worker = cluster.dispatcher.registry.workers[gone]
    cluster.dispatcher.worker_lost(worker, NodeUnavailable("it is gone"))
    worker.leaving = True
    cluster.dispatcher.registry._changed()
    (evicted, *_) = cluster.runs(prompt_of(1, 640))
    assert evicted[:2] == ("evicted", 576)
    assert (evicted[3]["where"], evicted[3]["why"]) == (gone, "it went away")


async def test_blocks_of_an_aborted_request_were_not_kept(cluster):
    cluster.start(prompt_of(1, 640))
    cluster.dispatcher.abort(RequestId("r1"))
    cluster.time.run()
    (run, _) = cluster.runs(prompt_of(1, 640))
    assert run[:3] == ("not_kept", 576, True)
    assert run[3] == {"rule": "the request that was to compute it has aborted"}


async def test_a_failed_load_is_named():
    cluster = Explained(num_workers=2)
    _, reader = _busy_holder(cluster)
    reader.fails = "NODE_UNAVAILABLE"
    runs = cluster.runs(prompt_of(1, 6400))
    assert runs[0][0] == "load_failed", runs
    assert runs[0][3] == {"source": "peer", "error": "NODE_UNAVAILABLE"}


async def test_what_is_loaded_from_a_peer_is_a_source():
    cluster = Explained(num_workers=2)
    _busy_holder(cluster)
    assert brief(cluster.runs(prompt_of(1, 6400)))[0] == ("peer", 6336)


def _busy_holder(cluster: Explained):
    """Have one worker hold a prompt, and be busy with so much that the other one will fetch it."""
    first = cluster.start(prompt_of(1, 6400))
    cluster.time.run()
    holder = next(w for w in cluster.workers if w.registered.id == first.visits[0].worker)
    reader = next(w for w in cluster.workers if w is not holder)
    for worker in cluster.workers:
        load = worker.registered.load
        load.reset(_with_peers(load.reported, waits=worker is holder))
    return holder, reader


def _with_peers(load, *, waits: bool):
    tokens = 400_000 if waits else 0
    return structs.replace(
        load, peer_bytes_per_s=50e9, prefill_tokens_waiting=tokens, prefill_pairs_waiting=tokens * tokens // 8
    )


async def test_what_was_elsewhere_and_not_worth_fetching():
    cluster = Explained(num_workers=2)
    holder, _ = _busy_holder(cluster)
    for worker in cluster.workers:  # nobody can fetch from another
        load = worker.registered.load
        load.reset(_without_peers(load.reported))
    runs = cluster.runs(prompt_of(1, 6400))
    assert runs[0][:3] == ("not_worth_fetching", 6336, True), runs
    detail = runs[0][3]
    assert detail["holder"] == holder.registered.id
    assert detail["there_s"] > detail["here_s"] > 0


def _without_peers(load):
    return structs.replace(load, peer_bytes_per_s=0.0)


async def test_what_the_store_has_evicted():
    cluster = Explained(num_workers=1, num_blocks=20)
    keys = _only_in_store(cluster, prompt_of(1, 640))
    cluster.dispatcher.mirror.directory_event(DirectoryEvent(1, DirectoryEventKind.REMOVED, "node-1", keys))
    evicted, _ = cluster.runs(prompt_of(1, 640))
    assert evicted[:3] == ("evicted", 576, True)
    assert (evicted[3]["where"], evicted[3]["tier"]) == ("node-1", "store")


async def test_blocks_behind_an_evicted_one_are_evicted():
    """The first five leave the store once the request is routed, and nobody knows why the others were not loaded."""
    cluster = Explained(num_workers=1, num_blocks=20)
    keys = _only_in_store(cluster, prompt_of(1, 640))
    story = cluster.start(prompt_of(1, 640))
    cluster.dispatcher.mirror.directory_event(DirectoryEvent(1, DirectoryEventKind.REMOVED, "node-1", keys[:5]))
    cluster.time.run()
    evicted, _ = story.explanation.shown(Audience.ADMIN)["runs"]
    assert (evicted["cause"], evicted["tokens"], evicted["certain"]) == ("evicted", 576, True)
    assert evicted["detail"]["where"] == "node-1"


def _only_in_store(cluster: Explained, prompt):
    """Serve ``prompt``, store it, and push it out of the worker's cache; returns its keys."""
    cluster.runs(prompt)
    sequence = cluster.model.empty_sequence(b"")
    sequence.append(as_tokens(prompt))
    keys = tuple(kv_chunk_key(cluster.model.card.fingerprint, name, 0) for name in sequence.block_hashes)
    cluster.dispatcher.mirror.directory_event(DirectoryEvent(1, DirectoryEventKind.STORED, "node-1", keys))
    cluster.runs(prompt_of(2, 1270))
    return keys


async def test_a_forgotten_prompt_leaves_nothing_certain():
    cluster = Explained(num_blocks=20, max_bytes=20_000)
    for seed in range(20):
        cluster.runs(prompt_of(seed, 640))
    assert cluster.explainer.history.forgotten_s
    assert cluster.runs(prompt_of(99, 640))[0] == ("new", 576, False, {})


async def test_a_worker_that_joins_with_blocks_of_before_leaves_nothing_certain(cluster):
    cluster.explainer.joined((b"x" * 16,))
    assert cluster.runs(prompt_of(1, 640))[0] == ("new", 576, False, {})


@pytest.mark.parametrize("seed", range(4))
async def test_runs_add_up_whatever_happens(seed, monkeypatch):
    monkeypatch.setattr(explaining, "_LOOK_S", 0.0)
    rng, cluster = Random(seed), Explained(num_workers=3, num_blocks=60, max_bytes=1 << 20)
    prompts = [prompt_of(0, 300)]
    stories = []
    for number in range(120):
        base = rng.choice(prompts[-12:])
        prompts.append(base[: rng.randrange(1, len(base) + 1)] + prompt_of(number, rng.randrange(1, 400)))
        del prompts[-1][1500:]
        stories.append(cluster.start(prompts[-1], salt=rng.choice((b"", b"s"))))
        if rng.random() < 0.1:
            cluster.dispatcher.abort(RequestId(f"r{cluster.number}"))
        if rng.random() < 0.5:
            cluster.time.run()
    cluster.time.run()
    explained = [story.explanation for story in stories if story.explanation is not None]
    assert len(explained) > 90
    for each in explained:
        assert sum(run.tokens for run in each.runs) == each.prompt_tokens
        assert [run.start for run in each.runs] == np.cumsum([0, *(r.tokens for r in each.runs)])[:-1].tolist()
    seen = {run.why for each in explained for run in each.runs}
    assert seen >= {Cause.NEW, Cause.DIVERGED, Cause.TAIL, Source.WORKER}
    cluster.explainer.check()
