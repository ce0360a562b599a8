"""What a Submit message asks of vLLM, and what vLLM's outputs say to a session. Without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tanghulu.engines.common.requests import REPORT_LOADS
from tanghulu.engines.vllm_worker.requests import VllmRequest, VllmRequestFactory, output_of
from tanghulu.errors import InvalidRequest, NodeUnavailable
from tanghulu.hashing import as_tokens, vllm_chain_hashes, vllm_root_hash, vllm_salt
from tanghulu.session.messages import Submit
from tanghulu.session.outputs import FinishReason, KvLoad, KvSource, TokenLogprobs
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import InstanceId, RequestId

FACTORY = VllmRequestFactory(block_tokens=4)


def submit(tokens: list[int], num_prompt: int | None = None, **fields: Any) -> Submit:
    rules = {"sampling": Sampling(), "stop": StopRule(10)} | fields
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    return Submit(RequestId("r"), as_tokens(tokens).tobytes(), num_prompt, **rules)


def output(
    tokens: list[int], finish: str | None = None, logprobs: Any = None, cached: int = 0, loaded: Any = None
) -> Any:
    one = SimpleNamespace(token_ids=tokens, finish_reason=finish, logprobs=logprobs)
    told = None if loaded is None else {REPORT_LOADS: loaded}
    return SimpleNamespace(outputs=[one], num_cached_tokens=cached, kv_transfer_params=told)


def test_a_prompt_with_its_names_and_salt():
    made = FACTORY.request(submit([1, 2, 3, 4, 5], salt=b"tenant"))
    assert made.prompt == {"prompt_token_ids": [1, 2, 3, 4, 5], "cache_salt": vllm_salt(b"tenant")}
    root = vllm_root_hash(salt=vllm_salt(b"tenant").encode())
    assert made.block_hashes == vllm_chain_hashes(root, as_tokens([1, 2, 3, 4]), 4)
    assert (made.num_prompt_tokens, made.priority, made.grammar) == (5, 0, None)
    assert not FACTORY.request(submit([1])).prompt.keys() - {"prompt_token_ids"}


def test_sampling_as_the_conductor_means_it():
    sampling = Sampling(temperature=0.5, top_k=7, seed=3, num_logprobs=0, logit_bias={9: -1.5})
    stop = StopRule(max_new_tokens=10, min_tokens=2, stop_token_ids=(8,), ignore_eos=True)
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
    made = VllmRequestFactory(4, keeps_seeds=False).request(submit([1, 2], sampling=Sampling(seed=3)))
    assert made.sampling["seed"] is None


def test_a_request_that_another_worker_began_has_less_before_it():
    stop = StopRule(max_new_tokens=10, min_tokens=5)
    made = FACTORY.request(submit([1, 2, 3, 4, 5], 2, stop=stop, sampling=Sampling(seed=40)))
    assert made.num_prompt_tokens == 2
    assert [made.sampling[name] for name in ("max_tokens", "min_tokens", "seed")] == [7, 2, 43]
    penalised = FACTORY.request(submit([1, 2, 3, 3], 2, stop=stop, sampling=Sampling(frequency_penalty=0.5)))
    assert penalised.sampling["logit_bias"] == {3: -1.0}
    told = output_of(made, output([6, 7], cached=4))
    assert (told.tokens, told.cached_tokens) == ([6, 7], 2), "of the prompt"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (submit([1, 2], hand_over=True), InvalidRequest),
        (submit([1, 2], source=KvSource(InstanceId("w"), "h:1", "", 0, 2)), InvalidRequest),
        (submit([1, 2, 3], 4), InvalidRequest),
        (submit([]), InvalidRequest),
        (submit([1, 2, 3], 1, stop=StopRule(max_new_tokens=2)), InvalidRequest),
        (submit([1, 2, 3], 2, sampling=Sampling(regex="a+")), NodeUnavailable),
    ],
)
def test_what_vllm_cannot_be_asked_for(message, error):
    with pytest.raises(error):
        FACTORY.request(message)


def test_grammars_by_their_names_in_vllm():
    for kind, name in (("json_schema", "json"), ("regex", "regex"), ("lark", "grammar")):
        assert FACTORY.request(submit([1], sampling=Sampling(**{kind: "x"}))).grammar == {name: "x"}


def test_who_goes_first():
    assert FACTORY.request(submit([1], priority=5)).priority == 0
    assert VllmRequestFactory(4, by_priority=True).request(submit([1], priority=5)).priority == -5


def request(**sampling: Any) -> VllmRequest:
    return VllmRequest(RequestId("r"), [1, 2], 2, [], {"logprobs": None, **sampling})


def test_outputs_and_ends():
    told = output_of(request(), output([5, 6]))
    assert (told.tokens, told.finish) == ([5, 6], None)
    told = output_of(request(), output([7], "stop"))
    assert (told.finish, told.stop_token) == (FinishReason.STOP, 7)
    told = output_of(request(), output([], "length"))
    assert (told.tokens, told.finish) == ([], FinishReason.LENGTH)
    for given_up in ("abort", "error"):
        with pytest.raises(NodeUnavailable, match=given_up):
            output_of(request(), output([], given_up))


def test_loads_are_asked_for_where_there_is_a_store():
    assert "extra_args" not in FACTORY.request(submit([1])).sampling
    stored = VllmRequestFactory(block_tokens=4, has_store=True).request(submit([1]))
    assert stored.sampling["extra_args"] == {"kv_transfer_params": {REPORT_LOADS: True}}


@pytest.mark.parametrize(
    ("cached", "loaded", "told"),
    [
        (12, None, (12, [])),
        (12, [8, 8], (12, [KvLoad("store", 8)])),
        (12, [8, 4], (8, [KvLoad("store", 4, "TRANSFER_FAILED")])),  # vLLM counts what did not arrive
        (12, [8, 0], (4, [KvLoad("store", 0, "TRANSFER_FAILED")])),
        (0, [8, 0], (0, [KvLoad("store", 0, "TRANSFER_FAILED")])),  # it had nothing, and has begun anew
    ],
)
def test_what_was_loaded_and_what_was_lost(cached, loaded, told):
    request = FACTORY.request(submit(list(range(13))))
    made = output_of(request, output([5], "length", cached=cached, loaded=loaded))
    assert (made.cached_tokens, made.loads) == told


def test_logprobs_are_told_token_by_token_and_best_first():
    found = [
        {5: SimpleNamespace(logprob=-2.0, rank=3), 8: SimpleNamespace(logprob=-0.5, rank=1)},
        {9: SimpleNamespace(logprob=-0.1, rank=1), 8: SimpleNamespace(logprob=-3.0, rank=2)},
    ]
    told = output_of(request(logprobs=1), output([5, 9], "length", found))
    assert (told.tokens, told.finish) == ([5, 9], FinishReason.LENGTH)
    assert told.logprobs == [TokenLogprobs((5, 8), (-2.0, -0.5)), TokenLogprobs((9, 9), (-0.1, -0.1))]
    alone = output_of(request(logprobs=0), output([5, 9], "length", found))
    assert [each.token_ids for each in alone.logprobs] == [(5,), (9,)]


def test_a_prefill_alone_is_one_token_and_a_source_is_where_the_prompt_came_from():
    handing = VllmRequestFactory(block_tokens=4, has_store=True)
    stop = StopRule(max_new_tokens=10, min_tokens=5)
    made = handing.request(submit([1, 2, 3, 4, 5], hand_over=True, stop=stop))
    assert (made.hand_over, made.sampling["max_tokens"], made.sampling["min_tokens"]) == (True, 1, 1)
    there = KvSource(InstanceId("prefill-1"), "10.0.0.1:7430", "", 0, 5)
    made = handing.request(submit([1, 2, 3, 4, 5, 6], 5, source=there, stop=stop))
    assert (made.hand_over, made.tokens, made.sampling["max_tokens"]) == (False, [1, 2, 3, 4, 5, 6], 9)
    for asked in (submit([1, 2], hand_over=True), submit([1, 2], source=there)):
        with pytest.raises(InvalidRequest, match="no store to hand prompts over"):
            FACTORY.request(asked)
