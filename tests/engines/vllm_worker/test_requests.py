"""What a Submit message asks of vLLM, and what vLLM's outputs say to a session. Without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tanghulu.engines.vllm_worker.requests import VllmRequest, VllmRequestFactory, outputs_of
from tanghulu.errors import InvalidRequest, NodeUnavailable
from tanghulu.hashing import as_tokens, vllm_chain_hashes, vllm_root_hash, vllm_salt
from tanghulu.protos import session_pb2 as pb
from tanghulu.types import RequestId
from tanghulu.workers.engine.requests import EngineFinishReason

FACTORY = VllmRequestFactory(block_tokens=4)


def submit(tokens: list[int], num_prompt: int = 0, **fields: Any) -> pb.Submit:
    stop = fields.pop("stop", pb.Stop(max_new_tokens=10))
    return pb.Submit(
        request_id="r", tokens=as_tokens(tokens).tobytes(), num_prompt_tokens=num_prompt, stop=stop, **fields
    )


def output(tokens: list[int], finish: str | None = None, logprobs: Any = None, cached: int = 0) -> Any:
    one = SimpleNamespace(token_ids=tokens, finish_reason=finish, logprobs=logprobs)
    return SimpleNamespace(outputs=[one], num_cached_tokens=cached)


def test_a_prompt_with_its_names_and_salt():
    made = FACTORY.request(submit([1, 2, 3, 4, 5], salt=b"tenant"))
    assert made.prompt == {"prompt_token_ids": [1, 2, 3, 4, 5], "cache_salt": vllm_salt(b"tenant")}
    root = vllm_root_hash(salt=vllm_salt(b"tenant").encode())
    assert made.block_hashes == vllm_chain_hashes(root, as_tokens([1, 2, 3, 4]), 4)
    assert (made.num_prompt_tokens, made.priority, made.grammar) == (5, 0, None)
    assert not FACTORY.request(submit([1])).prompt.keys() - {"prompt_token_ids"}


def test_sampling_as_the_conductor_means_it():
    sampling = pb.Sampling(temperature=0.5, top_k=7, seed=3, num_logprobs=0, logit_bias={9: -1.5})
    stop = pb.Stop(max_new_tokens=10, min_tokens=2, stop_token_ids=[8], ignore_eos=True)
    made = FACTORY.request(submit([1, 2], sampling=sampling, stop=stop)).sampling
    assert made == {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {9: -1.5},
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 3,
        "logprobs": 0,
        "max_tokens": 10,
        "min_tokens": 2,
        "stop_token_ids": [8],
        "ignore_eos": True,
        "detokenize": False,
    }
    plain = FACTORY.request(submit([1, 2])).sampling
    assert (plain["logprobs"], plain["logit_bias"]) == (None, None)
    assert 0 <= plain["seed"] < 1 << 63
    assert FACTORY.request(submit([1, 2])).sampling["seed"] == plain["seed"], "its id is the seed"


def test_a_vllm_that_ends_at_seeds_gets_none():
    made = VllmRequestFactory(4, keeps_seeds=False).request(submit([1, 2], sampling=pb.Sampling(seed=3)))
    assert made.sampling["seed"] is None


def test_a_request_that_another_worker_began_has_less_before_it():
    stop = pb.Stop(max_new_tokens=10, min_tokens=5)
    made = FACTORY.request(submit([1, 2, 3, 4, 5], 2, stop=stop, sampling=pb.Sampling(seed=40)))
    assert made.num_prompt_tokens == 2
    assert [made.sampling[name] for name in ("max_tokens", "min_tokens", "seed")] == [7, 2, 43]
    (told,) = outputs_of(made, output([6, 7], cached=4), 0)
    assert (told.num_prompt_tokens, told.num_generated_tokens, told.num_cached_tokens) == (2, 5, 4)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (submit([1, 2], hand_over=True), InvalidRequest),
        (submit([1, 2], source=pb.KvSource(address="h:1")), InvalidRequest),
        (submit([1, 2, 3], 4), InvalidRequest),
        (submit([]), InvalidRequest),
        (submit([1, 2, 3], 1, stop=pb.Stop(max_new_tokens=2)), InvalidRequest),
        (submit([1, 2, 3], 2, sampling=pb.Sampling(regex="a+")), NodeUnavailable),
    ],
)
def test_what_vllm_cannot_be_asked_for(message, error):
    with pytest.raises(error):
        FACTORY.request(message)


def test_grammars_by_their_names_in_vllm():
    for kind, name in (("json_schema", "json"), ("regex", "regex"), ("lark", "grammar")):
        assert FACTORY.request(submit([1], sampling=pb.Sampling(**{kind: "x"}))).grammar == {name: "x"}


def test_who_goes_first():
    assert FACTORY.request(submit([1], priority=5)).priority == 0
    assert VllmRequestFactory(4, by_priority=True).request(submit([1], priority=5)).priority == -5


def request(**sampling: Any) -> VllmRequest:
    return VllmRequest(RequestId("r"), [1, 2], 2, [], {"logprobs": None, **sampling})


def test_outputs_and_ends():
    (told,) = outputs_of(request(), output([5, 6]), 3)
    assert (told.tokens, told.finish_reason, told.num_generated_tokens) == ((5, 6), None, 5)
    (told,) = outputs_of(request(), output([7], "stop"), 0)
    assert told.finish_reason is EngineFinishReason.STOP
    (told,) = outputs_of(request(), output([], "length"), 0)
    assert (told.tokens, told.finish_reason) == ((), EngineFinishReason.LENGTH)
    for given_up in ("abort", "error"):
        with pytest.raises(NodeUnavailable, match=given_up):
            outputs_of(request(), output([], given_up), 0)


def test_logprobs_are_told_token_by_token_and_best_first():
    found = [
        {5: SimpleNamespace(logprob=-2.0, rank=3), 8: SimpleNamespace(logprob=-0.5, rank=1)},
        {9: SimpleNamespace(logprob=-0.1, rank=1), 8: SimpleNamespace(logprob=-3.0, rank=2)},
    ]
    one, two = outputs_of(request(logprobs=1), output([5, 9], "length", found), 0)
    assert (one.tokens, one.finish_reason, one.num_generated_tokens) == ((5,), None, 1)
    assert one.logprobs is not None
    assert (one.logprobs.chosen.logprob, [each.token for each in one.logprobs.top]) == (-2.0, [8])
    assert (two.tokens, two.finish_reason, two.num_generated_tokens) == ((9,), EngineFinishReason.LENGTH, 2)
    (alone, _) = outputs_of(request(logprobs=0), output([5, 9], "length", found), 0)
    assert alone.logprobs is not None
    assert (alone.logprobs.chosen.token, alone.logprobs.top) == (5, ())


def test_a_prefill_alone_is_one_token_and_a_source_is_where_the_prompt_came_from():
    handing = VllmRequestFactory(block_tokens=4, hands_over=True)
    stop = pb.Stop(max_new_tokens=10, min_tokens=5)
    made = handing.request(submit([1, 2, 3, 4, 5], hand_over=True, stop=stop))
    assert (made.hand_over, made.sampling["max_tokens"], made.sampling["min_tokens"]) == (True, 1, 1)
    there = pb.KvSource(instance_id="prefill-1", address="10.0.0.1:7430", num_tokens=5)
    made = handing.request(submit([1, 2, 3, 4, 5, 6], 5, source=there, stop=stop))
    assert (made.hand_over, made.tokens, made.sampling["max_tokens"]) == (False, [1, 2, 3, 4, 5, 6], 9)
    for asked in (submit([1, 2], hand_over=True), submit([1, 2], source=there)):
        with pytest.raises(InvalidRequest, match="without a store"):
            FACTORY.request(asked)
