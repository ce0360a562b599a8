"""Causes of cache misses at a plain vLLM server, known from its KV events and its number of cached tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.conductor.engines.fake_vllm import BLOCK, FakeVllm
from tests.conductor.engines.test_cache import known_blocks, until_known, with_events
from tests.conductor.fake_worker import TOKENIZER

PROMPT = "the rain in Spain stays mainly in the plain, and so does the sun"
TOKENS = TOKENIZER.encode(PROMPT).ids
#: Tokens in whole blocks, without the last token, which is always computed.
NAMED = (len(TOKENS) - 1) // BLOCK * BLOCK


async def runs_of(front: Any, prompt: str) -> list[dict[str, Any]]:
    answer = await front.complete(prompt, explain_cache=True)
    explained = answer["cache_explanation"]
    assert sum(run["tokens"] for run in explained["runs"]) == explained["prompt_tokens"]
    return explained["runs"]


def brief(runs: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(run.get("source") or run["cause"], run["tokens"]) for run in runs]


def evict(server: FakeVllm) -> None:
    hashes = [int.from_bytes(each[-8:], "big") for each in server.cached]
    server.cached.clear()
    server.events.publish([{"type": "BlockRemoved", "medium": "GPU", "block_hashes": hashes}])


async def test_new_cached_diverged_and_evicted(fronts, folder):
    (server,) = with_events(folder)
    async with fronts(servers=[server]) as front:
        await front.up()
        tail = ("tail", len(TOKENS) - NAMED)
        assert brief(await runs_of(front, PROMPT)) == [("new", NAMED), tail]
        await until_known(front, server, PROMPT)
        assert brief(await runs_of(front, PROMPT)) == [("worker", NAMED), tail]

        other = PROMPT[:-12] + "X" + PROMPT
        shared = next(at for at, (a, b) in enumerate(zip(TOKENS, TOKENIZER.encode(other).ids, strict=False)) if a != b)
        worker, diverged, _ = await runs_of(front, other)
        assert brief([worker]) == [("worker", shared // BLOCK * BLOCK)]
        assert (diverged["cause"], diverged["certain"]) == ("diverged", True)
        assert diverged["detail"]["token"] == shared

        evict(server)
        async with asyncio.timeout(30):
            while await known_blocks(front, server, PROMPT):  # noqa: ASYNC110 - it has no hook for tests
                await asyncio.sleep(0.005)
        evicted, last = await runs_of(front, PROMPT)
        assert brief([evicted, last]) == [("evicted", NAMED), tail]
        assert (evicted["certain"], evicted["detail"]["where"]) == (True, f"127.0.0.1:{server.port}")
        assert (evicted["detail"]["tier"], evicted["detail"]["uses"]) == ("worker", 3)
