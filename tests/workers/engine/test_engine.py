"""EngineCore on the tiny model: caching, hooks, hand-over between two engines, sampling that migrates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tanghulu.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from tanghulu.session.outputs import FinishReason, KvSource
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import RequestId
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.compute.runners import TorchRunner
from tanghulu.workers.engine.block_pool import KvEventKind
from tanghulu.workers.engine.engine import EngineCore, KvTransfers
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.step import CommittedBlock, FetchWanted
from tests.workers.peers import export_at
from tests.workers.tiny import BLOCK, VOCAB, engine, outputs_of, request, run_all, runner_of

PROMPT = random.Random(9).choices(range(2, VOCAB), k=45)


class Shelf(KvTransfers):
    """A store in a dict: keeps the bytes of committed blocks, and gives them to whoever fetches."""

    def __init__(self, *, can_fetch: bool = True) -> None:
        self.can_fetch = can_fetch
        self.chunks: dict[bytes, bytes] = {}
        self.core: EngineCore
        self.wanted: list[FetchWanted] = []
        self.declined: list[KvSource] = []

    def blocks_committed(self, blocks: Sequence[CommittedBlock]) -> None:
        for block in blocks:
            self.chunks[block.block_hash] = self.core.cache.block_view(block.block_id).tobytes()

    def decline(self, peer: KvSource) -> None:
        self.declined.append(peer)

    def fetch(self, wanted: FetchWanted) -> None:
        self.wanted.append(wanted)

    def deliver(self) -> int:
        """Answer all fetches; how many blocks arrived."""
        total = 0
        while self.wanted:
            wanted, arrived = self.wanted.pop(), 0
            for block, block_hash in zip(wanted.block_ids, wanted.block_hashes, strict=True):
                if block_hash not in self.chunks:
                    break
                self.core.cache.block_view(block)[:] = self.chunks[block_hash]
                arrived += 1
            self.core.fetch_done(wanted.request_id, arrived)
            total += arrived
        return total


def test_a_second_turn_finds_the_first(tiny_model: Model) -> None:
    core = engine(tiny_model)
    core.add(request("one", PROMPT, 10))
    first = outputs_of(core)
    assert [output.cached_tokens for output in first] == [0] * 10
    assert [len(output.tokens) for output in first] == [1] * 10
    text = [output.tokens[0] for output in first]
    core.add(request("two", [*PROMPT, *text, 4, 5], 5))
    second = outputs_of(core)
    assert second[0].cached_tokens == 48, "45 + 10 tokens fill 6 blocks of 8, the newest token's KV aside"
    fresh = engine(tiny_model)
    fresh.add(request("two", [*PROMPT, *text, 4, 5], 5))
    assert [output.tokens for output in outputs_of(fresh)] == [output.tokens for output in second]


def test_steps_tell_what_they_did(tiny_model: Model) -> None:
    core = engine(tiny_model, max_num_batched_tokens=32)
    core.add(request("a", PROMPT, 2))
    first, second, third = core.step(), core.step(), core.step()
    assert (first.num_computed_tokens, second.num_computed_tokens, third.num_computed_tokens) == (32, 13, 1)
    assert not first.outputs
    assert [event.kind for event in first.kv_events] == [KvEventKind.STORED] * 4
    assert third.outputs[0].finish is FinishReason.LENGTH
    assert first.timings.forward_s > 0
    assert core.step().idle
    assert core.pool.drop_cached() == 5
    assert [event.kind for event in core.step().kv_events] == [KvEventKind.REMOVED] * 5


def test_blocks_travel_through_a_store(tiny_model: Model) -> None:
    shelf = Shelf(can_fetch=False)
    source = shelf.core = engine(tiny_model, transfers=shelf)
    source.add(request("a", PROMPT, 12))
    expected = run_all(source)["a"]
    assert len(shelf.chunks) == 7
    shelf.can_fetch = True
    target = shelf.core = engine(tiny_model, transfers=shelf)
    target.add(request("a", PROMPT, 12))
    assert target.step().idle
    assert shelf.deliver() == 5
    outputs = outputs_of(target)
    assert [output.tokens[0] for output in outputs] == expected
    assert outputs[0].cached_tokens == 40


@pytest.mark.parametrize("length", [1, 15, 16, 17, 45])
def test_hand_over_between_two_engines(tiny_model: Model, length: int) -> None:
    """Prefill here, decode there, the partial last block included; the text is that of one engine alone."""
    alone, prefill = engine(tiny_model), engine(tiny_model)
    shelf = Shelf()
    decode = shelf.core = engine(tiny_model, transfers=shelf)
    alone.add(request("a", PROMPT[:length], 12))
    expected = run_all(alone)["a"]
    prefill.add(request("a", PROMPT[:length], 12, hold_kv=True))
    (first,) = outputs_of(prefill)
    assert first.finish is FinishReason.HANDED_OVER
    export = prefill.scheduler.exports.get(RequestId("a"))
    assert export is not None
    tokens = [*PROMPT[:length], *first.tokens]
    peer = export_at("prefill", "a", export.num_tokens)
    decode.add(request("a", tokens, 12, num_prompt=length, peer=peer))
    decode.step()
    (wanted,) = shelf.wanted
    for theirs, ours in zip(export.block_ids[wanted.first_block :], wanted.block_ids, strict=True):
        decode.cache.block_view(ours)[:] = prefill.cache.block_view(theirs)
    decode.fetch_done(RequestId("a"), len(wanted.block_ids))
    result = decode.step()
    assert result.num_computed_tokens == 1
    assert [*first.tokens, *result.outputs[0].tokens, *run_all(decode)["a"]] == expected
    assert prefill.exports.release(RequestId("a"))
    prefill.check()


def test_a_seeded_text_survives_migration_and_company(tiny_model: Model) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=42, frequency_penalty=0.3)
    core = engine(tiny_model)
    core.add(request("a", PROMPT, 24, sampling=sampling))
    text = run_all(core)["a"]
    for cut in (1, 7, 20):
        other = engine(tiny_model, max_num_batched_tokens=16)
        for index in range(3):
            company = Sampling(temperature=1.0, seed=index)
            other.add(request(f"company{index}", PROMPT[index:], 30, sampling=company))
        for _ in range(index):
            other.step()
        other.add(request("a", PROMPT + text[:cut], 24, num_prompt=len(PROMPT), sampling=sampling))
        assert run_all(other)["a"] == text[cut:]
    core.add(request("b", PROMPT, 24, sampling=Sampling(temperature=0.9, seed=43)))
    assert run_all(core)["b"] != text


def test_min_tokens_hold_back_the_end(tiny_model: Model) -> None:
    everything = frozenset(range(VOCAB)) - {60, 61}
    core = engine(tiny_model)
    core.add(request("a", PROMPT, stop=StopRule(20, stop_token_ids=tuple(everything), min_tokens=4)))
    text = run_all(core)["a"]
    assert set(text[:4]) <= {60, 61}
    assert len(text) >= 5


def test_logprobs_come_with_the_token(tiny_model: Model) -> None:
    core = engine(tiny_model)
    core.add(request("a", PROMPT, 2, sampling=Sampling(temperature=0, num_logprobs=3)))
    core.add(request("b", PROMPT[:9], 2))
    outputs = outputs_of(core)
    for output in outputs:
        if output.request_id == "b":
            assert not output.logprobs
            continue
        (logprobs,) = output.logprobs
        assert logprobs.token_ids[:2] == (output.tokens[0],) * 2
        assert logprobs.logprobs[0] == logprobs.logprobs[1]


def test_the_cache_lives_in_a_given_buffer(tiny_model: Model) -> None:
    memory = bytearray(10 * KvLayout.of(tiny_model.config, BLOCK, "float32").block_bytes)
    core = engine(tiny_model, num_blocks=10, buffer=memory)
    core.add(request("a", PROMPT, 1))
    (output,) = outputs_of(core)
    assert any(memory)
    plain = engine(tiny_model)
    plain.add(request("a", PROMPT, 1))
    assert outputs_of(plain)[0].tokens == output.tokens


def test_what_cannot_be_served_is_refused(tiny_model: Model) -> None:
    with pytest.raises(ConfigError, match="holds no block"):
        runner_of(TorchRunner, tiny_model, block_tokens=BLOCK, kv_capacity_bytes=100)
    core = engine(tiny_model, num_blocks=4)
    with pytest.raises(ContextLengthExceeded, match="KV cache 4 blocks of 8"):
        core.add(request("long", PROMPT))
    bad: list[dict[str, Any]] = [
        {"sampling": Sampling(logit_bias={VOCAB: 1.0})},
        {"stop": StopRule(3, stop_token_ids=(VOCAB,))},
    ]
    for more in bad:
        with pytest.raises(InvalidRequest, match=str(VOCAB)):
            core.add(request("bad", [1, 2], **more))
    with pytest.raises(InvalidRequest, match="vocabulary"):
        core.add(request("bad", [VOCAB]))
    core.check()
    assert not core.scheduler.has_work


def test_the_second_turn_of_a_chat_computes_only_its_new_tokens(tiny_model: Model) -> None:
    """Its own answer is found too: only what follows the last full block of the first turn is computed."""
    core = engine(tiny_model)
    first = list(range(2, 43))
    core.add(request("turn-1", first, 20))
    answer = run_all(core)["turn-1"]
    second = [*first, *answer, *range(50, 63)]
    core.add(request("turn-2", second, 4))
    computed, cached = 0, 0
    while core.scheduler.has_work:
        result = core.step()
        computed += result.num_computed_tokens
        cached = max([output.cached_tokens for output in result.outputs], default=cached)
    known = len(first) + len(answer) - 1  # the last token of the answer was sampled and never computed
    assert cached == known // BLOCK * BLOCK == 56
    assert computed == len(second) - cached + 3
