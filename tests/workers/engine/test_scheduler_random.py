"""Random schedules: whatever arrives, aborts, fetches and overflows, everybody ends, and every step is legal."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.session.outputs import FinishReason
from tanghulu.types import RequestId
from tanghulu.workers.engine.block_pool import BlockPool
from tanghulu.workers.engine.exports import ExportState, KvExport
from tanghulu.workers.engine.ngram_drafts import NgramProposer
from tanghulu.workers.engine.requests import EngineRequest
from tanghulu.workers.engine.scheduler import EngineCoreConfig, Scheduler
from tanghulu.workers.engine.step import FetchWanted, ScheduledRun, StepPlan
from tests.workers.peers import export_at
from tests.workers.tiny import request, sampled


class World:
    """A seeded outside: it adds, aborts, fetches in its own time, and checks every decision."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.block = rng.choice((1, 2, 4, 8))
        seqs = rng.randint(1, 6)
        max_context = rng.randint(12, 60)
        max_num_batched_tokens = seqs + rng.randint(0, 12)
        can_fetch = rng.random() < 0.6
        self.config = EngineCoreConfig(
            block_tokens=self.block,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=seqs,
            moves_preempted=rng.random() < 0.5,
            proposer=NgramProposer(rng.randint(1, 6), least=1) if rng.random() < 0.5 else None,
        )
        self.core = Scheduler(self.config, BlockPool(rng.randint(3, 24)), max_context, can_fetch=can_fetch)
        self.fetches: list[FetchWanted] = []
        self.left = rng.randint(1, 12)
        self.added: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.ended: dict[str, FinishReason] = {}
        self.computed: Counter[str] = Counter()
        self.num_preempted = 0
        self.prefixes: set[str] = set()
        self.exports: dict[RequestId, KvExport] = {}
        self.pulls: dict[str, list[int]] = {}
        self.num_pulled = 0
        self.num_drafted = self.num_accepted = 0

    def run(self) -> None:
        for _ in range(4000):
            self.act()
            self.step()
            if not self.left and not self.core.has_work and not self.fetches and not self.pulls:
                break
        else:
            raise AssertionError(f"somebody starves: {self.core!r}")
        self.read_exports()
        for name in [*self.exports, *self.prefixes]:
            self.core.exports.release(RequestId(name))
        self.core.check()
        assert self.core.pool.num_in_use == 0
        assert self.ended.keys() | self.aborted == self.added.keys()

    def act(self) -> None:
        rng = self.rng
        if self.left and rng.random() < 0.4:
            self.left -= 1
            self.add(f"r{self.left}")
        if self.added and rng.random() < 0.03:
            name = rng.choice(sorted(self.added))
            if self.core.abort(RequestId(name)):
                self.aborted.add(name)
        if self.fetches and rng.random() < 0.3:
            wanted = self.fetches.pop(rng.randrange(len(self.fetches)))
            full = len(wanted.block_ids)
            arrived = rng.choice((0, full, rng.randint(0, full)))
            self.core.fetch_done(wanted.request_id, arrived)
        self.read_a_prefix()
        self.read_exports()
        self.pull()
        self.core.check()

    def read_exports(self) -> None:
        """Exports are read for a while, also when they were withdrawn."""
        for export in self.core.exports.take_changed():
            before = self.exports.get(export.name)
            if before is not None:
                assert before.state is ExportState.GROWING
                assert export.block_ids[: len(before.block_ids)] == before.block_ids, "it grows at its end"
            self.exports[export.name] = export
        for name, export in list(self.exports.items()):
            if export.state is not ExportState.GROWING and self.rng.random() < 0.1:
                assert self.core.exports.release(name)
                del self.exports[name]

    def pull(self) -> None:
        """Pulls bring blocks in their own time and end anywhere."""
        rng = self.rng
        for name, coming in list(self.pulls.items()):
            if rng.random() < 0.4:
                came = rng.randint(0, len(coming))
                self.core.pulls.arrived(RequestId(name), came)
                self.num_pulled += came
                del coming[:came]
            if rng.random() < 0.2:
                self.core.pulls.done(RequestId(name))
                del self.pulls[name]

    def read_a_prefix(self) -> None:
        """Another worker reads cached blocks for a while."""
        rng = self.rng
        if self.added and not self.prefixes and rng.random() < 0.1:
            name = f"prefix-{rng.getrandbits(40)}"
            hashes = self.added[rng.choice(sorted(self.added))].sequence.block_hashes
            if self.core.exports.export_prefix(RequestId(name), hashes) is not None:
                self.prefixes.add(name)
        elif self.prefixes and rng.random() < 0.5:
            assert self.core.exports.release(RequestId(self.prefixes.pop()))

    def add(self, name: str) -> None:
        rng = self.rng
        length = rng.randint(1, max(1, min(30, self.core.max_tokens - 1)))
        if length >= self.core.max_tokens:
            return
        # Prompts share prefixes: ids of one of two families up to a random fork.
        tokens = [rng.choice((1, 2))] * rng.randint(0, length)
        tokens += rng.choices(range(10, 90), k=length - len(tokens))
        made = request(
            name,
            tokens,
            rng.randint(1, 20),
            block_tokens=self.block,
            hold_kv=rng.random() < 0.2,
            priority=rng.choice((0, 0, 0, 1)),
            fetch_blocks=rng.choice((None, None, 0, 2)),
            peer=export_at("p", name, length) if rng.random() < 0.2 else None,
            ahead=RequestId(f"{name}.pull") if rng.random() < 0.3 else None,
        )
        if made.ahead is not None:
            wanted = self.core.pull_ahead(made.ahead, made.sequence, export_at("p", name, length))
            if wanted is not None:
                self.pulls[made.ahead] = list(wanted.block_ids)
            if rng.random() < 0.2:
                self.core.pulls.drop(made.ahead)
            self.pull()
        self.core.add(made)
        self.added[name] = made

    def step(self) -> None:
        plan = self.core.schedule()
        self.check_plan(plan)
        self.fetches += plan.fetches
        self.num_preempted += len(plan.preempted)
        if self.added and self.rng.random() < 0.02:
            name = self.rng.choice(sorted(self.added))
            if self.core.abort(RequestId(name)):
                self.aborted.add(name)
        outcome = self.core.step_done(sampled([token for run in plan.runs for token in self.drawn(run)]))
        self.num_drafted += plan.num_drafted
        self.num_accepted += outcome.num_accepted
        for output in outcome.outputs:
            if output.finish is not None:
                assert output.request_id not in self.ended
                self.ended[output.request_id] = output.finish
        self.core.check()

    def drawn(self, run: ScheduledRun) -> list[int]:
        """What a run samples: often what was proposed."""
        likely = [*run.draft, self.rng.randrange(90)]
        return [token if self.rng.random() < 0.8 else self.rng.randrange(90) for token in likely[: run.num_samples]]

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens + plan.num_drafted <= self.config.max_num_batched_tokens
        assert len(plan.runs) <= self.config.max_num_seqs
        names = [run.request.request_id for run in plan.runs]
        assert len(set(names)) == len(names)
        assert not set(names) & set(plan.preempted)
        written: set[int] = set()
        for run in plan.runs:
            assert run.num_tokens > 0
            assert run.start == run.request.num_computed
            end = run.start + run.num_tokens
            assert run.samples is (end == run.request.num_tokens)
            end += len(run.draft)
            assert end < self.core.max_tokens
            assert end <= len(run.request.block_ids) * self.block
            blocks = set(run.request.block_ids[run.start // self.block : -(-end // self.block)])
            assert not blocks & written, "two requests write one block"
            written |= blocks
        moving = {block for wanted in [*self.fetches, *plan.fetches] for block in wanted.block_ids}
        moving.update(block for coming in self.pulls.values() for block in coming)
        assert not written & moving, "a step writes a block that a transfer writes"
        for block in plan.displaced:
            assert self.config.moves_preempted
            assert block.request_id in plan.preempted
            assert block.block_hash == self.added[block.request_id].sequence.block_hashes[block.index]
            assert block.block_id not in moving
        if not (plan.runs or self.fetches or plan.fetches or plan.preempted or self.pulls):
            assert not self.core.num_waiting or self.core.pool.num_in_use, "work, room and nobody moves"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**48))
def test_everybody_ends_and_every_step_is_legal(seed: int) -> None:
    World(seed).run()


def test_the_random_worlds_do_preempt_pull_and_draft() -> None:
    total = pulled = accepted = wasted = 0
    for seed in range(40):
        world = World(seed)
        world.run()
        total += world.num_preempted
        pulled += world.num_pulled
        accepted += world.num_accepted
        wasted += world.num_drafted - world.num_accepted
    assert min(total, pulled, accepted, wasted) > 10
