"""The scheduler by examples: plans written out, one rule a test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tanghulu.errors import ConfigError, ContextLengthExceeded, InvalidRequest, Overloaded
from tanghulu.session.outputs import FinishReason
from tanghulu.session.sampling import StopRule
from tanghulu.types import RequestId
from tanghulu.workers.engine.block_pool import BlockPool
from tanghulu.workers.engine.requests import TRANSITIONS, EngineRequest, EngineRequestEvent, EngineRequestState
from tanghulu.workers.engine.scheduler import EngineCoreConfig, Scheduler
from tanghulu.workers.engine.step import StepOutcome, StepPlan
from tests.workers.peers import export_at
from tests.workers.tiny import request, sampled

B = 4


def scheduler(num_blocks: int = 32, **more: Any) -> Scheduler:
    config = {"block_tokens": B, "max_context": 1000, "max_num_batched_tokens": 8, "max_num_seqs": 4} | more
    max_context, can_fetch = config.pop("max_context"), config.pop("can_fetch", False)
    return Scheduler(EngineCoreConfig(**config), BlockPool(num_blocks), max_context, can_fetch=can_fetch)


def req(name: str, tokens: int | list[int], max_new: int = 100, **more: Any) -> EngineRequest:
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    return request(name, ids, max_new, block_tokens=B, **more)


def step(core: Scheduler, token: int = 7) -> tuple[StepPlan, StepOutcome]:
    plan = core.schedule()
    outcome = core.step_done(sampled([token] * sum(run.samples for run in plan.runs)))
    core.check()
    return plan, outcome


def runs(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {run.request.request_id: (run.start, run.num_tokens) for run in plan.runs}


def drain(core: Scheduler, steps: int = 500) -> None:
    for _ in range(steps):
        if not core.has_work:
            return
        step(core)
    raise AssertionError(core)


def ident(name: str) -> RequestId:
    return RequestId(name)


def test_decodes_first_then_prompts_in_order_of_arrival() -> None:
    """The example of the module's docstring."""
    core = scheduler()
    core.add(req("a", [90]))
    step(core)
    core.add(req("b", 10))
    core.add(req("c", [50, 51, 52]))
    assert runs(step(core)[0]) == {"a": (1, 1), "b": (0, 7)}
    assert runs(step(core)[0]) == {"a": (2, 1), "b": (7, 3), "c": (0, 3)}
    assert runs(step(core)[0]) == {"a": (3, 1), "b": (10, 1), "c": (3, 1)}


def test_what_is_pending_is_told_in_tokens_and_in_pairs() -> None:
    core = scheduler()
    core.add(req("a", 12))
    core.add(req("b", 3))
    assert core.pending == (15, 12**2 + 3**2)
    step(core)  # 8 of a's tokens
    assert core.pending == (7, 12**2 - 8**2 + 3**2)


def test_sequences_in_a_step_are_bounded() -> None:
    core = scheduler(max_num_seqs=2)
    for index in range(4):
        core.add(req(f"r{index}", [index], max_new=2))
    assert list(runs(step(core)[0])) == ["r0", "r1"]
    step(core)
    assert list(runs(step(core)[0])) == ["r2", "r3"]


def test_priority_goes_before_arrival() -> None:
    core = scheduler(max_num_seqs=1)
    core.add(req("early", [1], 1))
    core.add(req("urgent", [2], 1, priority=1))
    assert list(runs(step(core)[0])) == ["urgent"]


def test_a_repeated_prompt_hits_but_computes_its_last_token() -> None:
    core = scheduler()
    core.add(req("a", 8, 1))
    _, outcome = step(core)
    assert [block.index for block in outcome.committed] == [0, 1]
    core.add(req("b", 8, 1))
    plan, outcome = step(core)
    assert runs(plan) == {"b": (4, 4)}
    assert outcome.outputs[0].cached_tokens == 4
    assert outcome.committed == [], "its twin of the last block stays private"
    core.add(req("c", 9, 1))
    assert runs(step(core)[0]) == {"c": (8, 1)}


def test_stop_reasons() -> None:
    core = scheduler(max_num_batched_tokens=32, max_num_seqs=8)
    eos = frozenset({7})
    core.add(req("eos", 3, stop=StopRule(5), eos_ids=eos))
    core.add(req("ignored", 3, stop=StopRule(5, ignore_eos=True), eos_ids=eos))
    core.add(req("stop-id", 3, stop=StopRule(5, stop_token_ids=tuple(eos), ignore_eos=True)))
    core.add(req("length", 3, 1))
    reasons = {output.request_id: output.finish for output in step(core)[1].outputs}
    assert reasons == {
        "eos": FinishReason.STOP,
        "ignored": None,
        "stop-id": FinishReason.STOP,
        "length": FinishReason.LENGTH,
    }


def test_a_grammar_that_cannot_be_kept_is_an_error() -> None:
    core = scheduler()
    made = req("a", 3)
    made.grammar = SimpleNamespace(failure="stuck")
    core.add(made)
    (output,) = step(core)[1].outputs
    assert output.finish is FinishReason.ERROR
    assert output.failure is not None
    assert isinstance(output.failure.error, InvalidRequest)


def test_end_tokens_are_banned_until_min_tokens() -> None:
    made = req("a", 3, stop=StopRule(9, stop_token_ids=(8,), min_tokens=2), eos_ids=frozenset({7}))
    assert made.banned_ids(0) == made.banned_ids(1) == {7, 8}
    assert made.banned_ids(2) == frozenset()


def test_the_context_ends_a_text() -> None:
    core = scheduler(max_context=6)
    core.add(req("a", 3))
    assert [step(core)[1].outputs[0].finish for _ in range(3)] == [None, None, FinishReason.LENGTH]


def test_a_resubmitted_request_goes_on_where_it_was() -> None:
    """Two of its three tokens were generated elsewhere: one is left."""
    core = scheduler()
    core.add(req("a", 7, 3, num_prompt=5))
    output = step(core)[1].outputs[0]
    assert output.finish is FinishReason.LENGTH
    assert output.tokens == [7]


def test_what_cannot_be_served_is_refused_at_once() -> None:
    core = scheduler(num_blocks=2, max_num_waiting=1)
    with pytest.raises(ContextLengthExceeded, match="8 tokens; this worker takes at most 7"):
        core.add(req("long", 8))
    with pytest.raises(InvalidRequest, match="already generated 2 tokens"):
        core.add(req("done", 5, 2, num_prompt=3))
    core.add(req("a", 3))
    with pytest.raises(InvalidRequest, match="already here"):
        core.add(req("a", 3))
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        core.add(req("b", 3))
    with pytest.raises(ConfigError, match="below max_num_seqs"):
        EngineCoreConfig(block_tokens=4, max_num_batched_tokens=3, max_num_seqs=4)
    core.check()


def test_the_youngest_gives_way_and_returns_to_its_place() -> None:
    """5 blocks: both prompts fill one each; they grow until the older needs the younger's blocks."""
    core = scheduler(num_blocks=5)
    core.add(req("old", [1, 2, 3], 12))
    core.add(req("young", [4, 5, 6], 12))
    preempted = []
    for _ in range(14):
        plan, _ = step(core)
        preempted += plan.preempted
    assert preempted == ["young"]
    assert core.request(ident("old")) is None
    assert core.request(ident("young")) is not None
    drain(core)
    assert core.pool.num_in_use == 0


def test_a_waiting_head_is_not_overtaken() -> None:
    core = scheduler(num_blocks=6, max_num_batched_tokens=32)
    core.add(req("running", 12, 9))
    step(core)
    core.add(req("large", list(range(100, 116)), 1))
    core.add(req("small", [1], 1))
    assert list(runs(step(core)[0])) == ["running"]
    drain(core)


def test_abort_in_every_state() -> None:
    core = scheduler(max_num_seqs=1)
    core.add(req("a", 20))
    core.add(req("b", 3))
    step(core)
    assert core.abort(ident("b"))
    assert core.abort(ident("a"))
    assert not core.abort(ident("a"))
    core.check()
    assert not core.has_work
    assert core.pool.num_in_use == 0


def test_abort_while_the_step_runs() -> None:
    core = scheduler()
    core.add(req("a", 3))
    core.add(req("b", 3))
    plan = core.schedule()
    core.abort(ident("a"))
    outcome = core.step_done(sampled([1, 2]))
    assert [(output.request_id, output.tokens) for output in outcome.outputs] == [("b", [2])]
    assert len(plan.runs) == 2
    core.check()


def test_an_unknown_pair_is_a_bug() -> None:
    finished = req("a", 3)
    finished.on(EngineRequestEvent.ADMIT)
    finished.on(EngineRequestEvent.FINISH)
    for event in EngineRequestEvent:
        with pytest.raises(AssertionError, match=f"{event.name} in state FINISHED"):
            finished.on(event)
    assert {state for state, _ in TRANSITIONS} == set(EngineRequestState) - {
        EngineRequestState.FINISHED,
        EngineRequestState.ABORTED,
    }


# ---- fetches


def test_missing_blocks_are_fetched_while_others_run() -> None:
    core = scheduler(can_fetch=True)
    core.add(req("short", [99, 98, 97]))
    core.add(req("a", 14))
    plan, _ = step(core)
    assert list(runs(plan)) == ["short"]
    (wanted,) = plan.fetches
    assert (wanted.request_id, wanted.first_block, wanted.num_tokens) == ("a", 0, 12)
    assert len(wanted.block_ids) == len(wanted.block_hashes) == 3
    assert core.pool.num_in_transfer == 3
    step(core)
    core.fetch_done(ident("a"), 2)
    core.check()
    plan, outcome = step(core)
    assert runs(plan)["a"] == (8, 6)
    assert core.pool.num_in_transfer == 0
    a = next(output for output in outcome.outputs if output.request_id == "a")
    assert a.cached_tokens == 8
    core.add(req("again", 9))
    assert step(core)[0].fetches == [], "the fetched blocks are found here now"


def test_a_fetch_goes_on_behind_the_local_hits() -> None:
    core = scheduler(can_fetch=True)
    core.add(req("a", 8, 1, fetch_blocks=0))
    drain(core)
    core.add(req("b", 17))
    (wanted,) = step(core)[0].fetches
    assert (wanted.first_block, len(wanted.block_ids), wanted.num_tokens) == (2, 2, 16)


def test_an_export_that_is_found_here_is_forgone() -> None:
    core = scheduler(can_fetch=True)
    peer = export_at("p", 1, 8)
    core.add(req("a", 9, 1, fetch_blocks=0))
    drain(core)
    core.add(req("partly", 14, peer=export_at("p", 2, 13)))
    core.add(req("wholly", 9, peer=peer))
    plan, _ = step(core)
    assert [wanted.request_id for wanted in plan.fetches] == ["partly"]
    assert plan.declined == [peer]


def test_a_fetch_is_bounded_by_what_is_known_to_exist() -> None:
    core = scheduler(can_fetch=True)
    core.add(req("a", 17, fetch_blocks=1))
    core.add(req("b", list(range(50, 60)), fetch_blocks=0))
    plan, _ = step(core)
    assert [(wanted.request_id, len(wanted.block_ids)) for wanted in plan.fetches] == [("a", 1)]
    assert list(runs(plan)) == ["b"]


def test_nothing_arrived() -> None:
    core = scheduler(can_fetch=True)
    core.add(req("a", 9))
    step(core)
    core.fetch_done(ident("a"), 0)
    assert runs(step(core)[0]) == {"a": (0, 8)}
    assert len(core.pool.matchable_hashes()) == 2


def test_abort_while_fetching_keeps_the_blocks_until_the_transfer_ends() -> None:
    core = scheduler(can_fetch=True)
    core.add(req("a", 14))
    step(core)
    assert core.abort(ident("a"))
    assert not core.abort(ident("a"))
    core.check()
    assert core.pool.num_in_transfer == 3
    core.fetch_done(ident("a"), 3)
    core.check()
    assert core.pool.num_in_use == 0
    assert core.request(ident("a")) is None


# ---- hand-over


def test_hand_over_keeps_the_blocks_until_they_are_released() -> None:
    core = scheduler()
    core.add(req("a", 8, hold_kv=True))
    output = step(core)[1].outputs[0]
    assert output.finish is FinishReason.HANDED_OVER
    export = core.exports.get(ident("a"))
    assert export is not None
    assert (export.num_tokens, len(export.block_ids)) == (8, 2)
    assert core.pool.num_in_use == 2
    assert core.exports.release(ident("a"))
    assert not core.exports.release(ident("a"))
    core.check()
    assert core.pool.num_in_use == 0


def test_no_hand_over_of_a_text_that_is_over() -> None:
    core = scheduler()
    core.add(req("a", 8, 1, hold_kv=True))
    assert step(core)[1].outputs[0].finish is FinishReason.LENGTH
    assert core.exports.get(ident("a")) is None


@pytest.mark.parametrize("num_prompt", [6, 7, 8, 9])
def test_a_decode_worker_takes_over_with_the_partial_block(num_prompt: int) -> None:
    """Prompt from the peer, its first token known: exactly that one token is computed."""
    core = scheduler(can_fetch=True)
    peer = export_at("prefill-1", "x", num_prompt)
    core.add(req("a", [*range(num_prompt), 77], num_prompt=num_prompt, peer=peer))
    (wanted,) = step(core)[0].fetches
    assert wanted.num_tokens == num_prompt
    assert wanted.peer == peer
    assert len(wanted.block_ids) == -(-num_prompt // B)
    assert len(wanted.block_hashes) == num_prompt // B
    core.fetch_done(ident("a"), len(wanted.block_ids))
    core.check()
    assert runs(step(core)[0]) == {"a": (num_prompt, 1)}


def test_a_peer_that_failed_is_not_asked_again() -> None:
    core = scheduler(can_fetch=True)
    core.add(req("a", 9, peer=export_at("p", "x", 9)))
    step(core)
    core.fetch_done(ident("a"), 1)
    assert runs(step(core)[0]) == {"a": (4, 5)}


def test_held_blocks_outlive_their_request() -> None:
    core = scheduler(num_blocks=3)
    core.add(req("a", 8, 1))
    (first, second) = step(core)[1].committed
    core.exports.hold([first.block_id, second.block_id])
    core.check()
    assert core.pool.num_available == 1
    core.exports.unhold([first.block_id, second.block_id])
    core.check()
    assert core.pool.num_available == 3


def test_clients_take_turns() -> None:
    """One sends ten prompts; another's single one waits for one turn, and not for ten."""
    core = scheduler(max_num_seqs=1)
    for number in range(10):
        core.add(req(f"a{number}", 8, max_new=1, client="a"))
    served = [next(iter(runs(step(core)[0]))) for _ in range(3)]
    core.add(req("b", 8, max_new=1, client="b"))
    served += [next(iter(runs(step(core)[0]))) for _ in range(3)]
    assert served == ["a0", "a1", "a2", "b", "a3", "a4"]
    core.add(req("first", 8, max_new=1, client="a", priority=1))
    assert next(iter(runs(step(core)[0]))) == "first"


def test_a_priority_takes_its_clients_first_turn_and_nobody_elses() -> None:
    core = scheduler(max_num_seqs=1)
    for number in range(4):
        core.add(req(f"a{number}", 8, max_new=1, client="a"))
    core.add(req("b0", 8, max_new=1, client="b"))
    core.add(req("urgent", 8, max_new=1, client="a", priority=1))
    served = [next(iter(runs(step(core)[0]))) for _ in range(2)]
    core.add(req("c0", 8, max_new=1, client="c"))
    served += [next(iter(runs(step(core)[0]))) for _ in range(5)]
    assert served == ["urgent", "b0", "c0", "a0", "a1", "a2", "a3"]


def test_what_was_moved_goes_ahead_of_new_prompts() -> None:
    core = scheduler(max_num_seqs=1)
    for number in range(3):
        core.add(req(f"new{number}", 8, max_new=1))
    core.add(req("moved", 8, max_new=1, moved=True))
    core.add(req("urgent", 8, max_new=1, moved=True, priority=1))
    assert [next(iter(runs(step(core)[0]))) for _ in range(4)] == ["urgent", "moved", "new0", "new1"]
