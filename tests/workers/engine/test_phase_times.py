"""Where a request's time goes in an engine: a clock moves on in what the engine calls, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.session.outputs import FinishReason, Output, PhaseTimes
from tanghulu.types import RequestId
from tanghulu.workers.engine.engine import Computed, EngineCore, KvTransfers
from tanghulu.workers.engine.kv_layout import KvLayout, KvMemory
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.engine.step import CommittedBlock, FetchWanted, Sampled, StepPlan
from tests.virtual.clock import ManualClock
from tests.workers.tiny import BLOCK, request

LAYOUT = KvLayout(block_tokens=BLOCK, num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
PROMPT = list(range(2, 2 + 2 * BLOCK + 3))
STEP_S, STORE_S = 1.0, 0.25


class Runner:
    """Each step takes a second."""

    def __init__(self, clock: ManualClock, num_blocks: int) -> None:
        self.layout, self.vocab, self.max_context = LAYOUT, 1000, 4096
        self.cache = KvMemory(LAYOUT, num_blocks, memoryview(bytearray(num_blocks * LAYOUT.block_bytes)))
        self._clock = clock

    def run(self, plan: StepPlan) -> Computed:
        self._clock.advance(STEP_S)
        samples = [7 for run in plan.runs if run.samples]
        return Computed(Sampled(samples, [None] * len(samples)), STEP_S, 0.0)


class Outside(KvTransfers):
    """A store that takes a quarter of a second for each call, and fetches that end when a test says so."""

    def __init__(self, clock: ManualClock, *, can_fetch: bool) -> None:
        self._clock, self.can_fetch = clock, can_fetch
        self.wanted: list[FetchWanted] = []

    def fetch(self, wanted: FetchWanted) -> None:
        self.wanted.append(wanted)

    def blocks_committed(self, blocks: Sequence[CommittedBlock]) -> None:
        self._clock.advance(STORE_S)


class Rig:
    def __init__(self, *, fetches: bool = False, num_blocks: int = 64, **more: int) -> None:
        self.clock = ManualClock(100.0)
        self.outside = Outside(self.clock, can_fetch=fetches)
        config = EngineCoreConfig(**{"block_tokens": BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 8} | more)
        runner = Runner(self.clock, num_blocks)
        self.core = EngineCore(runner, config, self.outside, self.clock)

    def step(self) -> dict[str, Output]:
        outputs = {output.request_id: output for output in self.core.step().outputs}
        self.core._phases.check(self.core.scheduler._requests)
        return outputs


def test_the_first_token_and_the_last_one_tell() -> None:
    rig = Rig()
    rig.core.add(request("a", PROMPT, 3))
    rig.clock.advance(0.5)
    assert rig.step()["a"].phases == PhaseTimes(queue_s=0.5, prefill_s=STEP_S, kv_store_s=STORE_S)
    assert rig.step()["a"].phases is None
    last = rig.step()["a"]
    assert last.finish is FinishReason.LENGTH
    assert last.phases == PhaseTimes(0.5, 0.0, STEP_S, STORE_S, 2 * STEP_S)


def test_a_fetch_is_loading_and_no_waiting() -> None:
    rig = Rig(fetches=True)
    rig.core.add(request("a", PROMPT, 1, hold_kv=True))
    rig.clock.advance(0.5)
    assert not rig.step()
    rig.clock.advance(3.0)
    rig.core.fetch_done(RequestId("a"), 0)
    assert rig.step()["a"].phases == PhaseTimes(0.5, 3.0, STEP_S, STORE_S, 0.0)


def test_who_waits_for_another_waits() -> None:
    rig = Rig(max_num_seqs=1)
    rig.core.add(request("a", PROMPT, 2))
    rig.core.add(request("b", [9, *PROMPT], 1))
    rig.step()
    rig.step()
    phases = rig.step()["b"].phases
    assert phases == PhaseTimes(queue_s=2 * STEP_S + STORE_S, prefill_s=STEP_S, kv_store_s=STORE_S)


def test_a_preempted_request_waits_again() -> None:
    rig = Rig(num_blocks=4)
    rig.core.add(request("a", PROMPT[: 2 * BLOCK - 1], 8))
    rig.core.add(request("b", [9, *PROMPT][: 2 * BLOCK - 1], 8))
    began_s, told = rig.clock.now_s(), []
    for _ in range(40):
        for name, output in rig.step().items():
            if output.finish is not None:
                told.append((name, output.phases, rig.clock.now_s()))
    assert [name for name, _, _ in told] == ["a", "b"]
    for _, phases, ended_s in told:
        assert phases is not None
        spent = phases.queue_s + phases.kv_load_s + phases.prefill_s + phases.kv_store_s + phases.decode_s
        assert spent == ended_s - began_s
    assert told[1][1].queue_s > 0


def test_an_aborted_one_is_forgotten() -> None:
    rig = Rig()
    rig.core.add(request("a", PROMPT, 3))
    rig.step()
    rig.core.abort(RequestId("a"))
    rig.core.add(request("b", PROMPT, 3))
    rig.core.abort(RequestId("b"))
    rig.step()
    assert not rig.core._phases._times
