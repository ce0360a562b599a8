"""The cache of an engine server as the conductor sees it: by its KV events, or assumed without any."""

from __future__ import annotations

import asyncio

import pytest

from tanghulu.conductor.engines.dialect import EngineCall
from tanghulu.conductor.engines.names import BlockNames, NamingDecoder
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.hashing import TokenSequence, as_tokens
from tanghulu.session.model_card import ModelCard
from tanghulu.session.outputs import KvChange
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import Fingerprint, RequestId
from tests.conductor.engines.fake_vllm import FakeEvents, FakeVllm

CARD = ModelCard("m", Fingerprint(bytes(16)), "xxh3_128", 4, 512, 300, (), b"", "", "", "", False, 0)
LONG = "the rain in Spain stays mainly in the plain"


def with_events(folder, num: int = 1) -> list[FakeVllm]:
    pytest.importorskip("zmq")
    made = [FakeVllm(folder) for _ in range(num)]
    for each in made:
        each.events = FakeEvents()
    return made


async def known_blocks(front, server: FakeVllm, prompt: str = LONG) -> int:
    answer = await front.cluster.http.post("/route", json={"model": "tiny", "prompt": prompt, "max_tokens": 1})
    return answer.json()["hit_blocks"]["workers"].get(f"127.0.0.1:{server.port}", 0)


async def until_known(front, server: FakeVllm, prompt: str = LONG) -> int:
    async with asyncio.timeout(30):
        while not (num := await known_blocks(front, server, prompt)):  # noqa: ASYNC110 - it has no hook for tests
            await asyncio.sleep(0.005)
    return num


async def test_second_turn_goes_where_the_first_was(fronts, folder):
    async with fronts(servers=with_events(folder, 2), policy="linear") as front:  # speeds of a busy machine aside
        await front.up()
        first = await front.complete(LONG)
        (where,) = [each for each in front.servers if each.requests]
        await until_known(front, where)
        turn = LONG + first["choices"][0]["text"]
        second = await front.complete(turn + " and more")
        assert len(where.requests) == 2
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 4 * (len(where.requests[0]["prompt"]) // 4)
        assert where.requests[1].get("vllm_xargs") is None


async def test_contents_from_before_are_replayed(fronts, folder):
    (server,) = with_events(folder)
    for at in range(3):
        server._keep(list(range(at, at + 8)), {})
    async with fronts(servers=[server]) as front:
        await front.up()
        await front.complete(LONG)
        await until_known(front, server)
        worker = front.cluster.registry.workers[f"127.0.0.1:{server.port}"]
        assert len(worker.session._known.names.held) == len(server.cached)


async def test_lost_events_have_the_cache_reported_anew(fronts, folder):
    (server,) = with_events(folder)
    server.events.sent += [b""] * 3
    server.events.replay_endpoint = ""
    async with fronts(servers=[server]) as front:
        await front.up()
        await front.complete(LONG)
        assert server.requests[0]["vllm_xargs"] == {"kv_cache_report_mode": "full"}


async def test_without_events_the_cache_is_assumed(fronts):
    async with fronts(2) as front:
        await front.up()
        await front.complete(LONG)
        (where,) = [each for each in front.servers if each.requests]
        assert await until_known(front, where)
        for _ in range(3):
            await front.complete(LONG)
        assert len(where.requests) == 4


async def test_dropped_cache_is_forgotten(fronts):
    async with fronts() as front:
        await front.up()
        await front.complete(LONG)
        await until_known(front, front.servers[0])
        answer = await front.cluster.http.post("/flush_cache")
        assert answer.status_code == 200
        assert not front.servers[0].cached
        assert not await known_blocks(front, front.servers[0])


# --- names, pure


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **more: object) -> dict:
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": 4}
    return {"type": "BlockStored", "medium": "GPU", **fields, **more}


def own_names(names: BlockNames, tokens: list[int], salt: bytes = b"") -> list[bytes]:
    return TokenSequence(names.root(salt), 4, tokens).block_hashes


def decoded(names: BlockNames, *events: dict) -> list[KvChange]:
    return NamingDecoder(names).decode([0.0, list(events), 0])


def test_blocks_are_named_by_their_tokens():
    names = BlockNames(CARD, 100)
    tokens = list(range(16))
    first, second = decoded(names, stored([7, 9], tokens[:8]), stored([3, 4], tokens[8:], 9))
    assert [*first.stored, *second.stored] == own_names(names, tokens)
    (removed,) = decoded(names, {"type": "BlockRemoved", "medium": "GPU", "block_hashes": [9, 1234]})
    assert list(removed.removed) == own_names(names, tokens)[1:2]


def test_tenants_blocks_are_named_apart():
    names = BlockNames(CARD, 100, b"key")
    salt = names.cache_salt(b"tenant")
    assert salt != names.cache_salt(b"other") != names.cache_salt(b"")
    keys = {"extra_keys": [[salt], None]}
    first, more = decoded(names, stored([7, 9], list(range(8)), **keys), stored([3], list(range(8, 12)), 9))
    assert [*first.stored, *more.stored] == own_names(names, list(range(12)), b"tenant")
    (foreign,) = decoded(names, stored([5], [1, 2, 3, 4], extra_keys=[["somebody's own salt"]]))
    assert foreign == KvChange()


@pytest.mark.parametrize(
    "event",
    [
        stored([7], [1, 2, 3], block_size=3),
        stored([7], [], block_size=0),
        stored([7], [1, 2, 3, 4], parent=99),
        stored([7], [1, 2, 3, 4], lora_name="a", extra_keys=[["a"]]),
        stored([7, 8], [*range(8)], extra_keys=[None, [["image", 3]]]),
        stored([7], [(1, 2), (2, 3)], block_size=4),
    ],
)
def test_blocks_that_cannot_be_named_are_skipped(event):
    assert decoded(BlockNames(CARD, 100), event) == [KvChange()]


def test_an_adapters_blocks_are_its_own():
    names = BlockNames(CARD, 100, adapter="a")
    event = stored([7, 8], [*range(8)], lora_name="a", extra_keys=[["a"], ["a"]])
    (change,) = decoded(names, event)
    assert list(change.stored) == own_names(names, [*range(8)])
    assert decoded(names, stored([7], [1, 2, 3, 4])) == [KvChange()]


# --- a moved request's penalties


def test_frequency_penalty_goes_on_as_a_bias():
    prompt = as_tokens([1, 2])
    sampling = Sampling(frequency_penalty=0.5, logit_bias={7: 1.0})
    request = GenerationRequest(RequestId("r"), "m", prompt, sampling, StopRule(9, min_tokens=5))
    call = EngineCall(request, "r.2", as_tokens([1, 2, 7, 8, 7]), 3, "", "m")
    sent = call.sampling()
    assert sent["logit_bias"] == {7: 0.0, 8: -0.5}
    assert (sent["max_tokens"], sent["min_tokens"]) == (6, 2)
    assert EngineCall(request, "r.1", prompt, 0, "", "m").sampling()["logit_bias"] == {7: 1.0}
