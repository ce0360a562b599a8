"""Speculative decoding by n-grams: what is proposed, and that the text is the same in fewer steps."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch

from tanghulu.errors import ConfigError
from tanghulu.session.outputs import FinishReason
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import RequestId
from tanghulu.workers.compute.device import CPU
from tanghulu.workers.compute.forward_batch import SequenceChunk, build_forward_batch
from tanghulu.workers.compute.kv_cache import KvCache
from tanghulu.workers.compute.lanes import cut_lanes
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.compute.models.model import Model, load_model
from tanghulu.workers.compute.runners import DeviceRunner
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.engine import EngineCore, ModelRunner
from tanghulu.workers.engine.grammar import Grammar
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.ngram_drafts import MAX_DRAFT_TOKENS, NgramProposer
from tanghulu.workers.weights import resolve_model
from tests.workers.tiny import BLOCK, VOCAB, TinyModel, engine, outputs_of, request, runner_of
from tests.workers.ways import WAYS, Served, cpu_runner

PHRASE = random.Random(2).choices(range(2, VOCAB), k=9)
NUM_NEW = 36


@pytest.mark.parametrize(
    ("tokens", "limit", "proposed"),
    [
        ([7, 8, 9, 4, 5, 7, 8], 9, (9, 4, 5)),  # as in the module's example
        ([7, 8, 9, 4, 5, 7, 8], 2, (9, 4)),
        ([7, 8, 9, 4, 5, 7, 8], 0, ()),
        ([1, 2, 3, 4, 5], 9, ()),  # nothing twice
        ([8, 1, 2, 3, 8], 9, ()),  # one token is too little
        ([8, 8], 9, ()),
        ([1, 2, 3, 9, 9, 9, 2, 3, 6, 6, 6, 1, 2, 3], 9, (9, 9, 9)),  # the longest match, not the last
        ([1, 2, 7, 7, 7, 1, 2, 8, 8, 8, 1, 2], 9, (8, 8, 8)),  # of equal ones the last
        ([5, 5, 5, 5, 5, 5], 9, (5, 5, 5)),  # what is too short goes round
        ([4, 5, 4, 5], 9, (4, 5, 4)),
        ([], 9, ()),
    ],
)
def test_what_followed_the_same_tokens_is_proposed(tokens: list[int], limit: int, proposed: tuple[int, ...]) -> None:
    assert NgramProposer(3).propose(np.array(tokens, dtype=np.uint32), limit) == proposed


def test_the_option() -> None:
    assert NgramProposer.of("") is None
    assert NgramProposer.of("ngram:5") == NgramProposer(5)
    for text in ("ngram", "ngram:0", f"ngram:{MAX_DRAFT_TOKENS + 1}", "ngram:-1", "eagle:4", "5"):
        with pytest.raises(ConfigError, match="must be ngram:K"):
            NgramProposer.of(text)
    with pytest.raises(ConfigError, match="--engine torch"):
        WorkerConfig(engine="mock", speculative="ngram:4")


@dataclass(frozen=True)
class Ended:
    tokens: list[int]
    logprobs: list[Any]
    reason: FinishReason | None
    num_steps: int


def ended(core: EngineCore, prompt: list[int], **more: Any) -> Ended:
    core.add(request("a", prompt, NUM_NEW, **more))
    outputs, num_steps = [], 0
    while core.scheduler.has_work:
        outputs += core.step().outputs
        num_steps += 1
    assert core.scheduler.pool.num_in_use == 0
    return Ended(
        [token for output in outputs for token in output.tokens],
        [logprobs for output in outputs for logprobs in output.logprobs],
        outputs[-1].finish,
        num_steps,
    )


@pytest.fixture(scope="module")
def invariant_model(tiny: TinyModel) -> Model:
    """One whose logits do not hang on how many tokens a step computes, so that texts can be compared bit by bit."""
    arithmetic = Arithmetic.of(torch.float32, CPU, invariant=True)
    return load_model(resolve_model(str(tiny.path)), torch.float32, arithmetic=arithmetic)


SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "drawn": Sampling(temperature=0.05, seed=5, num_logprobs=3),
    "penalised": Sampling(
        temperature=0.2, top_p=0.9, seed=6, presence_penalty=0.01, repetition_penalty=1.01, logit_bias={9: 1.5}
    ),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_text_and_log_probabilities_are_the_same(name: str, invariant_model: Model) -> None:
    prompt = PHRASE * 4
    plain = ended(engine(invariant_model), prompt, sampling=SAMPLINGS[name])
    for count in (3, 20):
        ahead = ended(engine(invariant_model, proposer=NgramProposer(count)), prompt, sampling=SAMPLINGS[name])
        assert (ahead.tokens, ahead.logprobs) == (plain.tokens, plain.logprobs)
        assert len(ahead.tokens) == NUM_NEW
        assert ahead.num_steps < plain.num_steps


@pytest.mark.parametrize("num_new", [1, 2, 33])
def test_no_token_more_than_asked_for(num_new: int, invariant_model: Model) -> None:
    plain = ended(engine(invariant_model), PHRASE * 4, stop=StopRule(num_new, ignore_eos=True))
    ahead = ended(
        engine(invariant_model, proposer=NgramProposer(8)), PHRASE * 4, stop=StopRule(num_new, ignore_eos=True)
    )
    assert len(ahead.tokens) == num_new
    assert (ahead.tokens, ahead.reason) == (plain.tokens, plain.reason)


@pytest.mark.parametrize("min_tokens", [0, 25])
def test_a_stop_token_inside_a_draft_ends_the_text(min_tokens: int, invariant_model: Model) -> None:
    circle = ended(engine(invariant_model), PHRASE * 4).tokens
    stop = StopRule(NUM_NEW, stop_token_ids=(circle[-1],), ignore_eos=True, min_tokens=min_tokens)
    plain = ended(engine(invariant_model), PHRASE * 4, stop=stop)
    ahead = ended(engine(invariant_model, proposer=NgramProposer(8)), PHRASE * 4, stop=stop)
    assert (ahead.tokens, ahead.reason) == (plain.tokens, plain.reason)


def test_the_context_ends_where_it_did(invariant_model: Model) -> None:
    """A cache of 8 blocks bounds the sequence."""
    plain = ended(engine(invariant_model, num_blocks=8), PHRASE * 4)
    ahead = ended(engine(invariant_model, num_blocks=8, proposer=NgramProposer(8)), PHRASE * 4)
    assert ahead.tokens == plain.tokens
    assert ahead.reason is FinishReason.LENGTH
    assert len(ahead.tokens) < NUM_NEW


def test_a_text_under_a_grammar_has_no_drafts(invariant_model: Model) -> None:
    class Anything:
        failure = None

        def __init__(self) -> None:
            self.seen: list[int] = []

        def allowed(self, generated: Any) -> Any:
            assert generated.tolist()[: len(self.seen)] == self.seen, "what was taken back"
            self.seen = generated.tolist()
            return np.ones(VOCAB, dtype=np.bool_)

    core = engine(invariant_model, proposer=NgramProposer(8))
    core.add(request("a", PHRASE * 4, NUM_NEW, grammar=cast("Grammar", Anything())))
    while core.scheduler.has_work:
        assert core.step().num_drafted_tokens == 0


def test_counts_of_proposed_and_accepted_tokens(invariant_model: Model) -> None:
    core = engine(invariant_model, proposer=NgramProposer(4))
    core.add(request("a", PHRASE * 4, NUM_NEW))
    drafted = accepted = generated = 0
    while core.scheduler.has_work:
        result = core.step()
        drafted, accepted = drafted + result.num_drafted_tokens, accepted + result.num_accepted_tokens
        assert len(result.outputs) == result.num_accepted_tokens + 1
        generated += len(result.outputs)
    assert 0 < accepted <= drafted
    assert generated == NUM_NEW


def test_an_abort_while_a_draft_is_computed(invariant_model: Model) -> None:
    core = engine(invariant_model, proposer=NgramProposer(8))
    core.add(request("a", PHRASE * 4, NUM_NEW))
    while True:
        plan = core.scheduler.schedule()
        if plan.num_drafted:
            break
        core.scheduler.step_done(core.runner.run(plan).sampled)
    drawn = core.runner.run(plan).sampled
    assert core.scheduler.abort(RequestId("a"))
    assert core.scheduler.step_done(drawn).outputs == []
    core.check()
    assert core.scheduler.pool.num_in_use == 0


def test_drafts_take_what_others_leave(invariant_model: Model) -> None:
    """With a budget of one token for each sequence there is none for drafts, and everybody goes on."""
    core = engine(invariant_model, proposer=NgramProposer(8), max_num_batched_tokens=8, max_num_seqs=8)
    for at in range(8):
        core.add(request(str(at), PHRASE[: at + 1] * 4, 12))
    outputs = outputs_of(core)
    assert len({output.request_id for output in outputs if output.finish is not None}) == 8


def prompts() -> list[tuple[list[int], Sampling]]:
    made = []
    for index, length in enumerate((2, 5, 9, 30)):
        own = random.Random(index).choices(range(2, VOCAB), k=length)
        sampling = Sampling(temperature=0.05 * (index % 2), seed=index, num_logprobs=2)
        made.append((PHRASE * (index % 3) + own * 3, sampling))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_device", "kv_dtype"), [(False, "auto"), (False, "int8"), pytest.param(True, "auto", marks=pytest.mark.by_hand)]
)
def test_the_same_bits_in_every_way_of_serving(invariant_model: Model, on_device: bool, kv_dtype: str) -> None:
    """Batched, chunked, cached, preempted, handed over, moved."""

    def device_runner(model: Model, block_tokens: int, num_blocks: int) -> ModelRunner:
        return runner_of(DeviceRunner, model, block_tokens=block_tokens, num_blocks=num_blocks)

    make_runner = device_runner if on_device else functools.partial(cpu_runner, kv_dtype=kv_dtype)
    plain = Served(invariant_model, prompts(), num_new=24, make_runner=make_runner)
    alone = plain.alone()
    ahead = Served(invariant_model, prompts(), num_new=24, make_runner=make_runner, proposer=NgramProposer(5))
    assert ahead.alone() == alone
    for name, way in WAYS.items():
        assert way(ahead) == alone, name


def test_lanes_may_cut_between_the_rows_of_a_draft(tiny_model: Model) -> None:
    cache = KvCache(KvLayout.of(tiny_model.config, BLOCK, "float32"), 16)
    tokens = (PHRASE * 10)[:80]
    whole = SequenceChunk(tokens, 0, range(10), wants_logits=True, num_more_logits=50)
    wanted = tiny_model.forward(build_forward_batch([whole], BLOCK), cache)
    assert wanted.shape == (51, VOCAB)
    lanes = cut_lanes([whole], 4, 1e9)
    parts = [tiny_model.forward(build_forward_batch(lane, BLOCK), cache) for lane in lanes]
    assert [len(part) for part in parts] == [0, 11, 20, 20]
    torch.testing.assert_close(torch.cat(parts), wanted, atol=1e-5, rtol=1e-4)
